"""State of user code changes once per step and on every rank, wherever user code keeps it.

Profiling and the check of the loss run the step beforehand; these runs must not count.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlres import PipelinePlan
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Classifier, batches, trainer_for


@dataclass
class Annealer:
    """An object that counts its calls, and keeps scales in a nested dict."""

    calls: int = 0
    memory: dict[str, Any] = field(default_factory=lambda: {"deep": {"scales": {}}})

    def scale(self) -> float:
        self.calls += 1
        self.memory["deep"]["scales"][self.calls] = 0.9**self.calls
        return self.memory["deep"]["scales"][self.calls]


class Criterion(nn.Module):
    """A loss with a counter and a buffer."""

    warmth: Tensor

    def __init__(self, warms: bool = True) -> None:
        super().__init__()
        self.calls, self.warms = 0, warms
        self.register_buffer("warmth", torch.zeros(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.warms:
            self.warmth += 1.0
        return F.cross_entropy(out * (1 + 1 / self.calls) * (1 + self.warmth / 9), target)


class CounterCallback(Callback):
    """A callback with a counter that the step changes."""

    def __init__(self) -> None:
        self.seen = 0


class CallLogger(Logger):
    """A logger that keeps its calls. The test compares only those of rank 0."""

    name = version = "calls"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @property
    def experiment(self) -> Any:
        return self

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_text(self, key: str, texts: list[str]) -> None:
        self.calls.append(f"{key} {texts}")

    def add_scalar(self, tag: str, value: Any) -> None:
        self.calls.append(f"{tag} {float(value):.4f}")


class ManyStates(Classifier):
    """A model that keeps state in many kinds of places; the loss depends on every kind.

    Args:
        growing: Also keep and print what differs between the micro-batches of a step, such as the
            loss. "auto" then chooses GPipe, which runs the step once.
    """

    calls = 0

    def __init__(self, growing: bool) -> None:
        super().__init__()
        self._steps, self.annealer, self.criterion = 0, Annealer(), Criterion(growing)
        self.loose, self.table = [Criterion()], {"sizes": {"last": 0}}
        self.window: deque[int] = deque([0], maxlen=3)
        self.counter, self.by_kind = Counter[str](), defaultdict(int)
        self.array, self.nested = np.zeros(2), (torch.zeros(2), {"t": torch.zeros(1)})
        self.generator, self.py = torch.Generator().manual_seed(5), random.Random(5)
        self.rng = np.random.default_rng(5)
        self.seen: set[int] = set()
        self.growing = growing

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._steps += 1
        self.table["sizes"]["last"] += 1
        self.counter["steps"] += 1
        self.by_kind["steps"] += 2
        self.array += 1.0
        self.nested[1]["t"].add_(1.0)
        noise = float(torch.rand((), generator=self.generator)) + self.py.random()
        noise += float(self.rng.random())
        out = self.net(batch[0])
        loss = self.criterion(out, batch[1]) * self.annealer.scale() + self.loose[0](out, batch[1])
        counter = next(c for c in self.trainer.callbacks if isinstance(c, CounterCallback))  # type: ignore[attr-defined]
        counter.seen += 1
        if self.trainer.is_global_zero and self.trainer.world_size == 1:
            self.by_kind["zero"] += 1
        if self.growing:
            self.window.append(self._steps)
            self.seen.add(self._steps)
            self.table["loss"] = loss.detach()
            self.annealer.memory["losses"] = [float(loss)]
            print(f"step {self._steps}: {float(loss):.4f}")
            self.print(f"printed {self._steps}")
            logging.getLogger("many_states").warning("step %d", self._steps)
            assert self.logger is not None
            self.logger.log_text("step", [str(self._steps)])  # type: ignore[attr-defined]
            self.logger.experiment.add_scalar("loss", loss)  # type: ignore[attr-defined]
        self.log("loss", loss)
        return loss * (1 + noise)

    def on_train_batch_end(self, *args: Any) -> None:
        counter = next(c for c in self.trainer.callbacks if isinstance(c, CounterCallback))  # type: ignore[attr-defined]
        self.observed += [
            *(self._steps, self.annealer.calls, self.criterion.calls, float(self.criterion.warmth)),
            *(self.loose[0].calls, float(self.loose[0].warmth), self.table["sizes"]["last"]),
            *(self.counter["steps"], self.by_kind["steps"], self.by_kind["zero"]),
            *(float(self.array.sum()), float(self.nested[1]["t"]), counter.seen),
            *(len(self.annealer.memory["deep"]["scales"]), float(sum(self.window))),
            float(torch.rand((), generator=self.generator)),
            *(self.py.random(), float(self.rng.random()), len(self.seen)),
            *(float(self.table.get("loss", 0.0)), *self.annealer.memory.get("losses", ())),  # type: ignore[arg-type]
        ]


@dataclass
class Outcome:
    """The results of a run."""

    schedule: str
    observed: list[float]
    weights: list[float]
    printed: list[str]
    logger_calls: list[str]
    num_messages: int


def fit(context: RankContext | None, growing: bool, schedule: str) -> Outcome:
    seed_everything(3, verbose=False)
    model, logger, lines = ManyStates(growing), CallLogger(), []
    options: dict[str, Any] = {"plan": None, "stages": context.world_size} if context else {}
    trainer = trainer_for(
        context, callbacks=[CounterCallback()], logger=logger, schedule=schedule, **options
    )
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("many_states").addHandler(handler)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            trainer.fit(model, batches())
    finally:
        logging.getLogger("many_states").removeHandler(handler)
    return Outcome(
        str(getattr(trainer.strategy, "schedule", "")),
        model.observed,
        [float(p.detach().double().sum()) for p in model.parameters() if not p.is_meta],
        [line for line in text.getvalue().splitlines() if line.startswith(("step", "printed"))],
        logger.calls,
        len(lines),
    )


def outcomes_of_all_runs(context: RankContext) -> dict[str, tuple[Outcome, Outcome]]:
    cases = [(False, "auto"), (False, "gpipe"), (True, "auto"), (True, "gpipe")]
    plain = {growing: fit(None, growing, "auto") for growing in (False, True)}
    return {
        f"growing={growing} {schedule}": (plain[growing], fit(context, growing, schedule))
        for growing, schedule in cases
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_state_changes_as_often_as_on_a_single_device(pool: RankPool, ranks: int) -> None:
    by_rank = pool.run(outcomes_of_all_runs, ranks)
    for rank, outcomes in enumerate(by_rank):
        for name, (plain, outcome) in outcomes.items():
            assert outcome.observed == pytest.approx(plain.observed, rel=1e-4), name
            assert outcome.weights == pytest.approx(plain.weights, rel=1e-4, abs=1e-5), name
            assert outcome.printed == (plain.printed if rank == 0 else []), name
            # The messages appear on the last stage, which the planner may place on any rank.
            assert (
                sum(outcomes_of_rank[name][1].num_messages for outcomes_of_rank in by_rank)
                == plain.num_messages
            ), name
            if rank == 0:
                assert outcome.logger_calls == plain.logger_calls, name
            if schedule_of(name) == "auto":
                assert outcome.schedule == ("gpipe" if "growing=True" in name else "1f1b")


def schedule_of(name: str) -> str:
    return name.partition(" ")[2]


class PrintsText(Classifier):
    """A model that prints before and after the module's call: the loss, or only the batch's
    number."""

    def __init__(self, values: bool) -> None:
        super().__init__()
        self.values = values

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        print(f"step {batch_idx}")
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        print(
            f"step {batch_idx}: {float(loss):.3f}" if self.values else f"step {batch_idx} is over"
        )
        return loss


def printed_by(context: RankContext | None, values: bool, **options: Any) -> tuple[str, list[str]]:
    trainer = trainer_for(context, **options)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        trainer.fit(PrintsText(values), batches())
    lines = [line for line in text.getvalue().splitlines() if line.startswith("step")]
    return str(getattr(trainer.strategy, "schedule", "")), lines


def printed_by_all_runs(context: RankContext) -> list[Any]:
    replicas = {"stages": 1, "plan": PipelinePlan(replicas=((0,), (1,)), split=(5,))}
    return [
        (printed_by(None, values)[1], printed_by(context, values, **options))
        for values in (True, False)
        for options in ({}, replicas, {"schedule": "gpipe", **replicas})
    ]


def test_step_prints_the_text_of_a_single_device_once(pool: RankPool) -> None:
    for rank, outcomes in enumerate(pool.run(printed_by_all_runs, 2)):
        for plain, (_, lines) in outcomes:
            assert lines == (plain if rank == 0 else [])
        schedules = [schedule for _, (schedule, _) in outcomes]
        assert schedules == ["gpipe", "gpipe", "gpipe", "1f1b", "1f1b", "gpipe"]
