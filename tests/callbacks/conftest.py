"""One thread computes: several workers with several threads each wait for each other. And links are
measured with less memory: what they are exactly is of no interest here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dlres.memory.links._UNCACHED_BYTES", 4 << 20)
