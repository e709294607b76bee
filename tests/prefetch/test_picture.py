"""The picture of the cache over time shows what happened."""

from __future__ import annotations

from docs.tools.prefetch_picture import draw, simulate
from lightning_dlres.prefetch.cache.space.entry_kernels import HIT, IN_USE, WAITING


def test_a_history_shows_zone_moves_and_states() -> None:
    history = simulate()
    assert len(history.entries) == len(history.passing) == len(history.moves)
    assert any(history.passing)
    assert any(history.moves)
    states = {state for entries in history.entries for _, _, state in entries}
    assert states == {WAITING, IN_USE, HIT}
    # Samples come while a pass is under way (C9).
    pairs = zip(history.entries, history.entries[1:], history.passing, strict=False)
    assert any(passing and len(after) > len(before) for before, after, passing in pairs)
    for entries in history.entries:
        assert all(end <= history.capacity for end in (o + n for o, n, _ in entries))
    assert draw(history).startswith(b"\x89PNG")
