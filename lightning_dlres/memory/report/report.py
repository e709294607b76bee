"""The memory of one step as a picture: what was planned, by kind, and what was measured."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from lightning_dlres.core.units import format_bytes
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.profile.step_profile import StepProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 1 << 20
_NEAR = 1.2
_COLOURS = {
    "parameters and optimizer state": "#b8bcc4",
    "gradients and workspace": "#8fa8c8",
    "saved data": "#f0b878",
}


def draw_memory(
    plan: MemoryPlan, profile: StepProfile, measured: Sequence[tuple[float, int]]
) -> bytes:
    """Return a PNG: bytes on the device over one step.

    Args:
        plan: what was planned.
        profile: what it was made from.
        measured: of one step, seconds since its start and the bytes of saved data on the device.
    """
    # Takes a good part of a second, which only those shall wait for who draw.
    import matplotlib
    from matplotlib.figure import Figure

    # The user's own style (LaTeX, a dark theme) shall not decide whether this can be read.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        figure = Figure(figsize=(10, 4.8), layout="constrained", facecolor="white")
        _draw(figure.subplots(), plan, profile, measured)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()


def _draw(
    axes: Axes, plan: MemoryPlan, profile: StepProfile, measured: Sequence[tuple[float, int]]
) -> None:
    starts, ends = _times(plan)
    held = _persistent(plan, profile)
    lower = [0.0] * len(starts)
    # The data at the bottom: what was measured of them lies over what was planned.
    layers = {
        "saved data": list(plan.held),
        "parameters and optimizer state": [min(held, base) for base in plan.base],
        "gradients and workspace": [max(0, base - held) for base in plan.base],
    }
    for name, values in layers.items():
        upper = [low + value / _MIB for low, value in zip(lower, values, strict=True)]
        axes.fill_between(
            _steps(starts, ends),
            _twice(lower),
            _twice(upper),
            color=_COLOURS[name],
            label=f"{name}, planned",
            linewidth=0,
        )
        lower = upper
    limits = {"budget": plan.device_limit, "saved_budget": plan.saved_limit}
    for name, limit in limits.items():
        # One that is far away would make all else small.
        if limit is not None and limit <= _NEAR * plan.plain_peak:
            text = f"{name}, {format_bytes(int(limit))}"
            axes.axhline(limit / _MIB, color="#b03030", linestyle="--", linewidth=1, label=text)
    axes.axhline(
        plan.plain_peak / _MIB,
        color="#606060",
        linestyle=":",
        label=f"peak if all is kept, {format_bytes(plan.plain_peak)}",
    )
    _mark_copies(axes, plan, starts, ends)
    if measured:
        own = [when * 1e3 for when, _ in measured]
        axes.plot(
            own,
            [nbytes / _MIB for _, nbytes in measured],
            color="#202020",
            linewidth=1,
            drawstyle="steps-post",
            label="saved data, measured",
        )
    axes.set(xlabel="time in the step (ms)", ylabel="on the device (MiB)", xlim=(0, None))
    axes.set_ylim(bottom=0)
    axes.set_title(plan.prediction(), fontsize=9, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)


def _times(plan: MemoryPlan) -> tuple[list[float], list[float]]:
    """Return when every interval starts and ends, in milliseconds; after it comes its event, for
    which the device may wait."""
    starts, ends, now = [], [], 0.0
    for seconds, stall in zip(plan.interval_seconds, plan.stalls, strict=True):
        starts.append(now)
        now += seconds * 1e3
        ends.append(now)
        now += stall * 1e3
    return starts, ends


def _persistent(plan: MemoryPlan, profile: StepProfile) -> int:
    known = sum(layer.parameters + layer.history for layer in profile.layers)
    return min(known, min(plan.base, default=0))


def _mark_copies(axes: Axes, plan: MemoryPlan, starts: list[float], ends: list[float]) -> None:
    """Mark what leaves and what comes back below the curve, and where the device waits."""
    out, back = [], []
    for decision in plan.decisions:
        if decision.tier is None:
            continue
        out.append(ends[decision.saved])
        when = decision.fetch_at if decision.fetch_at is not None else decision.first_use
        if when is not None:
            back.append(ends[when])
    for name, places, marker in (("leaves", out, "v"), ("comes back", back, "^")):
        if places:
            axes.plot(
                places,
                [0] * len(places),
                marker,
                color="#7a3b8f",
                markersize=6,
                clip_on=False,
                label=f"{name}: {len(places)}",
                zorder=4,
            )
    label = f"waits and compression: {sum(plan.stalls) * 1e3:.3g} ms"
    for end, (_, start) in zip(ends, pairwise([*starts, ends[-1]]), strict=True):
        if start > end:
            axes.axvspan(end, start, color="#d04040", alpha=0.35, linewidth=0, label=label)
            label = "_nolegend_"


def _steps(starts: list[float], ends: list[float]) -> list[float]:
    after = [*starts[1:], ends[-1]]
    return [when for pair in zip(starts, after, strict=True) for when in pair]


def _twice(values: list[float]) -> list[float]:
    return [value for value in values for _ in range(2)]
