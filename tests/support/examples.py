"""How many random examples a property gets: `make test` is run all the time, and other examples are
drawn each time; `make test-all` asks for all of them."""

from __future__ import annotations

import os

# Set by `make test-all`.
ALL = "DLRES_ALL_EXAMPLES"
_PART = 0.5


def examples(count: int) -> int:
    """Return how many of `count` examples are drawn in this run."""
    return count if os.environ.get(ALL) else max(1, round(_PART * count))
