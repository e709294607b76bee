"""Classes of a data module's samples: given names, or the folders of one split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning.pytorch.strategies import Strategy

from lightning_dlres.core.errors import ConfigError, DlresError
from lightning_dlres.prefetch.storage.labels import parse_labels


class ClassLabels:
    """Names of classes in the order of their numbers, the same on all ranks.

    Args:
        labels: "folder", a list of names, or None for samples without labels.
        list_folders: Returns the names of the folders that samples lie in.

    Raises:
        ConfigError: If `labels` is none of these.
    """

    def __init__(
        self, labels: str | Sequence[str] | None, list_folders: Callable[[], Sequence[str]]
    ) -> None:
        self._given = parse_labels(labels)
        self._list_folders = list_folders
        # The given names, or those of the folders once they have been listed.
        self._names: tuple[str, ...] = self._given or ()

    @property
    def are_used(self) -> bool:
        """True if samples have labels."""
        return self._given is not None

    @property
    def known(self) -> tuple[str, ...]:
        """Names of the classes; () if there are no labels, or folders were not listed yet."""
        return self._names

    def names(self) -> list[str]:
        """Return the names of the classes; list folders if they are not known.

        Raises:
            ConfigError: If samples have no labels, or lie in no folders.
        """
        if self._given is None:
            raise ConfigError(
                "labels must be given where classes are asked for, got None. Use labels='folder'."
            )
        self._names = self._names or tuple(self._list_folders())
        return list(self._names)

    def agree(self, strategy: Strategy, is_first: bool) -> None:
        """List folders on rank 0, and use its names on all ranks. All ranks must call this.

        Args:
            strategy: Strategy of the ranks.
            is_first: True on rank 0.

        Raises:
            DlresError: If rank 0 could not list the classes; on all ranks.
        """
        if not self.are_used:
            return
        result: list[str] | DlresError
        try:
            result = self.names() if is_first else []
        except DlresError as error:
            # Broadcast, so that the other ranks do not wait for names.
            result = error
        result = strategy.broadcast(result, 0)
        if isinstance(result, DlresError):
            raise result
        self._names = tuple(result)

    def forget_folders(self) -> None:
        """Forget the names of folders, because the source has changed; given names stay."""
        self._names = self._given or ()

    def check(self, names: list[str]) -> None:
        """Raise if a checkpoint has other classes, or the same in another order.

        Raises:
            ConfigError: If the numbers of classes stand for other classes in the checkpoint.
        """
        if self._names and names and list(self._names) != names:
            raise ConfigError(
                f"labels must give the {len(names)} classes of the checkpoint in their order, got "
                f"{len(self._names)} others from {'labels' if self._given else 'folders'}. Pass "
                "labels with a list of the names."
            )
