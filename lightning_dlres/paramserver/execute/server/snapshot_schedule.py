"""Schedule of a server's snapshots: when one begins, how it goes on, and how it has ended."""

from __future__ import annotations

from collections.abc import Callable

from lightning_dlres.paramserver.execute.server.shard import Shard
from lightning_dlres.paramserver.execute.server.snapshots import SnapshotFiles, SnapshotTask


class SnapshotSchedule:
    """Snapshots of one server; only for its thread.

    Args:
        files: Files of the server; None: no snapshots are made.
        seconds: Seconds between two snapshots.
        note_failure: Function that gets the reason why a snapshot failed.

    Attributes:
        error: Reason why the last snapshot, or the file of workers, failed; "" if it did not.
        last: Clock at the last snapshot; None without one.
        is_wanted: True if a worker waits for a snapshot.
        workers_are_saved: False if the file of workers must be written again.
    """

    def __init__(
        self, files: SnapshotFiles | None, seconds: float, note_failure: Callable[[str], None]
    ) -> None:
        self._files, self._seconds, self._note_failure = files, seconds, note_failure
        self._task: SnapshotTask | None = None
        self._next = 0.0
        self.error = ""
        self.last: float | None = None
        self.is_wanted, self.workers_are_saved = False, True

    @property
    def is_on(self) -> bool:
        """True if snapshots are made."""
        return self._files is not None

    def make_first(self, shard: Shard, now: float) -> None:
        """Make the snapshot of a job that starts, and wait for it; `error` tells if it failed.

        A server that is killed after the first push must find the parameters again.
        """
        if self._files is not None:
            task = SnapshotTask(self._files, shard)
            task.finish()
            self._conclude(task, now)

    def advance(self, shard: Shard | None, now: float) -> tuple[bool, bool]:
        """Go on with a snapshot, begin one that is due, or end one.

        Returns:
            True if a key was copied; and True if a snapshot has reached the disk.
        """
        if self._files is None or shard is None or not shard.is_started:
            return False, False
        if shard.failure:
            # A key may be updated in part, and must not reach the disk. A restarted server goes on
            # from the previous snapshot.
            if self._task is not None:
                self._task.cancel(shard.failure)
                self._conclude(self._task, now)
            return False, False
        if self._task is None:
            is_due = self.is_wanted or now >= self._next
            if not is_due or shard.members.have_left():
                return False, False
            self.is_wanted = False
            self._task = SnapshotTask(self._files, shard)
        if self._task.is_done:
            return False, self._conclude(self._task, now)
        return self._task.advance(), False

    def save_workers(self, shard: Shard) -> None:
        """Write the file of workers; if that fails, `workers_are_saved` is False."""
        if self._files is None:
            return
        try:
            self._files.save_members(shard.setup.job, shard.members.records())
            self.workers_are_saved = True
        except OSError as error:
            self.workers_are_saved, self.error = False, str(error)

    def forget(self) -> None:
        """Remove all files: the job is over."""
        if self._task is not None:
            self._task.cancel("the job is over")
            self._task = None
        if self._files is not None:
            self._files.remove()
        self.last = None

    def _conclude(self, task: SnapshotTask, now: float) -> bool:
        """Note the end of a snapshot; return True if it has reached the disk."""
        self._task = None
        self._next = now + self._seconds
        self.error = task.error
        if task.error:
            self._note_failure(f"no snapshot: {task.error}")
            return False
        self.last = now
        task.note_durable()
        return True
