"""Weights and optimizer states, gathered from the stages that hold them and distributed to them.

Rank 0 gathers the ordinary state of single-device training: the same keys, the same indices, real
tensors. So a checkpoint does not depend on the number of stages that wrote it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import recurrent_weights_released
from lightning_dlres.core.comm.mailbox import Channel, Mailbox
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.execute.partition import ModelLayers, Owners, held_tensors
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.stage.closeness import has_same_values
from lightning_dlres.pipeline.stage.initialise import replace_storage


def gather_model_state(
    state: dict[str, Any], layers: ModelLayers, plan: PipelinePlan, mailbox: Mailbox
) -> dict[str, Any]:
    """Return the whole model's state dict on rank 0, and the local one on other ranks.

    Called by all ranks. The order of keys is that of `state`.

    Args:
        state: Local state dict; remote entries are meta tensors.
        layers: Layers of the model.
        plan: Plan of the run.
        mailbox: Mailbox of this rank.
    """
    sources = {_source_rank(layers.layer_of(key), plan) for key in state}
    own = own_model_entries(state, layers, plan, mailbox.rank)
    own_entries = {key: _on_cpu(value) for key, value in own.items()}
    parts = _to_rank_zero(own_entries, sorted(sources), mailbox, "its weights")
    if mailbox.rank != 0:
        return state
    return with_entries(state, {key: value for part in parts for key, value in part.items()})


def with_entries(state: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict that has these entries only, in its own order.

    It keeps what a state dict of torch has beside its entries: the versions of the modules, from
    which a module tells whether it must convert old values.

    Args:
        state: State dict of a model.
        entries: New values of some of its keys.
    """
    result = copy.copy(cast("dict[str, Any]", state))
    for key in state:
        if key in entries:
            result[key] = entries[key]
        else:
            del result[key]
    return result


def gather_optimizer_state(
    state: dict[str, Any],
    parameters: list[nn.Parameter],
    owners: Owners,
    plan: PipelinePlan,
    mailbox: Mailbox,
) -> dict[str, Any]:
    """Return the whole optimizer's state dict on rank 0, and the local one on other ranks.

    Called by all ranks.

    Args:
        state: `state_dict()` of the local optimizer.
        parameters: Parameters of the optimizer, by index.
        owners: Stages that hold each parameter.
        plan: Plan of the run.
        mailbox: Mailbox of this rank.
    """
    sources = [plan.replicas[0][owners[p][0]] for p in parameters]
    own = own_optimizer_entries(state, parameters, owners, plan, mailbox.rank)
    own_entries = {
        index: {key: _on_cpu(value) for key, value in entry.items()} for index, entry in own.items()
    }
    parts = _to_rank_zero(own_entries, sorted(set(sources)), mailbox, "its optimizer state")
    if mailbox.rank != 0:
        return state
    merged = {index: entry for part in parts for index, entry in part.items()}
    return {**state, "state": dict(sorted(merged.items()))}


def own_model_entries(
    state: Mapping[str, Any], layers: ModelLayers, plan: PipelinePlan, rank: int
) -> dict[str, Any]:
    """Return the entries of a model's state dict that a rank gives to a checkpoint."""
    return {
        key: value
        for key, value in state.items()
        if _source_rank(layers.layer_of(key), plan) == rank
    }


def own_optimizer_entries(
    state: Mapping[str, Any],
    parameters: list[nn.Parameter],
    owners: Owners,
    plan: PipelinePlan,
    rank: int,
) -> dict[int, Any]:
    """Return the states in an optimizer's state dict that a rank gives to a checkpoint."""
    sources = [plan.replicas[0][owners[p][0]] for p in parameters]
    return {index: entry for index, entry in state["state"].items() if sources[index] == rank}


def own_optimizer_state(
    state: Mapping[str, Any], parameters: list[nn.Parameter], owners: Owners, stage: int
) -> dict[str, Any]:
    """Return an optimizer's state dict with the entries of the stage's own parameters only.

    Args:
        state: State dict of the whole optimizer.
        parameters: Parameters of the optimizer, by index.
        owners: Stages that hold each parameter.
        stage: This rank's stage.
    """
    own_entries = {
        index: entry
        for index, entry in state["state"].items()
        if stage in owners[parameters[index]]
    }
    return {**state, "state": own_entries}


def distribute_from_rank_zero(
    layers: ModelLayers, owners: Owners, plan: PipelinePlan, mailbox: Mailbox
) -> None:
    """Give every rank the parameters and buffers of rank 0 that it will hold.

    Called by all ranks before the model is partitioned, while rank 0 has all of it. Without a
    common seed, every rank has initialised its model with other values. But all holders of a
    parameter must start with the same value.
    """
    for rank in range(1, plan.world_size):
        _, stage = plan.position(rank)
        if mailbox.rank == 0:
            held = held_tensors(layers, owners, plan, stage)
            values = {name: tensor.detach() for name, tensor in held.items()}
            mailbox.send(rank, Channel.STATE, ("distribute",), values)
        elif mailbox.rank == rank:
            values = mailbox.receive(0, Channel.STATE, ("distribute",), "the initial weights")
            _copy_values(values, held_tensors(layers, owners, plan, stage))


