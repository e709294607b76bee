"""Detection and reversal of sharding in the user's loaders.

Rank 0 reads the data for all ranks, so it must read all of it. A sampler that divides samples among
ranks is changed to one rank. A dataset that was divided before the run cannot be made whole. It is
detected by attributes that differ between the ranks.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError

# Levels of references that are searched from a loader; bounds the search.
_MAX_DEPTH = 6
# Most elements of a list, tuple or dict that are searched; bounds the search.
_MAX_CHILDREN = 32
# Number of first elements of a sequence that are hashed. Shards already differ in these.
_MAX_HASHED = 8192
# Number of smallest hashes in the sketch of a sequence. Sequences with common elements have common
# smallest hashes, unless the overlap is small.
_SKETCH_SIZE = 64
# Attributes by which a `DistributedSampler` is recognised.
_SAMPLER_ATTRIBUTES = ("num_replicas", "rank")


def undo_sharding(loader: Any) -> Callable[[], None]:
    """Make every sampler of a loader yield all samples; return a function that undoes this.

    It changes samplers with the attributes of `DistributedSampler`, also inside a batch sampler.

    Raises:
        ConfigError: If the sizes of a sampler are not those that a `DistributedSampler` would have.
    """
    saved: list[tuple[Any, dict[str, Any]]] = []
    for path, value in _objects(loader):
        attributes = _attributes_of(value)
        if (
            not all(_is_count(attributes.get(name)) for name in _SAMPLER_ATTRIBUTES)
            or attributes["num_replicas"] == 1
        ):
            continue
        replacements = _one_rank_attributes(path, attributes)
        saved.append((value, {name: attributes[name] for name in replacements}))
        attributes.update(replacements)

    def undo() -> None:
        for value, old_attributes in saved:
            _attributes_of(value).update(old_attributes)

    return undo


def _one_rank_attributes(path: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return new values of the attributes with which the sampler yields all samples.

    Args:
        path: Path of the sampler, for the error.
        attributes: Its attributes now.
    """
    one_rank = {"num_replicas": 1, "rank": 0}
    if "num_samples" not in attributes and "total_size" not in attributes:
        return one_rank
    source_names = [name for name in ("dataset", "data_source") if name in attributes]
    source: Any = attributes[source_names[0]] if source_names else None
    drop_last = bool(attributes.get("drop_last", False))
    if hasattr(source, "__len__"):
        length = len(source)
        expected = _sizes(length, attributes["num_replicas"], drop_last)
        if all(attributes.get(name, size) == size for name, size in expected.items()):
            sizes = _sizes(length, 1, drop_last)
            return one_rank | {name: n for name, n in sizes.items() if name in attributes}
    raise ConfigError(
        f"{path} must yield all samples, since rank 0 reads for all, got num_replicas="
        f"{attributes['num_replicas']}. Make the sampler with num_replicas=1, rank=0."
    )


def _sizes(length: int, replicas: int, drop_last: bool) -> dict[str, int]:
    """Return the sizes that a `DistributedSampler` computes from the length of its dataset."""
    part = math.ceil(length / replicas)
    if drop_last and length % replicas:
        part = math.ceil((length - replicas) / replicas)
    return {"num_samples": part, "total_size": part * replicas}


def describe(loader: Any) -> list[list[Any]]:
    """Return the attributes of a loader's objects that may differ between ranks.

    Returns:
        For each attribute a list of the object's path, the attribute's name, and its value: a
        count, or the sketch of a sequence.
    """
    attributes: list[list[Any]] = []
    for path, value in _objects(loader):
        for name, content in _attributes_of(value).items():
            if _is_count(content):
                attributes.append([path, name, content])
            elif _is_sequence(content):
                attributes.append([path, name, _sketch(content)])
            elif isinstance(content, (list, tuple)):
                arrays = [
                    item
                    for item in content[:_MAX_CHILDREN]
                    if isinstance(item, (Tensor, np.ndarray))
                ]
                attributes += [
                    [path, f"{name}[{i}]", _sketch(item)] for i, item in enumerate(arrays)
                ]
    return attributes


