"""Contenders of benchmarks/hetero_pipeline.py, their settings, and checks of their fairness."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.support.command import FairnessError
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks, set_share
from benchmarks.support.rpc import Message
from benchmarks.support.testbed import Testbed

OURS, PEER = "benchmarks.support.hetero_pipeline.ours", "benchmarks.support.hetero_pipeline.peer"
# Additional time for our planning, in seconds, on top of the time limit of an answer.
_PLAN_SECONDS = 60.0
# Largest allowed relative difference between both contenders' losses of a step. The two add float32
# numbers in different orders, so after some steps their losses are not equal to the bit.
_LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Settings:
    """Sizes of the comparison, and of the matrix (see `matrix.matrix`).

    A *start* makes new ranks for both contenders. They then take turns: a *turn* is a few steps of
    one contender while the other waits.

    Before steps 0, 1, 2, 4, 8 and so on, our pipeline checks its loss, which makes them slower. So
    the first steps of a training run do not count. Neither does the first step of a later turn,
    which may be step 8.

    Attributes:
        task: Sizes that differ from the defaults of the model's `Task`.
        microbatches: Number of micro-batches in the comparison.
        swept: Further settings of the peer, as (micro-batches, threads). A host has one core: with
            two threads, two steps did not end within 200 s.
        matrix: Numbers of micro-batches for which the matrix checks predicted step times.
        warmup: Number of first steps, which do not count.
        after_planning: Number of steps right after planning that are compared with the prediction.
            Some minutes later, the speed of a shared machine may differ by a fifth.
        counted: Number of steps of a turn that count; one more step comes before them.
        starts: Number of times that both contenders are started on unequal devices. Differences
            between processes are noise, too.
        rounds: Number of turns of each of these starts.
        pairs: Number of starts of one turn each on equal devices. Where both contenders are nearly
            as fast, most of the noise is between starts.
        fresh: True forks the ranks from a new process in every start.
        timeout: Time limit of a turn, in seconds.
        profile_seconds: Minimum time over which our ranks measure the layers. All ranks compute
            during all of it.
    """

    task: dict[str, int] = field(default_factory=dict)
    microbatches: int = 16
    swept: tuple[tuple[int, int], ...] = ((8, 1), (32, 1))
    matrix: tuple[int, ...] = (4, 8, 16)
    warmup: int = 5
    after_planning: int = 10
    counted: int = 2
    starts: int = 5
    rounds: int = 2
    pairs: int = 15
    fresh: bool = True
    timeout: float = 600.0
    profile_seconds: float = 3.0

    def turns(self, count: int) -> list[int]:
        """Return the number of steps of each of our turns: the warm-up, then `count` turns."""
        return [self.warmup, *[1 + self.counted] * count]


QUICK = Settings(
    {"blocks": 6, "width": 32, "context": 16, "batch": 8},
    microbatches=4,
    swept=((8, 1),),
    matrix=(4,),
    warmup=2,
    after_planning=1,
    counted=1,
    starts=2,
    rounds=1,
    pairs=2,
    fresh=False,
    timeout=60.0,
    profile_seconds=0.0,
)


@dataclass(frozen=True)
class Plan:
    """Plan of our pipeline, with its prediction, its printed form and its JSON."""

    split: tuple[int, ...]
    ranks: tuple[int, ...]
    predicted_seconds: float
    text: str
    json: str


@dataclass(frozen=True)
class Setting:
    """Setting of the peer's training; `ranks` are in stage order."""

    name: str
    split: tuple[int, ...]
    ranks: tuple[int, ...]
    microbatches: int
    threads: int


@dataclass(frozen=True)
class Steps:
    """Steps of a turn.

    Attributes:
        seconds: Seconds of each step on rank 0.
        processor_seconds: Processor time of each step, of all threads of all ranks, in seconds.
    """

    seconds: list[float]
    processor_seconds: list[float]

    @classmethod
    def of(cls, answers: Sequence[Message]) -> Steps:
        """Return the steps in the answers of all ranks."""
        per_rank = [answer["processor_seconds"] for answer in answers]
        return cls(list(answers[0]["seconds"]), [sum(step) for step in zip(*per_rank, strict=True)])


