"""Encoding of the items of a map-style data set as bytes, without pickle.

An item is a tree of tensors, arrays, numbers and texts.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.core.wire import payload
from lightning_dlres.prefetch.cache.samples import Sample

# Name of this encoding in the manifest of a store.
ENCODING = "tensors"
# Length of the header in bytes; precedes the header.
_LENGTH = struct.Struct("<I")


def encode_item(item: Any) -> bytes:
    """Return an item as bytes.

    Raises:
        ConfigError: If the item contains a value that cannot be encoded.
    """
    try:
        header, large = payload.encode(item, ())
        contents = [tensor.cpu().numpy().tobytes() for tensor in large]
    except ConfigError as error:
        # `payload` encodes messages between ranks. Its own error speaks of ranks and batches.
        raise ConfigError(
            "An item of a map-style data set must be made of dense tensors, numeric arrays, "
            "numbers, texts, None, and tuples, lists, dicts or data classes of these, got: "
            f"{str(error).partition(' cannot be sent')[0]}. Return tensors, or put files into a "
            "folder and pass `decode`."
        ) from error
    return b"".join([_LENGTH.pack(len(header)), header, *contents])


def decode_item(sample: Sample) -> Any:
    """Return the item that a sample holds, as a copy.

    Raises:
        ProtocolError: If the sample is no item that `encode_item` has encoded.
    """
    data = sample.array
    name = f"sample {sample.key!r}"
    if len(data) < _LENGTH.size:
        raise ProtocolError(f"{name} must be an encoded item, got {len(data)} bytes.")
    (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
    at = _LENGTH.size + length
    header = payload.decode_header(data[_LENGTH.size : at].tobytes(), name)
    large = []
    for size in payload.large_sizes(header):
        # A copy is aligned for its dtype; the sample lies at any address.
        large.append(torch.from_numpy(data[at : at + size].copy()))
        at += size
    if at != len(data):
        raise ProtocolError(f"{name} must have {at} bytes, got {len(data)}.")
    return payload.decode(header, large)
