"""States of all ranks' codecs in checkpoints: residuals of compressed pushes, and their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_dlres.paramserver.execute.worker.push_codecs import SavedPushes
from lightning_dlres.paramserver.execute.worker.session import WorkerSession

# Key, in a Lightning checkpoint, of the states of all ranks' codecs.
CHECKPOINT_KEY = "dlres_parameter_server_pushes"


class CheckpointedResiduals:
    """States of codecs between sessions and in checkpoints.

    Args:
        may_exist: True if ranks may hold residuals. It must be the same on all ranks.
    """

    def __init__(self, *, may_exist: bool) -> None:
        self._may_exist = may_exist
        # States of all ranks from a checkpoint, until the next session goes on with them.
        self._loaded: list[SavedPushes] | None = None
        # State of this rank at the end of the last session, for a later checkpoint.
        self._kept: SavedPushes | None = None

    def begin_run(self) -> None:
        """Forget the states of a checkpoint that another run has loaded, and may not have used."""
        self._loaded = None

    def begin_fit(self) -> None:
        """Forget this rank's state: a new training begins, with that of a checkpoint if any."""
        self._kept = None

    def continue_in(self, session: WorkerSession) -> None:
        """Let a session go on with the loaded states, if there are any."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            session.load_pushes(loaded)

    def keep(self, session: WorkerSession) -> None:
        """Keep this rank's state of a session that ends."""
        self._kept = session.saved_pushes()

    def take_from(self, checkpoint: dict[str, Any], *, is_used: bool) -> None:
        """Remove the states from a loaded checkpoint; `is_used` says that a training resumes."""
        pushes = checkpoint.pop(CHECKPOINT_KEY, None)
        if is_used:
            self._loaded = pushes
            # Without a codec, the first push takes them.
            self._may_exist |= pushes is not None

    def add_to(
        self,
        checkpoint: dict[str, Any],
        session: WorkerSession | None,
        gathered: Callable[[dict[str, Any], str], list[dict[str, Any]] | None],
    ) -> None:
        """Add the states of all ranks to a checkpoint of rank 0; called on all ranks.

        Args:
            checkpoint: The checkpoint.
            session: Session of this rank; None outside of training.
            gathered: Gathers a tree from all ranks on rank 0, under a name.
        """
        # A checkpoint of weights alone has no optimizer states, and needs no residuals.
        if not self._may_exist or "optimizer_states" not in checkpoint:
            return
        pushes = self._loaded
        own = self._kept if session is None else session.saved_pushes()
        # Otherwise no step has used those of the loaded checkpoint.
        if own is not None:
            trees = gathered({"pushes": own}, "residuals")
            pushes = None if trees is None else [one["pushes"] for one in trees]
        if pushes is not None and any(pushes):
            checkpoint[CHECKPOINT_KEY] = pushes
