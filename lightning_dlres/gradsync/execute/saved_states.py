"""Codec states in checkpoints: saved per rank, and restored under the same plan or another one.

A rank saves its states as a dict of numbers, strings and tensors. Under the same units and the same
number of ranks, every state returns to where it was. Otherwise, states are put together to whole
gradients and cut again:

- The residual of a rank's own gradient is shared out equally if the number of ranks has changed.
- The residual of a sum goes to the rank that completes this sum now.
- All residuals are scaled by the new number of ranks over the old one. Means over more ranks weigh
  a residual less, and without the factor, a part of it would be lost.
- The rank that completes a sum may have no state for its own gradient. Its share is then added to
  the residual of the sum.
- The first rank of a host may synchronise for the others. It then gets the shares of all ranks of
  its host.
- What a codec keeps per unit, such as a threshold, begins anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.codecs.gradient import RESIDUAL, GradientCodec, State
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.execute.unit_graphs import unit_graph
from lightning_dlres.gradsync.plan.graph import Part, TaskKind
from lightning_dlres.gradsync.plan.hosts import Hosts
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan
from lightning_dlres.gradsync.plan.units import GradientSpec, SyncUnit

# Saved states of one rank: {"world_size": ..., "plan": ..., "units": [{"gradient": ..., "tensors":
# ...}]}.
SavedStates = Mapping[str, Any]
# Key of the states of all ranks of an earlier run, in the state of rank 0.
LOADED = "loaded"
# Key of the parameters' orders in memory; see `without_reordered`.
MEMORY_ORDERS = "memory_orders"
# Keys of a state that holds nothing.
_ALWAYS_SAVED = {"step", "algorithm"}


class LoadedStates:
    """States of all ranks of an earlier run, until the first step uses them.

    A checkpoint that is saved before that passes them on unchanged, to any number of ranks.
    """

    def __init__(self) -> None:
        self._states: list[SavedStates] = []

    def __len__(self) -> int:
        return len(self._states)

    def load(self, saved: Sequence[SavedStates]) -> Sequence[SavedStates]:
        """Keep the states of all ranks from a checkpoint, and return them.

        Args:
            saved: States of all ranks of the run that saved the checkpoint, by rank. If that run
                passed on the states of an earlier one, these are kept.
        """
        states = list(saved[0].get(LOADED, saved))
        self._states = states if any(one.keys() - _ALWAYS_SAVED for one in states) else []
        return states

    def to_pass_on(self, rank: int) -> dict[str, Any]:
        """Return the states as an entry of a rank's own state, empty on all ranks but 0."""
        return {LOADED: self._states} if self._states and not rank else {}

    def take(self, orders: Mapping[str, Sequence[int]] | None = None) -> list[dict[str, Any]]:
        """Return the states, see `with_units`, and forget them.

        Args:
            orders: If given, states of parameters with another order are left out; see
                `without_reordered`.
        """
        states, self._states = with_units(self._states), []
        return states if orders is None else without_reordered(states, orders)

    def take_of(self, gradients: Collection[str]) -> list[dict[str, Any]]:
        """Return the states of some gradients, see `with_units`, and forget these."""
        states = with_units(self._states)
        rest = [_without_units(one, lambda name: name in gradients) for one in states]
        self._states = [*rest] if any(one["units"] for one in rest) else []
        return [_without_units(one, lambda name: name not in gradients) for one in states]


def _without_units(saved: SavedStates, drops: Callable[[str], bool]) -> dict[str, Any]:
    return {**saved, "units": [one for one in saved["units"] if not drops(one["gradient"])]}


def with_units(saved: Sequence[SavedStates]) -> list[dict[str, Any]]:
    """Return the states of all ranks, each with the key "units"; an empty list if none has states.

    A rank without states counts: means are over all ranks.
    """
    if not any("plan" in one or one.get("units") for one in saved):
        return []
    return [{**one, "units": one.get("units", [])} for one in saved]


