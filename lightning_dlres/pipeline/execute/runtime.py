"""One rank's part of the pipeline: its stage, its neighbours, and the messages between them.

The runtime follows a plan and decides nothing. User code (the step up to the module's call, and
from the call to the loss) comes in through `UserStep`, so that the pipeline is the same under any
front end.

Id spaces:

- rank: number of the process, over all hosts; (replica, stage) is its place in the plan.
- micro-batch: index in the global batch, in messages, spans and seeds. In `Action.microbatch` and
  in timelines it is the index among the micro-batches of one replica.
- layer: index in the whole model, in the plan and seeds; *position* is its index in its stage.
- pass: one run of a batch through the pipeline, for a training step or a forward without
  recording. Passes are numbered from 1.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_dlres.core.comm.mailbox import Channel, Key, Mailbox
from lightning_dlres.core.errors import BatchMismatchError, UnsupportedStepError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.execute.buffers import BufferSync
from lightning_dlres.pipeline.execute.gradients import GradientSync
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.stage.layer_errors import noting_micro_batch
from lightning_dlres.pipeline.stage.microbatch import (
    InputCutter,
    join_if_alike,
    microbatch_sizes,
    own_copy,
    samples_in,
    share,
)
from lightning_dlres.pipeline.stage.stage import Stage

# Stands for the inputs of the pipelined module if a step returns None before the module's call.
# None would not do: it may be an input.
SKIPPED: Any = object()
# Python's own exceptions whose constructors need more than a text.
_NOT_MADE_OF_TEXT = frozenset(
    ("UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError", "ExceptionGroup")
)
# Types in an exception's arguments that another rank gets as they are.
_SENT_TYPES = frozenset((bool, int, float, str, bytes, type(None), Tensor))


class Runtime:
    """One rank's part of the pipeline.

    Args:
        plan: Plan of the run.
        rank: This rank.
        stage: Layers of this rank's stage.
        non_pipelined: Trainable parameters that user code uses outside of the layers.
        sync: Sums gradients over the ranks that hold them.
        buffers: Keeps the stage's buffers equal in all replicas.
        mailbox: Sends and receives messages.
        tracer: Records a span for every computation.
        microbatches: Number of micro-batches of the global batch; fewer if it has fewer samples.
        slowdown: Factor by which every computation is stretched, to emulate a slower device.
    """

    def __init__(
        self,
        *,
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
        self.replica, self.stage_index = plan.position(rank)
        self._ranks = plan.replicas[self.replica]
        self.stage, self.sync, self.buffers = stage, sync, buffers
        self.non_pipelined = list(non_pipelined)
        self._mailbox, self._slowdown = mailbox, slowdown
        self.inputs = InputCutter()
        # All ranks count the same passes, so the number in a message key separates one pass from
        # the next.
        self._pass_number = 0

    @property
    def is_first(self) -> bool:
        """True if this rank runs the step up to the module's call."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """True if this rank runs the step from the module's call on."""
        return self.stage_index == self.plan.stages - 1

    def set_trainable(
        self,
        layer_parameters: Sequence[Sequence[nn.Parameter]],
        non_pipelined: Sequence[nn.Parameter],
        sync: GradientSync,
        between: Sequence[nn.Parameter] = (),
    ) -> None:
        """Train these parameters from now on, after user code has frozen or unfrozen some.

        Args:
            layer_parameters: Trainable parameters of every layer of the stage.
            non_pipelined: Trainable parameters outside of the layers.
            sync: Sums the gradients of these parameters.
            between: Those of `non_pipelined` that code between two layers may use.
        """
        self.stage.set_parameters(layer_parameters, between)
        self.non_pipelined, self.sync = list(non_pipelined), sync

    def forward(
        self,
        inputs: Tree,
        seed: int,
        batch_digest: int,
        everywhere: bool = True,
        place: str = "in a training step",
    ) -> Tree:
        """Run the layers forward over the global batch without recording; called by all ranks.

        Args:
            inputs: Inputs of the pipelined module, the same on all ranks; or `SKIPPED`.
            seed: Seed of the pass.
            batch_digest: Fingerprint of the batch that this rank sees.
            everywhere: True returns the output on every rank, False on the last stages only.
            place: Place of the call in user code, for errors; see `announce`.

        Returns:
            The output of the whole batch, or None on ranks that do not get it. `SKIPPED` if the
            inputs are.
        """
        sizes = self.announce(inputs, batch_digest, place)
        if not sizes:
            return SKIPPED
        own = share(len(sizes), len(self.plan.replicas), self.replica)
        parts = self.inputs.cut(map_tensors(Tensor.detach, inputs), sizes) if self.is_first else []
        outputs = []
        for microbatch in own:
            if self.is_first:
                activation = own_copy(parts[microbatch], sizes)
            else:
                activation = self.receive(Channel.ACTIVATION, -1, microbatch, "the activations")
            with (
                self.computing("forward", microbatch),
                noting_micro_batch(sizes[microbatch], sum(sizes)),
            ):
                activation = self.stage.forward(microbatch, activation, seed, for_backward=False)
            if self.is_last:
                outputs.append(activation)
            else:
                self.send(Channel.ACTIVATION, 1, microbatch, activation)
        return self._share_output(outputs, sizes, own, everywhere)

    def compute_layer(
        self, layer: int, compute: Callable[[], Tree], batch_digest: int, place: str
    ) -> Tree:
        """Compute the output of one layer on one rank, and return it on all; called by all ranks.

        Args:
            layer: Index of the layer. A rank of the first replica that holds it computes.
            compute: Returns the output.
            batch_digest: Fingerprint of the batch that this rank sees.
            place: Place of the call in user code; see `announce`.

        Raises:
            Exception: What `compute` has raised. On other ranks the same, if it is an exception of
                Python's own; else `UnsupportedStepError`.
        """
        self.announce(None, batch_digest, f"{place}, at layer {layer}")
        owner = self.plan.replicas[0][self.plan.stage_of(layer)]
        if self.rank != owner:
            output, raised = self._output_of(owner)
            if raised is not None:
                raise error_of_layer(self.plan.rank_name(owner), *raised)
            return output
        others = [peer for peer in range(self.plan.world_size) if peer != owner]
        send = partial(self._mailbox.send_copies, others, Channel.OUTPUT, self.key("output"))
        try:
            with self.computing("forward", 0):
                output = map_tensors(Tensor.detach, compute())
        except Exception as error:
            # User code may catch it, and must then do so on all ranks.
            send([None, [type(error).__name__, str(error), _sendable_arguments(error)]])
            raise
        send([output, None])
        return output

    def announce(
        self, inputs: Tree, batch_digest: int, place: str = "in a training step"
    ) -> list[int]:
        """Begin a pass, and return the number of samples of each of its micro-batches.

        The list is empty if the step skips the batch before the module's call.

        Called by all ranks. The first stage of the first replica announces the sizes to the others.

        Args:
            inputs: Inputs of the pipelined module, or `SKIPPED`; only those of the announcing rank
                count.
            batch_digest: Fingerprint of the batch that this rank sees.
            place: Place of the call in user code; it must be the same on all ranks.

        Raises:
            UnsupportedStepError: If this rank is at another place than the announcing one.
            BatchMismatchError: If this rank sees another batch than the announcing one.
        """
        self._pass_number += 1
        announcer = self.plan.replicas[0][0]
        message = None
        if self.rank == announcer:
            samples = 0 if inputs is SKIPPED else samples_in(inputs) or 1
            sizes = microbatch_sizes(samples, self.microbatches) if samples else []
            message = [sizes, batch_digest, place]
        sizes, expected_digest, expected_place = self._mailbox.broadcast(
            announcer, Channel.STEP, ("step", self._pass_number), message, "the start of the step"
        )
        if expected_place != place:
            raise UnsupportedStepError(
                f"{self.plan.rank_name(self.rank)} is {place}, and "
                f"{self.plan.rank_name(announcer)} is {expected_place}. The pipelined module must "
                "be called on all ranks or on none. Call it without a condition on the rank. The "
                "same holds for uses of its weights. Code that sets trainer.should_stop must do so "
                "on all ranks."
            )
        if expected_digest != batch_digest:
            raise BatchMismatchError(
                f"{self.plan.rank_name(self.rank)} sees another batch than "
                f"{self.plan.rank_name(announcer)}: the fingerprints are {batch_digest:#010x} and "
                f"{expected_digest:#010x}. One rank reads the data for all, so user code changed "
                "the batch. Look for random or rank-dependent code in on_before_batch_transfer, "
                "on_after_batch_transfer and on_train_batch_start."
            )
        return list(sizes)

    def meet(self, place: str) -> None:
        """Wait until all ranks are at the same place of user code; see `announce`."""
        announcer, key = self.plan.replicas[0][0], self.key("met")
        with self.explaining(
            f"It is {place}, where all ranks must be, or none. No condition on the rank may decide."
        ):
            self.announce(None, 0, place)
            if self.rank != announcer:
                self._mailbox.send(announcer, Channel.STEP, key, None)
                return
            for peer in range(self.plan.world_size):
                if peer != announcer:
                    self._mailbox.receive(peer, Channel.STEP, key, "an answer")

    def explaining(self, reason: str) -> AbstractContextManager[None]:
        """Context manager in which a long wait for a message names this likely reason.

        See `Mailbox.explaining`.
        """
        return self._mailbox.explaining(reason)

    def key(self, *parts: str | int) -> Key:
        """Return a message key that is unique to this pass."""
        return (*parts, self._pass_number)

    def receive(self, channel: Channel, offset: int, microbatch: int, what: str) -> Tree:
        """Receive a micro-batch's message from a neighbouring stage.

        Args:
            channel: Channel of the message.
            offset: -1 for the previous stage, 1 for the next.
            microbatch: Index in the global batch.
            what: Content of the message, for errors.
        """
        peer = self._ranks[self.stage_index + offset]
        return self._on_device(
            self._mailbox.receive(
                peer, channel, self.key(microbatch), f"{what} of micro-batch {microbatch}"
            )
        )

    def send(self, channel: Channel, offset: int, microbatch: int, tree: Tree) -> None:
        """Send a micro-batch's message to a neighbouring stage; for the arguments see `receive`."""
        self._mailbox.send(
            self._ranks[self.stage_index + offset], channel, self.key(microbatch), tree
        )

    @contextmanager
    def computing(self, name: str, microbatch: int) -> Iterator[None]:
        """Context manager that traces a computation, and stretches it to emulate a slower
        device."""
        with self.tracer.span(name, "compute", stage=self.stage_index, microbatch=microbatch):
            if self._slowdown <= 1.0:
                yield
                return
            start, cpu_start = time.perf_counter(), time.process_time()
            yield
            # Wall time includes other processes on a shared core, and CPU time adds up the threads
            # of this one. The smaller of both excludes either error.
            wall_seconds = time.perf_counter() - start
            computed = min(wall_seconds, time.process_time() - cpu_start)
            time.sleep(computed * (self._slowdown - 1.0))

    def last_ranks(self, sizes: Sequence[int]) -> list[int]:
        """Return the last stage's rank of every replica that has a micro-batch."""
        replicas = self.plan.replicas
        return [
            ranks[-1]
            for index, ranks in enumerate(replicas)
            if share(len(sizes), len(replicas), index)
        ]

    def replica_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return the number of samples of every replica that has a micro-batch."""
        replicas = len(self.plan.replicas)
        counts = [
            sum(sizes[m] for m in share(len(sizes), replicas, index)) for index in range(replicas)
        ]
        return [count for count in counts if count]

    def exchange_outputs(self, output: Tree, sizes: Sequence[int]) -> list[Tree]:
        """Return the outputs of all replicas that have a micro-batch, in order.

        Called by the last stages of these replicas. This rank's own output is the same object, so
        that gradients flow through it.
        """
        ranks = self.last_ranks(sizes)
        for peer in ranks:
            if peer != self.rank:
                self._mailbox.send(peer, Channel.OUTPUT, self.key("output"), output)
        return [output if peer == self.rank else self._output_of(peer) for peer in ranks]

    def share_record(self, record: Tree, sources: Sequence[int]) -> None:
        """Send the record of the step to all ranks, if this rank is one of the sources."""
        if self.rank in sources:
            others = [peer for peer in range(self.plan.world_size) if peer != self.rank]
            self._mailbox.send_copies(others, Channel.RECORD, self.key("record"), record)

    def gather_records(self, record: Tree, sources: Sequence[int]) -> list[Tree]:
        """Return the records of all sources, in order; `record` is this rank's own."""
        return [
            record
            if source == self.rank
            else self._mailbox.receive(
                source, Channel.RECORD, self.key("record"), "the loss and logs of the step"
            )
            for source in sources
        ]

    def _output_of(self, peer: int) -> Tree:
        return self._on_device(
            self._mailbox.receive(peer, Channel.OUTPUT, self.key("output"), "the module's output")
        )

    def _on_device(self, message: Tree) -> Tree:
        """Return a message with its tensors on this rank's device; they arrive on the CPU."""
        return map_tensors(lambda tensor: tensor.to(self.stage.device), message)

    def _share_output(
        self, outputs: list[Tree], sizes: list[int], own: range, everywhere: bool
    ) -> Tree:
        """Return the output of the whole batch, or None on ranks that do not get it.

        Args:
            outputs: Outputs of this rank's micro-batches, on the last stage.
            sizes: Samples of every micro-batch.
            own: Micro-batches of this replica.
            everywhere: True sends the output to all ranks, False to the last stages only.
        """
        ranks = self.last_ranks(sizes)
        own_output = None
        if self.is_last and own:
            own_output = join_if_alike(outputs, [sizes[m] for m in own])
        receivers = range(self.plan.world_size) if everywhere else ranks
        if self.rank in ranks:
            # Copies are sent, since user code may change the output in place during the transfer.
            others = [peer for peer in receivers if peer != self.rank]
            self._mailbox.send_copies(others, Channel.OUTPUT, self.key("output"), own_output)
        if self.rank not in receivers:
            return None
        parts = [own_output if peer == self.rank else self._output_of(peer) for peer in ranks]
        return join_if_alike(parts, self.replica_sizes(sizes))


def error_of_layer(
    rank: str, kind: str, text: str, arguments: Sequence[Any] | None = None
) -> Exception:
    """Return the exception for what a layer has raised on another rank.

    Args:
        rank: Name of that rank.
        kind: Name of the exception's class.
        text: Its text.
        arguments: Its arguments; None if they cannot be sent. An exception of Python's own then has
            its text as the only argument.
    """
    known = getattr(builtins, kind, None)
    if arguments is None and kind in _NOT_MADE_OF_TEXT:
        known = None
    if isinstance(known, type) and issubclass(known, Exception):
        error: Exception = known(*([text] if arguments is None else arguments))
        return error
    return UnsupportedStepError(f"A layer has raised on {rank}: {kind}: {text}")


def _sendable_arguments(error: Exception) -> list[Any] | None:
    """Return the arguments of an exception, if they are plain data; else None."""
    return list(error.args) if all(map(_is_sent_as_it_is, error.args)) else None


def _is_sent_as_it_is(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_sent_as_it_is, value))
    if type(value) is dict:
        return all(type(key) is str and _is_sent_as_it_is(item) for key, item in value.items())
    return type(value) in _SENT_TYPES