def align_holders(
    layers: ModelLayers, owners: Owners, plan: PipelinePlan, mailbox: Mailbox
) -> None:
    """Copy the value of each parameter from the first rank that holds it to the other ones.

    Used for models from the meta device, in which every rank has initialised its own layers.
    """
    for name, parameter in layers.root.named_parameters():
        ranks = [replica[stage] for replica in plan.replicas for stage in owners[parameter]]
        if len(ranks) > 1 and mailbox.rank in ranks:
            if mailbox.rank == ranks[0]:
                for rank in ranks[1:]:
                    mailbox.send(rank, Channel.STATE, ("align", name), {name: parameter.detach()})
            else:
                values = mailbox.receive(
                    ranks[0], Channel.STATE, ("align", name), f"the initial value of {name}"
                )
                _copy_values(values, {name: parameter})


def restore_whole_model(
    layers: ModelLayers, owners: Owners, plan: PipelinePlan, mailbox: Mailbox
) -> None:
    """Give every rank all parameters and buffers again, on the CPU; the inverse of `partition`."""
    with recurrent_weights_released(layers.root):
        _restore_whole_model(layers, owners, plan, mailbox)


def fill_remote_tensors(
    layers: ModelLayers,
    owners: Owners,
    plan: PipelinePlan,
    mailbox: Mailbox,
    device: torch.device,
) -> None:
    """Give every rank the values of its remote parameters and buffers, on a device.

    Called by all ranks. The tensors that a rank holds stay as they are.
    """
    with recurrent_weights_released(layers.root):
        for values in _values_of_stages(layers, owners, plan, mailbox):
            parameters = dict(layers.root.named_parameters())
            buffers = dict(layers.root.named_buffers(remove_duplicate=False))
            for name, value in values.items():
                parameter = parameters.get(name)
                if parameter is None and (name not in buffers or buffers[name].is_meta):
                    _set_buffer(layers.root, name, value.to(device, copy=True))
                elif parameter is not None and parameter.is_meta:
                    replace_storage(parameter, value.to(device, copy=True))


def _restore_whole_model(
    layers: ModelLayers, owners: Owners, plan: PipelinePlan, mailbox: Mailbox
) -> None:
    for stage, values in enumerate(_values_of_stages(layers, owners, plan, mailbox)):
        parameters = dict(layers.root.named_parameters())
        buffers = dict(layers.root.named_buffers(remove_duplicate=False))
        for name, value in values.items():
            if name not in parameters:
                is_outside = layers.layer_of(name) is None
                own = buffers.get(name)
                if (
                    own is None
                    or own.is_meta
                    or (
                        # Attributes of a layer may hold the very tensor, or a view of it.
                        (stage == 0 or not is_outside) and not _is_kept(own, value)
                    )
                ):
                    _set_buffer(layers.root, name, value.clone())
            elif parameters[name].is_meta:
                replace_storage(parameters[name], value.clone())
            else:
                parameters[name].data = parameters[name].data.cpu()


def _is_kept(own: Tensor, value: Tensor) -> bool:
    """Return whether a rank's own buffer can stay for a value."""
    is_usable = own.device == value.device and own.dtype == value.dtype and not own.is_inference()
    return is_usable and own.layout == torch.strided and has_same_values(own, value)


def _set_buffer(root: nn.Module, name: str, value: Tensor) -> None:
    module_name, _, key = name.rpartition(".")
    setattr(root.get_submodule(module_name), key, value)


def _values_of_stages(
    layers: ModelLayers, owners: Owners, plan: PipelinePlan, mailbox: Mailbox
) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters and buffers of one stage after the other, by name, on the CPU."""
    # The stage of a module's first layer.
    first_stage: dict[nn.Module, int] = {}
    for index, layer in enumerate(layers.modules):
        for module in layer.modules():
            first_stage.setdefault(module, plan.stage_of(index))
    modules = dict(layers.root.named_modules())
    for stage, source in enumerate(plan.replicas[0]):
        own_values = None
        if mailbox.rank == source:
            own_values = {
                name: tensor.detach().cpu()
                for name, tensor in held_tensors(layers, owners, plan, stage).items()
                # Several stages may hold a buffer, with different values. Take the value of the
                # first stage that runs the module. Outside of the layers, user code may have made
                # a copy of a layer, whose buffers some stages lack.
                if isinstance(tensor, nn.Parameter)
                or (
                    first_stage.get(modules[name.rpartition(".")[0]], stage) == stage
                    and not tensor.is_meta
                )
            }
        yield mailbox.broadcast(
            source, Channel.STATE, ("whole", stage), own_values, "the trained weights"
        )


def _source_rank(layer: int | None, plan: PipelinePlan) -> int:
    """Return the rank, in the first replica, from which rank 0 gets a layer's weights.

    It is rank 0 itself for weights outside of the layers (None), which all ranks hold.
    """
    return 0 if layer is None else plan.replicas[0][plan.stage_of(layer)]


def _to_rank_zero(own: Tree, sources: list[int], mailbox: Mailbox, what: str) -> list[Tree]:
    """Return the entries of rank 0 and of all sources on rank 0, and an empty list elsewhere."""
    if mailbox.rank != 0:
        if mailbox.rank in sources:
            mailbox.send(0, Channel.STATE, ("gather",), own)
        return []
    return [
        own if source == 0 else mailbox.receive(source, Channel.STATE, ("gather",), what)
        for source in sorted({0, *sources})
    ]


def _on_cpu(value: Any) -> Any:
    """Return a copy of a tensor on the CPU, and other values as they are."""
    # Always a copy: training may go on while the message is sent or the file is written.
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _copy_values(values: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Copy values by name into the tensors that this rank holds."""
    with torch.no_grad():
        for name, value in values.items():
            held[name].copy_(value)
