"""Class names of a data module: given by the user, or taken from the folders of one split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning.pytorch.strategies import Strategy

from lightning_dlres.core.errors import ConfigError, error_named, text_of
from lightning_dlres.prefetch.storage.labels import parse_labels


class ClassLabels:
    """Class names in the order of their indices, the same on all ranks.

    Args:
        labels: "folder", a list of names, or None for samples without labels.
        list_folders: Function that returns the names of the folders that contain samples.

    Raises:
        ConfigError: If `labels` is none of these.
    """

    def __init__(
        self, labels: str | Sequence[str] | None, list_folders: Callable[[], Sequence[str]]
    ) -> None:
        self._given = parse_labels(labels)
        self._list_folders = list_folders
        # The given names, or the names of the folders after they were listed. () before.
        self._names: tuple[str, ...] = self._given or ()

    @property
    def are_used(self) -> bool:
        """True if samples have labels."""
        return self._given is not None

    @property
    def known_names(self) -> tuple[str, ...]:
        """Class names; () if samples have no labels, or the folders were not listed yet."""
        return self._names

    def names(self) -> list[str]:
        """Return the class names. List the folders first if the names are not known.

        Raises:
            ConfigError: If samples have no labels, no source is given, or a sample is in no folder.
            PeerTimeoutError: If a storage node does not answer.
        """
        if self._given is None:
            raise ConfigError(
                "labels must be 'folder' or a list of names for a data module with classes, got "
                "None. Use labels='folder'."
            )
        self._names = self._names or tuple(self._list_folders())
        return list(self._names)

    def broadcast_names(self, strategy: Strategy, is_rank_zero: bool) -> None:
        """List the folders on rank 0, and broadcast the names to all ranks.

        All ranks must call this.

        Args:
            strategy: Strategy of the ranks.
            is_rank_zero: True on rank 0, which lists the folders.

        Raises:
            DlresError: If rank 0 cannot list the folders. All ranks raise it.
        """
        if not self.are_used:
            return
        names: list[str] = []
        failure: Exception | None = None
        if is_rank_zero:
            try:
                names = self.names()
            except Exception as error:  # raised below, after the other ranks have the result
                failure = error
        # Strategies carry plain data, and so no exceptions. Without the failure, the other ranks
        # would wait for names forever.
        described = [type(failure).__name__, text_of(failure)] if failure is not None else None
        names, described = strategy.broadcast((names, described), 0)
        if failure is not None:
            raise failure
        if described is not None:
            raise error_named(*described)
        self._names = tuple(names)

    def forget_folders(self) -> None:
        """Forget the folder names after a change of the source. Given names stay."""
        self._names = self._given or ()

    def check_checkpoint_names(self, checkpoint_names: list[str]) -> None:
        """Check that a checkpoint has the same classes in the same order.

        Raises:
            ConfigError: If a class index means another class in the checkpoint.
        """
        if self._names and checkpoint_names and list(self._names) != checkpoint_names:
            raise ConfigError(
                f"labels must give the {len(checkpoint_names)} classes of the checkpoint in their "
                f"order, got {len(self._names)} classes that differ, from "
                f"{'labels' if self._given else 'folders'}. Pass the names as a list in labels."
            )