def refuse_shards(kind: str, descriptions: Sequence[list[list[Any]]]) -> str | None:
    """Return a warning if the ranks' loaders seem to hold different shards of the data; else None.

    Args:
        kind: Name of the loader in messages.
        descriptions: Result of `describe` on every rank, by rank.

    Raises:
        ConfigError: If an object of a loader has its rank and the number of ranks as attributes.
    """
    ranks = len(descriptions)
    values = [{(path, name): value for path, name, value in rows} for rows in descriptions]
    common = [key for key in values[0] if all(key in other for other in values)]
    for path, name in common:
        by_rank = [other[path, name] for other in values]
        if by_rank == list(range(ranks)):
            sizes = [n for p, n in common if p == path and all(v[p, n] == ranks for v in values)]
            if sizes:
                raise ConfigError(
                    f"{kind}{path} must hold all of the data, since rank 0 reads for all, got "
                    f"{name}={by_rank[0]}, {sizes[0]}={ranks}. Make it with one rank: "
                    f"{name}=0, {sizes[0]}=1."
                )
            # On rank 0 this object was made in a view of a single device, so it holds all data.
            if any(_made_for_reader(values, key, ranks) for key in common if key[0] == path):
                continue
        elif not _is_divided(by_rank):
            continue
        return (
            f"{kind}{path}.{name} differs between the ranks, and only rank 0 reads data. If each "
            "rank has a part of the data, the parts of the other ranks are never read. Give all of "
            "the data to every rank."
        )
    return None


def _objects(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that are reachable from a loader, each once, with its path."""
    queue, seen = [("", loader, 0)], {id(loader)}
    while queue:
        path, value, depth = queue.pop(0)
        if isinstance(value, (list, tuple)):
            children = [(f"[{i}]", child) for i, child in enumerate(value[:_MAX_CHILDREN])]
        elif isinstance(value, dict):
            children = [(f"[{k!r}]", child) for k, child in list(value.items())[:_MAX_CHILDREN]]
        else:
            yield path, value
            children = [(f".{name}", child) for name, child in _attributes_of(value).items()]
        for suffix, child in children:
            if depth < _MAX_DEPTH and id(child) not in seen and _is_searched(child):
                seen.add(id(child))
                queue.append((path + suffix, child, depth + 1))


def _is_searched(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return True
    kind = type(value)
    # A search of Lightning's objects would reach the Trainer. Only its samplers are searched.
    is_library = kind.__module__.partition(".")[0] in ("lightning", "threading", "logging")
    return (
        bool(_attributes_of(value))
        and not issubclass(kind, (type, Tensor, nn.Module))
        and not _has(value, "__get__")
        and (_has(value, "num_replicas") or not is_library)
        and not _has(value, "strategy")
    )


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's own attributes, as the object itself keeps them.

    No code of the user's runs: a `__getattr__` may raise, or ask a server.
    """
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _has(value: Any, name: str) -> bool:
    """Return True if an object or its class has an attribute."""
    return name in _attributes_of(value) or any(name in vars(base) for base in type(value).__mro__)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _made_for_reader(values: Sequence[Mapping[Any, Any]], key: Any, ranks: int) -> bool:
    """Return True if an attribute is 1 on rank 0, the reader, and the number of ranks elsewhere."""
    return [other[key] for other in values] == [1] + [ranks] * (ranks - 1)


def _is_divided(sketches: Sequence[Any]) -> bool:
    """Return True if the values are sketches, and no two ranks' sketches have a hash in common."""
    if not all(isinstance(sketch, list) and sketch for sketch in sketches):
        return False
    return len(set().union(*sketches)) == sum(len(set(sketch)) for sketch in sketches)


def _is_sequence(value: Any) -> bool:
    if isinstance(value, (np.ndarray, Tensor)):
        return value.ndim > 0
    if isinstance(value, (list, tuple, range)):
        return len(value) > 1 and isinstance(value[0], (int, str, bytes, Path, tuple))
    return False


def _sketch(values: Any) -> list[int]:
    """Return the smallest hashes of a sequence's first elements."""
    hashes = {zlib.crc32(_text(value).encode(errors="replace")) for value in values[:_MAX_HASHED]}
    return heapq.nsmallest(_SKETCH_SIZE, hashes)


def _text(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return repr(value.reshape(-1)[:8].tolist())
    if isinstance(value, tuple):
        return repr([_text(item) for item in value[:8]])
    return (
        repr(value) if isinstance(value, (int, float, str, bytes, Path)) else type(value).__name__
    )
