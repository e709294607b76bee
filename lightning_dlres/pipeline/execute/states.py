"""Weights and optimizer states collected from, and handed out to, the stages that hold them.

What rank 0 gets is the ordinary single-device state: the same keys, the same indices, real tensors.
Nothing in a checkpoint tells how many stages wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import recurrent_weights_released
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.comm.mailbox import Channel, Mailbox
from lightning_dlres.pipeline.execute.partition import ModelLayers, Owners, held_tensors
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.stage.initialise import replace_storage


def gather_model_state(
    state: dict[str, Any], layers: ModelLayers, plan: PipelinePlan, mailbox: Mailbox
) -> dict[str, Any]:
    """Return the whole model's state dict on rank 0, in the order of its own keys; elsewhere the
    local one.

    Args:
        state: the local state dict; remote entries are meta tensors.
    """
    home = {key: _home(layers.layer_of(key), plan) for key in state}
    mine = {key: _on_cpu(value) for key, value in state.items() if home[key] == mailbox.rank}
    parts = _to_rank_zero(mine, sorted(set(home.values())), mailbox, "its weights")
    if mailbox.rank != 0:
        return state
    merged = {key: value for part in parts for key, value in part.items()}
    return {key: merged[key] for key in state}


def gather_optimizer_state(
    state: dict[str, Any],
    parameters: list[nn.Parameter],
    owners: Owners,
    plan: PipelinePlan,
    mailbox: Mailbox,
) -> dict[str, Any]:
    """Return the whole optimizer's state dict on rank 0; elsewhere the local one.

    Args:
        state: the local optimizer's `state_dict()`.
        parameters: the optimizer's parameters, by index.
    """
    home = [plan.replicas[0][owners[p][0]] for p in parameters]
    mine = {
        i: _on_cpu_tree(entry) for i, entry in state["state"].items() if home[i] == mailbox.rank
    }
    parts = _to_rank_zero(mine, sorted(set(home)), mailbox, "its optimizer state")
    if mailbox.rank != 0:
        return state
    merged = {index: entry for part in parts for index, entry in part.items()}
    return {**state, "state": dict(sorted(merged.items()))}


def own_optimizer_state(
    state: Mapping[str, Any], parameters: list[nn.Parameter], owners: Owners, stage: int
) -> dict[str, Any]:
    """Return an optimizer's state dict without the entries of parameters that the stage does not
    hold."""
    kept = {i: entry for i, entry in state["state"].items() if stage in owners[parameters[i]]}
    return {**state, "state": kept}


def spread_from_rank_zero(
    layers: ModelLayers, owners: Owners, plan: PipelinePlan, mailbox: Mailbox
) -> None:
    """Make every rank's parameters and buffers those of rank 0, which holds the whole model; called
    before partitioning.

    Without a common seed each rank initialised its own model; holders of one parameter must start
    alike.
    """
    for rank in range(1, plan.world_size):
        _, stage = plan.place(rank)
        if mailbox.rank == 0:
            held = held_tensors(layers, owners, plan, stage)
            mailbox.send(rank, Channel.STATE, ("spread",), {n: t.detach() for n, t in held.items()})
        elif mailbox.rank == rank:
            sent = mailbox.receive(0, Channel.STATE, ("spread",), "the initial weights")
            _write(held_tensors(layers, owners, plan, stage), sent)


def align_holders(
    layers: ModelLayers, owners: Owners, plan: PipelinePlan, mailbox: Mailbox
) -> None:
    """Make parameters with several holders equal to the first holder's; for models that were
    materialised piece by piece."""
    for name, parameter in layers.root.named_parameters():
        ranks = [replica[stage] for replica in plan.replicas for stage in owners[parameter]]
        if len(ranks) > 1 and mailbox.rank in ranks:
            if mailbox.rank == ranks[0]:
                for rank in ranks[1:]:
                    mailbox.send(rank, Channel.STATE, ("align", name), {name: parameter.detach()})
            else:
                sent = mailbox.receive(
                    ranks[0], Channel.STATE, ("align", name), f"the initial value of {name}"
                )
                _write({name: parameter}, sent)


def make_whole(layers: ModelLayers, owners: Owners, plan: PipelinePlan, mailbox: Mailbox) -> None:
    """Give every rank all parameters and buffers again, on the CPU."""
    with recurrent_weights_released(layers.root):
        _make_whole(layers, owners, plan, mailbox)


def _make_whole(layers: ModelLayers, owners: Owners, plan: PipelinePlan, mailbox: Mailbox) -> None:
    holders = plan.replicas[0]
    home: dict[nn.Module, int] = {}
    for index, layer in enumerate(layers.modules):
        for module in layer.modules():
            home.setdefault(module, plan.stage_of(index))
    modules = dict(layers.root.named_modules())
    for stage, source in enumerate(holders):
        held = held_tensors(layers, owners, plan, stage)
        mine = None
        if mailbox.rank == source:
            mine = {
                name: tensor.detach().cpu()
                for name, tensor in held.items()
                # A buffer that several stages hold counts where it is used.
                if isinstance(tensor, nn.Parameter)
                or home.get(modules[name.rpartition(".")[0]], 0) == stage
            }
        sent = mailbox.broadcast(
            source, Channel.STATE, ("whole", stage), mine, "the trained weights"
        )
        parameters = dict(layers.root.named_parameters())
        for name, value in sent.items():
            if name not in parameters:
                owner, _, key = name.rpartition(".")
                setattr(layers.root.get_submodule(owner), key, value.clone())
            elif parameters[name].is_meta:
                replace_storage(parameters[name], value.clone())
            else:
                parameters[name].data = parameters[name].data.cpu()


def _home(layer: int | None, plan: PipelinePlan) -> int:
    return 0 if layer is None else plan.replicas[0][plan.stage_of(layer)]


def _to_rank_zero(mine: Tree, sources: list[int], mailbox: Mailbox, what: str) -> list[Tree]:
    if mailbox.rank != 0:
        if mailbox.rank in sources:
            mailbox.send(0, Channel.STATE, ("gather",), mine)
        return []
    return [
        mine if s == 0 else mailbox.receive(s, Channel.STATE, ("gather",), what)
        for s in sorted({0, *sources})
    ]


def _on_cpu(value: Any) -> Any:
    # A copy, so that training can go on while the message is under way and the file is being
    # written.
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _on_cpu_tree(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: _on_cpu(value) for key, value in entry.items()}


def _write(held: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in sent.items():
            held[name].copy_(value)
