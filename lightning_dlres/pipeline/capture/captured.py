"""A captured module: its layers, and the run of some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.capture.blocks import candidate_blocks
from lightning_dlres.pipeline.capture.paths import Decisions, Paths
from lightning_dlres.pipeline.capture.recording import (
    BlockOutput,
    NotALayer,
    Recorder,
    calls_replaced,
    original_call,
)
from lightning_dlres.pipeline.capture.running import SegmentRun, without_objects
from lightning_dlres.pipeline.capture.trace import Trace

# Relative difference of two outputs that counts as rounding.
_TOLERANCE = 1e-3
# Called with the index of a layer before it runs, such as to seed its random numbers.
BeforeLayer = Callable[[int], None]


def _nothing(layer: int) -> None:
    pass


class CapturedModule:
    """A module as a chain of layers, which run with the module's own code.

    Args:
        paths: Traces of the forward, by `training` of the module.

    Attributes:
        module: The module.
        names: Name of each layer's block in the module.
        blocks: Block of each layer.
        shared_parameters: For each layer, trainable parameters that its glue uses.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        paths: Mapping[bool, Paths],
        shared_parameters: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        self.module, self.names, self.blocks = module, tuple(blocks), tuple(blocks.values())
        self.shared_parameters = tuple(map(tuple, shared_parameters))
        self._paths = paths

    def run(
        self,
        layers: range,
        inputs: Tree,
        *,
        before_layer: BeforeLayer = _nothing,
        copies: Mapping[int, nn.Module] | None = None,
    ) -> Tree:
        """Run consecutive layers.

        Args:
            layers: The layers.
            inputs: (args, kwargs) of the module's call for the first layer; else what the layers
                before have returned.
            before_layer: Called with the index of a layer before it runs.
            copies: Modules that run in the place of blocks, by layer.

        Returns:
            What the next layer takes, and `output` after the last layer.

        Raises:
            UnsupportedStepError: If the module's code takes a path that cannot be cut.
        """
        return self._segment(layers, inputs, before_layer, copies or {})

    def output(self, crossing: Tree) -> Tree:
        """Return the module's output, given what the last layer has returned."""
        return self._segment(range(len(self.blocks), len(self.blocks)), crossing, _nothing, {})

    def _segment(
        self,
        layers: range,
        inputs: Tree,
        before_layer: BeforeLayer,
        copies: Mapping[int, nn.Module],
    ) -> Tree:
        tensors = tensors_of(inputs)
        run = SegmentRun(
            self.module,
            self.blocks,
            self._paths[self.module.training],
            copies=copies,
            layers=layers,
            device=tensors[0].device if tensors else torch.device("cpu"),
            before_layer=before_layer,
        )
        return run.run(inputs)


def capture(module: nn.Module, inputs: Tree) -> CapturedModule:
    """Capture a module, and check that its layers give what the module gives.

    Args:
        module: The module. It runs in training mode and in evaluation mode; buffers and random
            state are restored.
        inputs: (args, kwargs) of a call of it.

    Raises:
        UnsupportedStepError: If the module cannot be cut, for instance because it uses a tensor of
            a submodule that the submodule does not return.
    """
    closed: set[str] = set()
    glue: set[str] = set()
    reason = "no submodule has parameters"
    while True:
        blocks = {n: b for n, b in candidate_blocks(module, closed).items() if n not in glue}
        if not blocks:
            raise UnsupportedStepError(
                f"{type(module).__name__} must be a module that calls several submodules once each "
                f"to be cut into stages, got one that cannot be cut: {reason}. Name another module "
                "with HeteroPipeStrategy(module=...)."
            )
        try:
            return _captured(module, blocks, inputs)
        except NotALayer as refused:
            reason = str(refused)
            parent = "" if refused.is_glue else _called_parent(module, refused.name)
            if parent:
                closed.add(parent)
            else:
                glue.add(refused.name)


