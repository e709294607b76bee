"""Examples of tests with many of them, and hypothesis strategies that several tests use.

`make test` draws fewer examples of a property than `make test-all`, because it runs often, and each
run draws other examples. Of large tables of cases it runs every second one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import strategies as st

# Environment variable that `make test-all` sets.
ALL = "DLRES_ALL_EXAMPLES"
# Share of the examples that `make test` draws.
_PART = 0.5


def examples(count: int) -> int:
    """Return the number of examples for this run, of `count` in `make test-all`."""
    return count if os.environ.get(ALL) else max(1, round(_PART * count))


def checkered(*axes: Iterable[Any], start: int = 0) -> list[Any]:
    """Return the parameters of a test: one value of each axis, in all combinations.

    Those of one colour, as on a chessboard, run in `make test`: each value of an axis meets every
    second one of the others. `make test-all` runs all.

    Args:
        *axes: Values of each argument of the test.
        start: 1 for the other colour.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    return [
        pytest.param(
            *(value for _, value in choice),
            marks=[] if sum(index for index, _ in choice) % 2 == start else pytest.mark.exhaustive,
        )
        for choice in itertools.product(*numbered)
    ]


# Seeded by hypothesis, so that it can shrink their draws.
randoms = st.randoms(use_true_random=False)
stage_counts = st.integers(1, 3)
replica_counts = st.integers(1, 2)
