"""Fixtures: one computing thread, and short measurements of links.

The threads of several test workers block each other. The exact speed of a link does not matter.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fast(one_thread: None, short_link_measurements: None) -> None:
    pass
