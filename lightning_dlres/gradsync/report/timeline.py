"""Picture of one step: backward, the queue of compute tasks and the messages of every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_dlres.core.figures import draw_png
from lightning_dlres.gradsync.report.measurement import SyncStep
from lightning_dlres.gradsync.report.rank_steps import COMPUTE_TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Ranks in the picture at most; more would be too small to read.
MOST_RANKS = 8
# Rows of a rank from top to bottom.
_LANES = ("backward", "compute", "send", "receive")
# Label and colour by name of the bar. Bars are drawn in this order, so messages on their way lie
# below the tasks. The colours are those of Okabe and Ito (2002), which people with any kind of
# colour vision can tell apart.
_STYLE = {
    "backward": ("backward", "#E69F00"),
    "exposed": ("exposed: waits for gradients", "#CCCCCC"),
    "message": ("message on its way", "#A8DCC9"),
    "encode": ("encode", "#0072B2"),
    "merge": ("merge", "#CC79A7"),
    "decode": ("decode", "#56B4E9"),
    "send": ("send", "#009E73"),
    "receive": ("receive", "#D55E00"),
}
_WIDTH, _DPI = 12.0, 110
# Heights in inches: of a lane, of the space below a rank, and of the margins.
_LANE, _SPACE, _TOP, _BOTTOM = 0.2, 0.14, 0.7, 0.55
_LEFT, _RIGHT = 1.35, 0.25


@dataclass(frozen=True, kw_only=True)
class TimelineBar:
    """A bar of the picture.

    Attributes:
        rank: The rank.
        lane: Row of the rank: "backward", "compute", "send" or "receive".
        name: Name of a task, or "backward", "exposed" or "message"; the legend explains each.
        start: Start, in milliseconds since the first rank began backward.
        end: End, in the same unit.
    """

    rank: int
    lane: str
    name: str
    start: float
    end: float


def timeline_bars(step: SyncStep) -> list[TimelineBar]:
    """Return the bars of a step, of all ranks."""
    bars = []
    for rank, lane, name, start_ns, end_ns in _intervals(step):
        start, end = ((time - step.start_ns) / 1e6 for time in (start_ns, end_ns))
        bars.append(TimelineBar(rank=rank, lane=lane, name=name, start=start, end=end))
    return bars


def _intervals(step: SyncStep) -> Iterator[tuple[int, str, str, int, int]]:
    for delivery in step.deliveries:
        times = delivery.start_ns, delivery.end_ns
        yield delivery.source, "send", "message", *times
        yield delivery.destination, "receive", "message", *times
    for rank, own in step.ranks.items():
        yield rank, "backward", "backward", own.start_ns, own.ready_ns
        yield rank, "backward", "exposed", own.ready_ns, own.end_ns
        for span in own.tasks:
            lane = "compute" if span.name in COMPUTE_TASKS else span.name
            yield rank, lane, span.name, span.start_ns, span.end_ns


def draw_timeline(step: SyncStep, title: str) -> bytes:
    """Return a PNG of a step, with the first `MOST_RANKS` ranks.

    Args:
        step: The step.
        title: Title of the picture.
    """
    ranks = sorted(step.ranks)[:MOST_RANKS]
    if len(ranks) < len(step.ranks):
        title += f"; ranks {ranks[0]} to {ranks[-1]} of {len(step.ranks)}"
    rank_inches = len(_LANES) * _LANE + _SPACE
    height = _TOP + _BOTTOM + len(ranks) * rank_inches
    bars = [bar for bar in timeline_bars(step) if bar.rank in ranks]

    def draw(figure: Figure) -> None:
        # Matplotlib wants fractions of the figure.
        size = (_WIDTH - _LEFT - _RIGHT) / _WIDTH, (height - _TOP - _BOTTOM) / height
        axes = figure.add_axes((_LEFT / _WIDTH, _BOTTOM / height, *size))
        _draw_bars(axes, bars, ranks, rank_inches)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=6)
        _draw_legend(figure, {bar.name for bar in bars}, 1 - 0.08 / height)

    return draw_png(draw, figsize=(_WIDTH, height), dpi=_DPI)


def _draw_bars(
    axes: Axes, bars: Sequence[TimelineBar], ranks: Sequence[int], rank_inches: float
) -> None:
    top = {
        (rank, lane): row * rank_inches + _SPACE / 2 + position * _LANE
        for row, rank in enumerate(ranks)
        for position, lane in enumerate(_LANES)
    }
    for name in _STYLE:
        for (rank, lane), y in top.items():
            own = [bar for bar in bars if (bar.rank, bar.lane, bar.name) == (rank, lane, name)]
            # An edge of the same colour shows bars that are narrower than a pixel.
            axes.broken_barh(
                [(bar.start, bar.end - bar.start) for bar in own],
                (y, 0.84 * _LANE),
                facecolors=_STYLE[name][1],
                edgecolors=_STYLE[name][1],
                linewidths=0.4,
            )
    axes.set_xlim(min(0.0, *(bar.start for bar in bars)), max(bar.end for bar in bars))
    axes.set_ylim(len(ranks) * rank_inches, 0)
    for row in range(1, len(ranks)):
        axes.axhline(row * rank_inches, color="#999999", lw=0.8)
    axes.set_yticks([y + 0.42 * _LANE for y in top.values()])
    axes.set_yticklabels(
        [f"rank {rank}  {lane}" if lane == _LANES[0] else lane for rank, lane in top], fontsize=8
    )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#CCCCCC", lw=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("ms since the first rank began backward", fontsize=9)


def _draw_legend(figure: Figure, names: set[str], top: float) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, lw=0, label=label)
        for name, (label, colour) in _STYLE.items()
        if name in names
    ]
    figure.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, top),
        borderaxespad=0.0,
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        handletextpad=0.5,
        columnspacing=1.4,
    )