class Ours:
    """Ranks that train with `dlres_hetero_pipe`. After each turn, they wait for the next
    order."""

    def __init__(self, starter: RankStarter, world_size: int, settings: Settings) -> None:
        self._settings = settings
        self.ranks = Ranks(starter, OURS, world_size, settings.timeout + _PLAN_SECONDS)
        self.losses: list[float] = []
        self._bytes = 0

    def start(self, microbatches: int, turns: Sequence[int], plan: str | None = None) -> Plan:
        """Start a training run, and stop before the first step.

        Args:
            microbatches: Number of micro-batches.
            turns: Number of steps of each turn.
            plan: Plan to follow, as JSON; None profiles and plans.
        """
        order = {
            "task": self._settings.task,
            "microbatches": microbatches,
            "turns": list(turns),
            "plan": plan,
            "timeout": self._settings.timeout,
            "profile_seconds": self._settings.profile_seconds,
        }
        answers = self.ranks.ask(order)
        self._bytes = sum(answer.pop("bytes") for answer in answers)
        self.losses = []
        split, ranks = (tuple(answers[0].pop(name)) for name in ("split", "ranks"))
        return Plan(split, ranks, **answers[0])

    def turn(self) -> Steps:
        """Run the next turn; return its steps.

        Raises:
            FairnessError: If the ranks' losses differ.
        """
        answers = self.ranks.ask({})
        if any(answer["losses"] != answers[0]["losses"] for answer in answers):
            raise FairnessError("all our ranks must log the same losses, got different ones")
        self.losses += answers[0]["losses"]
        return Steps.of(answers)

    def end(self) -> None:
        """Let the training run end, and check that the ranks held the whole model once.

        Raises:
            FairnessError: If the bytes of all ranks are not those of the model.
        """
        whole = self.ranks.ask({})[0]["whole_bytes"]
        if self._bytes != whole:
            raise FairnessError(
                f"our ranks must hold the model's parameters once ({whole} bytes), got "
                f"{self._bytes} bytes"
            )

    def close(self) -> None:
        """End the ranks."""
        self.ranks.close()


class Peer:
    """Ranks that train with torch.distributed.pipelining, under one or more settings."""

    def __init__(self, starter: RankStarter, world_size: int, settings: Settings) -> None:
        self._settings = settings
        self.ranks = Ranks(starter, PEER, world_size, settings.timeout)
        self.losses: dict[Setting, list[float]] = {}

    def prepare(self, setting: Setting) -> None:
        """Build model and optimizer for a setting, without training."""
        self.ranks.ask({"task": self._settings.task, **asdict(setting)})
        self.losses[setting] = []

    def run(self, setting: Setting, steps: int) -> Steps:
        """Run steps of a setting; return them."""
        answers = self.ranks.ask({"name": setting.name, "steps": steps})
        self.losses[setting] += answers[setting.ranks[-1]]["losses"]
        return Steps.of(answers)

    def close(self) -> None:
        """End the ranks."""
        self.ranks.close()


def cores(hosts: int) -> list[list[int]]:
    """Return the cores that each host may use: one core each.

    If there are fewer cores than hosts, the last hosts share one core. Without fixed cores, hosts
    of equal shares sometimes had different speeds.
    """
    available = sorted(os.sched_getaffinity(0))
    return [[available[min(host, len(available) - 1)]] for host in range(hosts)]


def set_shares(bed: Testbed, shares: Sequence[float]) -> None:
    """Set the CPU shares of the first hosts; the others get no limit."""
    for number, host in enumerate(bed.hosts):
        set_share(host, shares[number] if number < len(shares) else None)


def require_same_losses(ours: Sequence[float], *peers: Sequence[float]) -> None:
    """Raise unless the losses show the same model and data on both sides.

    Raises:
        FairnessError: If two losses differ by more than rounding, or one is NaN.
    """
    for peer in peers:
        for step, (a, b) in enumerate(zip(ours, peer, strict=False)):
            # Written so that NaN fails, too.
            if not abs(a - b) <= _LOSS_TOLERANCE * abs(b):
                raise FairnessError(
                    f"losses of step {step} must be equal, got {a} (ours) and {b} (peer)"
                )


def shown(numbers: Iterable[float]) -> str:
    """Return shares or a split as text."""
    return " : ".join(f"{number:g}" for number in numbers)
