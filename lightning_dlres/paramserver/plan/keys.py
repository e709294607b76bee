"""Keys: the parts of parameters that are pushed and pulled, and the server of each one.

A large parameter is several keys, so that its update and its way back begin before its last part
has arrived. Only optimizers that treat every element by itself allow that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

# Keys begin at multiples of this many elements, so that codecs may cut a gradient there.
_BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """Parameter of a model, as far as its keys depend on it.

    Attributes:
        name: Name in the model.
        shape: Its shape.
        dtype: Name of its dtype, such as "float32".
        itemsize: Bytes of an element.
        optimizer: Index of its optimizer.
        group: Index of its group in the optimizer.
        is_divisible: True if its optimizer treats every element by itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    optimizer: int
    group: int
    is_divisible: bool

    @property
    def count(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a parameter.

    Attributes:
        index: Position in the list of all keys. Forward probably needs smaller ones earlier, see
            `make_keys`.
        name: Name of the parameter.
        start: First element of the part in the flat parameter.
        count: Number of elements.
        shape: Shape of the part: that of the parameter if it is whole, else flat.
        dtype: Name of the dtype, such as "float32".
        optimizer: Index of the optimizer.
        group: Index of the parameter's group in the optimizer.
        server: Index of its server.
        nbytes: Bytes of the part.
    """

    index: int
    name: str
    start: int
    count: int
    shape: tuple[int, ...]
    dtype: str
    optimizer: int
    group: int
    server: int
    nbytes: int

    def __str__(self) -> str:
        return self.name if self.start == 0 else f"{self.name}[{self.start}:]"


def make_keys(parameters: Sequence[ParameterInfo], servers: int, key_bytes: int) -> tuple[Key, ...]:
    """Return the keys of parameters, shared out over the servers by bytes.

    Args:
        parameters: Parameters in the order of their definition in the model, which usually is that
            of their first use in forward.
        servers: Number of servers.
        key_bytes: Largest number of bytes of a key, where its parameter is divisible.
    """
    parts = [
        (parameter, start, count)
        for parameter in parameters
        for start, count in _parts(parameter, key_bytes)
    ]
    chosen = balanced_servers([count * p.itemsize for p, _, count in parts], servers)
    return tuple(
        Key(
            index=index,
            name=parameter.name,
            start=start,
            count=count,
            shape=parameter.shape if count == parameter.count else (count,),
            dtype=parameter.dtype,
            optimizer=parameter.optimizer,
            group=parameter.group,
            server=server,
            nbytes=count * parameter.itemsize,
        )
        for index, ((parameter, start, count), server) in enumerate(zip(parts, chosen, strict=True))
    )


def balanced_servers(sizes: Sequence[int], servers: int) -> list[int]:
    """Return the server of each key, so that all servers have about the same bytes.

    Each key, from the largest on, goes to the server with the fewest bytes so far. The largest load
    is at most 4/3 of the least possible one (Graham, 1969). Equal keys are dealt out in turn, so
    that all servers work on every stretch of the model.
    """
    loads = [0] * servers
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        server = min(range(servers), key=lambda server: (loads[server], server))
        chosen[index] = server
        loads[server] += sizes[index]
    return chosen


def _parts(parameter: ParameterInfo, key_bytes: int) -> list[tuple[int, int]]:
    """Return start and number of elements of each key of a parameter."""
    total = parameter.count
    most = key_bytes // parameter.itemsize // _BLOCK * _BLOCK or _BLOCK
    if not parameter.is_divisible or total <= most:
        return [(0, total)]
    return [(start, min(most, total - start)) for start in range(0, total, most)]
