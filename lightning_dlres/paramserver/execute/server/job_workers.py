"""Workers of a job, as a server knows them: their processes, and when each was last heard.

A worker that was silent past its deadline is shut out: its process may go on later, when another
process has taken its place. Only a later process of the worker, with a larger incarnation, is
admitted then.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from lightning_dlres.paramserver.protocol import Request

# A server that did not look for so many seconds was paused itself; silence in that time does not
# count.
_OWN_PAUSE_SECONDS = 2.0
# Time without any word of a job, in seconds, after which another job may take its place before its
# first worker was heard.
_START_SECONDS = 15.0


class JobWorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a worker for a restarted server."""

    incarnation: int
    is_shut_out: bool
    has_left: bool


@dataclass
class JobWorker:
    """A worker.

    Attributes:
        incarnation: Incarnation of its latest process; 0 before the first.
        is_shut_out: True if that process was silent past its deadline.
        has_left: True if that process has said farewell with a `LEAVE` request.
        last_heard: Clock at its last message; None if it was never heard.
        peer: Name of its connection.
        pushed_bytes, pulled_bytes: Bytes of its gradients, and of the values sent to it.
    """

    incarnation: int = 0
    is_shut_out: bool = False
    has_left: bool = False
    last_heard: float | None = None
    peer: str = ""
    pushed_bytes: int = 0
    pulled_bytes: int = 0

    @property
    def is_active(self) -> bool:
        """True if it takes part: it was heard, is not shut out, and has not left."""
        return self.last_heard is not None and not self.is_shut_out and not self.has_left


class JobWorkers:
    """The workers of one job.

    Args:
        workers: Number of workers.
        deadline: Seconds of silence after which a worker is shut out.
        records: Records of an earlier process of this server.
        now: Clock in seconds.

    Attributes:
        by_index: The workers.
    """

    def __init__(
        self,
        workers: int,
        deadline: float,
        records: list[JobWorkerRecord] | None = None,
        now: float = 0.0,
    ) -> None:
        self.by_index = [JobWorker() for _ in range(workers)]
        self._deadline, self._last_look = deadline, now
        # Clock at the last message that described the job.
        self._described = now
        for member, record in zip(self.by_index, records or [], strict=False):
            member.incarnation = record.incarnation
            member.is_shut_out, member.has_left = record.is_shut_out, record.has_left
            member.last_heard = now if record.incarnation else None

    def records(self) -> list[JobWorkerRecord]:
        """Return the records for a restarted server."""
        return [
            JobWorkerRecord(
                incarnation=one.incarnation, is_shut_out=one.is_shut_out, has_left=one.has_left
            )
            for one in self.by_index
        ]

    def is_shut_out(self, request: Request) -> bool:
        """Return True if a request comes from a process that no longer takes part."""
        member = self.by_index[request.worker]
        if request.incarnation < member.incarnation:
            return True
        return request.incarnation == member.incarnation and member.is_shut_out

    def admit(self, request: Request, peer: str, now: float) -> bool:
        """Note a message of a process that takes part; return True if the process is new."""
        member = self.by_index[request.worker]
        is_new = request.incarnation > member.incarnation
        if is_new:
            member.incarnation = request.incarnation
            member.is_shut_out = member.has_left = False
        member.peer, member.last_heard = peer, now
        return is_new

    def shut_out_silent(self, now: float) -> list[int]:
        """Shut out workers that were silent past their deadline, and return them."""
        paused = now - self._last_look
        self._last_look = now
        if paused > _OWN_PAUSE_SECONDS:
            for member in self.by_index:
                if member.last_heard is not None:
                    member.last_heard += paused
        silent = [
            index
            for index, member in enumerate(self.by_index)
            if member.is_active
            and member.last_heard is not None
            and now - member.last_heard > self._deadline
        ]
        for index in silent:
            self.by_index[index].is_shut_out = True
        return silent

    def note_description(self, now: float) -> None:
        """Note that worker 0 has described the job again, while it waits for other servers."""
        self._described = now

    def are_over(self, now: float) -> bool:
        """Return True if no worker takes part: all that were heard have left or were shut out.

        Before the first was heard, worker 0 must describe the job from time to time.
        """
        heard = [member for member in self.by_index if member.last_heard is not None]
        if not heard:
            return now - self._described > _START_SECONDS
        return all(member.has_left or member.is_shut_out for member in heard)

    def silence(self, now: float) -> float:
        """Return the seconds since a worker was last heard."""
        heard = [one.last_heard for one in self.by_index if one.last_heard is not None]
        return now - max(heard, default=self._described)

    def have_left(self) -> bool:
        """Return True if all workers have said farewell."""
        return all(member.has_left for member in self.by_index)
