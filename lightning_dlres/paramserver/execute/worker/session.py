"""A worker's session with the servers of a job: join, push, wait, land, leave.

Each push gets the next number of its key. A value with that number, or a larger one, answers it.
Values that arrive early stay in their messages until `land` copies them into the parameters:
backward may still need the old ones.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from lightning_dlres.core.errors import ConfigError, PeerTimeoutError, ProtocolError
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.core.wire.message import Message
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.consistency import BSP
from lightning_dlres.paramserver.execute.worker.connection.link import ServerLink
from lightning_dlres.paramserver.execute.worker.connection.pending_request import PendingRequest
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.execute.worker.joining import Joining
from lightning_dlres.paramserver.execute.worker.push_codecs import PushCodecs, SavedPushes
from lightning_dlres.paramserver.execute.worker.state.exchange import Exchange, KeyExchange
from lightning_dlres.paramserver.execute.worker.state.parameters import KeyedParameters, part_of
from lightning_dlres.paramserver.execute.worker.state.push_log import PushLog
from lightning_dlres.paramserver.execute.worker.waits import ServerWaits
from lightning_dlres.paramserver.plan.keys import Key

# Details of a push in the log, in bytes, beyond its payload.
_DETAILS_BYTES = 2048
# Longest silence of a server at the farewell, in seconds: it may be gone already.
_LEAVE_SECONDS = 10.0
_POLL_SECONDS = 0.2
# Keys whose values or optimizer states are on their way while those of another key are used.
_KEYS_AHEAD = 8


class WorkerSession:
    """Session of one worker.

    Args:
        job: The job.
        parameters: The parameters.
        check_peers: See `ServerWaits`.

    Attributes:
        exchange: State of the exchange.

    Raises:
        ConfigError: If an address is wrong, or the log cannot be made.
    """

    def __init__(
        self,
        job: Job,
        parameters: KeyedParameters,
        check_peers: Callable[[], None] | None = None,
    ) -> None:
        self._job, self._parameters = job, parameters
        too_large = next((key for key in job.keys if key.nbytes > protocol.FRAME_BYTES), None)
        if too_large is not None:
            raise ConfigError(
                f"each parameter must have at most {format_bytes(protocol.FRAME_BYTES)} with this "
                f"optimizer, got {format_bytes(too_large.nbytes)} in {too_large.name}. Use an "
                "optimizer that treats every element by itself, such as AdamW."
            )
        step_bytes = sum(key.nbytes + _DETAILS_BYTES for key in job.keys)
        path = None
        if job.log_directory is not None:
            # The name must not give the token away.
            name = hashlib.sha256(job.token).hexdigest()[:24]
            path = job.log_directory / f"dlres-ps-{name}-{job.worker}"
        self.exchange = Exchange(
            job=job.token,
            worker=job.worker,
            incarnation=time.time_ns(),
            keys=[KeyExchange(key) for key in job.keys],
            log=PushLog(max(job.log_bytes, 2 * step_bytes), path),
            bases=[0] * len(job.keys),
            is_synchronous=job.consistency == BSP,
        )
        self._codecs = PushCodecs(job)
        # For each key, the number of each worker's last push; empty before `end_pushes`.
        self._last_numbers: list[tuple[int, ...]] = []
        self._links: list[ServerLink] = []
        try:
            for index, address in enumerate(job.servers):
                self._links.append(
                    ServerLink(
                        address,
                        index,
                        self.exchange,
                        retry_seconds=job.retry_seconds,
                        silence_seconds=job.timeout / 4,
                        curve=job.curve,
                        server_key=job.server_keys[index] if job.curve is not None else None,
                    )
                )
        except ConfigError:
            self.close()
            self.exchange.log.close(remove=True)
            raise
        self._waits = ServerWaits(
            self.exchange, self._links, job.timeout, job.retry_seconds, check_peers
        )
        self._joining = Joining(job, parameters, self.exchange, self._links, self._waits)

    def start(self, states: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Describe the job to the servers and give them the parameters; only worker 0 calls it.

        Args:
            states: Optimizer states of a checkpoint, by index of the key; None for new ones.

        Raises:
            PeerError: If a server refuses the job, or does not answer in time.
        """
        self._joining.start(states)

    def join(self) -> int:
        """Take part, and land the parameters; return the number of updates that are in them.

        Under "bsp" the next pushes must be those of the step after these.

        Raises:
            PeerError: If a server does not answer in time, or another worker does not push.
            ConfigError: If another process takes over the same log.
        """
        return self._joining.join()

    def push(
        self,
        key: int,
        gradient: Tensor | None,
        options: bytes,
        *,
        is_held: bool = False,
        clip_value: float = 0.0,
    ) -> None:
        """Push a gradient, and await the value that contains it.

        Args:
            key: Index of the key.
            gradient: Gradient of the whole parameter; None if it has none.
            options: Options of the parameter's group, as msgpack.
            is_held: Let the update wait for `commit`.
            clip_value: Bound of the merged gradient's elements; 0 for none.

        Raises:
            PeerError: If the exchange has failed, or the log stays full.
        """
        one, self._last_numbers = self.exchange.keys[key], []
        number = one.number + 1
        codec_step = self._codecs.step(key, number)
        codec = self._codecs.codec(key, codec_step)
        push = protocol.Push(
            job=self.exchange.job,
            worker=self.exchange.worker,
            incarnation=self.exchange.incarnation,
            key=key,
            number=number,
            options=options,
            codec=codec.name if codec is not None and gradient is not None else "",
            has_gradient=gradient is not None,
            is_held=is_held,
            clip_value=clip_value,
            base=self.exchange.bases[key],
            codec_step=codec_step,
        )
        nbytes = 0
        if gradient is not None:
            nbytes = one.key.nbytes if codec is None else codec.payload_bytes(one.key.count)
        details = msgspec.msgpack.encode(push)
        with self.exchange.lock:
            self.exchange.check()
            entry = self.exchange.log.append(key, number, details, nbytes)
            deadline = time.monotonic() + self._job.timeout
            while entry is None:
                self._wait_for_room(deadline)
                entry = self.exchange.log.append(key, number, details, nbytes)
            if gradient is not None:
                values = part_of(gradient.detach(), one.key)
                self._codecs.write(key, codec, values, entry.array, codec_step)
            self.exchange.log.seal(entry)
            one.number = number
            self.exchange.expect(key, number, is_queued=True)
            self._link_of(key).push(entry)

    def wait(self) -> None:
        """Wait for all awaited values.

        Raises:
            PeerError: If they do not come in time; the message names the server or the workers.
        """
        self._waits.until(lambda: not self.exchange.awaited)

    def wait_merged(self) -> dict[int, float]:
        """Wait until all pushes since `land` are merged; return the squared norms, by key.

        Raises:
            PeerError: See `wait`.
        """
        self._waits.until(lambda: not self.exchange.unmerged)
        with self.exchange.lock:
            return {one.key.index: one.norm for one in self.exchange.keys if one.is_pending}

    def commit(self, scale: float) -> None:
        """Let the held updates happen, with the merged gradients multiplied by a factor."""
        with self.exchange.lock:
            for link in self._links:
                numbers = []
                for one in self.exchange.keys:
                    if one.key.server != link.index or not one.is_pending:
                        continue
                    one.is_committed = True
                    # A restarted server may need the commit of a key whose value is here already.
                    entry = self.exchange.log.get(one.key.index, one.number)
                    if entry is not None:
                        self.exchange.log.commit(entry, scale)
                    if one.is_awaited:
                        # From now on the link asks for the value.
                        one.is_merged, one.touched = False, time.monotonic()
                        numbers.append((one.key.index, one.number))
                if numbers:
                    link.post_commit(numbers, scale)

    def land(self) -> None:
        """Copy all values that have arrived into the parameters."""
        self.exchange.land(self._parameters)

    def numbers(self) -> list[int]:
        """Return the number of the latest push of each key."""
        return [one.number for one in self.exchange.keys]

    def saved_pushes(self) -> SavedPushes:
        """Return what this worker's codecs keep between pushes; see `PushCodecs.save`."""
        return self._codecs.save(self.numbers())

    def load_pushes(self, saved: Sequence[SavedPushes]) -> None:
        """Go on with the codecs' states of an earlier job; see `PushCodecs.load`."""
        self._codecs.load(saved)

    def end_pushes(self, numbers: Sequence[Sequence[int]]) -> None:
        """Let the values and states that are asked for until the next push have the last pushes of
        all workers.

        A server that was started again has these pushes only after all workers have sent them
        again.

        Args:
            numbers: `numbers` of each worker, after its last push; empty if only the pushes of this
                worker count.
        """
        self._last_numbers = list(zip(*numbers, strict=True))

    def refresh(self, *, without: Collection[str] = ()) -> None:
        """Land the values with all pushes; see `end_pushes`.

        Args:
            without: Names of parameters that stay as they are.

        Raises:
            PeerError: See `wait`.
        """
        keys = [one.key.index for one in self.exchange.keys if one.key.name not in without]
        with torch.no_grad():
            self._parameters.land(self._values(keys))

    def states(self, keys: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Yield the optimizer state of each of these keys: tensors and numbers by name.

        Args:
            keys: Indices of the keys.

        Raises:
            PeerError: If a server does not answer in time.
        """
        for _, answer in self._contents(protocol.STATE, keys):
            yield protocol.decode_state(answer.decode(list[protocol.StatePart]))

    def leave(self, seconds: float | None = None) -> None:
        """Say farewell to the servers, and remove the log; the job ends when all have left.

        A server answers when it no longer needs the worker's log: when the worker's pushes are in a
        snapshot, or when all workers have their last values.

        Args:
            seconds: Longest wait for the answers; None: the job's timeout.
        """
        longest = self._job.timeout if seconds is None else seconds
        with self.exchange.lock:
            has_failed = self.exchange.failure is not None
        if not has_failed:
            pending = [
                (
                    link,
                    link.request(protocol.LEAVE, self.exchange.request(), self._numbers_of(link)),
                )
                for link in self._links
            ]
            start = time.monotonic()
            with self.exchange.lock:
                while self.exchange.failure is None:
                    now = time.monotonic()
                    is_waiting = any(
                        one.answer is None and now - max(start, link.last_heard) < _LEAVE_SECONDS
                        for link, one in pending
                    )
                    if not is_waiting or now - start > longest:
                        break
                    self.exchange.changed.wait(_POLL_SECONDS)
        self.close()
        self.exchange.log.close(remove=True)

    def close(self) -> None:
        """Close all connections; a process of the same worker may take this one's place."""
        for link in self._links:
            link.close()

    def _values(self, keys: Iterable[int]) -> Iterator[tuple[Key, memoryview]]:
        for index, answer in self._contents(protocol.CONTENT, keys):
            key, value = self.exchange.keys[index].key, memoryview(answer.payload)
            if len(value) != key.nbytes:
                raise ProtocolError(
                    f"{self._link_of(index).name} sent {len(value)} bytes of {key}."
                )
            yield key, value

    def _contents(self, kind: str, keys: Iterable[int]) -> Iterator[tuple[int, Message]]:
        """Ask for each of these keys; yield its index and the answer.

        Only the answers for a few keys are in memory at a time.
        """
        pending: deque[tuple[int, PendingRequest]] = deque()

        def next_answer() -> tuple[int, Message]:
            key, request = pending.popleft()
            (answer,) = self._waits.answers([request], need_workers=bool(self._last_numbers))
            return key, answer

        for key in keys:
            one = self.exchange.keys[key]
            # Within a step, as after a failure, the pushes of other workers may never come.
            number = one.number - 1 if one.is_awaited else one.number
            numbers = self._last_numbers[key] if self._last_numbers else ()
            request = self.exchange.content_request(key, number, numbers)
            pending.append((key, self._link_of(key).request(kind, request)))
            if len(pending) > _KEYS_AHEAD:
                yield next_answer()
        while pending:
            yield next_answer()

    def _wait_for_room(self, deadline: float) -> None:
        """Let the servers make snapshots, and wait for room in the log; the lock is held."""
        for link in self._links:
            link.post(protocol.SNAPSHOT, self.exchange.request())
        self.exchange.changed.wait(self._job.retry_seconds)
        self._waits.check()
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"waited {format_seconds(self._job.timeout)} for a snapshot of the servers, since "
                f"the log of {format_bytes(self.exchange.log.capacity)} is full. See the reason "
                "with `dlres ps status`."
            )

    def _numbers_of(self, link: ServerLink) -> bytes:
        """Return index and number of each key of a server, as msgpack."""
        keys = [one for one in self.exchange.keys if one.key.server == link.index]
        return msgspec.msgpack.encode([(one.key.index, one.number) for one in keys])

    def _link_of(self, key: int) -> ServerLink:
        return self._links[self.exchange.keys[key].key.server]


def norm_scale(norms: Mapping[int, float], max_norm: float) -> float:
    """Return the factor by which `torch.nn.utils.clip_grad_norm_` would multiply gradients.

    Args:
        norms: Squared norms of the merged gradients.
        max_norm: Largest norm of all of them together.
    """
    # Unlike math.fsum, sum allows an infinite total.
    total = math.sqrt(sum(norms[key] for key in sorted(norms)))
    factor = max_norm / (total + 1e-6)
    # torch makes all gradients NaN if one is. The loss then shows it in the next step.
    return factor if math.isnan(factor) else min(1.0, factor)
