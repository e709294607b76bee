"""One unit in one step on one rank: its data, and the tasks that work on it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.codecs.gradient import RESIDUAL, GradientCodec, State
from lightning_dlres.core.arrays import typed_array
from lightning_dlres.gradsync.execute.messages import Payload
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.plan.graph import Graph, Part, SyncTask, TaskKind
from lightning_dlres.gradsync.plan.task_table import TaskTable
from lightning_dlres.gradsync.plan.units import SyncUnit

# Number of leading elements that `is_zero` looks at first. Most gradients have a nonzero one there.
_NUM_CHECKED_FIRST = 1024


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of all units of a step.

    Attributes:
        step: Number of the step, from 0.
        rank: This rank.
        world_size: Number of ranks.
        loss_scale: Factor of the gradients, a power of two. Residuals are in units without it.
        has_error_feedback: False drops what a rank did not send of its own gradient, or of the sum
            that it passes on in a ring.
        has_sum_feedback: False drops what was not sent of a complete sum.
        has_data: False for a rank without samples. Its gradients that are zero change no residual.
        keeps_zeros: True keeps the residual of a gradient or sum that is zero, and sends zeros.
    """

    step: int
    rank: int
    world_size: int
    loss_scale: float = 1.0
    has_error_feedback: bool = True
    has_sum_feedback: bool = True
    has_data: bool = True
    keeps_zeros: bool = False

    def keeps_errors(self, part: Part) -> bool:
        """Return True if a part's compression error is kept, to be sent in a later step."""
        return self.has_sum_feedback if part is Part.SUM else self.has_error_feedback


