"""Picture of the cache space over time: the place and the state of every sample.

`docs/images/prefetch_cache.png` is made from it.
"""

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
from lightning_dlres.prefetch.cache.space.entry_kernels import EVICTABLE, IN_USE, WAITING
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples
from lightning_dlres.prefetch.order.sequence import shuffled

_COLOURS = {WAITING: "#4c78a8", IN_USE: "#f58518", EVICTABLE: "#d0d0d0"}
_LABELS = {WAITING: "waits for its batch", IN_USE: "in use", EVICTABLE: "used: may be evicted"}


@dataclass
class History:
    """Snapshots of a cache space, one after every event that changed something.

    Attributes:
        capacity: Bytes of the cache space.
        threshold: Used part of the capacity at which eviction starts.
        entries: Offset, length and state of each sample, per snapshot.
        is_evicting: True if an eviction pass was under way, per snapshot.
        moves: Copies within the space since the snapshot before, per snapshot.
    """

    capacity: int
    threshold: float
    entries: list[list[tuple[int, int, int]]] = field(default_factory=list)
    is_evicting: list[bool] = field(default_factory=list)
    moves: list[list[Move]] = field(default_factory=list)

    def add(self, space: CacheSpace, moves: list[Move]) -> None:
        """Add a snapshot if it differs from the last one."""
        entries = [(int(e["offset"]), int(e["length"]), int(e["state"])) for e in space.entries()]
        if self.entries and self.entries[-1] == entries:
            return
        self.entries.append(entries)
        self.is_evicting.append(space.is_evicting)
        self.moves.append(list(moves))


def simulate(
    *,
    samples: int = 120,
    nodes: int = 4,
    prefetch: int = 6,
    capacity: int = 4096,
    batch_size: int = 4,
    slice_bytes: int = 90,
) -> History:
    """Return the history of one epoch over samples of random sizes. Eviction is slow, so that the
    picture shows it."""
    random = np.random.default_rng(3)
    sizes = random.integers(20, 120, samples)
    space = CacheSpace(np.zeros(capacity, dtype=np.uint8), samples, threshold=0.75)
    pinned = PinnedSamples(np.zeros(0, dtype=np.uint8), sizes)
    engine = PrefetchEngine(sizes, nodes, space, pinned, prefetch=prefetch, lookahead=capacity // 2)
    history, moves = History(capacity, space.threshold), list[Move]()
    space.on_move = lambda move: moves.append(move) if move else None
    space.slice_bytes, space.moved_per_stored_byte = slice_bytes, 0
    engine.begin_epoch(0, CacheIndex.build(shuffled(samples, 0, 0), nodes), lambda _: None)
    held: list[int] = []

    def snapshot() -> None:
        history.add(space, moves)
        moves.clear()

    for request_id in range(-(-samples // batch_size)):
        first = request_id * batch_size
        slots = np.arange(first, min(first + batch_size, samples), dtype=np.uint32)
        engine.request_batch("rank 0", request_id, 0, slots)
        while not engine.pop_replies():
            for fetch in engine.pop_fetches():
                data = np.zeros(int(sizes[fetch.sample_ids].sum()), dtype=np.uint8)
                engine.arrive(fetch.fetch_id, data)
                snapshot()
        held.append(request_id)
        snapshot()
        space.advance(slice_bytes)
        snapshot()
        if len(held) > 1:
            engine.release("rank 0", held.pop(0))
            snapshot()
    return history


def draw(history: History) -> bytes:
    """Return a PNG: time to the right, the cache space from its start upwards."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for at, entries in enumerate(history.entries):
        if history.is_evicting[at]:
            axes.axvspan(at, at + 1, color="#ffe8cc", linewidth=0)
        for state, colour in _COLOURS.items():
            bars = [(offset, length) for offset, length, other in entries if other == state]
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
    axes.set_xlabel("events: replies stored, batches delivered and released, slices of eviction")
    axes.set_ylabel(f"cache space ({format_bytes(history.capacity)})")
    handles = [Patch(color=_COLOURS[state], label=label) for state, label in _LABELS.items()]
    handles.append(Patch(color="#ffe8cc", label="eviction pass under way"))
    handles.append(Patch(color="#c0392b", label="moved towards the start"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return png.getvalue()


def _rectangle(x: float, y: float, width: float, height: float, **style: str) -> Patch:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, linewidth=0.2, **style)  # type: ignore[arg-type]