def without_reordered(
    saved: list[dict[str, Any]], orders: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Return the states of all ranks without those of parameters whose elements have another order
    in memory now, and warn of them.

    Args:
        saved: Saved states of all ranks of the earlier run, by rank.
        orders: Dimensions, in the order of memory, of each parameter that is not contiguous.
    """
    names = {entry["gradient"] for one in saved for entry in one["units"]}
    reordered = reordered_names(saved, names, orders)
    return [_without_units(one, lambda name: name in reordered) for one in saved]


def reordered_names(
    saved: Sequence[SavedStates], names: Iterable[str], orders: Mapping[str, Sequence[int]]
) -> set[str]:
    """Return the parameters whose elements have another order in memory now, and warn of them.

    Args:
        saved: Saved states of all ranks of the earlier run, by rank.
        names: Parameters with states.
        orders: As for `without_reordered`.
    """
    # Earlier versions did not save the orders.
    all_earlier = [one[MEMORY_ORDERS] for one in saved if one.get(MEMORY_ORDERS) is not None]
    reordered = {
        name
        for name in names
        if any(list(one.get(name, ())) != list(orders.get(name, ())) for one in all_earlier)
    }
    if reordered:
        warnings.warn(
            f"The checkpoint's residuals of {sorted(reordered)} were dropped, because these "
            "parameters have another memory format now.",
            stacklevel=2,
        )
    return reordered


def save_states(states: CodecStates, plan: SyncPlan) -> dict[str, Any]:
    """Return the states of this rank as a tree of numbers, strings and tensors (not copied)."""
    codecs = {(unit.gradient, unit.start, unit.stop): unit.codec for unit in plan.units}
    return {
        "world_size": plan.world_size,
        "plan": plan.to_json(),
        "units": [
            {
                "gradient": gradient,
                "start": start,
                "stop": stop,
                "part": int(part),
                "codec": codecs[gradient, start, stop],
                "tensors": dict(state),
            }
            for (gradient, start, stop, part), state in states.by_key.items()
            if state
        ],
    }


def saved_plan(
    saved: Sequence[SavedStates],
    gradients: Sequence[GradientSpec],
    codecs: Mapping[str, GradientCodec],
    topologies: Collection[str],
    world_size: int,
    hosts: Hosts = (),
) -> SyncPlan | None:
    """Return the plan of an earlier run if this run may use it; else None.

    Args:
        saved: Saved states of all ranks of the earlier run, by rank.
        gradients: Gradients of this run.
        codecs: Codecs that this run may use, by name.
        topologies: Topologies that this run may use.
        world_size: Number of ranks of this run.
        hosts: Ranks of each host in this run, if one rank of a host synchronises for the others.
    """
    text = saved[0].get("plan") if saved else None
    if text is None:
        return None
    plan = SyncPlan.from_json(text)
    fits = (
        (plan.world_size, plan.hosts) == (world_size, hosts)
        and plan.topology in topologies
        and plan.gradient_counts() == {gradient.name: gradient.count for gradient in gradients}
        and {unit.codec for unit in plan.units} <= {RAW, *codecs}
    )
    return plan if fits else None


def restore_states(
    saved: Sequence[SavedStates],
    plan: SyncPlan,
    codecs: Mapping[str, GradientCodec],
    rank: int,
    device: torch.device,
    states: CodecStates,
) -> list[str]:
    """Fill the states of this rank, which must be new.

    Args:
        saved: Saved states of all ranks of the earlier run, by rank.
        plan: Plan of this run.
        codecs: Codecs of the plan by name.
        rank: This rank.
        device: Device of the gradients.
        states: States to fill.

    Returns:
        Names of gradients whose states were dropped, because they are gone or have another codec.
    """
    if _has_same_units(saved, plan, codecs):
        copy_states(saved[rank], plan, codecs, device, states)
        return []
    dropped = {
        entry["gradient"]
        for one in saved
        for entry in one["units"]
        if not _matches(entry, plan.units_of(entry["gradient"]))
    }
    for unit in plan.units:
        if unit.codec != RAW and unit.gradient not in dropped:
            _resplit(saved, plan, unit, codecs[unit.codec], rank, device, states)
    return sorted(dropped)


def continue_states(
    saved: Sequence[SavedStates],
    plan: SyncPlan,
    codecs: Mapping[str, GradientCodec],
    rank: int,
    device: torch.device,
    states: CodecStates,
) -> None:
    """Fill the states of this rank, and warn of what did not stay as it was.

    For the arguments see `restore_states`; without saved states nothing is done.
    """
    if not saved:
        return
    dropped = restore_states(saved, plan, codecs, rank, device, states)
    if len(saved) != plan.world_size:
        warnings.warn(
            f"The checkpoint has residuals of {len(saved)} ranks, and this run has "
            f"{plan.world_size}: they were shared out again.",
            stacklevel=2,
        )
    if dropped:
        warnings.warn(
            f"The checkpoint's residuals of {dropped} were dropped, because these parameters have "
            "another codec or size now.",
            stacklevel=2,
        )


def unsent_mean(saved: Sequence[SavedStates], gradient: GradientSpec) -> Tensor:
    """Return what an earlier run had not sent of a mean gradient.

    It is the sum of all residuals, divided by the number of ranks of that run, as means are. If
    every rank adds it to its own gradient, the mean grows by it.

    Args:
        saved: Saved states of all ranks of the earlier run, by rank.
        gradient: The gradient.

    Returns:
        float32[gradient.count].
    """
    whole = SyncUnit(
        index=0, gradient=gradient.name, start=0, stop=gradient.count, codec=RAW, owner=0
    )
    total = torch.zeros(gradient.count)
    for part in Part:
        total += _collect(saved, whole, part, {RESIDUAL}, 1 / len(saved)).get(RESIDUAL, 0)
    return total


def unsent_raw(saved: Sequence[SavedStates], plan: SyncPlan, rank: int) -> dict[str, Tensor]:
    """Return what an earlier plan has left unsent of gradients that this plan does not compress.

    Args:
        saved: Saved states of all ranks of the earlier run, by rank.
        plan: Plan of this run.
        rank: This rank.

    Returns:
        float32[elements] by gradient, to be added to this rank's next gradients.
    """
    own = [saved[rank]] if len(saved) == plan.world_size else saved
    names = {e["gradient"] for one in own for e in one["units"] if e["codec"] == RAW}
    unsent: dict[str, Tensor] = {}
    for name in sorted(names):
        units = plan.units_of(name)
        if units and units[0].codec == RAW:
            # Entries of another size are dropped, with a warning.
            fitting = [
                {**one, "units": [entry for entry in one["units"] if _matches(entry, units)]}
                for one in own
            ]
            whole = SyncUnit(
                index=0, gradient=name, start=0, stop=units[-1].stop, codec=RAW, owner=0
            )
            values = _collect(fitting, whole, Part.GRADIENT, {RESIDUAL}, 1 / len(own))
            # A parameter without elements has none.
            if RESIDUAL in values:
                unsent[name] = values[RESIDUAL]
    return unsent


def _has_same_units(
    saved: Sequence[SavedStates], plan: SyncPlan, codecs: Mapping[str, GradientCodec]
) -> bool:
    """Return True if every saved state belongs to a unit of the plan, on the same ranks."""
    if len(saved) != plan.world_size:
        return False
    units = {(unit.gradient, unit.start, unit.stop, unit.codec): unit for unit in plan.units}
    for rank, one in enumerate(saved):
        for entry in one["units"]:
            unit = units.get((entry["gradient"], entry["start"], entry["stop"], entry["codec"]))
            if unit is None:
                return False
            if unit.codec == RAW:
                # What an earlier plan has left unsent.
                return False
            graph = unit_graph(plan, unit, rank, codecs)
            if not any(t.kind is TaskKind.ENCODE and t.part == entry["part"] for t in graph):
                return False
    return True


def _matches(entry: Mapping[str, Any], units: Sequence[SyncUnit]) -> bool:
    """Return True if a saved state is one of a gradient with these units.

    Any unit takes raw elements, which an earlier plan has left unsent.
    """
    count = max((unit.stop for unit in units), default=0)
    return bool(entry["stop"] <= count and entry["codec"] in (RAW, units[0].codec))


def copy_states(
    saved: SavedStates,
    plan: SyncPlan,
    codecs: Mapping[str, GradientCodec],
    device: torch.device,
    states: CodecStates,
) -> None:
    """Fill the states of this rank, which must be new, from its own saved ones of the same plan."""
    units = {(unit.gradient, unit.start, unit.stop): unit for unit in plan.units}
    for entry in saved["units"]:
        unit = units[entry["gradient"], entry["start"], entry["stop"]]
        state = states.of(unit, Part(entry["part"]), codecs[unit.codec], device)
        for name, tensor in entry["tensors"].items():
            if name in state:
                state[name].copy_(tensor)


def _resplit(
    saved: Sequence[SavedStates],
    plan: SyncPlan,
    unit: SyncUnit,
    codec: GradientCodec,
    rank: int,
    device: torch.device,
    states: CodecStates,
) -> None:
    """Fill the states of a unit from those of other units or ranks."""
    graph = unit_graph(plan, unit, rank, {unit.codec: codec})
    parts = {task.part for task in graph if task.kind is TaskKind.ENCODE}
    # Names of the tensors with an entry per element; others cannot be cut.
    kept = {name for name, tensor in codec.new_state(2, device).items() if tensor.numel() == 2}
    host = next((ranks for ranks in plan.hosts if rank in ranks), (rank,))
    if len(saved) == plan.world_size:
        share = _collect([saved[one] for one in host], unit, Part.GRADIENT, kept, 1.0)
    else:
        # Each new rank takes the mean over the old ones. Together they then have the sum, times the
        # new number of ranks over the old one.
        share = _collect(saved, unit, Part.GRADIENT, kept, len(host) / len(saved))
    if Part.GRADIENT in parts:
        _fill(states.of(unit, Part.GRADIENT, codec, device), share)
    if Part.SUM in parts:
        total = _collect(saved, unit, Part.SUM, kept, plan.world_size / len(saved))
        if Part.GRADIENT not in parts and RESIDUAL in share:
            total[RESIDUAL] = total.get(RESIDUAL, 0) + share[RESIDUAL]
        _fill(states.of(unit, Part.SUM, codec, device), total)


def _collect(
    saved: Sequence[SavedStates], unit: SyncUnit, part: Part, names: Set[str], factor: float
) -> State:
    """Return the ranks' sums of saved tensors with an entry per element, times a factor."""
    total: State = {}
    for one in saved:
        for entry in one["units"]:
            start, stop = max(entry["start"], unit.start), min(entry["stop"], unit.stop)
            if entry["gradient"] != unit.gradient or entry["part"] != part or start >= stop:
                continue
            for name in names & entry["tensors"].keys():
                tensor = entry["tensors"][name]
                target = total.setdefault(name, torch.zeros(unit.count))
                piece = tensor[start - entry["start"] : stop - entry["start"]]
                target[start - unit.start : stop - unit.start] += piece.cpu() * factor
    return total


def _fill(state: State, values: Mapping[str, Tensor]) -> None:
    for name, tensor in values.items():
        if name in state:
            state[name].copy_(tensor)