def _captured(module: nn.Module, blocks: Mapping[str, nn.Module], inputs: Tree) -> CapturedModule:
    with _restored(module, is_training=True):
        order = _recorded(module, blocks, inputs)[0].order
    names = [list(blocks)[index] for index in order]
    if not names:
        raise NotALayer(next(iter(blocks)), "is not called", is_glue=True)
    ordered = {name: blocks[name] for name in names}
    paths, shared = {}, [list[nn.Parameter]() for _ in names]
    for is_training in (True, False):
        with _restored(module, is_training=is_training):
            recorder, trace = _recorded(module, ordered, inputs)
        if recorder.order != sorted(recorder.order):
            raise NotALayer(names[recorder.order[0]], "is called in another order in evaluation")
        for layer in range(1, len(names) + 1):
            boundary = trace.boundary(layer)
            if isinstance(boundary, str):
                raise NotALayer(names[layer - 1], f"cannot end a stage: {boundary}")

        def record(
            decisions: Decisions,
            outputs: Mapping[int, BlockOutput] = recorder.outputs,
            is_training: bool = is_training,
            writes: bool = any(event.written for event in trace.calls.values()),
        ) -> Trace:
            if writes:
                raise UnsupportedStepError(
                    f"The forward of {type(module).__name__} must not decide by the values of "
                    "tensors if a submodule changes its inputs in place. Set inplace=False."
                )
            with _restored(module, is_training=is_training):
                return _recorded(module, ordered, inputs, outputs, decisions)[1]

        paths[is_training] = Paths(trace, record)
        if is_training:
            for index, tensors in recorder.used.items():
                layer = max(sum(e.block is not None for e in trace.events[:index]) - 1, 0)
                shared[layer] += [t for t in tensors if isinstance(t, nn.Parameter)]
    captured = CapturedModule(module, ordered, paths, shared)
    for is_training in (True, False):
        with _restored(module, is_training=is_training):
            expected = _output(captured, inputs)
        with _restored(module, is_training=is_training):
            _check(captured, inputs, expected)
    return captured


def _output(captured: CapturedModule, inputs: Tree) -> Tree:
    """Return the output of the module's own forward, with the random numbers of `_check`."""

    def call(layer: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        if layer > 0:
            _seed(layer)
        return original_call(block, args, kwargs)

    args, kwargs = map_tensors(Tensor.clone, inputs)
    _seed(0)
    with calls_replaced(dict(enumerate(captured.blocks)), call):
        return captured.module.forward(*args, **kwargs)


def _check(captured: CapturedModule, inputs: Tree, expected: Tree) -> None:
    """Run the layers one by one; raise unless they give the output of the module."""
    crossing = map_tensors(Tensor.clone, inputs)
    for layer in range(len(captured.blocks)):
        crossing = captured.run(range(layer, layer + 1), crossing, before_layer=_seed)
        # As between stages; code may ask for a tensor's graph, or if it is a leaf.
        crossing = map_tensors(_as_received, crossing)
    ours, theirs = tensors_of(captured.output(crossing)), tensors_of(without_objects(expected))
    if len(ours) != len(theirs) or not all(map(_is_close, ours, theirs)):
        raise UnsupportedStepError(
            f"{type(captured.module).__name__} must give the same output if its submodules run on "
            "different ranks, got another output. Its submodules must pass tensors to each other "
            "only by their arguments and results."
        )


def _as_received(tensor: Tensor) -> Tensor:
    """Return a copy that has no graph before it, and may be changed in place."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding.

    torch has other kernels for whole transformers in evaluation than for their layers.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if not theirs.is_floating_point() or not theirs.numel():
        return torch.equal(ours, theirs)
    scale = float(theirs.nan_to_num().abs().max())
    return torch.allclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


def _seed(layer: int) -> None:
    torch.manual_seed(layer)


def _recorded(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    inputs: Tree,
    outputs: Mapping[int, BlockOutput] | None = None,
    decisions: Decisions = (),
) -> tuple[Recorder, Trace]:
    recorder = Recorder(module, blocks, _seed, outputs, decisions)
    args, kwargs = map_tensors(torch.zeros_like if outputs else Tensor.clone, inputs)
    return recorder, recorder.run(args, kwargs)


@contextmanager
def _restored(module: nn.Module, *, is_training: bool) -> Iterator[None]:
    """Context manager in which a module is in a mode, and which restores all that a run changes."""
    modes = [(m, m.training) for m in module.modules()]
    buffers = [(b, b.detach().clone()) for b in module.buffers() if not b.is_meta]
    if module.training != is_training:
        module.train(is_training)
    try:
        # Code may ask if gradients are recorded, as that of activation checkpointing does.
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(is_training):
            yield
    finally:
        for m, mode in modes:
            m.training = mode
        for buffer, before in buffers:
            buffer.data.copy_(before)


def _called_parent(module: nn.Module, name: str) -> str:
    """Return the name of the innermost module around one that is called itself; "" for the root."""
    parent = name.rpartition(".")[0]
    while parent and isinstance(module.get_submodule(parent), (nn.ModuleList, nn.ModuleDict)):
        parent = parent.rpartition(".")[0]
    return parent
