"""Number of random examples of a property test: fewer in `make test`, all in `make test-all`.

`make test` runs often, and each run draws other examples.
"""

from __future__ import annotations

import os

# Environment variable that `make test-all` sets.
ALL = "DLRES_ALL_EXAMPLES"
# Share of the examples that `make test` draws.
_PART = 0.5


def examples(count: int) -> int:
    """Return the number of examples for this run, of `count` in `make test-all`."""
    return count if os.environ.get(ALL) else max(1, round(_PART * count))
