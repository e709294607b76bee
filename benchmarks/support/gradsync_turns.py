"""Contenders of benchmarks/gradsync.py that train in turns on the hosts of one testbed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.support.gradsync_contender import LAYERS, WIDTH
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks
from benchmarks.support.testbed import Host, Testbed

RANK = "benchmarks.support.gradsync_rank"
# Name of a contender -> its algorithm, and its options; see `gradsync_contender`.
Contenders = Mapping[str, tuple[str, dict[str, Any]]]
# Steps before the counted ones: DDP rebuilds its buckets in them, and our hook makes its plan.
_WARM_UP = 5
# Steps at the beginning of a turn that do not count. They may find cold caches, and connections
# that start slowly again after a pause. Steps of a training have neither.
_UNCOUNTED_STEPS = 2
# Counted seconds of a turn, and least and most counted steps.
_TURN_SECONDS, _LEAST_STEPS, _MOST_STEPS = 1.5, 3, 12


@dataclass(frozen=True)
class Extent:
    """How much is measured: number of rounds, and of the model's layers."""

    rounds: int = 5
    layers: int = LAYERS


QUICK = Extent(rounds=1, layers=3)


class Turns:
    """Ranks on a testbed, one per host, that train with one contender after another.

    It is a context manager, which builds the testbed and starts the ranks.

    Args:
        hosts: Descriptions of the hosts.
        contenders: Algorithm and options of each contender, by name.
        layers: Number of the model's layers.
        width: Width of the layers.
        samples: Samples of a rank in a step, at most `gradsync_rank.SAMPLES`.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        contenders: Contenders,
        *,
        layers: int,
        width: int = WIDTH,
        samples: int = 16,
    ) -> None:
        self._bed, self._contenders = Testbed(hosts), contenders
        self._layers, self._width, self._samples = layers, width, samples
        self._size = len(hosts)
        # Replies of all ranks in each round, by contender.
        self._replies: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in contenders}

    def __enter__(self) -> Turns:
        self._bed.__enter__()
        self._ranks = Ranks(RankStarter(self._bed, [RANK]), RANK, self._size, timeout=300.0)
        return self

    def __exit__(self, *error: Any) -> None:
        self._ranks.close()
        self._bed.__exit__(*error)

    def warm_up(self, emulated: float = 0.0, names: Iterable[str] | None = None) -> None:
        """Make contenders, and train with each some steps that do not count.

        Args:
            emulated: Emulated seconds of computation in a step.
            names: The contenders; None for all.
        """
        for name in self._contenders if names is None else names:
            self.order(name, _WARM_UP, emulated)

    def order(self, name: str, steps: int, emulated: float = 0.0) -> list[dict[str, Any]]:
        """Train with a contender; return the replies of all ranks.

        The figures of this class come only from the replies that `run` keeps.

        Args:
            name: Name of the contender.
            steps: Number of steps.
            emulated: Emulated seconds of computation in a step.
        """
        algorithm, options = self._contenders[name]
        return self._ranks.ask(
            {
                "contender": name,
                "algorithm": algorithm,
                "options": options,
                "layers": self._layers,
                "width": self._width,
                "steps": steps,
                "samples": self._samples,
                "emulated": emulated,
            }
        )

    def run(self, rounds: int, emulated: float = 0.0) -> None:
        """Train with all contenders in turns of a few steps, and keep the replies.

        Args:
            rounds: Number of turns of each contender.
            emulated: Emulated seconds of computation in a step.
        """
        for number in range(rounds):
            # Every other round in the opposite order, so that no contender always follows another.
            names = list(self._contenders)
            for name in names if number % 2 else reversed(names):
                first = self.order(name, _UNCOUNTED_STEPS, emulated)[0]["seconds"]
                steps = max(_LEAST_STEPS, min(_MOST_STEPS, round(_TURN_SECONDS / first)))
                self._replies[name].append(self.order(name, steps, emulated))

    def seconds(self, name: str) -> float:
        """Return the seconds of a contender's step: the median of the rounds."""
        return statistics.median(self._rounds(name))

    def spread(self, name: str) -> float:
        """Return half the interquartile range of the rounds' step times, over their median."""
        rounds = self._rounds(name)
        if len(rounds) < 2:
            return 0.0
        low, median, high = statistics.quantiles(rounds, method="inclusive")
        return (high - low) / 2 / median

    def ratio(self, name: str, other: str) -> float:
        """Return the step of a contender over that of another one: the median of the rounds."""
        pairs = zip(self._rounds(name), self._rounds(other), strict=True)
        return statistics.median(seconds / other_seconds for seconds, other_seconds in pairs)

    def figure(self, name: str, figure: str, rank: int | None = None) -> float:
        """Return the median, over rounds, of a figure of the replies, such as "cpu": that of a
        rank, or of all ranks if it is None."""
        chosen = slice(None) if rank is None else slice(rank, rank + 1)
        return statistics.median(
            reply[figure] for replies in self._replies[name] for reply in replies[chosen]
        )

    def chosen(self, name: str) -> str:
        """Return the choices of a contender's cost model as text; "-" if it has none."""
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
        """Return the seconds of a step in each round: those of the slowest rank.

        All ranks share the processors. The time of a faster rank would leave out work of the
        round.
        """
        return [max(reply["seconds"] for reply in replies) for replies in self._replies[name]]
