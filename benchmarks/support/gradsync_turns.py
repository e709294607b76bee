"""Contenders of benchmarks/gradsync.py that train in turns on the hosts of one testbed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks
from benchmarks.support.testbed import Host, Testbed

RANK = "benchmarks.support.gradsync_rank"
# Name of a contender -> its algorithm, and its options; see `gradsync_contender`.
Contenders = Mapping[str, tuple[str, dict[str, Any]]]
# Steps before the counted ones: DDP sorts its buckets again, and our hook makes its plan.
_WARM_UP = 5
_STEPS = 3


class Turns:
    """Ranks on a testbed, one per host, that train with one contender after another.

    Use it as a context manager.

    Args:
        hosts: Hosts.
        contenders: Contenders.
        samples: Samples of a rank in a step.
    """

    def __init__(self, hosts: Sequence[Host], contenders: Contenders, *, samples: int = 16) -> None:
        self._bed, self._contenders, self._samples = Testbed(hosts), contenders, samples
        self._size = len(hosts)
        # Replies of all ranks to each order, by contender.
        self._replies: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in contenders}

    def __enter__(self) -> Turns:
        self._bed.__enter__()
        self._ranks = Ranks(RankStarter(self._bed, [RANK]), RANK, self._size, timeout=300.0)
        return self

    def __exit__(self, *error: Any) -> None:
        self._ranks.close()
        self._bed.__exit__(*error)

    def warm_up(self, emulated: float = 0.0) -> None:
        """Make all contenders, and train some steps that do not count."""
        for name in self._contenders:
            self.order(name, _WARM_UP, emulated)

    def order(self, name: str, steps: int, emulated: float = 0.0) -> list[dict[str, Any]]:
        """Train with a contender; return the replies of all ranks."""
        algorithm, options = self._contenders[name]
        return self._ranks.ask(
            {
                "contender": name,
                "algorithm": algorithm,
                "options": options,
                "steps": steps,
                "samples": self._samples,
                "emulated": emulated,
            }
        )

    def run(self, rounds: int, emulated: float = 0.0) -> None:
        """Train with all contenders in turns."""
        for number in range(rounds):
            # Every other round in the opposite order, so that no contender always follows another.
            names = list(self._contenders)
            for name in names if number % 2 else reversed(names):
                self._replies[name].append(self.order(name, _STEPS, emulated))

    def seconds(self, name: str) -> float:
        """Return the median seconds of a step."""
        return statistics.median(self._rounds(name))

    def spread(self, name: str) -> float:
        """Return half the range of the middle half of the rounds, over their median."""
        rounds = self._rounds(name)
        if len(rounds) < 2:
            return 0.0
        low, median, high = statistics.quantiles(rounds, method="inclusive")
        return (high - low) / 2 / median

    def ratio(self, name: str, other: str) -> float:
        """Return the step of a contender over that of another one: the median of all rounds."""
        pairs = zip(self._rounds(name), self._rounds(other), strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def figure(self, name: str, figure: str) -> float:
        """Return the median of a figure of the replies, such as "sent" or "cpu"."""
        return statistics.median(r[figure] for replies in self._replies[name] for r in replies)

    def chosen(self, name: str) -> str:
        """Return what the cost model of a contender has chosen, as text."""
        return self._replies[name][-1][0]["chosen"] or "-"

    def raw(self) -> dict[str, Any]:
        """Return the seconds of each round and the other figures, for the line of JSON."""
        return {
            name: {
                "seconds": self._rounds(name),
                "sent": self.figure(name, "sent"),
                "cpu": self.figure(name, "cpu"),
                "chosen": self.chosen(name),
            }
            for name in self._contenders
        }

    def _rounds(self, name: str) -> list[float]:
        return [
            statistics.median(second for reply in replies for second in reply["seconds"])
            for replies in self._replies[name]
        ]
