"""A step as a picture: what every stage does when, planned above measured on one time scale, since
people see a bubble sooner than they read it.

matplotlib draws into memory, without pyplot: no window, no global figure, and no trace of it in the
user's own plots.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_dlres.pipeline.plan.cost_model.simulator import Activity, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Places = Mapping[tuple[int, int], str]

# Label, colour, and colour of the numbers on it. These are Okabe and Ito's colours, which people
# with any kind of colour vision tell apart.
_STYLE: dict[str, tuple[str, str, str]] = {
    "forward": ("forward", "#0072B2", "white"),
    "recompute": ("recompute", "#56B4E9", "black"),
    "backward": ("backward", "#E69F00", "black"),
    "loss": ("loss", "#CC79A7", "black"),
    "activation": ("transfer: activation", "#009E73", ""),
    "gradient": ("transfer: gradient", "#D55E00", ""),
    "sync": ("gradient sync", "#222222", ""),
}
_IDLE = "#E6E6E6"
_NUMBERED = ("forward", "backward")
_LANES = ("activation", "gradient", "sync")
_DPI = 110
_FONT_SIZES = (8.0, 7.0, 6.0, 5.0)
# Inches.
_RIGHT, _TOP, _BOTTOM, _BETWEEN = 0.6, 0.75, 0.55, 0.5
_UNITS = ((10.0, "s", 1.0), (10e-3, "ms", 1e3), (0.0, "µs", 1e6))


@dataclass(frozen=True)
class Panel:
    """One timeline of the picture, under its title."""

    title: str
    timeline: Timeline


def draw(panels: Sequence[Panel], places: Places) -> bytes:
    """Return the picture as PNG.

    Args:
        panels: from top to bottom.
        places: what each row is called, by (replica, stage); one row for each, in this order.
    """
    # Takes a good part of a second, which only those shall wait for who draw.
    import matplotlib
    from matplotlib.figure import Figure

    lanes = [lane for lane in _LANES if lane in _names(panels)]
    rows = len(places)
    row_inches = (0.46 if rows <= 4 else 0.36) + 0.07 * len(lanes)
    height = _TOP + _BOTTOM + len(panels) * rows * row_inches + (len(panels) - 1) * _BETWEEN
    left, width = _label_inches(list(places.values())), _width(panels)
    horizon = max(_horizon(panel.timeline) for panel in panels)
    # The user's own style (LaTeX, a dark theme) shall not decide whether this can be read.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white")
        for index, panel in enumerate(panels):
            below, across, down = len(panels) - 1 - index, width - left - _RIGHT, rows * row_inches
            bottom = _BOTTOM + below * (down + _BETWEEN)
            box = (left / width, bottom / height, across / width, down / height)
            axes = figure.add_axes(box)
            drawing = _Drawing(axes, panel, list(places), lanes, horizon, across)
            drawing.draw([places[place] for place in places], labelled=below == 0)
            if index:
                axes.axvline(panels[0].timeline.step_seconds, color="#777777", lw=1, ls=(0, (4, 3)))
        _legend(figure, panels, (0.5, 1 - 0.05 / height))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


class _Drawing:
    """One panel: rows from top to bottom, each a bar of computing over thin lanes of messages."""

    def __init__(
        self,
        axes: Axes,
        panel: Panel,
        places: Sequence[tuple[int, int]],
        lanes: Sequence[str],
        horizon: float,
        inches: float,
    ) -> None:
        self.axes, self.panel, self.lanes, self.horizon = axes, panel, list(lanes), horizon
        self.row = {place: index for index, place in enumerate(places)}
        self.points_per_second = inches * 72 / horizon if horizon else 0.0
        lane = 0.13
        self.lane_height = lane * 0.8
        self.bar = (0.08, 0.86 - lane * len(self.lanes))
        self.lane_top = {
            name: 0.08 + self.bar[1] + 0.02 + lane * index for index, name in enumerate(self.lanes)
        }

    def draw(self, labels: Sequence[str], labelled: bool) -> None:
        axes, timeline = self.axes, self.panel.timeline
        unit, factor = _unit(self.horizon)
        axes.set_xlim(0, self.horizon or 1.0)
        axes.set_ylim(len(self.row), 0)
        for row in self.row.values():
            axes.broken_barh(
                [(0, timeline.step_seconds)], (row + self.bar[0], self.bar[1]), facecolors=_IDLE
            )
        for name in _STYLE:
            for place, row in self.row.items():
                found = [a for a in timeline.activities if a.name == name and _place(a) == place]
                if found:
                    self._bars(name, row, found)
        self._numbers()
        replicas = [replica for replica, _ in self.row]
        for row in range(1, len(replicas)):
            if replicas[row] != replicas[row - 1]:
                axes.axhline(row, color="#999999", lw=0.8)
        axes.axvline(timeline.step_seconds, color="#222222", lw=1.2)
        axes.set_title(self.panel.title, loc="left", fontsize=10, fontweight="bold", pad=5)
        axes.set_yticks([row + self.bar[0] + self.bar[1] / 2 for row in range(len(labels))])
        axes.set_yticklabels(labels, fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8, labelbottom=labelled)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value * factor:g}")
        axes.grid(axis="x", color="#CCCCCC", lw=0.5)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        if labelled:
            axes.set_xlabel(f"{unit} since the start of the step", fontsize=9)
        self._shares()

    def _bars(self, name: str, row: int, activities: Sequence[Activity]) -> None:
        thin = name in self.lanes
        top, height = (self.lane_top[name], self.lane_height) if thin else self.bar
        # White seams tell neighbours apart; on narrow bars they would leave nothing else. A message
        # gets an edge of its own colour instead: it may take less time than a pixel shows.
        seams = [
            0.5 if thin or (a.end - a.start) * self.points_per_second > 2.5 else 0.0
            for a in activities
        ]
        self.axes.broken_barh(
            [(a.start, a.end - a.start) for a in activities],
            (row + top, height),
            facecolors=_STYLE[name][1],
            edgecolors=_STYLE[name][1] if thin else "white",
            linewidths=seams,
            hatch="////" if name == "recompute" else None,
        )

    def _numbers(self) -> None:
        """Write the micro-batches' numbers, in one size, on the bars of those rows and kinds that
        have room for them."""
        groups = [
            [a for a in self.panel.timeline.activities if a.name == name and _place(a) == place]
            for place in self.row
            for name in _NUMBERED
        ]
        groups = [group for group in groups if group]
        size = next(
            (s for s in _FONT_SIZES if all(self._has_room(group, s) for group in groups)),
            _FONT_SIZES[-1],
        )
        for group in groups:
            for a in group if self._has_room(group, size) else []:
                self.axes.text(
                    (a.start + a.end) / 2,
                    self.row[_place(a)] + self.bar[0] + self.bar[1] / 2,
                    str(a.microbatch),
                    fontsize=size,
                    color=_STYLE[a.name][2],
                    ha="center",
                    va="center_baseline",
                    clip_on=True,
                )

    def _has_room(self, group: Sequence[Activity], size: float) -> bool:
        needed = len(str(max(a.microbatch for a in group))) * 0.64 * size + 1.0
        widths = sorted((a.end - a.start) * self.points_per_second for a in group)
        # A measured bar or two may be short by chance.
        return widths[len(widths) // 10] > needed

    def _shares(self) -> None:
        """Write beside every row for which share of the step it computes."""
        timeline = self.panel.timeline
        across: Any = self.axes.get_yaxis_transform()
        for (replica, stage), row in self.row.items():
            share = timeline.busy_seconds[replica][stage] / (timeline.step_seconds or 1.0)
            middle = row + self.bar[0] + self.bar[1] / 2
            self.axes.text(
                1.008, middle, f"{share:.0%}", transform=across, fontsize=8, va="center_baseline"
            )
        self.axes.text(1.008, 0, "busy", transform=across, fontsize=8, color="#555555")


def _legend(figure: Any, panels: Sequence[Panel], at: tuple[float, float]) -> None:
    from matplotlib.patches import Patch

    shown = [name for name in _STYLE if name in _names(panels)]
    handles = [
        Patch(
            facecolor=_STYLE[name][1],
            edgecolor="white",
            lw=0,
            hatch="////" if name == "recompute" else None,
            label=_STYLE[name][0],
        )
        for name in shown
    ]
    handles.append(Patch(facecolor=_IDLE, lw=0, label="idle"))
    figure.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=at,
        borderaxespad=0.0,
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        handletextpad=0.5,
        columnspacing=1.4,
    )


def _names(panels: Sequence[Panel]) -> set[str]:
    return {a.name for panel in panels for a in panel.timeline.activities}


def _place(activity: Activity) -> tuple[int, int]:
    return activity.replica, activity.stage


def _horizon(timeline: Timeline) -> float:
    return max([timeline.step_seconds, *(a.end for a in timeline.activities)])


def _width(panels: Sequence[Panel]) -> float:
    """Return inches: more for a step of many micro-batches, as far as a screen is wide."""
    most = max((a.microbatch for p in panels for a in p.timeline.activities), default=0) + 1
    return min(max(12.0, 9.0 + 0.3 * most), 20.0)


def _label_inches(labels: Sequence[str]) -> float:
    """Return the room that the longest line of the labels takes."""
    longest = max((len(line) for label in labels for line in label.splitlines()), default=0)
    return 0.25 + 0.072 * longest


def _unit(horizon: float) -> tuple[str, float]:
    return next((name, factor) for least, name, factor in _UNITS if horizon >= least)
