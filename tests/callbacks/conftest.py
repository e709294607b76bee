"""Fixtures: one computing thread, and short measurements of links.

The threads of several test workers block each other. The exact speed of a link does not matter.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dlres.memory.profile.links._UNCACHED_BYTES", 4 << 20)
