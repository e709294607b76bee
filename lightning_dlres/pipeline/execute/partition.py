"""Partition of a model over stages.

The owners of a parameter are the stages that hold it. For all other stages it is remote.

A remote parameter becomes a meta tensor *in place*. The Parameter object stays the same, so it
keeps its index in the optimizer, its name in the state dict and its place in user code, and takes
no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import recurrent_weights_released
from lightning_dlres.core.rng import derive_seed, forked, seed_device
from lightning_dlres.pipeline.deferred.values import forget_deferred
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.stage.initialise import initialise, replace_storage
from lightning_dlres.pipeline.stage.remote_parameters import mark_remote, remote_buffer

# The stages that hold each parameter, ascending, in the order of parameters in the whole model.
Owners = dict[nn.Parameter, tuple[int, ...]]


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model, in the order in which they are applied.

    Attributes:
        root: The whole model; it may have parameters outside of the layers.
        names: Name of each layer within the root, as in its state dict.
        modules: The layers.
        container: Name of the module that the layers are parts of; None: that around the layers'
            names, or the layer itself if there is one only.
        shared: For each layer, trainable parameters that it uses beside those of its module; empty
            if there are none.
    """

    root: nn.Module
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    container: str | None = None
    shared: tuple[tuple[nn.Parameter, ...], ...] = ()

    def are_present(self) -> bool:
        """Return whether the root still has these layers by these names."""
        modules = dict(self.root.named_modules(remove_duplicate=False))
        return all(modules.get(n) is m for n, m in zip(self.names, self.modules, strict=True))

    def layer_of(self, name: str) -> int | None:
        """Return the index of the layer to which a parameter, buffer or state dict key belongs;
        None for those outside of the layers.

        A second attribute of the model may hold the whole list of layers. A name through it belongs
        to the same layer as the name through the first attribute. A second attribute may also hold
        a single layer, which the model then uses outside of the pipeline too. So a name through
        that attribute belongs to no layer.
        """
        while name and name not in self._layer_by_module:
            name = name.rpartition(".")[0]
        return self._layer_by_module[name]

    @cached_property
    def _layer_by_module(self) -> dict[str, int | None]:
        """Layer of each module, by any of the module's names."""
        # A single layer is its own container.
        path = self.names[0].rpartition(".")[0] if len(self.names) > 1 else self.names[0]
        path = path if self.container is None else self.container
        container = self.root.get_submodule(path)
        named = dict(self.root.named_modules(remove_duplicate=False))
        prefixes = [name for name, module in named.items() if module is container]
        layers = {
            f"{prefix}{name[len(path) :]}": index
            for prefix in prefixes
            for index, name in enumerate(self.names)
        }
        layer_by_module: dict[str, int | None] = {}
        for name in named:
            ancestor = name
            while ancestor and ancestor not in layers:
                ancestor = ancestor.rpartition(".")[0]
            layer_by_module[name] = layers.get(ancestor)
        return layer_by_module

    def non_pipelined_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each module outside of the layers once, with a name.

        It does not visit modules inside of layers: it is called for every micro-batch, and must be
        fast.
        """
        pending = [("", self.root)]
        seen: set[nn.Module] = set()
        while pending:
            name, module = pending.pop()
            if module in seen or self._layer_by_module.get(name) is not None:
                continue
            seen.add(module)
            yield name, module
            prefix = f"{name}." if name else ""
            pending += [(prefix + child, inner) for child, inner in module.named_children()]

    def stages_by_module(self, plan: PipelinePlan) -> dict[nn.Module, set[int]]:
        """Return the stages that run each module; all stages for modules outside of the layers."""
        stages: dict[nn.Module, set[int]] = {}
        for name, module in self.root.named_modules(remove_duplicate=False):
            layer = self.layer_of(name)
            holders = range(plan.stages) if layer is None else (plan.stage_of(layer),)
            stages.setdefault(module, set()).update(holders)
        return stages

    def parameter_bytes(self) -> list[int]:
        """Return the bytes of every layer's parameters; a tied one counts in its first layer."""
        seen: set[nn.Parameter] = set()
        sizes = []
        for module in self.modules:
            unseen = [p for p in module.parameters() if p not in seen]
            seen.update(unseen)
            sizes.append(sum(p.numel() * p.element_size() for p in unseen))
        return sizes

    def owners(self, plan: PipelinePlan) -> Owners:
        """Return the stages that hold each parameter, ascending.

        All stages hold a parameter outside of the layers, because the user's step may use it on any
        rank. A parameter that several layers share is held by each of their stages.
        """
        stages: dict[nn.Parameter, set[int]] = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            layer = self.layer_of(name)
            holders = range(plan.stages) if layer is None else (plan.stage_of(layer),)
            stages.setdefault(parameter, set()).update(holders)
        for layer, parameters in enumerate(self.shared):
            for parameter in parameters:
                stages[parameter].add(plan.stage_of(layer))
        return {parameter: tuple(sorted(holders)) for parameter, holders in stages.items()}

    def trainable(self, layers: Sequence[int]) -> list[list[nn.Parameter]]:
        """Return, for each of these layers, its parameters that need a gradient."""
        return [
            [
                p
                for p in dict.fromkeys((*self.modules[layer].parameters(), *self._shared(layer)))
                if p.requires_grad
            ]
            for layer in layers
        ]

    def trainable_between(self) -> list[nn.Parameter]:
        """Return the trainable parameters outside of the layers that code between them may use.

        It may use others than in `shared`: those of a path that depends on values, and those that
        were frozen at first.
        """
        return self.non_pipelined_parameters() if self.shared else []

    def _shared(self, layer: int) -> tuple[nn.Parameter, ...]:
        return self.shared[layer] if self.shared else ()

    def non_pipelined_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters that the user's step may use outside of the layers."""
        named = self.root.named_parameters(remove_duplicate=False)
        outside = dict.fromkeys(p for name, p in named if self.layer_of(name) is None)
        return [p for p in outside if p.requires_grad]

    @cached_property
    def layer_parameters(self) -> frozenset[nn.Parameter]:
        """Parameters that are in layers, or that the code between them uses."""
        shared = (p for parameters in self.shared for p in parameters)
        return frozenset(shared).union(p for module in self.modules for p in module.parameters())

    @cached_property
    def layer_only_parameters(self) -> frozenset[nn.Parameter]:
        """Parameters that are in layers and nowhere else."""
        named = list(self.root.named_parameters(remove_duplicate=False))
        outside = {p for name, p in named if self.layer_of(name) is None}
        return frozenset(p for _, p in named if p not in outside)


