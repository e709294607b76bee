"""Capture of a module, or of a training step: the choice of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.capture.captured import CapturedModule
from lightning_dlres.pipeline.capture.segment_state import OpenStep
from lightning_dlres.pipeline.capture.tracing.block_capture import BlockCapture
from lightning_dlres.pipeline.capture.tracing.blocks import candidate_blocks
from lightning_dlres.pipeline.capture.tracing.recording import NotALayer


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
    return _best_of(
        lambda blocks, repeats: BlockCapture(module, blocks, inputs, repeats=repeats),
        module,
        f"{type(module).__name__} must be a module that calls several submodules",
        "Name another module with HeteroPipeStrategy(module=...).",
    )


def capture_step(root: nn.Module, step: OpenStep, arguments: Tree) -> CapturedModule:
    """Capture a training step that calls several submodules, and check that the layers agree.

    Args:
        root: The module with the submodules. Buffers and random state are restored.
        step: Opens the training step, whose run must leave nothing behind. The step returns all
            tensors that count, such as the loss and logged values.
        arguments: (args, kwargs) of its call.

    Raises:
        UnsupportedStepError: If the step cannot be cut.
    """
    return _best_of(
        lambda blocks, repeats: BlockCapture(root, blocks, arguments, step, repeats=repeats),
        root,
        f"{type(root).__name__}.training_step must call several submodules",
        "Name one module to cut with HeteroPipeStrategy(module=...).",
    )


def _best_of(
    make: Callable[[Mapping[str, nn.Module], bool], BlockCapture],
    module: nn.Module,
    rule: str,
    fix: str,
) -> CapturedModule:
    """Return the capture that cuts the larger part of a module.

    Blocks that are called several times make layers only if the module cannot be cut well without:
    sizes must then be the same in all batches.

    Args:
        make: Makes a capture from blocks; True if blocks may be called several times.
        module: The module.
        rule: Beginning of the message for a module that cannot be cut.
        fix: Way out, for the message.
    """
    captured, refused = _first_of(make, module, repeats=False)
    if captured is not None and 2 * _bytes(*captured.blocks) >= _bytes(module):
        return captured
    if any(is_repeated for _, is_repeated in refused):
        other, refused_other = _first_of(make, module, repeats=True)
        if other is not None and (
            captured is None or _bytes(*other.blocks) > _bytes(*captured.blocks)
        ):
            return other
        refused = refused_other or refused
    if captured is not None:
        return captured
    reason = refused[-1][0] if refused else "no submodule has parameters"
    raise UnsupportedStepError(
        f"{rule} to be cut into stages, got one that cannot be cut: {reason}. {fix}"
    )


def _first_of(
    make: Callable[[Mapping[str, nn.Module], bool], BlockCapture],
    module: nn.Module,
    *,
    repeats: bool,
) -> tuple[CapturedModule | None, list[tuple[str, bool]]]:
    """Return the first capture that succeeds, if any, and the refusals before it.

    A refusal is a text, and True if a block is called several times. The exceptions would keep the
    tensors of their runs.
    """
    refused: list[tuple[str, bool]] = []
    for blocks, refuse in _choices(module):
        try:
            return make(blocks, repeats).run(), refused
        except NotALayer as reason:
            refused.append((str(reason), reason.is_repeated))
            refuse(reason)
    return None, refused


def _bytes(*modules: nn.Module) -> int:
    """Return the bytes of the parameters of modules."""
    parameters = {p for module in modules for p in module.parameters()}
    return sum(p.numel() * p.element_size() for p in parameters)


def _choices(
    module: nn.Module,
) -> Iterator[tuple[dict[str, nn.Module], Callable[[NotALayer], None]]]:
    """Yield blocks to try, and a function for the refusal of one, until there are none left."""
    closed: set[str] = set()
    glue: set[str] = set()

    def refuse(refused: NotALayer) -> None:
        parent = "" if refused.is_glue else _called_parent(module, refused.name)
        if parent:
            closed.add(parent)
        else:
            glue.add(refused.name)

    while True:
        blocks = {n: b for n, b in candidate_blocks(module, closed).items() if n not in glue}
        if not blocks:
            return
        yield blocks, refuse


def _called_parent(module: nn.Module, name: str) -> str:
    """Return the name of the innermost module around one that is called itself; "" for the root."""
    parent = name.rpartition(".")[0]
    while parent and isinstance(module.get_submodule(parent), (nn.ModuleList, nn.ModuleDict)):
        parent = parent.rpartition(".")[0]
    return parent
