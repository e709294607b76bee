"""Loaders that would read only one rank's part of the data.

Rank 0 reads the data for all ranks, so it must read all of it. A sampler that divides samples among
ranks is changed to one rank. Data that was divided before the run cannot be restored. It is
detected by values that differ between the ranks.
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

# Levels of references that are searched from a loader.
_MAX_DEPTH = 6
# Number of elements of a list, tuple or dict that are searched.
_MAX_CHILDREN = 32
# Number of first elements of a sequence that are hashed. Parts of data differ in these already.
_MAX_HASHED = 8192
# Number of smallest hashes in the sketch of a sequence. Sketches of overlapping data overlap.
_SKETCH_SIZE = 64
# Attributes by which a `DistributedSampler` is recognised.
_SAMPLER_ATTRIBUTES = ("num_replicas", "rank")


def undo_sharding(loader: Any) -> Callable[[], None]:
    """Make every sampler of a loader yield all samples; return a function that undoes this.

    Changes samplers with the attributes of `DistributedSampler`, also inside a batch sampler.

    Raises:
        ConfigError: If a sampler counts its samples in another way.
    """
    saved: list[tuple[Any, dict[str, Any]]] = []
    for path, value in _objects(loader):
        own = vars(value)
        if (
            not all(_is_count(own.get(name)) for name in _SAMPLER_ATTRIBUTES)
            or own["num_replicas"] == 1
        ):
            continue
        replacements = _one_rank_attributes(path, own)
        saved.append((value, {name: own[name] for name in replacements}))
        own.update(replacements)

    def undo() -> None:
        for value, attributes in saved:
            vars(value).update(attributes)

    return undo


def _one_rank_attributes(path: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes with which a sampler yields all samples."""
    one_rank = {"num_replicas": 1, "rank": 0}
    if "num_samples" not in own and "total_size" not in own:
        return one_rank
    source: Any = next((own[n] for n in ("dataset", "data_source") if n in own), None)
    drop_last = bool(own.get("drop_last", False))
    if hasattr(source, "__len__"):
        length = len(source)
        expected = _sizes(length, own["num_replicas"], drop_last)
        if all(own.get(name, size) == size for name, size in expected.items()):
            sizes = _sizes(length, 1, drop_last)
            return {**one_rank, **{name: size for name, size in sizes.items() if name in own}}
    raise ConfigError(
        f"{path} must yield all samples, since one rank reads for all, got one that yields a part "
        f"of {own['num_replicas']}. Make it with num_replicas=1, rank=0."
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
        for name, content in vars(value).items():
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
    """Return a warning if the ranks' loaders differ as parts of the data do; None if they do not.

    Args:
        kind: Name of the loader in messages.
        descriptions: Result of `describe` on every rank, by rank.

    Raises:
        ConfigError: If an object has its rank and the number of ranks as attributes.
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
                    f"{kind}{path} must hold all of the data, since one rank reads for all, got "
                    f"{name}={by_rank[0]}, {sizes[0]}={ranks}. Make it with one rank: "
                    f"{name}=0, {sizes[0]}=1."
                )
            if any(_was_made_alone(values, key, ranks) for key in common if key[0] == path):
                continue
        elif not _is_divided(by_rank):
            continue
        return (
            f"{kind}{path}.{name} differs between the ranks, and rank 0 alone reads. If each rank "
            "was given a part of the data, the other parts are never read: give all of it to every "
            "rank."
        )
    return None


def _objects(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects of which a loader consists, each once, with its path."""
    queue, seen = [("", loader, 0)], {id(loader)}
    while queue:
        path, value, depth = queue.pop(0)
        if isinstance(value, (list, tuple)):
            children = [(f"[{i}]", child) for i, child in enumerate(value[:_MAX_CHILDREN])]
        elif isinstance(value, dict):
            children = [(f"[{k!r}]", child) for k, child in list(value.items())[:_MAX_CHILDREN]]
        else:
            yield path, value
            children = [(f".{name}", child) for name, child in vars(value).items()]
        for suffix, child in children:
            if depth < _MAX_DEPTH and id(child) not in seen and _is_searched(child):
                seen.add(id(child))
                queue.append((path + suffix, child, depth + 1))


def _is_searched(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return True
    # A search of Lightning's objects would reach the Trainer. Only its samplers are searched.
    is_library = type(value).__module__.partition(".")[0] in ("lightning", "threading", "logging")
    is_sampler = hasattr(value, "num_replicas")
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, Tensor, nn.Module))
        and not callable(getattr(value, "__get__", None))
        and (is_sampler or not is_library)
        and not hasattr(value, "strategy")
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _was_made_alone(values: Sequence[Mapping[Any, Any]], key: Any, ranks: int) -> bool:
    """Return True if the object on rank 0, the reader, was made for one rank, and the others for
    all ranks."""
    return [other[key] for other in values] == [1] + [ranks] * (ranks - 1)


def _is_divided(sketches: Sequence[Any]) -> bool:
    """Return True if no two ranks have an element in common."""
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
