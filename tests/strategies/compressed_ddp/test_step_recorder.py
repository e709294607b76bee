"""Steps are logged once each, also after the tracer has dropped older spans."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dlres.core.trace import Tracer
from lightning_dlres.strategies.compressed_ddp.step_recorder import StepRecorder


class Training:
    """Training without a model, whose steps send one message. A step has 5 spans.

    Args:
        capacity: Number of spans that the tracer keeps.
        interval: `log_every_n_steps` of the Trainer.

    Attributes:
        logged: Figures and step of each entry of the logger.
    """

    def __init__(self, capacity: int, interval: int) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.tracer = Tracer(capacity)
        self.recorder = StepRecorder(self.tracer)
        self.state: Any = SimpleNamespace(
            last_ready=0.0, steps=0, plan=None, plan_changes=(), synchroniser=None
        )
        logger = SimpleNamespace(log_metrics=lambda f, step: self.logged.append((f, step)))
        self.trainer = SimpleNamespace(
            log_every_n_steps=interval, is_global_zero=True, loggers=[logger], global_step=0
        )
        self.module: Any = SimpleNamespace(trainer=self.trainer)

    def step(self, nbytes: int, *, next_nbytes: int = 0, accumulates: bool = False) -> None:
        """Run a step.

        Args:
            nbytes: Bytes of its message.
            next_nbytes: Bytes of a message of the next step that arrives in this one; 0 for none.
            accumulates: True for a backward that does not synchronise, and so ends no step.
        """
        with self.recorder.forward():
            pass
        with self.recorder.backward(self.state, self.module):
            if accumulates:
                return
            number = self.state.steps
            self.state.last_ready, self.state.steps = time.perf_counter(), number + 1
            sizes = {"peer": 1, "nbytes": nbytes}
            with self.tracer.span("send", "transfer", step=number, raw_nbytes=nbytes, **sizes):
                pass
            if next_nbytes:
                sizes["nbytes"] = next_nbytes
                with self.tracer.span("receive", "transfer", step=number + 1, **sizes):
                    pass
        self.trainer.global_step += 1

    @property
    def megabytes(self) -> list[float]:
        """Logged megabytes on the wire, by entry."""
        return [figures["gradient_sync/wire_mb"] for figures, _ in self.logged]


@pytest.mark.parametrize("capacity", [5, 12, 1000])
def test_every_step_is_logged_once(capacity: int) -> None:
    training = Training(capacity, 1)
    for number in range(8):
        training.step(10**6 * number)
    numbers = list(range(8))
    # A tracer with room for one step drops spans from the second step on. The recorder then cannot
    # tell that the step in it is complete.
    assert training.megabytes == (numbers if capacity > 5 else numbers[:1])
    assert [step for _, step in training.logged] == numbers[: len(training.logged)]


def test_an_entry_is_the_mean_of_the_steps_since_the_last_one() -> None:
    training = Training(1000, 3)
    for number in range(7):
        training.step(10**6 * number)
    assert training.megabytes == [1, 4]
    assert [step for _, step in training.logged] == [2, 5]


def test_a_message_of_the_next_step_is_logged_with_it() -> None:
    training = Training(1000, 1)
    training.step(10**6, next_nbytes=5 * 10**6)
    training.step(2 * 10**6)
    assert training.megabytes == [1, 7]


def test_accumulated_batches_are_one_step() -> None:
    training = Training(1000, 1)
    training.step(0, accumulates=True)
    training.step(10**6)
    assert training.megabytes == [1]
    steps = [span for span in training.tracer.spans() if span.category == "step"]
    forwards = [span for span in training.tracer.spans() if span.name == "forward"]
    assert len(steps) == 1
    assert len(forwards) == 2
    assert steps[0].start_ns <= forwards[0].start_ns


def test_nothing_is_logged_without_an_interval_or_on_other_ranks() -> None:
    training = Training(1000, 0)
    training.step(1)
    training.trainer.log_every_n_steps, training.trainer.is_global_zero = 1, False
    training.step(1)
    assert not training.logged


def test_a_trainer_without_loggers_is_no_error() -> None:
    training = Training(1000, 1)
    training.trainer.loggers = []
    training.step(1)
