"""Part of benchmarks/gradsync.py: hosts of different speed, with samples shared out by speed."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.support.command import Figures
from benchmarks.support.gradsync_turns import Extent
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks
from benchmarks.support.report import at_least, table
from benchmarks.support.testbed import Host, Testbed

RANK = "benchmarks.support.gradsync_speeds_rank"
# Emulated milliseconds of computation for a sample on each host: speeds of 1 : 0.5 : 0.25.
SAMPLE_MS = (2.0, 4.0, 8.0)
RATE_MBIT = 1000


def compare_speeds(extent: Extent) -> Figures:
    """Compare the samples per second of a joint training with the sum over hosts that train alone.

    Args:
        extent: Extent of the benchmark; half as many rounds are run here, since each takes long.
    """
    contenders: dict[str, dict[str, Any]] = {
        "alone": {"share_samples": None},
        "equal": {"share_samples": "equal"},
        "speed": {"share_samples": "speed"},
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    with Testbed([Host(rate=f"{RATE_MBIT}mbit") for _ in SAMPLE_MS]) as bed:
        for _ in range(max(1, extent.rounds // 2)):
            for name, options in contenders.items():
                # A run leaves its process group initialised, so every run has new ranks.
                ranks = Ranks(RankStarter(bed, [RANK]), RANK, len(SAMPLE_MS), timeout=300.0)
                replies = ranks.ask({**options, "sample_ms": SAMPLE_MS})
                ranks.close()
                # Ranks of a joint training take the same time, so the rates add up.
                rates[name].append(sum(r["samples"] / r["seconds"] for r in replies))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    rows = [[name, medians[name], medians[name] / medians["alone"]] for name in contenders]
    print(table(["samples", "samples / s", "of the sum"], rows))
    gain = medians["speed"] / medians["alone"]
    return {"speeds: part of the sum": at_least(gain, 0.9)}, {"rates": rates}
