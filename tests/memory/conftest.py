"""Fixtures: one thread computes, as the threads of several test workers block each other."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass
