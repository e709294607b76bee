"""Capture of a module, or of a training step: the choice of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.capture.captured import CapturedModule
from lightning_dlres.pipeline.capture.segment_state import OpenStep
from lightning_dlres.pipeline.capture.tracing.block_capture import BlockCapture
from lightning_dlres.pipeline.capture.tracing.blocks import candidate_blocks
from lightning_dlres.pipeline.capture.tracing.not_a_layer import NotALayer


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
        lambda blocks, **how: BlockCapture(module, blocks, inputs, **how),
        module,
        f"{type(module).__name__} must be a module that calls several submodules",
        "Name another module with HeteroPipeStrategy(module=...).",
    )


def capture_step(
    root: nn.Module, step: OpenStep, arguments: Tree, *, is_whole: bool = False
) -> CapturedModule:
    """Capture a training step that calls several submodules, and check that the layers agree.

    Args:
        root: The module with the submodules. Buffers and random state are restored.
        step: Opens the training step, whose run must leave nothing behind. The step returns all
            tensors that count, such as the loss and logged values.
        arguments: (args, kwargs) of its call.
        is_whole: True if a batch is its only micro-batch.

    Raises:
        UnsupportedStepError: If the step cannot be cut.
    """
    return _best_of(
        lambda blocks, **how: BlockCapture(root, blocks, arguments, step, is_whole=is_whole, **how),
        root,
        f"{type(root).__name__}.training_step must call several submodules",
        "Name one module to cut with HeteroPipeStrategy(module=...).",
    )


def _best_of(
    make: Callable[..., BlockCapture],
    module: nn.Module,
    rule: str,
    fix: str,
) -> CapturedModule:
    """Return the capture that cuts the larger part of a module.

    Blocks that are called several times make layers only if the module cannot be cut well without:
    sizes must then be the same in all batches. The same holds for views of a batch in one tensor.

    Args:
        make: Makes a capture from blocks and from other arguments of `BlockCapture`.
        module: The module.
        rule: Beginning of the message for a module that cannot be cut.
        fix: Way out, for the message.
    """
    best, refused = _first_of(make, module)
    if best is not None and 2 * _bytes(*best.blocks) >= _bytes(module):
        return best
    others: list[dict[str, Any]] = []
    if any(reason.is_repeated for reason in refused):
        others.append({"repeats": True})
    others += [{"rows": reason.rows} for reason in refused if reason.rows > 1][:1]
    for how in others:
        other, refused_other = _first_of(make, module, **how)
        if other is not None and (best is None or _bytes(*other.blocks) > _bytes(*best.blocks)):
            best = other
        refused = refused_other or refused
    if best is not None:
        return best
    text = refused[-1].text if refused else "no submodule has parameters"
    raise UnsupportedStepError(
        f"{rule} to be cut into stages, got one that cannot be cut: {text}. {fix}"
    )


@dataclass(frozen=True)
class _Refusal:
    """Content of a `NotALayer`, which itself would keep the tensors of its run."""

    text: str
    is_repeated: bool
    rows: int


def _first_of(
    make: Callable[..., BlockCapture], module: nn.Module, **how: Any
) -> tuple[CapturedModule | None, list[_Refusal]]:
    """Return the first capture that succeeds, if any, and the refusals before it."""
    refused: list[_Refusal] = []
    for blocks, refuse in _choices(module):
        try:
            return make(blocks, **how).run(), refused
        except NotALayer as reason:
            refused.append(_Refusal(str(reason), reason.is_repeated, reason.rows))
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
