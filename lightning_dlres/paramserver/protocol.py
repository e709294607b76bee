"""Messages between workers and servers.

A message's details are one of the structs here, or a list of them. Its payload is raw data: a
gradient, a parameter, or a struct that is too large for details. A request carries a token that
only the workers of a job know, and the incarnation of its sender. An answer has the sequence number
of its request, unless it is about a key: the key and its number then say what it answers.

Every request may be repeated: the server carries out a push once, by its key and number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from lightning_dlres.core.arrays import byte_array
from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.paramserver.plan.keys import Key

# Version of this protocol; servers and workers of different versions refuse each other.
VERSION = 4
# Largest frame of a message in bytes.
FRAME_BYTES = 256 << 20
TOKEN_BYTES = 16
# Most riders of a message.
MOST_RIDERS = 64
# Dtypes on the wire: those of parameters, and the further ones of optimizer states. A name that a
# peer chooses is never looked up in `torch`: that would import modules.
PARAMETER_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}
STATE_DTYPES = PARAMETER_DTYPES | {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
}
# Largest number of dimensions of a tensor; torch has no kernels for more.
MAX_DIMENSIONS = 64

# Requests of workers.
HELLO = "hello"
SETUP = "setup"
LOAD = "load"
START = "start"
PUSH = "push"
PULL = "pull"
COMMIT = "commit"
# The parameter, or the optimizer state, of a key; see `ContentRequest`.
CONTENT = "content"
STATE = "state"
VERSIONS = "versions"
PING = "ping"
SNAPSHOT = "snapshot"
# The payload of `LEAVE` lists index and number of each key, as msgpack.
LEAVE = "leave"
STATUS = "status"
# Sent over a second connection, see `listener_name`: the server answers with `NOTICE` there.
LISTEN = "listen"

# Answers of servers. Those to `CONTENT`, `STATE`, `VERSIONS` and `STATUS` have the kind of their
# request.
# Answer to `HELLO`, see `ServerWelcome`.
WELCOME = "welcome"
# The request was carried out.
DONE = "done"
# Answers about a key, see `KeyReply`. The payload of `VALUE` is the parameter.
VALUE = "value"
# The pushes of all workers are merged, and the update waits for a `Commit`.
MERGED = "merged"
# The value is withheld until other workers have pushed.
WAITING = "waiting"
# The server lacks the pushes after the number; the worker sends them again.
BEHIND = "behind"
# Not asked for: `KeyVersion` of each key after a snapshot.
DURABLE = "durable"
# The pushes of all workers to keys have come, see `MergeNotice`. It goes over the connection of
# `LISTEN`, since the value itself may wait behind others for long.
NOTICE = "notice"
# Answer to `PING`; the payload is `ServerWelcome.boot`.
ALIVE = "alive"
# The worker was shut out, or a later process has taken its place.
FENCED = "fenced"
# The server has no job with the request's token.
UNKNOWN_JOB = "unknown job"
# Answer to `SETUP`: the workers of another job have not ended. The payload is the number of seconds
# since one of them was last heard.
BUSY = "busy"
# The request was refused; the payload is the reason.
FAILED = "failed"

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Part of every request of a worker.

    Attributes:
        job: Token of the job.
        worker: Index of the worker.
        incarnation: Number of the worker's process; a later process has a larger one.
    """

    job: Token
    worker: Count
    incarnation: Count


def worker_name(worker: int, incarnation: int) -> str:
    """Return the name of a worker's connection. Servers refuse its requests under other names."""
    return f"worker {worker}/{incarnation}"


def listener_name(worker: int, incarnation: int) -> str:
    """Return the name of the connection over which a worker gets notices."""
    return f"worker {worker}/{incarnation} listens"


class Hello(Request, frozen=True, kw_only=True, array_like=True):
    """Introduction of a worker; `version` is that of its protocol."""

    version: Count


