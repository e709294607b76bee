"""One server's part of a job: its keys, its optimizers and the workers that it knows."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from lightning_dlres.codecs.gradient.base import GradientCodec
from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.consistency import (
    BSP,
    CONSISTENCIES,
    SSP,
    Answer,
    Asynchronous,
    PushedGradient,
    Synchronous,
    UnequalClippingError,
)
from lightning_dlres.paramserver.execute.server.job_workers import JobWorkerRecord, JobWorkers
from lightning_dlres.paramserver.execute.server.key_state import KeyState, as_tensor
from lightning_dlres.paramserver.execute.server.optimizers import ServerOptimizers
from lightning_dlres.paramserver.execute.server.spare_tensors import SpareTensors
from lightning_dlres.paramserver.gradient_codecs import codec_of, job_codec

# Largest job that a server accepts.
MAX_WORKERS, MAX_KEYS = 4096, 1_000_000
# Largest number of keys times workers: each pair takes memory for two numbers.
_MAX_VERSIONS = 1 << 24
# Bytes of pushes that may wait for those of slower workers: the bytes of the parameters divided by
# 16, but at least 64 MiB.
_PENDING_DIVISOR, _LEAST_PENDING_BYTES = 16, 64 << 20
# Longest deadline of workers, in seconds: a server must become free when they are gone.
_MAX_DEADLINE = 7 * 86400.0


class Shard:
    """Keys of one server.

    Args:
        setup: Description of the job.
        records: Records of its workers, of an earlier process of this server.
        is_persistent: True if snapshots are made.
        now: Clock in seconds.

    Attributes:
        setup: Description of the job.
        members: Workers of the job.
        states: State of each key, by the index of the key.
        is_started: True once all keys have a value and workers may begin.
        failure: Reason why the job cannot go on; "" while it can.

    Raises:
        ProtocolError: If the description contradicts itself.
    """

    def __init__(
        self,
        setup: protocol.JobSetup,
        records: list[JobWorkerRecord] | None = None,
        *,
        is_persistent: bool = False,
        now: float = 0.0,
    ) -> None:
        _check_setup(setup)
        self.setup, self.is_started, self._is_persistent = setup, False, is_persistent
        self.failure = ""
        self.members = JobWorkers(setup.workers, setup.worker_deadline, records, now)
        nbytes = sum(key.nbytes for key in setup.keys)
        spare = SpareTensors(nbytes)
        self.states = {key.index: KeyState.new(key, setup.workers, spare) for key in setup.keys}
        parameters = [self.states[key.index].parameter for key in setup.keys]
        self._optimizers = ServerOptimizers(setup.optimizers, setup.keys, parameters)
        try:
            codec = job_codec(setup.codec, setup.codec_options)
        except ConfigError as error:
            raise ProtocolError(str(error)) from error
        self._codecs: dict[int, GradientCodec | None] = {
            key.index: codec_of(key, codec) for key in setup.keys
        }
        # A reference to this shard would make a circle, which keeps the parameters of a past job in
        # memory for long.
        own_update = weakref.WeakMethod(self._update)

        def update(state: KeyState) -> None:
            method = own_update()
            assert method is not None
            method(state)

        self._consistency: Synchronous | Asynchronous
        self._pushes_per_step = 1 if setup.consistency == BSP else setup.workers
        if setup.consistency == BSP:
            pending = max(_LEAST_PENDING_BYTES, nbytes // _PENDING_DIVISOR)
            self._consistency = Synchronous(self.members, update, pending)
        else:
            staleness = setup.staleness if setup.consistency == SSP else None
            self._consistency = Asynchronous(self.members, update, staleness)

    def state_of(self, index: int) -> KeyState:
        """Return the state of a key.

        Raises:
            ProtocolError: If this server has no such key.
        """
        state = self.states.get(index)
        if state is None:
            raise ProtocolError(f"key {index} is not one of this server.")
        return state

    def load(self, load: protocol.Load, data: memoryview) -> None:
        """Set the initial value of a key, or a part of its optimizer state.

        Once the job has started, this changes nothing: the request was sent twice.

        Raises:
            ProtocolError: If the data does not fit.
        """
        if self.is_started:
            return
        state = self.state_of(load.key)
        if not load.state:
            if len(data) != state.key.nbytes:
                raise ProtocolError(
                    f"{len(data)} bytes for {state.key}, which has {state.key.nbytes}."
                )
            state.set_value(data)
            state.loaded = True
            return
        value = _state_value(load.dtype, load.shape, data)
        self._optimizers.load_state(state.key, state.parameter, load.state, value)

    def set_optimizer_state(self, state: KeyState, name: str, value: Any) -> None:
        """Set a part of a key's optimizer state, without checks: it comes from a snapshot."""
        self._optimizers.set_state(state.key, state.parameter, name, value)

    def optimizer_state(self, state: KeyState) -> dict[str, Any]:
        """Return the optimizer state of a key."""
        return self._optimizers.state(state.key, state.parameter)

    def require_loaded(self) -> None:
        """Raise if the workers cannot begin.

        Raises:
            ProtocolError: If a key has no value.
        """
        missing = [str(state.key) for state in self.states.values() if not state.loaded]
        if missing:
            raise ProtocolError(f"{len(missing)} keys have no value yet, such as {missing[0]}.")

    def start(self) -> None:
        """Let the workers begin.

        Raises:
            ProtocolError: If a key has no value.
        """
        self.require_loaded()
        self.is_started = True

    def push(self, push: protocol.Push, data: memoryview) -> list[Answer]:
        """Take a push; return the answers that it makes possible.

        Raises:
            ProtocolError: If the push does not fit its key.
        """
        state = self._started(push.key)
        codec = self._codecs[push.key]
        if codec is not None:
            codec = codec.at_step(push.codec_step)
        if push.has_gradient:
            expected = state.key.nbytes if codec is None else codec.payload_bytes(state.key.count)
            if len(data) != expected or push.codec != (codec.name if codec else ""):
                raise ProtocolError(
                    f"{len(data)} bytes of codec {push.codec!r} for {state.key}, expected "
                    f"{expected} of {codec.name if codec else ''!r}."
                )
            if codec is not None:
                codec.check_payload(as_tensor(data), state.key.count)
        # All is checked before anything changes: a bad push must not spoil those of others.
        options = self._optimizers.checked(state.key, push.options)
        clip = push.clip_value
        if not 0 <= clip <= torch.finfo(state.parameter.dtype).max:
            raise ProtocolError(f"clip_value {clip} for {state.key}.")
        if push.base >= push.number:
            raise ProtocolError(f"push {push.number} of {state.key} from base {push.base}.")
        pushed = PushedGradient(
            push.worker,
            push.number,
            data if push.has_gradient else None,
            codec,
            options,
            push.is_held,
            clip,
            push.base,
        )
        with self._failing_the_job():
            return self._consistency.push(state, pushed)

    def pull(self, request: protocol.KeyRequest) -> Answer:
        """Return the answer to a worker that wants a key."""
        return self._consistency.pull(self._started(request.key), request.worker, request.number)

    def has_applied(self, request: protocol.ContentRequest) -> bool:
        """Return True if a key has all pushes that a request needs.

        Raises:
            ProtocolError: If the request does not have one number for each worker.
        """
        applied = self._started(request.key).applied
        if request.numbers and len(request.numbers) != len(applied):
            raise ProtocolError(
                f"a request with {len(request.numbers)} numbers for {len(applied)} workers."
            )
        return applied[request.worker] >= request.number and all(
            done >= number for done, number in zip(applied, request.numbers, strict=False)
        )

    def commit(self, commit: protocol.Commit, data: memoryview) -> Iterator[tuple[int, Answer]]:
        """Apply held updates; yield key and answer.

        Raises:
            ProtocolError: If the scale is infinite or negative, or a key is not of this server.
            msgspec.MsgspecError: If the payload is malformed.
        """
        # NaN is allowed: clipping computes it from gradients with a NaN.
        if math.isinf(commit.scale) or commit.scale < 0:
            raise ProtocolError(f"the scale {commit.scale} of a commit.")
        released = from_msgpack(data, list[tuple[protocol.Count, protocol.Count]])
        if len(released) > len(self.states):
            raise ProtocolError(f"a commit of {len(released)} keys, of {len(self.states)}.")
        # All keys are looked up before the first one changes.
        states = [(self._started(key), number) for key, number in released]
        for state, number in states:
            key = state.key.index
            with self._failing_the_job():
                answers = self._consistency.commit(state, commit.worker, number, commit.scale)
            for answer in answers:
                yield key, answer

    def rejoin(self, worker: int) -> None:
        """Let a new process of a worker take part."""
        self._consistency.rejoin(self.states.values(), worker)

    def shut_out_silent(self, now: float) -> tuple[list[int], list[tuple[int, Answer]]]:
        """Shut out silent workers; return them, and the answers that this makes possible."""
        silent = self.members.shut_out_silent(now)
        if not silent:
            return [], []
        released = self._consistency.shut_out(self.states.values())
        return silent, [(state.key.index, answer) for state, answer in released]

    def versions(self, worker: int) -> list[protocol.KeyVersion]:
        """Return the version of every key for a worker."""
        return [
            protocol.KeyVersion(
                key=index, number=state.applied[worker], durable=self.durable(state, worker)
            )
            for index, state in self.states.items()
        ]

    def durable(self, state: KeyState, worker: int) -> int:
        """Return the number of the worker's latest push that need not be sent again."""
        return (state.durable if self._is_persistent else state.applied)[worker]

    def are_durable(self, worker: int, data: memoryview) -> bool:
        """Return True if none of a worker's pushes need be sent again.

        Args:
            worker: Index of the worker.
            data: Index and number of each key, as msgpack.

        Raises:
            ProtocolError: If a key is not of this server.
            msgspec.MsgspecError: If the data is malformed.
        """
        numbers = from_msgpack(data, list[tuple[protocol.Count, protocol.Count]])
        return all(number <= self.durable(self.state_of(key), worker) for key, number in numbers)

    @contextmanager
    def _failing_the_job(self) -> Iterator[None]:
        """Context manager that ends the job if its workers contradict each other."""
        try:
            yield
        except UnequalClippingError as error:
            self.failure = str(error)
            raise

    def _started(self, key: int) -> KeyState:
        if not self.is_started:
            raise ProtocolError("the job has not started.")
        return self.state_of(key)

    def _update(self, state: KeyState) -> None:
        state.parameter.grad = state.gradient
        try:
            self._optimizers.update(
                state.key, state.parameter, state.options, self._pushes_per_step
            )
        except ProtocolError as error:
            # The parameter may have changed in part: do not send it, or put it in a snapshot.
            self.failure = str(error)
            raise
        finally:
            state.parameter.grad = None
        state.updates += 1


