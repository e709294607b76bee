"""Loaders that read a part of the data on each rank. Rank 0 alone reads, so that it must read all
of it.

A sampler that deals samples out is told of a single rank. Data that was divided before the run
cannot be put together again: it shows as values that differ between the ranks.
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

_DEPTH = 6
_MANY = 32
# Of long data, so many elements are looked at: first elements of parts differ, too.
_LOOKED_AT = 8192
# Two samples of the smallest hashes share some if the data do.
_SKETCH = 64
_REPLICAS = ("num_replicas", "rank")


def undo_sharding(loader: Any) -> Callable[[], None]:
    """Let every sampler that a loader draws from yield all samples, and return the undo.

    Works on samplers with the attributes of `DistributedSampler`, also inside of a batch sampler.

    Raises:
        ConfigError: a sampler counts its samples in another way.
    """
    saved: list[tuple[Any, dict[str, Any]]] = []
    for path, value in _objects(loader):
        own = vars(value)
        if not all(_is_count(own.get(name)) for name in _REPLICAS) or own["num_replicas"] == 1:
            continue
        mended = _of_one_rank(path, own)
        saved.append((value, {name: own[name] for name in mended}))
        own.update(mended)

    def undo() -> None:
        for value, attributes in saved:
            vars(value).update(attributes)

    return undo


def _of_one_rank(path: str, own: Mapping[str, Any]) -> dict[str, Any]:
    mended = {"num_replicas": 1, "rank": 0}
    if "num_samples" not in own and "total_size" not in own:
        return mended
    source: Any = next((own[n] for n in ("dataset", "data_source") if n in own), None)
    drop_last = bool(own.get("drop_last", False))
    if hasattr(source, "__len__"):
        length = len(source)
        before = _sizes(length, own["num_replicas"], drop_last)
        if all(own.get(name, size) == size for name, size in before.items()):
            sizes = _sizes(length, 1, drop_last)
            return {**mended, **{name: size for name, size in sizes.items() if name in own}}
    raise ConfigError(
        f"{path} must yield all samples, since one rank reads for all; got one that yields a part "
        f"of {own['num_replicas']}. Make it with num_replicas=1, rank=0."
    )


def _sizes(length: int, replicas: int, drop_last: bool) -> dict[str, int]:
    part = math.ceil(length / replicas)
    if drop_last and length % replicas:
        part = math.ceil((length - replicas) / replicas)
    return {"num_samples": part, "total_size": part * replicas}


def describe(loader: Any) -> list[list[Any]]:
    """Return what of a loader may differ between ranks: path, name, and a count or a sample of
    hashes."""
    found: list[list[Any]] = []
    for path, value in _objects(loader):
        for name, content in vars(value).items():
            if _is_count(content):
                found.append([path, name, content])
            elif _is_sequence(content):
                found.append([path, name, _sketch(content)])
            elif isinstance(content, (list, tuple)):
                arrays = [
                    item for item in content[:_MANY] if isinstance(item, (Tensor, np.ndarray))
                ]
                found += [[path, f"{name}[{i}]", _sketch(item)] for i, item in enumerate(arrays)]
    return found


def refuse_shards(kind: str, descriptions: Sequence[list[list[Any]]]) -> str | None:
    """Return a warning where the ranks' loaders differ as parts of the data do; None if they do
    not.

    Args:
        kind: the loader, for messages.
        descriptions: what `describe` returned on every rank.

    Raises:
        ConfigError: an object knows its rank and the number of ranks.
    """
    ranks = len(descriptions)
    values = [{(path, name): value for path, name, value in told} for told in descriptions]
    both = [key for key in values[0] if all(key in other for other in values)]
    for path, name in both:
        told = [other[path, name] for other in values]
        if told == list(range(ranks)):
            sizes = [n for p, n in both if p == path and all(v[p, n] == ranks for v in values)]
            if sizes:
                raise ConfigError(
                    f"{kind}{path} must hold all of the data, since one rank reads for all; got "
                    f"{name}={told[0]}, {sizes[0]}={ranks}. Make it for one rank of one."
                )
            if any(_was_made_alone(values, key, ranks) for key in both if key[0] == path):
                continue
        elif not _is_divided(told):
            continue
        return (
            f"{kind}{path}.{name} differs between the ranks, and rank 0 alone reads. If each rank "
            "was given a part of the data, the other parts are never read: give all of it to every "
            "rank."
        )
    return None


def _objects(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a loader is made of, each once, with its path."""
    waiting, seen = [("", loader, 0)], {id(loader)}
    while waiting:
        path, value, depth = waiting.pop(0)
        if isinstance(value, (list, tuple)):
            children = [(f"[{i}]", child) for i, child in enumerate(value[:_MANY])]
        elif isinstance(value, dict):
            children = [(f"[{k!r}]", child) for k, child in list(value.items())[:_MANY]]
        else:
            yield path, value
            children = [(f".{name}", child) for name, child in vars(value).items()]
        for suffix, child in children:
            if depth < _DEPTH and id(child) not in seen and _is_walked(child):
                seen.add(id(child))
                waiting.append((path + suffix, child, depth + 1))


def _is_walked(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return True
    foreign = type(value).__module__.partition(".")[0] in ("lightning", "threading", "logging")
    sampler = hasattr(value, "num_replicas")
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, Tensor, nn.Module))
        and not callable(getattr(value, "__get__", None))
        and (sampler or not foreign)
        and not hasattr(value, "strategy")
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _was_made_alone(values: Sequence[Mapping[Any, Any]], key: Any, ranks: int) -> bool:
    """Return whether rank 0, which reads, was told of one rank and the others of all."""
    return [told[key] for told in values] == [1] + [ranks] * (ranks - 1)


def _is_divided(told: Sequence[Any]) -> bool:
    """Return whether no two ranks have an element in common."""
    if not all(isinstance(sample, list) and sample for sample in told):
        return False
    return len(set().union(*told)) == sum(len(set(sample)) for sample in told)


def _is_sequence(value: Any) -> bool:
    if isinstance(value, (np.ndarray, Tensor)):
        return value.ndim > 0
    if isinstance(value, (list, tuple, range)):
        return len(value) > 1 and isinstance(value[0], (int, str, bytes, Path, tuple))
    return False


def _sketch(values: Any) -> list[int]:
    hashes = {zlib.crc32(_text(value).encode(errors="replace")) for value in values[:_LOOKED_AT]}
    return heapq.nsmallest(_SKETCH, hashes)


def _text(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return repr(value.reshape(-1)[:8].tolist())
    if isinstance(value, tuple):
        return repr([_text(item) for item in value[:8]])
    return (
        repr(value) if isinstance(value, (int, float, str, bytes, Path)) else type(value).__name__
    )
