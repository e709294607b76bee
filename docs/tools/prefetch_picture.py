"""The cache over time as a picture: where every sample lies, and what becomes of it."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_dlres.core.units import format_bytes
from lightning_dlres.prefetch.cache.engine import PrefetchEngine
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.cache.space.cache_space import CacheSpace, Move
from lightning_dlres.prefetch.cache.space.entry_kernels import HIT, IN_USE, WAITING
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples
from lightning_dlres.prefetch.order.sequence import shuffled

_COLOURS = {WAITING: "#4c78a8", IN_USE: "#f58518", HIT: "#d0d0d0"}
_NAMES = {WAITING: "waits to be hit", IN_USE: "in use", HIT: "hit: may be evicted"}


@dataclass
class History:
    """What a cache space has held: snapshots, one after every event that changed something.

    `entries` are lists of (offset, length, state), `passing` whether an eviction pass was under way
    and `moves` the copies within the space that led to each snapshot.
    """

    capacity: int
    threshold: float
    entries: list[list[tuple[int, int, int]]] = field(default_factory=list)
    passing: list[bool] = field(default_factory=list)
    moves: list[list[Move]] = field(default_factory=list)

    def note(self, space: CacheSpace, moves: list[Move]) -> None:
        """Add a snapshot if it differs from the last one."""
        found = [(int(e["offset"]), int(e["length"]), int(e["state"])) for e in space.entries()]
        if self.entries and self.entries[-1] == found:
            return
        self.entries.append(found)
        self.passing.append(space.passing)
        self.moves.append(list(moves))


def simulate(
    samples: int = 120,
    nodes: int = 4,
    prefetch: int = 6,
    capacity: int = 4096,
    batch: int = 4,
    slice_bytes: int = 90,
) -> History:
    """Return the history of one epoch over samples of random sizes, with slow eviction so that it
    can be seen."""
    random = np.random.default_rng(3)
    sizes = random.integers(20, 120, samples)
    space = CacheSpace(np.zeros(capacity, dtype=np.uint8), samples, threshold=0.75)
    kept = PinnedSamples(np.zeros(0, dtype=np.uint8), sizes)
    engine = PrefetchEngine(sizes, nodes, space, kept, prefetch=prefetch, lookahead=capacity // 2)
    history, moves = History(capacity, space.threshold), list[Move]()
    space.watch = lambda move: moves.append(move) if move else None
    space.slice_bytes, space.pace = slice_bytes, 0
    engine.begin(0, CacheIndex.build(shuffled(samples, 0, 0), nodes), lambda _: None)
    held: list[int] = []

    def note() -> None:
        history.note(space, moves)
        moves.clear()

    for take in range(-(-samples // batch)):
        positions = np.arange(take * batch, min((take + 1) * batch, samples), dtype=np.uint32)
        engine.take("rank 0", take, 0, positions)
        while not engine.deliveries():
            for request in engine.requests():
                data = np.zeros(int(sizes[request.numbers].sum()), dtype=np.uint8)
                engine.arrive(request.ticket, data)
                note()
        held.append(take)
        note()
        space.advance(slice_bytes)
        note()
        if len(held) > 1:
            engine.release("rank 0", held.pop(0))
            note()
    return history


def draw(history: History) -> bytes:
    """Return a PNG: time to the right, the space from its start upwards."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for at, entries in enumerate(history.entries):
        if history.passing[at]:
            axes.axvspan(at, at + 1, color="#ffe8cc", linewidth=0)
        for state, colour in _COLOURS.items():
            bars = [(offset, length) for offset, length, found in entries if found == state]
            for offset, length in bars:
                axes.add_patch(
                    _rectangle(at, offset, 1, length, facecolor=colour, edgecolor="white")
                )
        for move in history.moves[at]:
            axes.annotate(
                "",
                xy=(at, move.target + move.length / 2),
                xytext=(at, move.source + move.length / 2),
                arrowprops={"arrowstyle": "->", "color": "#c0392b", "linewidth": 0.8},
            )
    limit = history.threshold * history.capacity
    axes.axhline(limit, color="black", linestyle=":", linewidth=1)
    axes.text(len(history.entries), limit, " threshold", va="bottom", ha="right", fontsize=8)
    axes.set_xlim(0, len(history.entries))
    axes.set_ylim(0, history.capacity)
    axes.set_xlabel("events: replies stored, batches taken and released, slices of eviction")
    axes.set_ylabel(f"cache space ({format_bytes(history.capacity)})")
    handles = [Patch(color=_COLOURS[state], label=name) for state, name in _NAMES.items()]
    handles.append(Patch(color="#ffe8cc", label="eviction pass under way"))
    handles.append(Patch(color="#c0392b", label="moved towards the start"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=110)
    return target.getvalue()


def _rectangle(x: float, y: float, width: float, height: float, **style: str) -> Patch:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, linewidth=0.2, **style)  # type: ignore[arg-type]
