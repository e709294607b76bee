"""Residuals of compression between replicas in checkpoints: saved and loaded.

A checkpoint has the states of every replica, each with the gradients of all its stages. So it can
be loaded under a plan with other stages. Gradients of the pipeline are sums over the replicas. With
another number of replicas, their residuals therefore keep their sum, not their mean.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.gradsync.execute.saved_states import SavedStates, restore_states, save_states
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.pipeline.plan.plan import PipelinePlan


def merge_states(states: Sequence[Mapping[str, Any]], plan: PipelinePlan) -> dict[str, Any]:
    """Return the states of all ranks for a checkpoint: a tree of numbers, strings and tensors.

    Args:
        states: Result of `ReplicaCompression.state_dict` on every rank.
        plan: Plan of the run.
    """
    replicas = [
        {"units": [unit for rank in ranks for unit in states[rank]["units"]]}
        for ranks in plan.replicas
    ]
    return {"step": states[0]["step"], "replicas": replicas}


def load_replica_states(
    replicas: Sequence[SavedStates],
    plan: SyncPlan,
    codecs: Mapping[str, GradientCodec],
    states: CodecStates,
    *,
    order: Sequence[int],
    rank: int,
    device: torch.device,
    all_names: Collection[str],
) -> None:
    """Fill the states of this rank, which must be new, from those of an earlier run.

    Args:
        replicas: Saved states of each replica, of all its stages.
        plan: Plan of this stage's gradients.
        codecs: Codecs of the plan by name.
        states: States to fill.
        order: Replica of each rank of the process group.
        rank: This rank in the process group.
        device: Device of the gradients.
        all_names: Names of the gradients of all stages that are compressed.
    """
    own = {unit.gradient for unit in plan.units}
    # `restore_states` keeps the means over the ranks, and the sums are wanted here.
    factor = len(replicas) / plan.world_size
    chosen = order if len(replicas) == plan.world_size else range(len(replicas))
    saved = [_units_of(replicas[replica], own, factor) for replica in chosen]
    dropped = restore_states(saved, plan, codecs, rank, device, states)
    unknown = {
        entry["gradient"]
        for replica in replicas
        for entry in replica["units"]
        if entry["gradient"] not in all_names
    }
    is_same_plan = len(replicas) == plan.world_size and (
        _layout(saved[rank]) == _layout(save_states(states, plan))
    )
    if not is_same_plan and any(one["units"] for one in saved):
        warnings.warn(
            f"The checkpoint has residuals of compressed gradients under another plan, with "
            f"{len(replicas)} replicas: they were shared out again among {plan.world_size}.",
            stacklevel=2,
        )
    if lost := sorted({*dropped, *unknown}):
        warnings.warn(
            f"The checkpoint's residuals of {lost} were dropped, because these gradients have "
            "another codec or size now, or are not compressed.",
            stacklevel=2,
        )


def _units_of(saved: SavedStates, names: Collection[str], factor: float) -> dict[str, Any]:
    """Return the saved states of some gradients, with all tensors times a factor."""
    entries = [entry for entry in saved["units"] if entry["gradient"] in names]
    if factor == 1:
        return {"units": entries}
    return {
        "units": [
            {**entry, "tensors": {n: tensor * factor for n, tensor in entry["tensors"].items()}}
            for entry in entries
        ]
    }


def _layout(saved: SavedStates) -> set[tuple[Any, ...]]:
    """Return the partition, part and codec of each saved state."""
    keys = ("gradient", "start", "stop", "part", "codec")
    return {tuple(entry[key] for key in keys) for entry in saved["units"]}
