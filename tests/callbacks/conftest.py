"""One thread computes: several workers with several threads each wait for each other. And links are
measured with less memory: what they are exactly is of no interest here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dlres.memory.profile.links._UNCACHED_BYTES", 4 << 20)