class KeyRequest(Request, frozen=True, kw_only=True, array_like=True):
    """Request about a key.

    Attributes:
        key: Index of the key.
        number: Number of the push, from 1; for a pull, that of the last push that must be in it.
    """

    key: Count
    number: Count


class Rider(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Another push, or another value, in the message of one: its details, and its payload."""

    details: bytes
    data: bytes


Riders = Annotated[list[Rider], msgspec.Meta(max_length=MOST_RIDERS)]


class Push(KeyRequest, frozen=True, kw_only=True, array_like=True):
    """Push of a gradient, which is the payload.

    Attributes:
        options: Options of the parameter's group, as msgpack.
        codec: Name of the codec of the payload; "" for raw bytes.
        has_gradient: False if the parameter has no gradient in this step.
        is_held: True if the update waits for a `Commit`.
        clip_value: Bound of the merged gradient's elements; 0 for none.
        base: Number from which the worker's process has begun. It does not send earlier pushes.
        codec_step: Step of the codec, see `GradientCodec.at_step`: earlier jobs count, too.
        riders: Pushes of small keys in the same message; they have none.
    """

    options: bytes
    codec: str
    has_gradient: bool
    is_held: bool
    clip_value: float
    base: Count = 0
    codec_step: Count = 0
    riders: Riders = []


class MergeNotice(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Notice that the pushes of all workers to a key, up to a number, have come.

    The details of a `NOTICE` are a list of them.
    """

    key: Count
    number: Count


class ContentRequest(KeyRequest, frozen=True, kw_only=True, array_like=True):
    """Request for a key's parameter or optimizer state. It is answered when that has all pushes.

    Attributes:
        numbers: Number of each worker's last push that must be in it; empty if only `number`
            counts. A restarted server may have one worker's pushes again, but not yet another's.
    """

    numbers: list[Count] = []


class Commit(Request, frozen=True, kw_only=True, array_like=True):
    """Release of held updates.

    The payload lists index and number of each key, as msgpack.

    Attributes:
        scale: Factor of the merged gradients.
    """

    scale: float


class Load(KeyRequest, frozen=True, kw_only=True, array_like=True):
    """Initial value of a key, or a part of its optimizer state; the payload has the bytes.

    Attributes:
        state: Name of the state; "" for the parameter.
        dtype: Name of the dtype.
        shape: Shape.
    """

    state: str
    dtype: str
    shape: tuple[int, ...]


class OptimizerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer that servers make.

    Attributes:
        name: Name of its class, as in the registry of the servers.
        groups: Options of each group.
    """

    name: str
    groups: list[dict[str, Any]]


class JobSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a job, for one server.

    Attributes:
        job: Token of the job.
        workers: Number of workers.
        consistency: "bsp", "ssp" or "asp".
        staleness: Largest number of pushes by which a worker may be ahead of another under "ssp".
        server: Index of the server.
        servers: Number of servers.
        keys: Keys of this server.
        optimizers: All optimizers of the job.
        worker_deadline: Seconds of silence after which a worker is shut out.
        codec: Name of the codec of gradients; "" for raw bytes.
        codec_options: Options of the codec.
    """

    job: Token
    workers: Count
    consistency: str
    staleness: Count
    server: Count
    servers: Count
    keys: list[Key]
    optimizers: list[OptimizerSetup]
    worker_deadline: float
    codec: str
    codec_options: dict[str, Any]


class ServerWelcome(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a `Hello`.

    Attributes:
        version: Version of the server's protocol.
        boot: Random number of the server's process.
        is_started: True once the job has its parameters.
    """

    version: int
    boot: int
    is_started: bool


class KeyReply(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Answer about a key.

    Attributes:
        key: Index of the key.
        number: Number of the latest push of this worker in it; for `WAITING`, the awaited number.
        durable: Number of the latest push of this worker that a restarted server still has.
        workers: Workers that are awaited.
        norm: Squared norm of the merged gradient; for `VALUE`, of the one in its last update.
        riders: Values of small keys in the same message of kind `VALUE`; they have none.
    """

    key: Count
    number: Count
    durable: Count = 0
    workers: list[Count] = []
    norm: float = 0.0
    riders: Riders = []


class KeyVersion(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Version of a key: number of the worker's latest push in it, and of the latest durable one."""

    key: Count
    number: Count
    durable: Count


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as a server sees it.

    Attributes:
        worker: Index.
        state: "active", "silent", "shut out", "left" or "unknown".
        silent_seconds: Seconds since its last message.
        first_number, last_number: Smallest and largest number of its pushes over all keys.
        pushed_bytes, pulled_bytes: Bytes since the start of the server.
    """

    worker: int
    state: str
    silent_seconds: float
    first_number: int
    last_number: int
    pushed_bytes: int
    pulled_bytes: int


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a server.

    Attributes:
        address: Its address.
        server, servers: Its index, and the number of servers.
        consistency: "bsp", "ssp" or "asp"; "" without a job.
        keys: Number of keys.
        parameter_bytes: Bytes of its parameters.
        first_version, last_version: Smallest and largest number of updates of a key.
        snapshot_seconds: Seconds since the last snapshot; -1 without one.
        snapshot_error: Reason why the last snapshot failed; "" if it did not.
        refused: Number of refused messages.
        uptime_seconds: Seconds since the start.
        workers: Its workers.
    """

    address: str
    server: int
    servers: int
    consistency: str
    keys: int
    parameter_bytes: int
    first_version: int
    last_version: int
    snapshot_seconds: float
    snapshot_error: str
    refused: int
    uptime_seconds: float
    workers: list[WorkerStatus]


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a key's optimizer state: a tensor as raw bytes, or a number if `dtype` is ""."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes = b""
    number: bool | int | float | None = None


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Return the optimizer state of a key as msgpack."""
    parts = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensor = value.detach().contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            data = byte_array(tensor).tobytes()
            parts.append(StatePart(name=name, dtype=dtype, shape=tuple(tensor.shape), data=data))
        else:
            parts.append(StatePart(name=name, number=value))
    return msgspec.msgpack.encode(parts)


def decode_state(parts: Sequence[StatePart]) -> dict[str, Any]:
    """Return the optimizer state of a key; the inverse of `encode_state`.

    Raises:
        ProtocolError: If the bytes of a tensor do not fit its dtype and shape.
    """
    return {
        part.name: tensor_of(part.dtype, part.shape, memoryview(part.data))
        if part.dtype
        else part.number
        for part in parts
    }


def tensor_of(dtype: str, shape: tuple[int, ...], data: memoryview) -> Tensor:
    """Return the tensor of raw bytes, in memory of its own.

    Raises:
        ProtocolError: If the dtype is unknown, or the number of bytes does not fit.
    """
    tensor = empty_tensor(dtype, shape, len(data))
    byte_array(tensor)[:] = np.frombuffer(data, np.uint8)
    return tensor


def empty_tensor(dtype: str, shape: tuple[int, ...], nbytes: int | None = None) -> Tensor:
    """Return a tensor without values.

    Args:
        dtype: Name of its dtype.
        shape: Its shape.
        nbytes: Bytes that it must have; None for any.

    Raises:
        ProtocolError: If the dtype or the shape is not possible, or the number of bytes does not
            fit.
    """
    kind = STATE_DTYPES.get(dtype)
    if kind is None or len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise ProtocolError(f"a tensor of dtype {dtype!r} and {len(shape)} dimensions.")
    if nbytes is not None and math.prod(shape) * kind.itemsize != nbytes:
        raise ProtocolError(f"{nbytes} bytes for {dtype} of shape {shape}.")
    try:
        return torch.empty(shape, dtype=kind)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ProtocolError(f"no memory for {dtype} of shape {shape}.") from error
