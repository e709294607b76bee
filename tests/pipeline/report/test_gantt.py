"""The chart shows every kind of activity in its colour, has a limited size, and does not depend on
the user's matplotlib settings."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib
import numpy as np
import pytest

from lightning_dlres.pipeline.plan.cost_model.simulator import Activity, Timeline
from lightning_dlres.pipeline.report.gantt import Panel, draw

COLOURS = {
    "forward": (0x00, 0x72, 0xB2),
    "recompute": (0x56, 0xB4, 0xE9),
    "backward": (0xE6, 0x9F, 0x00),
    "loss": (0xCC, 0x79, 0xA7),
    "activation": (0x00, 0x9E, 0x73),
    "gradient": (0xD5, 0x5E, 0x00),
    "sync": (0x22, 0x22, 0x22),
    "idle": (0xE6, 0xE6, 0xE6),
}


def step(names: Sequence[str], stages: int = 2, microbatches: int = 1) -> Timeline:
    """Return a step in which every stage does the named activities one after the other.

    Every micro-batch takes a second, and the step ends half a second after the last one.
    """
    activities = [
        Activity(name, 0, stage, m, m + index / len(names), m + (index + 1) / len(names))
        for stage in range(stages)
        for m in range(microbatches)
        for index, name in enumerate(names)
    ]
    return Timeline(
        activities=tuple(activities),
        step_seconds=microbatches + 0.5,
        busy_seconds=((float(microbatches),) * stages,),
        peak_bytes=(),
    )


def row_labels(stages: int) -> dict[tuple[int, int], str]:
    return {(0, stage): f"stage {stage} · rank {stage}\ncpu (0.50)" for stage in range(stages)}


def pixels(data: bytes) -> np.ndarray:
    from matplotlib.image import imread

    assert data.startswith(b"\x89PNG")
    return np.rint(imread(io.BytesIO(data))[..., :3] * 255).astype(int)


# Pixels at the top of a chart that contain its legend.
LEGEND_HEIGHT = 60


def visible(data: bytes) -> set[str]:
    """Return the names of the activities that are visible below the legend."""
    below = pixels(data)[LEGEND_HEIGHT:]
    return {name for name, c in COLOURS.items() if (below == c).all(axis=-1).sum() > 100}


def test_every_kind_of_activity_has_its_colour() -> None:
    names = [name for name in COLOURS if name != "idle"]
    assert visible(draw([Panel("Planned", step(names))], row_labels(2))) == set(COLOURS)
    assert visible(draw([Panel("Planned", step(["forward"]))], row_labels(2))) == {
        "forward",
        "idle",
    }


def test_each_timeline_has_a_panel_on_the_same_time_scale() -> None:
    short, long = step(["forward"]), step(["forward"], microbatches=3)
    one = pixels(draw([Panel("Planned", long)], row_labels(2)))
    two = pixels(draw([Panel("Planned", short), Panel("Measured", long)], row_labels(2)))
    assert two.shape[0] > 1.5 * one.shape[0]
    columns = [
        np.flatnonzero((half == COLOURS["forward"]).all(axis=-1).any(axis=0))
        for half in (two[LEGEND_HEIGHT : len(two) // 2], two[len(two) // 2 :])
    ]
    ends = [column.max() - column.min() for column in columns]
    assert ends[0] * 3 == pytest.approx(ends[1], rel=0.02)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (8, 64)])
def test_small_and_large_steps_have_a_limited_size(stages: int, microbatches: int) -> None:
    timeline = step(["forward", "backward"], stages, microbatches)
    image = pixels(draw([Panel("Planned", timeline)], row_labels(stages)))
    assert image.shape[1] <= 2200
    assert image.shape[0] <= 700


def test_a_step_without_work_is_drawn() -> None:
    nothing = Timeline(activities=(), step_seconds=0.0, busy_seconds=((0.0,),), peak_bytes=())
    assert "forward" not in visible(draw([Panel("Measured", nothing)], row_labels(1)))


def test_the_chart_does_not_depend_on_the_users_style_and_keeps_it() -> None:
    panels = [Panel("Planned", step(["forward"]))]
    plain = draw(panels, row_labels(2))
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30.0}):
        assert (pixels(draw(panels, row_labels(2))) == pixels(plain)).all()
        assert matplotlib.rcParams["axes.facecolor"] == "black"
