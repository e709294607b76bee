"""Search for the module, or the training step, that is cut into stages."""

from __future__ import annotations

import torch
from torch import nn

from lightning_dlres._compat import compiled_names
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.strategies.hetero_pipe.step.pipelined_module import (
    PipelinedModule,
    has_several_layers,
    is_plain_sequential,
)
from lightning_dlres.strategies.hetero_pipe.step.pipelined_step import TRAINING_STEP, PipelinedStep


class UncutError(ConfigError):
    """The training step, or a module, cannot be cut into as many layers as are needed."""


def find_pipelined_module(
    root: nn.Module, path: str | None, stages: int = 1
) -> PipelinedModule | PipelinedStep:
    """Return the module to pipeline.

    Args:
        root: The LightningModule.
        path: Name of the module, such as "net" or "model.blocks", or "training_step" for the step.
            None selects the only `nn.Sequential` or `nn.ModuleList` with parameters that is not
            inside another one, and that has a layer for each stage. If there is none, it selects
            the only child with parameters. If there are several, it selects the step.
        stages: Least number of stages.

    Raises:
        ConfigError: If there is no such module, or if it has no layers.
    """
    if path is None:
        path = _only_candidate(root, stages)
    if path == TRAINING_STEP:
        _refuse_scripts(root, "")
        return PipelinedStep.of(root)
    try:
        if not path:
            raise AttributeError("an empty name")
        module = root.get_submodule(path)
    except AttributeError as error:
        names = [name for name, m in root.named_modules() if has_several_layers(m) and name]
        raise ConfigError(
            f"module must be the name of a module in {type(root).__name__}, got {path!r}. Use one "
            f"of {names}."
        ) from error
    _refuse_scripts(module, path)
    if has_several_layers(module):
        _refuse_compiled_list(root, path)
        pairs = [
            (n, m) for n, m in module.named_modules(remove_duplicate=False) if n and "." not in n
        ]
        if not pairs:
            raise ConfigError(
                f"module must be the name of a module with at least one layer, got {path!r}, which "
                "is empty. Name another module, or put layers into this one."
            )
        layers = {f"{path}.{name}": layer for name, layer in pairs}
    else:
        layers = {path: module}
    return PipelinedModule(path, module, ModelLayers(root, tuple(layers), tuple(layers.values())))


def _refuse_scripts(module: nn.Module, path: str) -> None:
    """Raise if weights are in TorchScript, which holds references to them that cannot move."""
    for name, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule) and any(True for _ in inner.parameters()):
            full = ".".join(filter(None, (path, name)))
            raise ConfigError(
                f"The pipelined module {full!r} must be a Python module, got one of TorchScript. "
                "Use the module from before torch.jit.script, or name another one to pipeline: "
                "HeteroPipeStrategy(module='...')."
            )


def _refuse_compiled_list(root: nn.Module, path: str) -> None:
    """Raise if torch.compile has made one function of a list of layers."""
    compiled = set(compiled_names(root)) - {""}
    parts = path.split(".")
    if compiled.intersection(".".join(parts[:count]) for count in range(1, len(parts) + 1)):
        raise ConfigError(
            f"The pipelined module {path.removesuffix('._orig_mod')!r} must be a list of layers, "
            "got one that torch.compile has compiled as a whole. Compile its layers instead: "
            "for layer in layers: layer.compile()."
        )


def require_layers(
    pipelined: PipelinedModule | PipelinedStep,
    stages: int,
    uncut_reason: str = "",
    hint: str = "",
    refused: str = "",
) -> None:
    """Check that every stage can get a layer.

    Args:
        pipelined: The module.
        stages: Number of stages.
        uncut_reason: Why the module's own code could not be cut; empty if that was not tried.
        hint: Sentence that says how to cut more of a step.
        refused: Sentence that says why a module could not be cut in the place of the step.

    Raises:
        UncutError: If there are fewer layers than stages.
    """
    count = len(pipelined.layers.modules)
    if isinstance(pipelined, PipelinedStep) and (uncut_reason or count < stages):
        raise _uncut_step(pipelined, stages, uncut_reason, hint, refused)
    if count < stages:
        kind = type(pipelined.module).__name__
        if isinstance(pipelined.module, nn.Sequential) and not is_plain_sequential(
            pipelined.module
        ):
            kind += ", an nn.Sequential with a forward of its own"
        if uncut_reason:
            raise UncutError(
                f"The pipelined module {pipelined.path!r} ({kind}) must be one that can be cut "
                f"into {stages} stages, got one that cannot be cut: {uncut_reason} Or train it "
                "whole on each device, with HeteroPipeStrategy(stages=1)."
            )
        # Stages must divide the number of devices, of which `stages` is a divisor.
        fitting = max(n for n in range(1, stages) if stages % n == 0 and n <= max(count, 1))
        raise UncutError(
            f"The pipelined module {pipelined.path!r} ({kind}) must have at least one layer for "
            f"each of the {stages} stages, got {count} layer{'s' if count != 1 else ''}. "
            f"Use devices={count}, HeteroPipeStrategy(stages={fitting}), or put more layers into "
            "one nn.Sequential. Or cut the step, which may call several modules: "
            f"HeteroPipeStrategy(module={TRAINING_STEP!r})."
        )


def _uncut_step(
    pipelined: PipelinedStep, stages: int, reason: str, hint: str, refused: str
) -> ConfigError:
    root, names = pipelined.module, [name for name, _ in _candidates(pipelined.module)]
    if not reason:
        layers = ", ".join(pipelined.layers.names)
        reason = (
            f"it has {len(pipelined.layers.names)} of the {stages} layers that are needed "
            f"({layers}). A module is none if it is called again with what a later one has "
            "returned, or if its tensors are used outside of it."
        )
    other_way = (
        f"Nor can one module be cut alone: {refused}"
        if refused
        else f"Or name the module with most of the computation ({', '.join(names)}), such as "
        f"HeteroPipeStrategy(module={names[0]!r}). All others are then not cut: every rank holds "
        "them whole."
    )
    return UncutError(
        f"{type(root).__name__}.training_step must be one that can be cut into stages, got one "
        f"that cannot be cut: {reason}{hint} {other_way}"
    )


def _candidates(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that could be the pipeline, with their names."""
    containers: list[tuple[str, nn.Module]] = [
        (name, m)
        for name, m in root.named_modules()
        if name and has_several_layers(m) and any(True for _ in m.parameters())
    ]
    outermost = [
        (n, m)
        for n, m in containers
        if not any(n.startswith(f"{other}.") for other, _ in containers)
    ]
    return outermost or _children(root)


def _children(root: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, m) for name, m in root.named_children() if any(True for _ in m.parameters())]


def _only_candidate(root: nn.Module, stages: int) -> str:
    """Return the name of the only module that can be pipelined; see `find_pipelined_module`."""
    candidates, children = _candidates(root), _children(root)
    if len(candidates) == 1 and len(list(candidates[0][1].children())) >= stages:
        return candidates[0][0]
    if len(children) == 1:
        # Its own code is cut into layers.
        return children[0][0]
    if not children:
        raise ConfigError(
            "module must be the name of the module to cut into stages, got None, and "
            f"{type(root).__name__} has no module with parameters. Make its layers in the "
            "LightningModule's constructor or configure_model, as one nn.Sequential."
        )
    return TRAINING_STEP