def _check_setup(setup: protocol.JobSetup) -> None:
    indices = {key.index for key in setup.keys}
    if not 1 <= setup.workers <= MAX_WORKERS or len(setup.keys) > MAX_KEYS:
        raise ProtocolError(f"a job of {setup.workers} workers and {len(setup.keys)} keys.")
    if len(indices) < len(setup.keys) or min(indices, default=0) < 0:
        raise ProtocolError("two keys with the same index, or a negative index.")
    if len(setup.keys) * setup.workers > _MAX_VERSIONS:
        raise ProtocolError(
            f"{len(setup.keys)} keys of {setup.workers} workers, expected a product of at most "
            f"{_MAX_VERSIONS}. Use more servers, or larger keys."
        )
    is_deadline = 0 < setup.worker_deadline <= _MAX_DEADLINE
    if setup.consistency not in CONSISTENCIES or not is_deadline:
        raise ProtocolError(
            f"the consistency {setup.consistency!r} with a deadline of {setup.worker_deadline} s."
        )
    for key in setup.keys:
        fits = 0 <= key.optimizer < len(setup.optimizers)
        if not fits or not 0 <= key.group < len(setup.optimizers[key.optimizer].groups):
            raise ProtocolError(f"{key} is of optimizer {key.optimizer}, group {key.group}.")


def _state_value(dtype: str, shape: tuple[int, ...], data: memoryview) -> Any:
    if dtype:
        return protocol.tensor_of(dtype, shape, data)
    try:
        return from_msgpack(data, bool | int | float | None)  # type: ignore[arg-type]
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a state that is no number: {error}") from error
