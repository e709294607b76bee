"""Picture of the memory of one step: planned bytes by kind, and measured bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from lightning_dlres.core.figures import draw_png
from lightning_dlres.core.units import format_bytes
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.profile.step_profile import StepProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 1 << 20
# A limit is drawn if it is at most this many times the peak of plain training. A higher one would
# make everything else small.
_MAX_LIMIT = 1.2
_COLOURS = {
    "parameters and optimizer state": "#b8bcc4",
    "gradients and workspace": "#8fa8c8",
    "saved tensors": "#f0b878",
}


def draw_memory(
    plan: MemoryPlan, profile: StepProfile, measured: Sequence[tuple[float, int]]
) -> bytes:
    """Return a PNG of the bytes on the device over one step.

    Args:
        plan: Plan of the step.
        profile: Profile that it was made from.
        measured: Measured bytes of saved tensors on the device: (seconds since the start of the
            step, bytes).
    """
    return draw_png(
        lambda figure: _draw(figure.subplots(), plan, profile, measured),
        figsize=(10, 4.8),
        layout="constrained",
        dpi=130,
    )


def _draw(
    axes: Axes, plan: MemoryPlan, profile: StepProfile, measured: Sequence[tuple[float, int]]
) -> None:
    starts, ends = _times(plan)
    persistent = _persistent_bytes(plan, profile)
    lower = [0.0] * len(starts)
    # Saved tensors are at the bottom, so that their measured curve lies over the planned area.
    layers = {
        "saved tensors": list(plan.held),
        "parameters and optimizer state": [min(persistent, base) for base in plan.base],
        "gradients and workspace": [max(0, base - persistent) for base in plan.base],
    }
    for name, values in layers.items():
        upper = [low + value / _MIB for low, value in zip(lower, values, strict=True)]
        axes.fill_between(
            _step_times(starts, ends),
            _step_values(lower),
            _step_values(upper),
            color=_COLOURS[name],
            label=f"{name}, planned",
            linewidth=0,
        )
        lower = upper
    limits = {"budget": plan.device_limit, "saved_budget": plan.saved_limit}
    for name, limit in limits.items():
        if limit is not None and limit <= _MAX_LIMIT * plan.plain_peak:
            text = f"{name}, {format_bytes(int(limit))}"
            axes.axhline(limit / _MIB, color="#b03030", linestyle="--", linewidth=1, label=text)
    axes.axhline(
        plan.plain_peak / _MIB,
        color="#606060",
        linestyle=":",
        label=f"peak of plain training, {format_bytes(plan.plain_peak)}",
    )
    _mark_copies(axes, plan, starts, ends)
    if measured:
        axes.plot(
            [seconds * 1e3 for seconds, _ in measured],
            [nbytes / _MIB for _, nbytes in measured],
            color="#202020",
            linewidth=1,
            drawstyle="steps-post",
            label="saved tensors, measured",
        )
    axes.set(xlabel="time in the step (ms)", ylabel="on the device (MiB)", xlim=(0, None))
    axes.set_ylim(bottom=0)
    axes.set_title(plan.prediction(), fontsize=9, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)


def _times(plan: MemoryPlan) -> tuple[list[float], list[float]]:
    """Return the starts and the ends of all intervals, in milliseconds.

    An event follows each interval. The device may wait, compress or recompute there.
    """
    starts, ends, now = [], [], 0.0
    for seconds, stall in zip(plan.interval_seconds, plan.stalls, strict=True):
        starts.append(now)
        now += seconds * 1e3
        ends.append(now)
        now += stall * 1e3
    return starts, ends


def _persistent_bytes(plan: MemoryPlan, profile: StepProfile) -> int:
    """Return the bytes of parameters and optimizer state, at most the least bytes of the base."""
    known = sum(layer.parameters + layer.optimizer_state for layer in profile.layers)
    return min(known, min(plan.base, default=0))


def _mark_copies(axes: Axes, plan: MemoryPlan, starts: list[float], ends: list[float]) -> None:
    """Mark the copies on the time axis, and the time for which the device does not compute."""
    out, back = [], []
    for decision in plan.decisions:
        if decision.tier is None:
            continue
        out.append(ends[decision.saved])
        event = decision.prefetch_at if decision.prefetch_at is not None else decision.first_use
        if event is not None:
            back.append(ends[event])
    for name, times, marker in (("offloaded", out, "v"), ("fetched", back, "^")):
        if times:
            axes.plot(
                times,
                [0] * len(times),
                marker,
                color="#7a3b8f",
                markersize=6,
                clip_on=False,
                label=f"{name}: {len(times)}",
                zorder=4,
            )
    label = f"waits, compression and recomputation: {sum(plan.stalls) * 1e3:.3g} ms"
    for end, (_, start) in zip(ends, pairwise([*starts, ends[-1]]), strict=True):
        if start > end:
            axes.axvspan(end, start, color="#d04040", alpha=0.35, linewidth=0, label=label)
            label = "_nolegend_"


def _step_times(starts: list[float], ends: list[float]) -> list[float]:
    """Return the corners of a step curve: start of each interval, and start of the next."""
    after = [*starts[1:], ends[-1]]
    return [time for pair in zip(starts, after, strict=True) for time in pair]


def _step_values(values: list[float]) -> list[float]:
    """Return every value twice, for the corners of `_step_times`."""
    return [value for value in values for _ in range(2)]
