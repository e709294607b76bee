"""Class labels of samples, from the names of their top folders.

Classes are numbered from 0 in alphabetical order, as torchvision's `ImageFolder` numbers them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.prefetch.storage.manifest import SampleTable

# First components of paths that are not names of classes; a listing may have such paths.
_NOT_CLASSES = ("", ".", "..")


def parse_labels(labels: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of the classes of the argument `labels`.

    They are () for "folder", whose classes are read later, and None for no labels.

    Raises:
        ConfigError: If the value is none of these.
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
    """Return the first folder of a sample's key, or None if it has none."""
    folder, slash, _ = key.partition("/")
    return folder if slash and folder not in _NOT_CLASSES else None


def class_names(table: SampleTable, source: str) -> tuple[str, ...]:
    """Return the folders that samples lie in, in alphabetical order.

    Raises:
        ConfigError: If a sample lies in no folder.
    """
    keys, starts = table.keys.tobytes(), [0, *table.key_ends.tolist()]
    # Many samples share a folder, so decode each folder's name only once.
    names: dict[bytes, str] = {}
    for sample_id in range(len(table)):
        folder, slash, _ = keys[starts[sample_id] : starts[sample_id + 1]].partition(b"/")
        if slash and folder in names:
            continue
        name = class_of(table.key(sample_id))
        if name is None:
            raise ConfigError(
                "With labels every sample must be in a folder of its class, got sample "
                f"{table.key(sample_id)!r} of {source}. Move it into a folder, or leave it out "
                "with extensions."
            )
        names[folder] = name
    return tuple(sorted(names.values()))


def check_classes(table: SampleTable, classes: Sequence[str], source: str) -> None:
    """Raise if a sample lies outside of the folders of these classes.

    Args:
        table: The samples.
        classes: Names of the classes; () if samples have no labels, so that nothing is checked.
        source: Name of the source, in errors.

    Raises:
        ConfigError: If a folder is not one of the classes. The message names the folder.
    """
    if not classes:
        return
    unknown = [name for name in class_names(table, source) if name not in set(classes)]
    if unknown:
        raise ConfigError(
            f"Samples must lie in folders of the {len(classes)} classes of the training samples "
            f"or of the labels argument, got the folder {unknown[0]!r} in {source}. Name all "
            f"classes: labels={_shortened([*classes, unknown[0]])}."
        )


def _shortened(names: Sequence[str], max_names: int = 5) -> str:
    shown = ", ".join(map(repr, sorted(names)[:max_names]))
    return f"[{shown}{', ...' if len(names) > max_names else ''}]"
