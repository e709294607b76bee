"""The classes of a data module's samples: those that are given, or the folders of one split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning.pytorch.strategies import Strategy

from lightning_dlres.core.errors import ConfigError, DlresError
from lightning_dlres.prefetch.storage.labels import parse_labels


class ClassLabels:
    """Names of classes in the order of their numbers, the same on all ranks.

    Args:
        labels: "folder", names, or None: samples have no labels.
        folders: Returns the names of the folders that samples lie in.

    Raises:
        ConfigError: `labels` is none of these.
    """

    def __init__(
        self, labels: str | Sequence[str] | None, folders: Callable[[], Sequence[str]]
    ) -> None:
        self._given = parse_labels(labels)
        self._folders = folders
        # Names of folders, once they are known.
        self._names: tuple[str, ...] = self._given or ()

    @property
    def are_used(self) -> bool:
        """True if samples have labels."""
        return self._given is not None

    @property
    def known(self) -> tuple[str, ...]:
        """The names, () where there are none or none are known yet."""
        return self._names

    def names(self) -> list[str]:
        """Return the names; folders are looked at for them.

        Raises:
            ConfigError: Samples have no labels, or lie in no folders.
        """
        if self._given is None:
            raise ConfigError(
                "labels must be given where classes are asked for, got None. Use labels='folder'."
            )
        self._names = self._names or tuple(self._folders())
        return list(self._names)

    def agree(self, strategy: Strategy, is_first: bool) -> None:
        """Have one rank look at folders for all.

        Args:
            strategy: Of the ranks, which all come here.
            is_first: Whether this is rank 0.

        Raises:
            DlresError: Rank 0 found no classes.
        """
        if not self.are_used:
            return
        found: list[str] | DlresError
        try:
            found = self.names() if is_first else []
        except DlresError as error:
            found = error
        found = strategy.broadcast(found, 0)
        if isinstance(found, DlresError):
            raise found
        self._names = tuple(found)

    def forget_folders(self) -> None:
        """Look again when names are asked for next: there is another source."""
        self._names = self._given or ()

    def check(self, names: list[str]) -> None:
        """Raise where a checkpoint has other names.

        Raises:
            ConfigError: Numbers of classes mean something else there.
        """
        if self._names and names and list(self._names) != names:
            raise ConfigError(
                f"labels must give the {len(names)} classes of the checkpoint in their order, got "
                f"{len(self._names)} others from {'labels' if self._given else 'folders'}. Pass "
                "labels with a list of the names."
            )
