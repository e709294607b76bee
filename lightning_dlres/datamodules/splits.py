"""Sources of a data module's splits: one source, or several sets with a loader each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.prefetch.cache.options import is_address
from lightning_dlres.prefetch.storage.listings import is_url

Source = str | Path | Dataset[Any]
SplitSource = Source | Sequence[Source] | None
SPLITS = ("train", "val", "test", "predict")
# Splits whose samples may have labels. Samples to predict have none.
LABELLED = ("train", "val", "test")


@dataclass(frozen=True)
class Split:
    """Split of the samples, with its sources.

    Attributes:
        name: One of `SPLITS`.
        sources: Sources by the names of their loaders. A source that is a list of strings holds
            addresses of storage nodes.
        is_list: True if the user gave a list of sources, even of one. Then the Trainer gets a list
            of loaders.
    """

    name: str
    sources: dict[str, Any]
    is_list: bool = False

    def __post_init__(self) -> None:
        rule = "a folder, a store, a listing, a URL, addresses or a map-style data set"
        for source in self.sources.values():
            if isinstance(source, IterableDataset):
                raise ConfigError(
                    f"{self.name} must be {rule}, got the IterableDataset {type(source).__name__}. "
                    "Its order is not known before it is read. Write its samples into files, or "
                    "pass it to a DataLoader."
                )
            if not _is_source(source):
                fix = f"{self.name}='data/{self.name}'"
                raise ConfigError(got_expected(self.name, source, rule, fix))

    @staticmethod
    def of(name: str, value: SplitSource) -> Split:
        """Return the split that an argument describes.

        Raises:
            ConfigError: If the argument is neither a source nor a list of sources, or if it is a
                list for "train".
        """
        if value is None:
            return Split(name, {})
        if not isinstance(value, (list, tuple)) or (value and all(map(_is_address, value))):
            return Split(name, {name: value})
        if name == "train":
            raise ConfigError(
                f"train must be one source, got a list of {len(value)}. Put all samples into one "
                "folder, or write a listing."
            )
        # `None in value` would compare arrays, whose comparison is an array.
        if not value or any(source is None for source in value):
            rule = "one source, or a list of sources"
            raise ConfigError(got_expected(name, value, rule, f"{name}=['data/a', 'data/b']"))
        return Split(name, {f"{name}-{at}": source for at, source in enumerate(value)}, True)


def is_data_set(source: Any) -> bool:
    """Return True if a source is a map-style data set, which has to be written into a store."""
    return not isinstance(source, (str, Path, list, tuple))


def has_files(source: Any) -> bool:
    """Return True if a source is a folder, store, listing or URL."""
    return isinstance(source, Path) or (isinstance(source, str) and not is_address(source))


def has_url(source: Any) -> bool:
    """Return True if a source is a URL of files."""
    return isinstance(source, str) and has_files(source) and is_url(source)


def check_source_arguments(splits: Sequence[Split], arguments: dict[str, Any]) -> None:
    """Raise an error if an argument about sources has a value but does not fit the sources.

    `labels` fits no map-style data set. The other arguments must apply to at least one source.

    Args:
        splits: All splits.
        arguments: Values of `labels`, `extensions` and `storage_options`.

    Raises:
        ConfigError: If there is such an argument; the message names it.
    """
    sources = [source for split in splits for source in split.sources.values()]
    if arguments["labels"] is not None:
        for split in splits:
            if split.name in LABELLED and any(map(is_data_set, split.sources.values())):
                raise ConfigError(
                    f"labels must be None where {split.name} is a map-style data set, got "
                    f"{arguments['labels']!r}. Let the data set return its labels."
                )
    for name, applies, kind in (
        ("extensions", has_files, "a folder, store, listing or URL"),
        ("storage_options", has_url, "a URL"),
    ):
        if arguments[name] is not None and sources and not any(map(applies, sources)):
            # The message does not show the value, which may be a secret.
            raise ConfigError(f"{name} must be None where no split is {kind}. Leave it out.")


def _is_source(source: Any) -> bool:
    if isinstance(source, (list, tuple)):
        return bool(source) and all(isinstance(address, str) for address in source)
    if isinstance(source, (str, Path)):
        return source != ""
    is_map_style = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return is_map_style and not isinstance(source, (bytes, bytearray))


def _is_address(value: object) -> bool:
    return isinstance(value, str) and is_address(value)
