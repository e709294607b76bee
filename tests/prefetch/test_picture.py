"""Tests of the picture of the cache over time in the documentation."""

from __future__ import annotations

from docs.tools.prefetch_picture import draw, simulate
from lightning_dlres.prefetch.cache.space.entry_kernels import EVICTABLE, IN_USE, WAITING


def test_a_simulated_history_has_evictions_moves_and_all_entry_states() -> None:
    history = simulate()
    assert len(history.entries) == len(history.is_evicting) == len(history.moves)
    assert any(history.is_evicting)
    assert any(history.moves)
    states = {state for entries in history.entries for _, _, state in entries}
    assert states == {WAITING, IN_USE, EVICTABLE}
    # Some samples are stored while an eviction pass runs.
    snapshots = zip(history.entries, history.entries[1:], history.is_evicting, strict=False)
    assert any(evicting and len(after) > len(before) for before, after, evicting in snapshots)
    for entries in history.entries:
        assert all(end <= history.capacity for end in (o + n for o, n, _ in entries))
    assert draw(history).startswith(b"\x89PNG")
