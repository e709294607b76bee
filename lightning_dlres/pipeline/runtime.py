"""The engine: executes a plan's schedule on this rank (Method D, D2; Method E, E7). It decides
nothing.

What belongs to user code (the step up to the module's call, and from it to the loss) comes in
through `UserStep`, so that the engine runs the same under any front end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import BatchMismatchError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.buffers import BufferSync
from lightning_dlres.pipeline.gradients import GradientSync
from lightning_dlres.pipeline.mailbox import Channel, Key, Mailbox
from lightning_dlres.pipeline.microbatch import cut, join, microbatch_sizes, samples_in, share
from lightning_dlres.pipeline.plan import PipelinePlan
from lightning_dlres.pipeline.schedule import ALL_MICROBATCHES, Action, Op, build_schedule
from lightning_dlres.pipeline.stage import GradientBuffer, Gradients, Stage, enter_inplace_safe


class UserStep(Protocol):
    """One training step of user code, seen from the pipeline."""

    def module_inputs(self) -> Tree:
        """First stage: run the step up to the module's call, and return what the module is called
        with."""

    def finish(self, output: Tree, microbatch: int | None, sizes: Sequence[int]) -> Tensor:
        """Last stage: run the step with `output` as the module's result, and return the loss.

        `microbatch` is None if the output is that of the whole batch, else the index of the
        micro-batch it belongs to.
        """

    def record(self, sizes: Sequence[int]) -> Tree:
        """Last stage, after the last `finish`: what the other ranks must know of the step."""


@dataclass(frozen=True)
class TrainResult:
    """What a training step leaves on every rank.

    Attributes:
        gradients: sum over the batch for every parameter held here, multiplied by the loss scale.
        records: what the last stages recorded: of the first VM only under GPipe, of every VM that
            had a micro-batch under 1F1B.
        sizes: samples of every micro-batch.
    """

    gradients: Gradients
    records: list[Tree]
    sizes: list[int]


class Runtime:
    """One rank's part of the pipeline.

    Args:
        plan: who is where.
        rank: this rank.
        stage: this stage's layers.
        outer: trainable parameters that user code uses outside of the layers.
        sync: sums gradients over their holders.
        buffers: keeps the stage's buffers alike over VMs.
        mailbox: messages.
        tracer: gets a span for every action.
        microbatches: into how many the global batch is cut; fewer if it has fewer samples.
        slowdown: every computation is stretched to this many times its time; for demos and tests on
            one machine.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        rank: int,
        stage: Stage,
        outer: Sequence[nn.Parameter],
        sync: GradientSync,
        buffers: BufferSync,
        mailbox: Mailbox,
        tracer: Tracer,
        microbatches: int,
        slowdown: float = 1.0,
    ) -> None:
        self.plan, self.rank, self.tracer, self.microbatches = plan, rank, tracer, microbatches
        self.machine, self.stage_index = plan.place(rank)
        self._ranks = plan.machines[self.machine]
        self._stage, self._outer, self._sync, self._buffers = stage, list(outer), sync, buffers
        self._mailbox, self._slowdown = mailbox, slowdown
        self._count = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank runs the step up to the module's call."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the step from the module's call on."""
        return self.stage_index == self.plan.stages - 1

    def train(
        self, step: UserStep, schedule: str, seed: int, batch_digest: int, scale: float = 1.0
    ) -> TrainResult:
        """Run one training step over the global batch; called by all ranks.

        Args:
            step: the user's step.
            schedule: "gpipe" (the loss once, over the whole batch) or "1f1b" (a loss per
                micro-batch, weighted by samples).
            seed: seed of this step for what is random in the layers.
            batch_digest: fingerprint of the batch that this rank sees.
            scale: the loss is multiplied by this before backward (mixed precision).

        Raises:
            BatchMismatchError: this rank's batch is not that of the first rank.
            PeerError: a peer is late, lost, or out of step; the message names stage, micro-batch
                and peer.
        """
        try:
            return _TrainingStep(self, step, schedule, seed, scale).run(batch_digest)
        except BaseException:
            self._stage.forget()
            raise

    def forward(self, inputs: Tree, seed: int, batch_digest: int, everywhere: bool = True) -> Tree:
        """Run the layers forward over the global batch without recording; called by all ranks, each
        with the inputs.

        Returns:
            The output of the whole batch on every rank, or, with `everywhere` off, on the last
            stages only (else None).
        """
        sizes = self.announce(inputs if self.is_first else None, batch_digest)
        own = share(len(sizes), len(self.plan.machines), self.machine)
        parts = cut(map_tensors(Tensor.detach, inputs), sizes) if self.is_first else []
        outputs = []
        for microbatch in own:
            if self.is_first:
                activation = parts[microbatch]
            else:
                activation = self.take(Channel.ACTIVATION, -1, microbatch, "the activations")
            with self.computing("forward", microbatch):
                activation = self._stage.forward(microbatch, activation, seed, keep=False)
            if self.is_last:
                outputs.append(activation)
            else:
                self.give(Channel.ACTIVATION, 1, microbatch, activation)
        return self._share_output(outputs, sizes, own, everywhere)

    def announce(self, inputs: Tree | None, batch_digest: int) -> list[int]:
        """Tell all ranks how the batch is cut; every rank compares its batch with that of the
        announcing rank."""
        self._count += 1
        announcer = self.plan.machines[0][0]
        message = None
        if self.rank == announcer:
            samples = samples_in(inputs) or 1
            message = [microbatch_sizes(samples, self.microbatches), batch_digest]
        sizes, expected = self._mailbox.broadcast(
            announcer, Channel.STEP, ("step", self._count), message, "the start of the step"
        )
        if expected != batch_digest:
            raise BatchMismatchError(
                f"{self.plan.rank_name(self.rank)} sees another batch than "
                f"{self.plan.rank_name(announcer)}: the fingerprints are {batch_digest:#010x} and "
                f"{expected:#010x}. One rank reads for all, so user code changed the batch: look "
                "for something random or rank-dependent in on_before_batch_transfer, "
                "on_after_batch_transfer or on_train_batch_start."
            )
        return list(sizes)

    def key(self, *parts: str | int) -> Key:
        """Return a message key that no other step shares."""
        return (*parts, self._count)

    def take(self, channel: Channel, step: int, microbatch: int, what: str) -> Tree:
        """Receive from the neighbour `step` stages on."""
        peer = self._ranks[self.stage_index + step]
        return self._mailbox.receive(
            peer, channel, self.key(microbatch), f"{what} of micro-batch {microbatch}"
        )

    def give(self, channel: Channel, step: int, microbatch: int, tree: Tree) -> None:
        """Send to the neighbour `step` stages on."""
        self._mailbox.send(
            self._ranks[self.stage_index + step], channel, self.key(microbatch), tree
        )

    @contextmanager
    def computing(self, name: str, microbatch: int) -> Iterator[None]:
        """Trace a computation, and stretch it where a slower device is emulated."""
        with self.tracer.span(name, "compute", stage=self.stage_index, microbatch=microbatch):
            start = time.perf_counter()
            yield
            if self._slowdown > 1.0:
                time.sleep((time.perf_counter() - start) * (self._slowdown - 1.0))

    def last_ranks(self, sizes: Sequence[int]) -> list[int]:
        """Return the last stage's rank of every VM that has a micro-batch."""
        machines = self.plan.machines
        return [
            m[-1] for index, m in enumerate(machines) if share(len(sizes), len(machines), index)
        ]

    def machine_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return the number of samples of every VM that has a micro-batch."""
        machines = len(self.plan.machines)
        counts = [
            sum(sizes[m] for m in share(len(sizes), machines, index)) for index in range(machines)
        ]
        return [count for count in counts if count]

    def exchange_outputs(self, output: Tree, sizes: Sequence[int]) -> list[Tree]:
        """Last stages: return every VM's output, in order; this rank's own is passed through
        untouched."""
        ranks = self.last_ranks(sizes)
        for peer in ranks:
            if peer != self.rank:
                self._mailbox.send(peer, Channel.OUTPUT, self.key("output"), output)
        return [output if peer == self.rank else self._output_of(peer) for peer in ranks]

    def share_record(self, record: Tree, sources: Sequence[int]) -> None:
        """Last stages: send what the step recorded to all ranks."""
        if self.rank in sources:
            for peer in range(self.plan.world_size):
                if peer != self.rank:
                    self._mailbox.send(peer, Channel.RECORD, self.key("record"), record)

    def gather_records(self, record: Tree, sources: Sequence[int]) -> list[Tree]:
        """Return what each of the sources recorded."""
        return [
            record
            if source == self.rank
            else self._mailbox.receive(
                source, Channel.RECORD, self.key("record"), "the loss and logs of the step"
            )
            for source in sources
        ]

    def _output_of(self, peer: int) -> Tree:
        return self._mailbox.receive(
            peer, Channel.OUTPUT, self.key("output"), "the module's output"
        )

    def _share_output(
        self, outputs: list[Tree], sizes: list[int], own: range, everywhere: bool
    ) -> Tree:
        ranks = self.last_ranks(sizes)
        mine = join(outputs, [sizes[m] for m in own]) if self.is_last and own else None
        peers = range(self.plan.world_size) if everywhere else ranks
        if self.rank in ranks:
            for peer in peers:
                if peer != self.rank:
                    self._mailbox.send(peer, Channel.OUTPUT, self.key("output"), mine)
        if self.rank not in peers:
            return None
        parts = [mine if peer == self.rank else self._output_of(peer) for peer in ranks]
        return join(parts, self.machine_sizes(sizes))


class _TrainingStep:
    """The state of one training step on one rank."""

    def __init__(
        self, runtime: Runtime, user: UserStep, schedule: str, seed: int, scale: float
    ) -> None:
        self.runtime, self.user, self.schedule, self.seed, self.scale = (
            runtime,
            user,
            schedule,
            seed,
            scale,
        )
        self.stage, self.sync = runtime._stage, runtime._sync
        self.buffer = GradientBuffer()
        self.inputs: dict[int, Tree] = {}
        self.outputs: dict[int, Tree] = {}
        self.gradients: dict[int, Sequence[Tensor | None]] = {}
        self.input_gradients: list[tuple[Tensor, Tensor]] = []
        self.sizes: list[int] = []
        self.own = range(0)
        self.record: Tree = None
        self.do: dict[Op, Callable[[int], None]] = {
            Op.RECEIVE_ACTIVATION: self.receive_activation,
            Op.FORWARD: self.forward,
            Op.SEND_ACTIVATION: self.send_activation,
            Op.LOSS: self.loss,
            Op.RECEIVE_GRADIENT: self.receive_gradient,
            Op.BACKWARD: self.backward,
            Op.SEND_GRADIENT: self.send_gradient,
        }

    def run(self, batch_digest: int) -> TrainResult:
        runtime, plan = self.runtime, self.runtime.plan
        whole = self.user.module_inputs() if runtime.is_first else None
        self.sizes = runtime.announce(whole, batch_digest)
        self.own = share(len(self.sizes), len(plan.machines), runtime.machine)
        if runtime.is_first:
            parts = cut(whole, self.sizes)
            self.inputs = {m: parts[m] for m in self.own}
        for action in build_schedule(
            self.schedule, plan.stages, runtime.stage_index, len(self.own)
        ):
            self.perform(action)
        self.backward_into_step()
        self.sync.finish(self.buffer)
        runtime._buffers.run()
        records = runtime.gather_records(self.record, self.sources())
        return TrainResult(self.buffer.gradients, records, self.sizes)

    def perform(self, action: Action) -> None:
        whole = action.microbatch == ALL_MICROBATCHES
        self.do[action.op](ALL_MICROBATCHES if whole else self.own[action.microbatch])

    def sources(self) -> list[int]:
        ranks = self.runtime.last_ranks(self.sizes)
        return ranks[:1] if self.schedule == "gpipe" else ranks

    def receive_activation(self, m: int) -> None:
        self.inputs[m] = self.runtime.take(Channel.ACTIVATION, -1, m, "the activations")

    def forward(self, m: int) -> None:
        with self.runtime.computing("forward", m):
            self.outputs[m] = self.stage.forward(m, self.inputs[m], self.seed)
        if not self.runtime.is_first:
            del self.inputs[m]

    def send_activation(self, m: int) -> None:
        self.runtime.give(Channel.ACTIVATION, 1, m, self.outputs.pop(m))

    def loss(self, m: int) -> None:
        if m != ALL_MICROBATCHES:
            self.loss_of_part(m)
        elif self.own:
            self.loss_of_whole()

    def loss_of_whole(self) -> None:
        """GPipe: the user's step runs once on the output of the whole batch, exact for any loss."""
        sizes = [self.sizes[m] for m in self.own]
        trees = [self.outputs.pop(m) for m in self.own]
        leaves = [tensors_of(tree) for tree in trees]
        output = join([_entered(tree) for tree in trees], sizes)
        if len(self.runtime.plan.machines) > 1:
            output = join(
                self.runtime.exchange_outputs(output, self.sizes),
                self.runtime.machine_sizes(self.sizes),
            )
        with self.runtime.computing("loss", ALL_MICROBATCHES):
            loss = self.user.finish(output, None, self.sizes)
            # Every VM's last stage computes the same loss over the same batch: what lies outside of
            # the layers counts once.
            outer = self.runtime._outer if self.runtime.machine == 0 else []
            self.take_gradients(loss, leaves, outer, self.scale)
        self.finish_loss()

    def loss_of_part(self, m: int) -> None:
        """1F1B: the user's step runs on one micro-batch, and counts by its samples."""
        tree = self.outputs.pop(m)
        with self.runtime.computing("loss", m):
            loss = self.user.finish(_entered(tree), m, self.sizes)
            weight = self.sizes[m] / sum(self.sizes)
            self.take_gradients(
                loss, [tensors_of(tree)], self.runtime._outer, self.scale * weight, [m]
            )
        if m == self.own[-1]:
            self.finish_loss()

    def finish_loss(self) -> None:
        self.record = self.user.record(self.sizes)
        self.runtime.share_record(self.record, self.sources())

    def take_gradients(
        self,
        loss: Tensor,
        leaves: list[list[Tensor]],
        outer: Sequence[nn.Parameter],
        scale: float,
        microbatches: Sequence[int] | None = None,
    ) -> None:
        wanted = [leaf for part in leaves for leaf in part if leaf.requires_grad]
        results: Iterator[Tensor | None] = iter([None] * len(wanted))
        if loss.requires_grad and (wanted or outer):
            found = torch.autograd.grad(
                loss * scale if scale != 1.0 else loss, [*wanted, *outer], allow_unused=True
            )
            results = iter(found)
            for parameter, gradient in zip(outer, found[len(wanted) :], strict=True):
                if gradient is not None:
                    self.buffer.add(parameter, gradient)
        for m, part in zip(microbatches or self.own, leaves, strict=True):
            self.gradients[m] = [next(results) if leaf.requires_grad else None for leaf in part]

    def receive_gradient(self, m: int) -> None:
        self.gradients[m] = self.runtime.take(Channel.GRADIENT, 1, m, "the gradients")

    def backward(self, m: int) -> None:
        last = m == self.own[-1]
        done = (lambda position: self.sync.layer_done(position, self.buffer)) if last else None
        with self.runtime.computing("backward", m):
            gradients = self.stage.backward(m, self.gradients.pop(m), self.buffer, done)
        if not self.runtime.is_first:
            self.gradients[m] = gradients
            return
        for tensor, gradient in zip(tensors_of(self.inputs.pop(m)), gradients, strict=True):
            if gradient is not None:
                self.input_gradients.append((tensor, gradient))

    def send_gradient(self, m: int) -> None:
        self.runtime.give(Channel.GRADIENT, -1, m, list(self.gradients.pop(m)))

    def backward_into_step(self) -> None:
        """First stage: go on through what the step did before the module's call."""
        outer = self.runtime._outer
        if not self.input_gradients or not outer:
            return
        tensors, gradients = zip(*self.input_gradients, strict=True)
        for parameter, gradient in zip(
            outer, torch.autograd.grad(tensors, outer, gradients, allow_unused=True), strict=True
        ):
            if gradient is not None:
                self.buffer.add(parameter, gradient)


def _entered(tree: Tree) -> Tree:
    """Return the tree with tensors that user code may change in place, which leaves do not
    allow."""

    def enter(tensor: Tensor) -> Any:
        return enter_inplace_safe([tensor])[0] if tensor.requires_grad else tensor

    return map_tensors(enter, tree)