class UnitTasks(TaskTable):
    """Tasks of one rank for a unit, and the memory that they use again in every step.

    Args:
        unit: The unit.
        graph: Tasks of this rank.
    """

    def __init__(self, unit: SyncUnit, graph: Graph) -> None:
        super().__init__(graph)
        self.unit = unit
        self._memory: dict[str, Tensor] = {}

    def memory(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor, the same one in every step.

        New memory in every step would cost page faults. A unit begins a step after all ranks have
        received its payloads of the step before, so it overwrites no payload in flight.
        """
        tensor = self._memory.get(name)
        if tensor is None or tensor.numel() != count:
            tensor = self._memory[name] = torch.empty(count, dtype=dtype, device=device)
        return tensor


class UnitRun:
    """Data of a unit in one step.

    The executor calls `finish` under its lock. The data needs no lock: one thread runs all compute
    tasks, and a transfer reads `outgoing` only after the task that wrote it.

    Args:
        tasks: Unit, and its tasks on this rank.
        codec: Codec of this step; None sends the elements as they are.
        gradient: Flat gradient of the unit, replaced by the mean of all ranks.
        options: Options of the step.
        states: States of this rank's codecs.
        is_used: False if this rank has not used the parameter since the last mean. If no rank has,
            the gradient and all states stay unchanged.

    Attributes:
        unfinished: Number of tasks that are not done.
        outgoing: Payloads to send, by part.
        gradient: See above.
        ready_mark: Mark after the work that computes the gradient; see `DeviceStream.mark`.
    """

    def __init__(
        self,
        *,
        tasks: UnitTasks,
        codec: GradientCodec | None,
        gradient: Tensor,
        options: StepOptions,
        states: CodecStates,
        is_used: bool = True,
    ) -> None:
        self.tasks, self.unit, self.graph, self.codec = tasks, tasks.unit, tasks.graph, codec
        self.options = options
        # Number of predecessors that are not done, for each task.
        self._pending = list(tasks.pending)
        self.unfinished = len(self.graph)
        self.outgoing: dict[Part, Tensor] = {}
        self.ready_mark: Any = None
        self.gradient, self._states = gradient, states
        self._incoming: dict[tuple[int, Part], Tensor] = {}
        self._arrived: set[tuple[int, Part]] = set()
        self._total: Tensor | None = None
        # True if the gradient comes from samples of this rank, or of another rank of its host.
        # Without samples, the gradient may hold the mean of an earlier backward.
        self._has_data = options.has_data or not is_zero(gradient)
        # True if this rank has used the parameter, or a rank whose payload has arrived.
        self._is_used = is_used
        # Changed state of an unused gradient: it counts if another rank has used the parameter.
        self._new_state: tuple[State, State] | None = None
        # Sum of this rank's gradient and those of other ranks of its host.
        self._host_sum: Tensor | None = None
        self._gradient_bytes = gradient.numel() * gradient.element_size()
        self._payload_bytes = (
            self._gradient_bytes if codec is None else codec.payload_bytes(self.unit.count)
        )

    @property
    def device(self) -> torch.device:
        """Device of the gradient."""
        return self.gradient.device

    def payload_bytes(self, part: Part) -> int:
        """Return the size of a payload that this rank sends."""
        if part is Part.HOST:
            return self._gradient_bytes if self._has_data else 0
        return self._payload_bytes

    def accepted_bytes(self, part: Part) -> tuple[int, ...]:
        """Return the sizes that a payload of another rank may have."""
        # A rank without samples sends no gradient to the leader of its host.
        return (self._gradient_bytes, 0) if part is Part.HOST else (self._payload_bytes,)

    def finish(self, position: int) -> list[int]:
        """Mark a task as done; return the positions of the tasks that it makes ready.

        The caller guards it against other threads.
        """
        self.unfinished -= 1
        return self.tasks.release(position, self._pending)

    def gradient_bytes(self) -> int:
        """Return the size of the unit's gradient without compression."""
        return self._gradient_bytes

    def missing_peers(self) -> list[int]:
        """Return the ranks whose payloads have not arrived."""
        return [
            task.peer
            for task in self.graph
            if task.kind is TaskKind.RECEIVE
            and task.peer is not None
            and (task.peer, task.part) not in self._arrived
        ]

    def payload(self, part: Part) -> Payload:
        """Return a payload to send, which is ready."""
        return Payload(self.unit.index, part, self.outgoing[part], self._is_used)

    def receive(self, peer: int, payload: Payload) -> bool:
        """Keep a payload that has arrived; return False if it has arrived before."""
        part = payload.part
        if (peer, part) in self._arrived:
            return False
        self._arrived.add((peer, part))
        self._incoming[peer, part] = payload.content
        if part is Part.SUM:
            # A ring passes the sum on.
            self.outgoing[part] = payload.content
        if payload.is_used:
            self._is_used = True
        return True

    def compute(self, task: SyncTask) -> None:
        """Run a compute task."""
        if task.kind is TaskKind.ENCODE:
            # Merging within a host adds to the gradient itself, so the result is still `gradient`.
            is_own = all(self.graph[before].part is Part.HOST for before in task.after)
            self._encode(task.part, is_own=is_own)
        elif task.kind is TaskKind.MERGE:
            assert task.peer is not None
            if task.part is Part.HOST:
                self._merge_in_host(task.peer)
            else:
                self._merge(task.peer)
        else:
            self._decode()

    def _encode(self, part: Part, *, is_own: bool) -> None:
        """Encode this rank's own gradient, or the sum of its merges."""
        source = self._own_sum()
        if not is_own:
            assert self._total is not None
            source = self._total
        if part is Part.HOST:
            self.outgoing[part] = source if self._has_data else source[:0]
            return
        if self.codec is None:
            self.outgoing[part] = self._addend(source) if is_own else source
            return
        # A partial sum is already in units without the loss scale.
        scale = 1 / self.options.loss_scale if is_own else 1.0
        payload = self.tasks.memory(part.name, self._payload_bytes, torch.uint8, source.device)
        state = self._states.of(self.unit, part, self.codec, source.device)
        if (is_own and not self._has_data) or (self.options.keeps_zeros and is_zero(source)):
            # A rank without data sends zeros and keeps its residual for a later step.
            state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        elif RESIDUAL in state and not self.options.keeps_errors(part):
            state = {**state, RESIDUAL: torch.zeros_like(state[RESIDUAL])}
        elif not self._is_used:
            # DistributedDataParallel drops this mean if no rank has used the parameter.
            changed = {name: tensor.clone() for name, tensor in state.items()}
            if part is not Part.SUM:
                self._new_state = state, changed
            state = changed
        seed = zlib.crc32(
            repr((self.options.step, self.options.rank, self.unit.index, int(part))).encode()
        )
        if source.dtype != torch.float32:
            source = source.to(torch.float32)
        self.codec.compress(source, state, payload, scale=scale, seed=seed)
        self.outgoing[part] = payload

    def _new_host_sum(self) -> Tensor:
        if self.gradient.dtype == torch.float16:
            # The sum may overflow where the mean does not.
            return self.gradient.to(torch.float32)
        # The gradient stays as it is if no rank has used the parameter.
        return self.gradient if self._is_used else self.gradient.clone()

    def _addend(self, gradient: Tensor) -> Tensor:
        """Return an own gradient as a sum without a codec adds it.

        A sum of float16 numbers may overflow where their mean does not.
        """
        if self.gradient.dtype != torch.float16:
            return gradient
        return (gradient / self.options.world_size).to(torch.float16)

    def _own_sum(self) -> Tensor:
        """Return this rank's gradient, with those of its host that were added."""
        return self.gradient if self._host_sum is None else self._host_sum

    def _merge_in_host(self, peer: int) -> None:
        """Add the gradient of another rank of this host; empty if that rank had no samples."""
        part = self._incoming.pop((peer, Part.HOST))
        if part.numel():
            if self._host_sum is None:
                self._host_sum = self._new_host_sum()
            self._host_sum.add_(part.to(self.device).view(self.gradient.dtype))
            self._has_data = True

    def _merge(self, peer: int) -> None:
        is_first = self._total is None
        if self.codec is None:
            is_own = peer == self.options.rank
            if is_own:
                addend = self._addend(self._own_sum())
            else:
                addend = self._received(peer).view(self.gradient.dtype)
            if self._total is None:
                self._total = addend.clone() if is_own else addend
            else:
                self._total.add_(addend)
            return
        if self._total is None:
            self._total = self.tasks.memory(
                "total", self.unit.count, torch.float32, self.gradient.device
            )
        if peer != self.options.rank:
            self.codec.expand(self._received(peer), self._total, accumulate=not is_first)
        elif Part.GRADIENT in self.outgoing:
            # The codec replaces the gradient, for example by its momentum, and this rank has
            # encoded its own: add the replacement, not the gradient.
            self.codec.expand(self.outgoing[Part.GRADIENT], self._total, accumulate=not is_first)
        elif is_first:
            # `mul` rounds the products of a float16 gradient to float16, where small ones vanish.
            gradient = self._own_sum().to(torch.float32)
            torch.mul(gradient, 1 / self.options.loss_scale, out=self._total)
        else:
            self._total.add_(self._own_sum(), alpha=1 / self.options.loss_scale)

    def _received(self, peer: int) -> Tensor:
        """Return a payload of another rank on the device; messages arrive on the CPU."""
        return self._incoming.pop((peer, Part.GRADIENT)).to(self.device)

    def _decode(self) -> None:
        if not self._is_used:
            return
        if self._new_state is not None:
            state, changed = self._new_state
            for name, tensor in changed.items():
                state[name].copy_(tensor)
        payload, scale = self.outgoing[Part.SUM].to(self.device), 1 / self.options.world_size
        if self.codec is None:
            is_mean = self.gradient.dtype == torch.float16
            torch.mul(
                payload.view(self.gradient.dtype), 1.0 if is_mean else scale, out=self.gradient
            )
            return
        scale *= self.options.loss_scale
        if self.gradient.dtype == torch.float32:
            self.codec.expand(payload, self.gradient, scale=scale)
            return
        values = torch.empty(self.unit.count, device=self.gradient.device)
        self.codec.expand(payload, values, scale=scale)
        self.gradient.copy_(values)


def is_zero(values: Tensor) -> bool:
    """Return True if all elements are zero; fast if one of the first is not."""
    if values.is_cpu and values.dtype == torch.float32:
        # Torch operations release the interpreter's lock and wait for threads.
        elements = typed_array(values, "<f4")
        return not elements[:_NUM_CHECKED_FIRST].any() and not elements.any()
    return not values[:_NUM_CHECKED_FIRST].any() and not values.any()
