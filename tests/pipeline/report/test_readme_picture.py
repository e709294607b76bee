"""The README's picture is drawn by the simulator of the day."""

from __future__ import annotations

from docs.tools.pipeline_picture import picture


def test_the_picture_is_drawn() -> None:
    assert picture().startswith(b"\x89PNG")
