"""The engine: executes a plan's schedule on this rank (Method D, D2; Method E, E7). It decides
nothing.

What belongs to user code (the step up to the module's call, and from it to the loss) comes in
through `UserStep`, so that the engine runs the same under any front end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from lightning_dlres.core.errors import BatchMismatchError, UnsupportedStepError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.comm.mailbox import Channel, Key, Mailbox
from lightning_dlres.pipeline.execute.buffers import BufferSync
from lightning_dlres.pipeline.execute.gradients import GradientSync
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.stage.microbatch import cut, join, microbatch_sizes, samples_in, share
from lightning_dlres.pipeline.stage.stage import Stage


class Runtime:
    """One rank's part of the pipeline.

    Args:
        plan: who is where.
        rank: this rank.
        stage: this stage's layers.
        non_pipelined: trainable parameters that user code uses outside of the layers.
        sync: sums gradients over their holders.
        buffers: keeps the stage's buffers alike over replicas.
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
        non_pipelined: Sequence[nn.Parameter],
        sync: GradientSync,
        buffers: BufferSync,
        mailbox: Mailbox,
        tracer: Tracer,
        microbatches: int,
        slowdown: float = 1.0,
    ) -> None:
        self.plan, self.rank, self.tracer, self.microbatches = plan, rank, tracer, microbatches
        self.replica, self.stage_index = plan.place(rank)
        self._ranks = plan.replicas[self.replica]
        self.stage, self.non_pipelined, self.sync, self.buffers = (
            stage,
            list(non_pipelined),
            sync,
            buffers,
        )
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

    def train_only(
        self,
        trainable: Sequence[Sequence[nn.Parameter]],
        non_pipelined: Sequence[nn.Parameter],
        sync: GradientSync,
    ) -> None:
        """From now on, train these parameters of every layer of the stage, and these outside of the
        layers; other parameters were frozen or unfrozen."""
        self.stage.set_parameters(trainable)
        self.non_pipelined, self.sync = list(non_pipelined), sync

    def forward(
        self,
        inputs: Tree,
        seed: int,
        batch_digest: int,
        everywhere: bool = True,
        place: str = "in a training step",
    ) -> Tree:
        """Run the layers forward over the global batch without recording; called by all ranks, each
        with the inputs. `place` says where in errors, as for `announce`.

        Returns:
            The output of the whole batch on every rank, or, with `everywhere` off, on the last
            stages only (else None).
        """
        sizes = self.announce(inputs if self.is_first else None, batch_digest, place)
        own = share(len(sizes), len(self.plan.replicas), self.replica)
        parts = cut(map_tensors(Tensor.detach, inputs), sizes) if self.is_first else []
        outputs = []
        for microbatch in own:
            if self.is_first:
                activation = parts[microbatch]
            else:
                activation = self.take(Channel.ACTIVATION, -1, microbatch, "the activations")
            with self.computing("forward", microbatch):
                activation = self.stage.forward(microbatch, activation, seed, for_backward=False)
            if self.is_last:
                outputs.append(activation)
            else:
                self.give(Channel.ACTIVATION, 1, microbatch, activation)
        return self._share_output(outputs, sizes, own, everywhere)

    def announce(
        self, inputs: Tree | None, batch_digest: int, place: str = "in a training step"
    ) -> list[int]:
        """Tell all ranks how the batch is cut; every rank compares its batch, and the place in the
        user's code, with those of the announcing rank."""
        self._count += 1
        announcer = self.plan.replicas[0][0]
        message = None
        if self.rank == announcer:
            samples = samples_in(inputs) or 1
            message = [microbatch_sizes(samples, self.microbatches), batch_digest, place]
        sizes, expected, there = self._mailbox.broadcast(
            announcer, Channel.STEP, ("step", self._count), message, "the start of the step"
        )
        if there != place:
            raise UnsupportedStepError(
                f"{self.plan.rank_name(self.rank)} is {place}, and "
                f"{self.plan.rank_name(announcer)} is {there}. The pipelined module must be "
                "called on all ranks or on none. Call it without a condition on the rank."
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

    def explaining(self, reason: str) -> AbstractContextManager[None]:
        """Context manager that names the likely reason of a long wait; see `Mailbox`."""
        return self._mailbox.explaining(reason)

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
            if self._slowdown <= 1.0:
                yield
                return
            start, busy = time.perf_counter(), time.process_time()
            yield
            # Where other processes take the core away, the time that was really computed counts.
            elapsed = time.perf_counter() - start
            computed = min(elapsed, time.process_time() - busy)
            time.sleep(computed * (self._slowdown - 1.0))

    def last_ranks(self, sizes: Sequence[int]) -> list[int]:
        """Return the last stage's rank of every replica that has a micro-batch."""
        replicas = self.plan.replicas
        return [
            m[-1] for index, m in enumerate(replicas) if share(len(sizes), len(replicas), index)
        ]

    def machine_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return the number of samples of every replica that has a micro-batch."""
        replicas = len(self.plan.replicas)
        counts = [
            sum(sizes[m] for m in share(len(sizes), replicas, index)) for index in range(replicas)
        ]
        return [count for count in counts if count]

    def exchange_outputs(self, output: Tree, sizes: Sequence[int]) -> list[Tree]:
        """Last stages: return every replica's output, in order; this rank's own is passed through
        untouched."""
        ranks = self.last_ranks(sizes)
        for peer in ranks:
            if peer != self.rank:
                self._mailbox.send(peer, Channel.OUTPUT, self.key("output"), output)
        return [output if peer == self.rank else self._output_of(peer) for peer in ranks]

    def share_record(self, record: Tree, sources: Sequence[int]) -> None:
        """Last stages: send what the step recorded to all ranks."""
        if self.rank in sources:
            others = [peer for peer in range(self.plan.world_size) if peer != self.rank]
            self._mailbox.send_copies(others, Channel.RECORD, self.key("record"), record)

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
            # Copies: user code may change the output in place while it is still under way.
            others = [peer for peer in peers if peer != self.rank]
            self._mailbox.send_copies(others, Channel.OUTPUT, self.key("output"), mine)
        if self.rank not in peers:
            return None
        parts = [mine if peer == self.rank else self._output_of(peer) for peer in ranks]
        return join(parts, self.machine_sizes(sizes))
