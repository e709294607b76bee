"""Beginning of a session: worker 0 starts the job, and every worker joins it.

A process that takes the place of a killed worker joins a job that is under way. It first sends
again what its predecessor has left in the log. Then it takes the parameters with which the current
step has begun, and takes part in that step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from lightning_dlres.core.arrays import byte_array
from lightning_dlres.core.errors import PeerError
from lightning_dlres.core.wire.message import Message
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.consistency import BSP
from lightning_dlres.paramserver.execute.worker.connection.link import ServerLink
from lightning_dlres.paramserver.execute.worker.connection.pending_request import PendingRequest
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.execute.worker.state.exchange import Exchange
from lightning_dlres.paramserver.execute.worker.state.parameters import KeyedParameters
from lightning_dlres.paramserver.execute.worker.waits import ServerWaits

# Workers of another job may end for this time after this job has begun, in seconds. After that, the
# other job runs if one of its workers was heard within the second time.
_MAY_LIVE_SECONDS, _LIVE_SECONDS = 15.0, 5.0


class Joining:
    """Start of a job, and entry into it.

    Args:
        job: The job.
        parameters: Parameters of this worker.
        exchange: State of the exchange.
        links: Connections to all servers.
        waits: Waits for the servers.
    """

    def __init__(
        self,
        job: Job,
        parameters: KeyedParameters,
        exchange: Exchange,
        links: Sequence[ServerLink],
        waits: ServerWaits,
    ) -> None:
        self._job, self._parameters, self._exchange = job, parameters, exchange
        self._links, self._waits = links, waits

    def start(self, states: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Describe the job to the servers and give them the parameters; only worker 0 calls it.

        Args:
            states: Optimizer states of a checkpoint, by index of the key; None for new ones.

        Raises:
            PeerError: If a server refuses the job, is busy with another, or does not answer in
                time.
        """
        self._describe()
        new = [
            link
            for link, answer in zip(self._links, self._greet(), strict=True)
            if not answer.decode(protocol.ServerWelcome).is_started
        ]
        # The parameters of a server may take longer than the deadline of workers at another one.
        for link in self._links:
            link.pings = True
        for link in new:
            self._load(link, states or {})
        self._waits.answers(
            [link.request(protocol.START, self._exchange.request()) for link in new]
        )

    def _describe(self) -> None:
        """Describe the job to all servers.

        Workers that were killed have not left their job. A server that is busy with it is asked
        again until it has shut them out.
        """
        start, has_told = time.monotonic(), False
        # Jobs that begin at once ask the first server before all others. Otherwise each could have
        # some servers and wait for the rest.
        for links in (self._links[:1], self._links):
            while silences := self._silences_of_other_jobs(links):
                peers = f"{' and '.join(link.name for link in silences)}, busy with another job"
                if time.monotonic() - start > _MAY_LIVE_SECONDS:
                    for link, silence in silences.items():
                        if silence < _LIVE_SECONDS:
                            raise PeerError(
                                f"{link.name} is busy with another job, whose workers run. Wait "
                                "for its end, or start another server."
                            )
                if not has_told:
                    has_told = True
                    sys.stderr.write(
                        f"dlres: waiting for {peers}. If its workers were killed, it is free when "
                        "their worker_deadline has passed.\n"
                    )
                    sys.stderr.flush()
                self._waits.pause(start + self._job.timeout, peers)

    def _silences_of_other_jobs(self, links: Sequence[ServerLink]) -> dict[ServerLink, float]:
        """Describe the job to servers; return the busy ones, and the seconds for which the workers
        of their jobs were silent.

        A server keeps a job without workers only while it is described from time to time.
        """
        request = self._exchange.request()
        answers = self._waits.answers(
            [
                link.request(
                    protocol.SETUP, request, msgspec.msgpack.encode(self._setup(link.index))
                )
                for link in links
            ]
        )
        return {
            link: answer.decode(float)
            for link, answer in zip(links, answers, strict=True)
            if answer.kind == protocol.BUSY
        }

    def join(self) -> int:
        """Take part, and land the parameters; return the number of updates that are in them.

        A process that takes the place of a killed one goes on from there. Under "bsp" its next
        pushes must be those of the following step.

        Raises:
            PeerError: If a server does not answer in time, or another worker does not push.
            ConfigError: If another process takes over the same log.
        """
        deadline = time.monotonic() + self._job.timeout
        while not all(one.decode(protocol.ServerWelcome).is_started for one in self._greet()):
            self._waits.pause(deadline, "worker 0, which starts the job")
        # The servers have shut the predecessor out.
        with self._exchange.lock:
            self._exchange.log.take_over()
        for link in self._links:
            link.pings = True
        while True:
            numbers = self._replay()
            lowest, highest = min(numbers, default=0), max(numbers, default=0)
            if self._job.consistency != BSP:
                bases = numbers
            elif highest - lowest <= 1:
                # If a step is under way, take part in it.
                bases = [lowest] * len(numbers)
            else:
                self._waits.pause(deadline, "the other workers, which bring a server up to date")
                continue
            if self._pull(bases):
                return lowest
            self._waits.pause(deadline, "a server that was started again")

    def _setup(self, server: int) -> protocol.JobSetup:
        job = self._job
        return protocol.JobSetup(
            job=job.token,
            workers=job.workers,
            consistency=job.consistency,
            staleness=job.staleness,
            server=server,
            servers=len(job.servers),
            keys=[key for key in job.keys if key.server == server],
            optimizers=list(job.optimizers),
            worker_deadline=job.worker_deadline,
            codec="" if job.codec is None else job.codec.name,
            codec_options=dict(job.codec_options or {}),
        )

    def _greet(self) -> list[Message]:
        request = self._exchange.request()
        hello = protocol.Hello(
            job=request.job,
            worker=request.worker,
            incarnation=request.incarnation,
            version=protocol.VERSION,
        )
        return self._waits.answers([link.request(protocol.HELLO, hello) for link in self._links])

    def _load(self, link: ServerLink, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Give a server the parameters and optimizer states of its keys."""
        pending = []
        for index, key in enumerate(self._job.keys):
            if key.server != link.index:
                continue
            value = self._parameters.value(key)
            pending.append(self._load_part(link, index, "", value))
            for name, part in states.get(index, {}).items():
                pending.append(self._load_part(link, index, name, part))
        self._waits.answers(pending)

    def _load_part(self, link: ServerLink, key: int, name: str, value: Any) -> PendingRequest:
        if isinstance(value, Tensor):
            tensor = value.detach().cpu().contiguous()
            payload: Any = byte_array(tensor).data
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        else:
            payload, dtype, shape = msgspec.msgpack.encode(value), "", ()
        load = protocol.Load(
            job=self._exchange.job,
            worker=self._exchange.worker,
            incarnation=self._exchange.incarnation,
            key=key,
            number=0,
            state=name,
            dtype=dtype,
            shape=shape,
        )
        return link.request(protocol.LOAD, load, payload)

    def _replay(self) -> list[int]:
        """Ask for the number of each key, and send what the servers lack; return the numbers."""
        request = self._exchange.request()
        answers = self._waits.answers(
            [link.request(protocol.VERSIONS, request) for link in self._links]
        )
        numbers = [0] * len(self._exchange.keys)
        log = self._exchange.log
        with self._exchange.lock:
            for link, answer in zip(self._links, answers, strict=True):
                for version in link.versions(answer):
                    numbers[version.key] = version.number
                    log.note_durable(version.key, version.durable)
            for index, number in enumerate(numbers):
                self._exchange.keys[index].number = max(number, log.latest(index))
                for entry in log.after(index, number):
                    self._links[self._exchange.keys[index].key.server].push(entry)
        return numbers

    def _pull(self, numbers: Sequence[int]) -> bool:
        """Land a value of each key, and go on from its number; return True if that was possible.

        Under "bsp" every value must have exactly the given number: return False, and land none, if
        a server has only a newer one. Otherwise newer values do as well.

        Args:
            numbers: Number for each key.
        """
        with self._exchange.lock:
            for index, number in enumerate(numbers):
                self._exchange.expect(index, number, is_queued=False)
                request = self._exchange.key_request(index, number)
                self._links[self._exchange.keys[index].key.server].post(protocol.PULL, request)
        self._waits.until(lambda: not self._exchange.awaited)
        with self._exchange.lock:
            keys = self._exchange.keys
            fits = all(
                one.value_number == number for one, number in zip(keys, numbers, strict=True)
            )
            if not fits and self._job.consistency == BSP:
                for one in keys:
                    one.value, one.expected = None, -1
                return False
            for index, one in enumerate(keys):
                one.number = self._exchange.bases[index] = numbers[index]
        self._exchange.land(self._parameters)
        return True
