"""Class labels of samples: the folders that they lie in, in alphabetical order, numbered from 0 as
torchvision's ImageFolder numbers them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.prefetch.storage.manifest import SampleTable

# First parts of paths in a listing that name no class.
_NO_CLASSES = ("", ".", "..")


def parse_labels(labels: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the classes that are given, () for "folder", and None where there are no labels.

    Raises:
        ConfigError: It is none of these.
    """
    if labels is None:
        return None
    if labels == "folder":
        return ()
    if (
        isinstance(labels, str)
        or not isinstance(labels, Sequence)
        or not labels
        or not all(isinstance(name, str) and name and "/" not in name for name in labels)
        or len(set(labels)) != len(labels)
    ):
        rule = "'folder', None, or a list of the folders' names, each once"
        raise ConfigError(got_expected("labels", labels, rule, "labels='folder'"))
    return tuple(labels)


def class_of(key: str) -> str | None:
    """Return the first folder of a sample's key; None where it has none."""
    folder, slash, _ = key.partition("/")
    return folder if slash and folder not in _NO_CLASSES else None


def class_names(table: SampleTable, source: str) -> tuple[str, ...]:
    """Return the folders that samples lie in, in alphabetical order.

    Raises:
        ConfigError: A sample lies in none.
    """
    keys, starts = table.keys.tobytes(), [0, *table.key_ends.tolist()]
    # A folder has many samples: its name is decoded once.
    known: dict[bytes, str] = {}
    for number in range(len(table)):
        folder, slash, _ = keys[starts[number] : starts[number + 1]].partition(b"/")
        if slash and folder in known:
            continue
        name = class_of(table.key(number))
        if name is None:
            raise ConfigError(
                "labels='folder' must be used where every sample lies in a folder of its class, "
                f"got sample {table.key(number)!r} of {source}. Move it into one, or leave it out "
                "with extensions."
            )
        known[folder] = name
    return tuple(sorted(known.values()))


def check_classes(table: SampleTable, classes: Sequence[str], source: str) -> None:
    """Raise where a sample lies in no folder of these classes; () stands for no labels.

    Raises:
        ConfigError: It names a folder without a class.
    """
    if not classes:
        return
    unknown = [name for name in class_names(table, source) if name not in set(classes)]
    if unknown:
        raise ConfigError(
            f"Samples must lie in folders of the {len(classes)} classes of the training samples "
            f"or of labels, got the folder {unknown[0]!r} in {source}. Name all classes: "
            f"labels={_first([*classes, unknown[0]])}."
        )


def _first(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(map(repr, sorted(names)[:most]))
    return f"[{shown}{', ...' if len(names) > most else ''}]"
