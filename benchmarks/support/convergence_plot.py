"""Plot of benchmarks/convergence: losses over the steps, beside losses over the time of the steps.

    python -m benchmarks.support.convergence_plot curves.json losses.svg

draws the curves of an earlier run again. The time of a step is simulated, with stated costs: four
hosts with links of 200 Mbit/s synchronise 25.2 MB of gradients, as in benchmarks/gradsync. The
models of the curves are smaller. The time axis thus tells what each algorithm would gain on this
network if it converged like this.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.gradsync_scale import Stated, stated_step
from lightning_dlres.gradsync.plan.plan import RAW
from lightning_dlres.gradsync.plan.simulation.simulator import simulate

PLAIN, ONE_BIT_ADAM = "uncompressed", "OneBitAdam"
# Part of the steps after which `OneBitAdam` freezes its variance. The learning rate rises in the
# first tenth.
WARM_UP_PART = 0.25
# Losses of the steps, by task, optimizer and algorithm.
Curves = dict[str, dict[str, dict[str, list[float]]]]

HOSTS = 4
# 24 gradients of 512 x 512, on hosts with a core each. The time of a codec per element is about the
# one that benchmarks/gradient_codecs measures.
NETWORK = Stated(
    elements=512 * 512,
    gradients=24,
    forward_seconds=0.01,
    backward_seconds=0.02,
    bandwidth=200e6 / 8,
    message_seconds=100e-6,
    latency_seconds=100e-6,
    task_seconds=20e-6,
    element_seconds=1e-9,
)
_TITLES = {"digits": "handwritten digits", "gpt": "byte-level GPT", "sgd": "SGD", "adamw": "AdamW"}
# Points of a line; each is the mean loss of the steps since the point before.
_POINTS = 40


@dataclass(frozen=True)
class Style:
    """Look of an algorithm's line; dashes and markers tell lines apart without colours."""

    colour: str
    marker: str
    dashes: str


STYLES = {
    PLAIN: Style("#000000", "o", "-"),
    "fp16": Style("#0072b2", "s", "--"),
    "int8": Style("#009e73", "^", "-."),
    "tbq": Style("#d55e00", "D", "-"),
    "onebit": Style("#aa4499", "v", "--"),
    ONE_BIT_ADAM: Style("#aa4499", "P", "-"),
    "onebit, no residual of the ranks": Style("#888888", "x", ":"),
    "OneBitAdam, no residual of the ranks": Style("#888888", "+", ":"),
}


def step_seconds(algorithm: str, network: Stated = NETWORK) -> Callable[[int, int], float]:
    """Return a function of a step's index and the number of steps: the step's seconds.

    Uncompressed gradients travel around a ring, as with DistributedDataParallel. Compressed ones
    travel through a parameter server. The momentum of `OneBitAdam` is ready after backward only.
    """
    if algorithm.startswith(ONE_BIT_ADAM):
        warm_up = _seconds(RAW, "ring", network)
        frozen = _seconds("onebit", "ps", network, ready_at_end=True)
        return lambda step, steps: warm_up if step < WARM_UP_PART * steps else frozen
    codec = RAW if algorithm == PLAIN else algorithm.partition(",")[0]
    seconds = _seconds(codec, "ring" if codec == RAW else "ps", network)
    return lambda step, steps: seconds


@cache
def _seconds(codec: str, topology: str, network: Stated, *, ready_at_end: bool = False) -> float:
    step = stated_step(HOSTS, codec, topology, network)
    if ready_at_end:
        ready = [dict.fromkeys(times, network.backward_seconds) for times in step.ready]
        step = replace(step, ready=ready)
    return network.forward_seconds + simulate(step).seconds


def draw(curves: Curves) -> str:
    """Return the plot as SVG: a row for each task and optimizer."""
    panels = [(task, optimizer) for task, panel in curves.items() for optimizer in panel]
    # The background is opaque, so that the plot is readable on dark pages. Fixed identifiers and no
    # date: equal curves give equal files.
    with rc_context({"svg.hashsalt": "lightning-dlres", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(10, 0.9 + 3.0 * len(panels)), layout="constrained")
        grid = figure.subplots(len(panels), 2, squeeze=False)
        for (task, optimizer), (by_steps, by_time) in zip(panels, grid, strict=True):
            draw_row(by_steps, by_time, curves[task][optimizer])
            title = f"{_TITLES.get(task, task)}, {_TITLES.get(optimizer, optimizer)}"
            by_steps.set_title(f"{title}: steps", fontsize=10)
            by_time.set_title(f"{title}: time", fontsize=10)
        lines = {line.get_label(): line for axes in grid[:, 0] for line in axes.get_lines()}
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3)
        figure.suptitle(
            "Means over the seeds. Time of a step: simulated, 4 hosts with links of 200 Mbit/s, "
            "25.2 MB of gradients",
            fontsize=10,
        )
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    # Two decimals of a point are enough, and half the file.
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", svg.getvalue())
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def draw_row(by_steps: Axes, by_time: Axes, losses: dict[str, list[float]]) -> None:
    """Draw the lines of the styled algorithms over the steps, and over the time.

    The axes fit all lines but those without residuals, which may diverge and leave the axes.
    """
    shown: list[float] = []
    for algorithm, style in STYLES.items():
        if algorithm not in losses:
            continue
        steps, means = points(losses[algorithm])
        if "no residual" not in algorithm:
            shown += means
        seconds, total = step_seconds(algorithm), len(losses[algorithm])
        elapsed, time = [], 0.0
        for step in range(total):
            time += seconds(step, total)
            elapsed.append(time)
        for axes, places in ((by_steps, steps), (by_time, [elapsed[step - 1] for step in steps])):
            axes.plot(
                places,
                means,
                color=style.colour,
                linestyle=style.dashes,
                marker=style.marker,
                markersize=4,
                markevery=4,
                linewidth=1.2,
                label=algorithm,
            )
    for axes, label in ((by_steps, "steps"), (by_time, "seconds (logarithmic)")):
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("training loss")
        axes.grid(visible=True, linewidth=0.3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_ylim(min(shown) / 1.1, max(shown) * 1.1)
    by_time.set_xscale("log")
    by_time.xaxis.set_major_formatter("{x:g}")


def points(losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return the numbers of steps at the points of a line, and the mean losses up to each."""
    size = max(len(losses) // _POINTS, 1)
    stops = list(range(size, len(losses) + 1, size))
    return stops, [mean(losses[stop - size : stop]) for stop in stops]


def main(curves: str, plot: str) -> None:
    """Draw the curves of one file into another."""
    Path(plot).write_text(draw(json.loads(Path(curves).read_text())))


if __name__ == "__main__":
    main(*sys.argv[1:])
