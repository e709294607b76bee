"""The two sides of benchmarks/hetero_pipeline.py as the benchmark drives them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.support.command import FairnessError
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks, limit
from benchmarks.support.testbed import Testbed

OURS, PEER = "benchmarks.support.hetero_pipeline_ours", "benchmarks.support.hetero_pipeline_peer"
_PLAN_SECONDS = 60.0
_LOSS_TOLERANCE = 1e-3  # float32 sums in another order, over some steps


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Ours checks its loss before steps 0, 1, 2, 4, 8 and so on: the first steps are not counted, and
    the first of a turn, which is step 8 at times, neither.

    Attributes:
        task: sizes other than the defaults of the model's `Task`.
        microbatches: of the comparison.
        swept: numbers of micro-batches, and of threads, that the peer is tried with beside it.
        matrix: numbers of micro-batches.
        first: steps before anything counts.
        promised: steps right after planning, which are compared with the prediction. The speed of a
            replica that is shared with others may differ by a fifth some minutes later.
        counted: steps of a turn that count; one more comes before them.
        starts: how often both sides are started on unequal devices: what differs from process to
            process is noise, too.
        rounds: turns of each of these starts.
        pairs: turns on equal devices, each of them of a start of its own: where both sides are
            nearly as fast, that is most of the noise.
        anew: whether they are forked of other processes every time.
        timeout: seconds that a turn may take.
        profiled: least seconds over which our ranks measure the layers; both are busy all along.
    """

    task: dict[str, int] = field(default_factory=dict)
    microbatches: int = 16
    swept: tuple[tuple[int, int], ...] = ((8, 1), (32, 1), (16, 2))
    matrix: tuple[int, ...] = (4, 8, 16)
    first: int = 5
    promised: int = 10
    counted: int = 2
    starts: int = 5
    rounds: int = 2
    pairs: int = 15
    anew: bool = True
    timeout: float = 180.0
    profiled: float = 3.0

    def turns(self, count: int) -> list[int]:
        """Return the numbers of steps of so many turns of ours, after the first steps."""
        return [self.first, *[1 + self.counted] * count]


QUICK = Settings(
    {"blocks": 6, "width": 32, "context": 16, "batch": 8},
    microbatches=4,
    swept=((8, 1),),
    matrix=(4,),
    first=2,
    promised=1,
    counted=1,
    starts=2,
    rounds=1,
    pairs=2,
    anew=False,
    timeout=60.0,
    profiled=0.0,
)


@dataclass(frozen=True)
class Plan:
    """What our planner decided, and what it promises; `text` is how it prints, `json` all of it."""

    split: tuple[int, ...]
    ranks: tuple[int, ...]
    predicted_seconds: float
    text: str
    json: str


@dataclass(frozen=True)
class Setting:
    """One way in which the peer trains; `ranks` are in stage order."""

    name: str
    split: tuple[int, ...]
    ranks: tuple[int, ...]
    microbatches: int
    threads: int


class Ours:
    """Our ranks, stopped between two steps of a training run."""

    def __init__(self, hosts: RankStarter, world_size: int, settings: Settings) -> None:
        self._settings = settings
        self.ranks = Ranks(hosts, OURS, world_size, settings.timeout + _PLAN_SECONDS)
        self.losses: list[float] = []
        self._bytes = 0

    def start(self, microbatches: int, turns: Sequence[int], plan: str | None = None) -> Plan:
        """Profile and plan, or take a plan as JSON, and stop before the first step."""
        order = {
            "task": self._settings.task,
            "microbatches": microbatches,
            "turns": list(turns),
            "plan": plan,
            "timeout": self._settings.timeout,
            "profiled": self._settings.profiled,
        }
        answers = self.ranks.ask(order)
        self._bytes = sum(answer.pop("bytes") for answer in answers)
        self.losses = []
        split, ranks = (tuple(answers[0].pop(name)) for name in ("split", "ranks"))
        return Plan(split, ranks, **answers[0])

    def turn(self) -> list[float]:
        """Run the next turn; return the seconds of its steps."""
        answers = self.ranks.ask({})
        if any(answer["losses"] != answers[0]["losses"] for answer in answers):
            raise FairnessError("our ranks log unlike losses")
        self.losses += answers[0]["losses"]
        return list(answers[0]["seconds"])

    def end(self) -> None:
        """End the training run in order."""
        whole = self.ranks.ask({})[0]["whole_bytes"]
        if self._bytes != whole:
            raise FairnessError(
                f"our ranks hold {self._bytes} bytes of parameters, the model has {whole}"
            )

    def close(self) -> None:
        """End the ranks."""
        self.ranks.close()


class Peer:
    """The peer's ranks, and the settings that they hold."""

    def __init__(self, hosts: RankStarter, world_size: int, settings: Settings) -> None:
        self._settings = settings
        self.ranks = Ranks(hosts, PEER, world_size, settings.timeout)
        self.losses: dict[Setting, list[float]] = {}

    def make(self, setting: Setting) -> None:
        """Make ready to train in this way."""
        self.ranks.ask({"task": self._settings.task, **asdict(setting)})
        self.losses[setting] = []

    def run(self, setting: Setting, steps: int) -> list[float]:
        """Run steps of a setting; return their seconds on rank 0."""
        answers = self.ranks.ask({"name": setting.name, "steps": steps})
        self.losses[setting] += answers[setting.ranks[-1]]["losses"]
        return list(answers[0]["seconds"])

    def close(self) -> None:
        """End the ranks."""
        self.ranks.close()


def cores(hosts: int) -> list[list[int]]:
    """Return which cores each host may use: one of its own; where there are fewer, the last ones
    have one together. On any core, hosts of equal shares were measured at unlike speeds at times.
    """
    available = sorted(os.sched_getaffinity(0))
    return [[available[min(host, len(available) - 1)]] for host in range(hosts)]


def set_shares(bed: Testbed, shares: Sequence[float]) -> None:
    """Set the CPU shares of the first hosts; the others get no limit."""
    for number, replica in enumerate(bed.hosts):
        limit(replica, shares[number] if number < len(shares) else None)


def require_same_losses(ours: Sequence[float], *peers: Sequence[float]) -> None:
    """Raise unless both sides have trained the same model on the same data."""
    for peer in peers:
        for step, (a, b) in enumerate(zip(ours, peer, strict=False)):
            if abs(a - b) > _LOSS_TOLERANCE * abs(b):
                raise FairnessError(f"step {step}: our loss is {a}, the peer's {b}")


def shown(numbers: Iterable[float]) -> str:
    """Return shares or a split as they are printed."""
    return " : ".join(f"{number:g}" for number in numbers)
