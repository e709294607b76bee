"""Items of a map-style data set as bytes and back: trees of tensors, arrays, numbers and texts,
without pickle.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.core.wire import payload
from lightning_dlres.prefetch.cache.samples import Sample

ENCODING = "tensors"
_LENGTH = struct.Struct("<I")


def encode_item(item: Any) -> bytes:
    """Return an item as bytes.

    Raises:
        ConfigError: the item has something else in it.
    """
    try:
        header, large = payload.encode(item, ())
        contents = [tensor.cpu().numpy().tobytes() for tensor in large]
    except (ConfigError, ProtocolError) as error:
        # The codec speaks of ranks and batches.
        raise ConfigError(
            "an item of a map-style data set must be made of dense tensors, numeric arrays, "
            "numbers, texts, None, and tuples, lists, dicts or data classes of them, got: "
            f"{str(error).partition(' cannot be sent')[0]}. Return tensors, or put files into a "
            "folder and pass `decode`."
        ) from error
    return b"".join([_LENGTH.pack(len(header)), header, *contents])


def decode_item(sample: Sample) -> Any:
    """Return the item that a sample holds, as a copy.

    Raises:
        ProtocolError: the sample is no such item.
    """
    data = sample.array
    name = f"sample {sample.key!r}"
    if len(data) < _LENGTH.size:
        raise ProtocolError(f"{name} has {len(data)} bytes; it is no item of a data set.")
    (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
    at = _LENGTH.size + length
    header = payload.decode_header(data[_LENGTH.size : at].tobytes(), name)
    large = []
    for size in payload.large_sizes(header):
        # A copy has the alignment that its type needs; its place among other samples has any.
        large.append(torch.from_numpy(data[at : at + size].copy()))
        at += size
    if at != len(data):
        raise ProtocolError(f"{name} has {len(data)} bytes, expected {at}.")
    return payload.decode(header, large)
