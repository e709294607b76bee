"""Hypothesis strategies that several tests use, and the number of examples of a property test.

`make test` draws fewer examples than `make test-all`, because it runs often, and each run draws
other examples.
"""

from __future__ import annotations

import os

from hypothesis import strategies as st

# Environment variable that `make test-all` sets.
ALL = "DLRES_ALL_EXAMPLES"
# Share of the examples that `make test` draws.
_PART = 0.5


def examples(count: int) -> int:
    """Return the number of examples for this run, of `count` in `make test-all`."""
    return count if os.environ.get(ALL) else max(1, round(_PART * count))


# Seeded by hypothesis, so that it can shrink their draws.
randoms = st.randoms(use_true_random=False)
stage_counts = st.integers(1, 3)
replica_counts = st.integers(1, 2)
