"""Gantt chart of a training step: the work of every stage over time.

The planned step is above the measured one, on the same time scale, so that the bubble of each is
easy to see. Matplotlib draws into memory and without pyplot, so that there is no window, no global
figure, and no effect on the user's own plots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_dlres.core.figures import draw_png
from lightning_dlres.pipeline.plan.cost_model.simulator import Activity, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Label of each row, by (replica, stage).
RowLabels = Mapping[tuple[int, int], str]

# By name of the activity: label, colour, and colour of the numbers on it. The colours are those of
# Okabe and Ito (2002), which are distinct for people with any kind of colour vision.
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
# Activities whose bars show the number of their micro-batch.
_NUMBERED = ("forward", "backward")
# Activities in thin lanes below the bar of a row.
_LANES = ("activation", "gradient", "sync")
_DPI = 110
# Candidate font sizes of micro-batch numbers, in points. The largest that fits is used.
_FONT_SIZES = (8.0, 7.0, 6.0, 5.0)
# Margins and the space between panels, in inches.
_RIGHT, _TOP, _BOTTOM, _BETWEEN = 0.6, 0.75, 0.55, 0.5
# Units of the time axis: smallest length of the axis in seconds, name, units per second.
_UNITS = ((10.0, "s", 1.0), (10e-3, "ms", 1e3), (0.0, "µs", 1e6))


@dataclass(frozen=True)
class Panel:
    """One timeline of the chart, with a title."""

    title: str
    timeline: Timeline


def draw(panels: Sequence[Panel], row_labels: RowLabels) -> bytes:
    """Return the chart as PNG.

    Args:
        panels: Panels from top to bottom. A dashed line in all but the first marks the end of the
            step in the first.
        row_labels: Label of each row, from top to bottom. All panels have the same rows.
    """
    lanes = [lane for lane in _LANES if lane in _names(panels)]
    rows = len(row_labels)
    row_inches = (0.46 if rows <= 4 else 0.36) + 0.07 * len(lanes)
    height = _TOP + _BOTTOM + len(panels) * rows * row_inches + (len(panels) - 1) * _BETWEEN
    left, width = _label_inches(list(row_labels.values())), _width(panels)
    horizon = max(_horizon(panel.timeline) for panel in panels)

    def draw_panels(figure: Figure) -> None:
        for index, panel in enumerate(panels):
            panels_below = len(panels) - 1 - index
            panel_width, panel_height = width - left - _RIGHT, rows * row_inches
            bottom = _BOTTOM + panels_below * (panel_height + _BETWEEN)
            # Matplotlib wants fractions of the figure.
            box = (left / width, bottom / height, panel_width / width, panel_height / height)
            drawing = _Drawing(
                figure.add_axes(box),
                panel,
                list(row_labels),
                lanes,
                horizon=horizon,
                inches=panel_width,
            )
            drawing.draw(list(row_labels.values()), with_time_axis=panels_below == 0)
            if index:
                # The end of the first panel's step, for comparison.
                drawing.axes.axvline(
                    panels[0].timeline.step_seconds, color="#777777", lw=1, ls=(0, (4, 3))
                )
        _draw_legend(figure, panels, (0.5, 1 - 0.05 / height))

    return draw_png(draw_panels, figsize=(width, height), dpi=_DPI)


class _Drawing:
    """One panel on its axes.

    Each stage has a row: a bar of computation above thin lanes of messages.

    Args:
        axes: Axes of the panel.
        panel: Content.
        places: (replica, stage) of each row, from top to bottom.
        lanes: Names of the activities that have a lane, from top to bottom.
        horizon: Seconds at the right end of the time axis.
        inches: Width of the axes.
    """

    def __init__(
        self,
        axes: Axes,
        panel: Panel,
        places: Sequence[tuple[int, int]],
        lanes: Sequence[str],
        *,
        horizon: float,
        inches: float,
    ) -> None:
        self.axes, self.panel, self.lanes, self.horizon = axes, panel, list(lanes), horizon
        self.row = {place: index for index, place in enumerate(places)}
        self.points_per_second = inches * 72 / horizon if horizon else 0.0
        # Vertical positions and heights are fractions of a row, measured from its top.
        lane = 0.13
        self.lane_height = lane * 0.8
        # Top and height of the bar.
        self.bar = (0.08, 0.86 - lane * len(self.lanes))
        self.lane_top = {
            name: 0.08 + self.bar[1] + 0.02 + lane * index for index, name in enumerate(self.lanes)
        }

    def draw(self, labels: Sequence[str], with_time_axis: bool) -> None:
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
                activities = [
                    a for a in timeline.activities if a.name == name and _place(a) == place
                ]
                if activities:
                    self._draw_bars(name, row, activities)
        self._draw_numbers()
        replicas = [replica for replica, _ in self.row]
        for row in range(1, len(replicas)):
            if replicas[row] != replicas[row - 1]:
                axes.axhline(row, color="#999999", lw=0.8)
        axes.axvline(timeline.step_seconds, color="#222222", lw=1.2)
        axes.set_title(self.panel.title, loc="left", fontsize=10, fontweight="bold", pad=5)
        axes.set_yticks([row + self.bar[0] + self.bar[1] / 2 for row in range(len(labels))])
        axes.set_yticklabels(labels, fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8, labelbottom=with_time_axis)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value * factor:g}")
        axes.grid(axis="x", color="#CCCCCC", lw=0.5)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        if with_time_axis:
            axes.set_xlabel(f"{unit} since the start of the step", fontsize=9)
        self._draw_busy_shares()

    def _draw_bars(self, name: str, row: int, activities: Sequence[Activity]) -> None:
        thin = name in self.lanes
        top, height = (self.lane_top[name], self.lane_height) if thin else self.bar
        # White edges separate neighbouring bars. A narrow bar has no edge, which would cover it. A
        # message has an edge of its own colour, as it may be narrower than a pixel.
        edge_widths = [
            0.5 if thin or (a.end - a.start) * self.points_per_second > 2.5 else 0.0
            for a in activities
        ]
        self.axes.broken_barh(
            [(a.start, a.end - a.start) for a in activities],
            (row + top, height),
            facecolors=_STYLE[name][1],
            edgecolors=_STYLE[name][1] if thin else "white",
            linewidths=edge_widths,
            hatch="////" if name == "recompute" else None,
        )

    def _draw_numbers(self) -> None:
        """Write the numbers of micro-batches on the bars, in one font size.

        All forwards of a row have numbers, or none if they are too narrow. The same holds for the
        backwards of a row.
        """
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
        """Return True if the numbers fit on the bars at this font size, in points."""
        # A digit is about 0.64 of the font size wide. The last point is a margin.
        needed = len(str(max(a.microbatch for a in group))) * 0.64 * size + 1.0
        widths = sorted((a.end - a.start) * self.points_per_second for a in group)
        # The tenth percentile: single measured bars may be short by chance.
        return widths[len(widths) // 10] > needed

    def _draw_busy_shares(self) -> None:
        """Write beside every row the share of the step in which its stage computes."""
        timeline = self.panel.timeline
        # Horizontal positions in fractions of the axes, vertical ones in rows.
        transform: Any = self.axes.get_yaxis_transform()
        for (replica, stage), row in self.row.items():
            share = timeline.busy_seconds[replica][stage] / (timeline.step_seconds or 1.0)
            middle = row + self.bar[0] + self.bar[1] / 2
            self.axes.text(
                1.008, middle, f"{share:.0%}", transform=transform, fontsize=8, va="center_baseline"
            )
        self.axes.text(1.008, 0, "busy", transform=transform, fontsize=8, color="#555555")


def _draw_legend(figure: Any, panels: Sequence[Panel], top_centre: tuple[float, float]) -> None:
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
        bbox_to_anchor=top_centre,
        borderaxespad=0.0,
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        handletextpad=0.5,
        columnspacing=1.4,
    )


def _names(panels: Sequence[Panel]) -> set[str]:
    """Return the names of all activities in the panels."""
    return {a.name for panel in panels for a in panel.timeline.activities}


def _place(activity: Activity) -> tuple[int, int]:
    """Return the row of an activity: (replica, stage)."""
    return activity.replica, activity.stage


def _horizon(timeline: Timeline) -> float:
    """Return the end of the step or of its last activity, in seconds."""
    return max([timeline.step_seconds, *(a.end for a in timeline.activities)])


def _width(panels: Sequence[Panel]) -> float:
    """Return the width of the chart in inches: more for more micro-batches, within limits."""
    microbatches = max((a.microbatch for p in panels for a in p.timeline.activities), default=0) + 1
    return min(max(12.0, 9.0 + 0.3 * microbatches), 20.0)


def _label_inches(labels: Sequence[str]) -> float:
    """Return the left margin in inches: the longest line of the labels, and some space."""
    longest = max((len(line) for label in labels for line in label.splitlines()), default=0)
    return 0.25 + 0.072 * longest


def _unit(horizon: float) -> tuple[str, float]:
    """Return the unit of the time axis, and the number of units in a second."""
    return next((name, factor) for least, name, factor in _UNITS if horizon >= least)