def has_meta_tensors(root: nn.Module) -> bool:
    """Return True if some parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))


def partition(
    layers: ModelLayers, owners: Owners, plan: PipelinePlan, stage: int, device: torch.device
) -> None:
    """Move a stage's parameters and buffers to the device, and make all others remote.

    Meta tensors of the stage stay; see `materialise`.

    Raises:
        ConfigError: If something else refers to a parameter that becomes remote; see
            `replace_storage`.
    """
    with recurrent_weights_released(layers.root):
        _partition(layers, owners, plan, stage, device)


def _partition(
    layers: ModelLayers, owners: Owners, plan: PipelinePlan, stage: int, device: torch.device
) -> None:
    stages_by_module = layers.stages_by_module(plan)
    for module in (module for module, stages in stages_by_module.items() if stage not in stages):
        _drop_computed_tensors(module)
    for parameter, holders in owners.items():
        if stage not in holders:
            if not parameter.is_meta:
                replace_storage(parameter, torch.empty_like(parameter, device="meta"))
            mark_remote(parameter)
        elif not parameter.is_meta and parameter.device != device:
            parameter.data = parameter.data.to(device)
    for module, stages in stages_by_module.items():
        is_held = stage in stages
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not is_held:
                setattr(module, name, remote_buffer(buffer))
            elif buffer.device != device and not buffer.is_meta:
                setattr(module, name, buffer.to(device))


def _drop_computed_tensors(module: nn.Module) -> None:
    """Make tensors remote that a module has computed from its parameters, as `weight_norm` does.

    The graph of such a tensor refers to the parameters, and would prevent `replace_storage`. The
    stage that runs the module computes the tensor again.
    """
    for name, value in list(vars(module).items()):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            setattr(module, name, remote_buffer(value))


def materialise(
    layers: ModelLayers, plan: PipelinePlan, stage: int, *, device: torch.device, seed: int
) -> None:
    """Give storage and initial values to the meta tensors that a stage holds.

    Deferred tensors get the values of a plain construction. Other modules are initialised by their
    own `reset_parameters`, with a seed that depends on the layer alone. So the initial weights do
    not depend on the plan.

    Raises:
        ConfigError: If a module has other meta tensors, but no `reset_parameters`.
    """
    held_layers = [(layer, layers.modules[layer]) for layer in plan.layers_of(stage)]
    names = {id(module): name for name, module in layers.root.named_modules()}
    inside = {id(m) for layer in layers.modules for m in layer.modules()}
    non_pipelined = [m for m in layers.root.modules() if id(m) not in inside]
    # Layer -1 stands for the modules outside of the layers.
    for layer, modules in [
        (-1, non_pipelined),
        *((index, list(module.modules())) for index, module in held_layers),
    ]:
        with forked(device):
            seed_device(derive_seed(seed, layer + 1), device)
            for module in modules:
                initialise(module, device, names.get(id(module), type(module).__name__))
    forget_deferred(*layers.root.parameters(), *layers.root.buffers())


def held_tensors(
    layers: ModelLayers, owners: Owners, plan: PipelinePlan, stage: int
) -> dict[str, Tensor]:
    """Return the parameters and buffers that a stage holds, by name.

    A tied parameter is there once, under its first name in the whole model. User code may have
    added a copy of a layer since, which has values on the ranks of the layer.
    """
    held: dict[str, Tensor] = {
        n: p
        for n, p in layers.root.named_parameters()
        if (stage in owners[p] if p in owners else not p.is_meta)
    }
    stages = layers.stages_by_module(plan)
    for prefix, module in layers.root.named_modules():
        if stage in stages[module]:
            for name, buffer in module.named_buffers(recurse=False):
                held[f"{prefix}.{name}" if prefix else name] = buffer
    return held


def resident_parameter_bytes(root: nn.Module) -> int:
    """Return the bytes of parameters that have storage in this process."""
    return sum(p.numel() * p.element_size() for p in root.parameters() if not p.is_meta)
