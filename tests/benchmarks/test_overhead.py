"""The benchmark of overheads runs to its end on tiny sizes, with every figure it promises."""

from __future__ import annotations

import contextlib
import io
import json
import math

from benchmarks import overhead
from tests.support.rank_pool import RankContext, RankPool


def printed_lines(context: RankContext) -> list[str]:
    """Measure on a rank of the pool, because the benchmark leaves a process group behind."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert overhead.main(["--quick"]) == 0
    return out.getvalue().splitlines()


def test_every_figure_is_reported(pool: RankPool) -> None:
    line = json.loads(pool.run(printed_lines, 1)[0][-1])
    assert list(line["checks"]) == [
        "ActivationOffload over plain, step of 10 ms",
        "dlres_hetero_pipe over plain, step of 10 ms",
        "ActivationOffload over the same training without, step of 10 ms",
        "files of 4 KB, epoch 1, over the best DataLoader",
        "files of 4 KB, epoch 2, over the best DataLoader",
        "files of 4 KB, epoch 3, over the best DataLoader",
    ]
    assert all(math.isfinite(c["value"]) and c["value"] > 0 for c in line["checks"].values())
    targets = [check["target"] for check in line["checks"].values()]
    assert targets == [1.01, 1.03, 1.01, 0.95, 0.95, 0.95]
    steps = line["raw"]["steps"]["10 ms"]
    assert all(len(times) == 2 for times in steps["seconds"].values())
    assert [[len(times) for times in pair] for pair in steps["in one training"]] == [[2, 2]]


def test_every_way_runs_first_in_some_round() -> None:
    orders = [overhead.turned(["a", "b", "c"], turn) for turn in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {"a", "b", "c"}
    assert overhead.paired([2.0, 6.0, 1.0], [1.0, 2.0, 1.0]) == 2.0
