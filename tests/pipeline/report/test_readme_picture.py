"""Test that the tool for the README's picture works with the current simulator."""

from __future__ import annotations

from docs.tools.pipeline_picture import picture


def test_the_picture_is_drawn() -> None:
    assert picture().startswith(b"\x89PNG")
