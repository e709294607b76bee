"""Trace of a module's forward, and what must cross from one layer to the next.

A forward is a series of *blocks*, the submodules that become layers, and of *glue*, the operations
between them. Layer i is block i and the glue after it, up to the next block; layer 0 has the glue
before block 0, too. A stage that begins at a layer runs the whole forward from the top. There
blocks and glue of earlier stages give placeholders without data. Only what the stage needs is real:
values that are sent, and glue that depends on nothing but the module's inputs, such as masks, which
is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from lightning_dlres.pipeline.capture.operations import fingerprint_of
from lightning_dlres.pipeline.capture.placeholders.skeleton import Skeleton

# Sources of a value: an input of the module, an output of a block, or a result of glue.
INPUT, BLOCK, GLUE = "input", "block", "glue"


# Index of a block that is beyond all others.
AFTER_ALL = 1 << 62


def seed_number(index: int) -> int:
    """Return the number that stands for a random operation of glue beside those of calls."""
    return -2 - index


@dataclass(frozen=True, order=True)
class Value:
    """A tensor of a forward.

    Attributes:
        source: INPUT, BLOCK or GLUE.
        index: Number of the block's call or of the operation of glue; 0 for inputs.
        position: Position among the tensors of the inputs or of the result.
    """

    source: str
    index: int
    position: int


@dataclass(frozen=True)
class Event:
    """An operation of glue, or the call of a block.

    Attributes:
        name: Name of the operation or of the block.
        block: Index of the block; None for glue.
        call: Number of the call of the block: the block's index, plus the number of blocks for each
            earlier call of the same block; None for glue.
        inputs: Values among the arguments.
        results: Tensors in the result that are new, as values.
        returned: Position of the argument that is the result, as in operations in place; None for
            other results.
        aliases: Tensors in the result that were there before: their positions and values.
        written: Storages that it writes to.
        is_local: True if the result of glue depends on more than its arguments: on a trainable
            parameter, a tensor of a block, or random numbers.
        is_random: True if it draws random numbers.
        is_effect: True for an operation between the blocks of a step that changes a tensor from
            outside of the step, such as a buffer. The code after all blocks runs it again, and so
            do all layers if it takes no value.
        reads_values: True if the result is no tensor, but depends on the values of tensors, such as
            that of `Tensor.item`. The path of the forward may depend on it.
        metas: Descriptions of the tensors in the result of glue.
        decision: The result, if `reads_values` is set and it is plain data.
        is_wrapped: True for glue whose result becomes that of the user's own
            `torch.autograd.Function`, which sets its gradient.
        is_checkpointed: True if the code calls the block inside of an activation checkpoint.
    """

    name: str
    block: int | None
    inputs: tuple[Value, ...]
    call: int | None = None
    results: tuple[Value, ...] = ()
    aliases: tuple[tuple[int, Value], ...] = ()
    written: frozenset[int] = frozenset()
    returned: int | None = None
    is_local: bool = False
    is_random: bool = False
    is_effect: bool = False
    reads_values: bool = False
    metas: tuple[Any, ...] = ()
    decision: Any = None
    is_wrapped: bool = False
    is_checkpointed: bool = False


@dataclass(frozen=True)
class Boundary:
    """Values that cross from the layers before a block to this block and all later ones.

    Attributes:
        values: Values that are sent, in order.
        repeated: Indices of operations of glue that run again, with real tensors.
        skipped: Indices of operations of glue that write to what is sent, so that they must not run
            again.
        decided: Numbers of the decisions that are sent and cannot be made again. After all blocks,
            the others are made again: another decision may hold for the whole batch.
    """

    values: tuple[Value, ...]
    repeated: frozenset[int]
    skipped: frozenset[int]
    decided: frozenset[int] = frozenset()


class _Dependencies:
    """Layers whose results an event takes, or whose reads must come before its writes.

    Args:
        storages: Storage of each value.
    """

    def __init__(self, storages: Mapping[Value, int]) -> None:
        self._storages = storages
        self._made: dict[Value, int] = {}
        self._written: dict[int, int] = {}
        self._read: dict[int, int] = {}

    def layer(self, event: Event) -> int:
        """Return the last of the layers; -1 if there is none."""
        inputs = [self._made.get(value, -1) for value in event.inputs]
        inputs += [self._written.get(self._storages[value], -1) for value in event.inputs]
        return max([-1, *inputs, *(self._read.get(storage, -1) for storage in event.written)])

    def add(self, event: Event, layer: int) -> None:
        """Add an event, which belongs to a layer."""
        self._made.update(dict.fromkeys(event.results, layer))
        for kept, storages in (
            (self._written, event.written),
            (self._read, [self._storages[value] for value in event.inputs]),
        ):
            for storage in storages:
                kept[storage] = max(kept.get(storage, -1), layer)


@dataclass(frozen=True)
class Trace:
    """Trace of a forward.

    Attributes:
        events: Events in the order of execution.
        storages: Storage of each value.
        outputs: Values in the module's output.
        of_samples: Values whose first dimension is the samples, as a run with twice as many shows.
        scaled: Values whose shape depends on the number of samples in another way.
        sample_dims: For the values of both, the dimensions that are a multiple of the samples.
        held: Values that variables of a step still hold after the last block. The step may use them
            there in other steps.
        outside: Storages of tensors that were there before a step.
        skeletons: Skeleton of the output of each call, without the number of samples; empty if the
            number is not known.
        prefix: Number of events before the first block that run once on the whole batch, and whose
            results are then cut; None if every micro-batch runs them.
        is_whole: True if a batch is its only micro-batch.
    """

    events: tuple[Event, ...]
    storages: dict[Value, int]
    outputs: tuple[Value, ...]
    of_samples: frozenset[Value] = frozenset()
    scaled: frozenset[Value] = frozenset()
    sample_dims: Mapping[Value, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    held: tuple[Value, ...] = ()
    outside: frozenset[int] = frozenset()
    skeletons: Mapping[int, Skeleton] = field(default_factory=dict)
    prefix: int | None = None
    is_whole: bool = False

    @cached_property
    def made_by_layers(self) -> frozenset[int]:
        """Storages of tensors that not every stage can compute from the module's inputs."""
        return frozenset(self._fixed_storages(self.events))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Numbers of the calls of blocks, in order."""
        return tuple(event.call for event in self.events if event.call is not None)

    @cached_property
    def opening(self) -> str:
        """Fingerprint of the operations before the first block."""
        return fingerprint_of(e.name for e in takewhile(lambda e: e.block is None, self.events))

    @cached_property
    def has_repeats(self) -> bool:
        """True if a block is called several times."""
        return len({event.block for event in self.events if event.block is not None}) < len(
            self.order
        )

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layer of each event: -1 before the first block.

        An event belongs to the layer of the last block before it. If blocks are called several
        times, it belongs to the last layer whose results it takes, since the calls of one block run
        on one stage.
        """
        last = max((at for at, e in enumerate(self.events) if e.block is not None), default=-1)
        layers: list[int] = []
        needed = _Dependencies(self.storages)
        for at, event in enumerate(self.events):
            before = layers[-1] if layers else -1
            if event.block is not None:
                layer = event.block
            elif at > last:
                layer = AFTER_ALL
            elif self.has_repeats and before >= 0:
                layer = max(needed.layer(event), 0)
            else:
                layer = before
            needed.add(event, layer)
            layers.append(layer)
        return tuple(layers)

    @cached_property
    def early_call(self) -> str:
        """Name of a block that takes what a later layer returns; "" if there is none."""
        needed = _Dependencies(self.storages)
        for event, layer in zip(self.events, self.layers, strict=True):
            if event.block is not None and needed.layer(event) > layer:
                return event.name
            needed.add(event, layer)
        return ""

    @cached_property
    def decisions(self) -> tuple[Any, ...]:
        """Results of operations that read values of tensors, in order."""
        return tuple(event.decision for event in self.events if event.reads_values)

    @cached_property
    def calls(self) -> dict[int, Event]:
        """Calls of blocks, by their numbers."""
        return {event.call: event for event in self.events if event.call is not None}

    @cached_property
    def glue_layers(self) -> tuple[int, ...]:
        """Layer of each operation of glue."""
        pairs = zip(self.events, self.layers, strict=True)
        return tuple(layer for event, layer in pairs if event.block is None)

    def sample_dim(self, value: Value) -> int | None:
        """Return the only dimension of a value that depends on the samples, and is their number."""
        if value in self.of_samples:
            return 0
        dims = self.sample_dims.get(value, ())
        return dims[0][0] if len(dims) == 1 and dims[0][1] == 1 else None

    def is_seeded(self, index: int) -> bool:
        """Return True for a random operation of glue that gets a seed of its own.

        If blocks are called several times, the stages have other calls before it.
        """
        return self.has_repeats and self.glue[index].is_random and self.glue_layers[index] >= 0

    @cached_property
    def glue(self) -> tuple[Event, ...]:
        """Operations of glue, in order."""
        return tuple(event for event in self.events if event.block is None)

    def boundary(self, block: int) -> Boundary | str:
        """Return what crosses to a block and all later ones, or why the forward cannot be cut here.

        Args:
            block: Index of a block; beyond the last one, of the glue after all blocks.
        """
        if block not in self._boundaries:
            self._boundaries[block] = self._find_boundary(block)
        return self._boundaries[block]

    @cached_property
    def _boundaries(self) -> dict[int, Boundary | str]:
        """Boundaries that have been found, by block."""
        return {}

    def _find_boundary(self, block: int) -> Boundary | str:
        layers = list(zip(self.events, self.layers, strict=True))
        last = max((layer for _, layer in layers if layer < AFTER_ALL), default=-1)
        stop = block if block <= last else AFTER_ALL
        before = [event for event, layer in layers if layer < stop]
        after = [event for event, layer in layers if layer >= stop]
        fixed = self._fixed_storages(before)
        prefix, is_end = self.prefix or 0, not any(event.block is not None for event in after)
        needed = self._needed(after, is_end=is_end)
        decisions = [id(event) for event in self.events if event.reads_values]
        decided: set[int] = set()
        for index, event in enumerate(before):
            if not event.reads_values:
                continue
            is_fixed = any(self.storages[value] in fixed for value in event.inputs)
            if index < prefix and event.inputs and event.decision is None:
                return f"{event.name} reads values of a whole batch before the first submodule"
            if (is_fixed or index < prefix) and event.decision is not None:
                decided.add(decisions.index(id(event)))
                continue
            needed += event.inputs
            written_later = {s for later in before[index + 1 :] for s in later.written}
            if any(self.storages[v] in fixed & written_later for v in event.inputs):
                return f"{event.name} reads a tensor that a later operation changes in place"
        if is_end:
            needed += self._held_and_sendable(before, fixed)
        effects = {id(e) for e in before if e.is_effect and (is_end or not e.inputs)}
        needed += [value for e in before if id(e) in effects for value in e.inputs]
        values, computed = self._sent(needed, before, fixed, is_end=is_end)
        computed |= effects
        uncut = (value for value in values & self.scaled if self.sample_dim(value) is None)
        is_cut = self.prefix is not None and block == 0 and not self.is_whole
        if is_cut and any(True for _ in uncut):
            return "no dimension is the samples in a tensor that depends on their number"
        storages = [self.storages[value] for value in values]
        written_later = {storage for event in after for storage in event.written}
        if any(s in written_later and storages.count(s) > 1 for s in storages):
            return "two views of one tensor are needed later, and one of them is changed in place"
        numbers = {id(event): number for number, event in enumerate(self.glue)}
        glue = [(numbers[id(event)], event) for event in before if event.block is None]
        skipped = frozenset(
            at
            for at, event in glue
            if id(event) not in effects
            and (event.written & fixed or (event.written and at < prefix))
        )
        open_ones = (e for e in before if e.reads_values)
        again = computed.union(id(e) for e in open_ones if decisions.index(id(e)) not in decided)
        repeated = {at for at, event in glue if id(event) in again}
        ordered = sorted(values)
        if self.prefix is not None:
            # The first tensor shows the number of samples.
            ordered.sort(key=lambda value: self.sample_dim(value) is None)
        return Boundary(tuple(ordered), frozenset(repeated - skipped), skipped, frozenset(decided))

    def _held_and_sendable(self, before: Sequence[Event], fixed: set[int]) -> list[Value]:
        """Return the values that a step holds, without those whose parts cannot be joined."""
        return [
            value
            for value in self.held
            if None not in map(self.sample_dim, self._sent([value], before, fixed, is_end=True)[0])
        ]

    def _needed(self, after: Sequence[Event], *, is_end: bool) -> list[Value]:
        """Return the values that events and the output take.

        Args:
            after: The events after a boundary.
            is_end: True for the boundary after all blocks.
        """
        end = after if is_end else self.boundary(AFTER_ALL)
        if not isinstance(end, Boundary):
            return [value for event in after for value in event.inputs] + list(self.outputs)
        # The code after all blocks computes some values again, and so needs others.
        at = max(number for number, event in enumerate(after) if event.block is not None)
        return [value for event in after[: at + 1] for value in event.inputs] + list(end.values)

    def _fixed_storages(self, before: Sequence[Event]) -> set[int]:
        """Return the storages whose content glue cannot compute again from the module's inputs.

        Inputs are sent as they are at the end of `before`. If they have been changed in place, what
        was made of them before cannot be computed again, either.
        """
        written = {storage for event in before for storage in event.written}
        fixed = {
            storage
            for value, storage in self.storages.items()
            if value.source == BLOCK or (value.source == INPUT and storage in written)
        }
        count = -1
        while count != len(fixed):
            count = len(fixed)
            for event in before:
                touched = event.written.union(self.storages[v] for v in event.inputs)
                if event.block is None and (event.is_local or touched & fixed):
                    fixed |= event.written
                    fixed.update(self.storages[value] for value in event.results)
        return fixed

    def _is_without_samples(self, value: Value) -> bool:
        """Return True for a value that is known to have no dimension for the samples."""
        is_known = value not in self.scaled or value in self.sample_dims
        return bool(self.of_samples) and is_known and self.sample_dim(value) is None

    def _sent(
        self,
        needed: Iterable[Value],
        before: Sequence[Event],
        fixed: set[int],
        *,
        is_end: bool,
    ) -> tuple[set[Value], set[int]]:
        """Return what is sent: the needed values that cannot be computed again, and the inputs of
        those that can. Also return the ids of the events that compute the latter.

        Args:
            needed: Values that are needed.
            before: Events before the boundary.
            fixed: Storages that cannot be computed again.
            is_end: True after all blocks.
        """
        produced = {value: event for event in before for value in event.results}
        writers: dict[int, list[Event]] = {}
        for event in before:
            for storage in event.written:
                writers.setdefault(storage, []).append(event)
        in_prefix = {id(event) for event in before[: self.prefix or 0]}
        # The code after all blocks gets the whole batch.
        has_inputs = is_end and self.prefix is not None
        sent: set[Value] = set()
        computed: set[int] = set()
        pending, seen = list(needed), set()
        while pending:
            value = pending.pop()
            if value in seen or (value.source != INPUT and value not in produced):
                continue
            seen.add(value)
            if value.source == INPUT:
                if not has_inputs:
                    sent.add(value)
                continue
            event = produced[value]
            touched = {self.storages[v] for v in (value, *event.inputs)}
            is_early = id(event) in in_prefix
            if has_inputs and is_early:
                # The prefix runs again.
                continue
            is_again = not is_early and self.storages[value] not in fixed
            is_again |= has_inputs and self.storages[value] in self.outside
            if event.block is None and not event.is_random and not touched & writers.keys():
                # Values without samples are computed from values that have them.
                is_joined = is_end and self._is_without_samples(value)
                # The glue of a module uses its parameters on the stage where it stands.
                is_joined &= not event.is_local or self.prefix is not None
                is_uncut = value in self.scaled and self.sample_dim(value) is None
                is_again |= is_joined or (is_early and is_uncut and not event.is_local)
            if not is_again:
                sent.add(value)
                continue
            for again in (event, *writers.get(self.storages[value], ())):
                computed.add(id(again))
                pending += again.inputs
        return sent, computed
