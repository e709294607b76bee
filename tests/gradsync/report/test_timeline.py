"""The timeline has both queues of every rank on one time axis."""

from __future__ import annotations

import io

import numpy as np

from lightning_dlres.gradsync.report.measurement import SyncStep, measure_sync
from lightning_dlres.gradsync.report.timeline import (
    MOST_RANKS,
    TimelineBar,
    draw_timeline,
    timeline_bars,
)
from tests.gradsync.report.hand_made import run_spans, step_spans

COLOURS = {
    "backward": (0xE6, 0x9F, 0x00),
    "exposed": (0xCC, 0xCC, 0xCC),
    "message": (0xA8, 0xDC, 0xC9),
    "encode": (0x00, 0x72, 0xB2),
    "merge": (0xCC, 0x79, 0xA7),
    "decode": (0x56, 0xB4, 0xE9),
    "send": (0x00, 0x9E, 0x73),
    "receive": (0xD5, 0x5E, 0x00),
}


def step() -> SyncStep:
    measured = measure_sync(run_spans(2), warm_up=1)
    assert measured is not None
    return measured.steps[0]


def test_bars_are_on_one_time_axis() -> None:
    def bar(rank: int, lane: str, name: str, start: float, end: float) -> TimelineBar:
        return TimelineBar(rank=rank, lane=lane, name=name, start=start, end=end)

    bars = timeline_bars(step())
    assert [b for b in bars if b.rank == 0 and b.lane in ("backward", "compute")] == [
        bar(0, "backward", "backward", 0, 10),
        bar(0, "backward", "exposed", 10, 18),
        bar(0, "compute", "encode", 1, 4),
        bar(0, "compute", "merge", 9, 11),
        bar(0, "compute", "decode", 14, 18),
    ]
    for rank, lane, start, end in [(0, "send", 4, 9), (1, "receive", 4, 9), (0, "receive", 8, 14)]:
        assert bar(rank, lane, "message", start, end) in bars
    assert bar(0, "send", "send", 4, 5) in bars
    assert bar(1, "receive", "receive", 8.5, 9) in bars


def test_every_kind_of_work_has_its_colour() -> None:
    from matplotlib.image import imread

    picture = draw_timeline(step(), "Step 1")
    assert picture.startswith(b"\x89PNG")
    pixels = np.rint(imread(io.BytesIO(picture))[..., :3] * 255).astype(int)
    below_legend = pixels[60:]
    for name, colour in COLOURS.items():
        assert (below_legend == colour).all(axis=-1).sum() > 50, name


def test_a_picture_of_many_ranks_shows_the_first_ones() -> None:
    from matplotlib.image import imread

    def height(ranks: int) -> int:
        spans = {rank: step_spans(0, 0, rank) for rank in range(ranks)}
        measured = measure_sync(spans)
        assert measured is not None
        return int(imread(io.BytesIO(draw_timeline(measured.steps[0], "Step 0"))).shape[0])

    assert height(2) < height(MOST_RANKS) == height(3 * MOST_RANKS)
