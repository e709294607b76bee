"""The benchmark of convergence: its checks, and the plot of its curves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import convergence
from benchmarks.support import convergence_plot
from benchmarks.support.convergence_plot import ONE_BIT_ADAM, PLAIN, STYLES, step_seconds

STEPS = 8


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def regression() -> convergence.Task:
    """Return a task of a few parameters."""
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)

    def batch(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 1000 + step * 10 + rank)
        chosen = torch.randint(64, (8,), generator=generator)
        return x[chosen], y[chosen]

    return convergence.Task(
        make=lambda: nn.Linear(6, 1),
        batch=batch,
        loss=lambda model, data: functional.mse_loss(model(data[0]), data[1]),
        validation=lambda: (x, y),
        steps=STEPS,
        lr={"sgd": 0.01, "adamw": 1e-3},
    )


def test_every_algorithm_is_checked_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(steps: int) -> convergence.Task:
        raise ImportError("No module named 'sklearn'")

    monkeypatch.setattr(convergence, "digits_task", missing)
    monkeypatch.setattr(convergence, "gpt_task", lambda steps: regression())
    saved, plot = tmp_path / "curves.json", tmp_path / "losses.svg"
    assert convergence.main(["--quick", "--curves", str(saved), "--plot", str(plot)]) == 0
    printed = capsys.readouterr()
    assert "Install scikit-learn" in printed.err
    line, curves = json.loads(printed.out.splitlines()[-1]), json.loads(saved.read_text())
    assert curves.keys() == {"gpt"}
    for optimizer, runs in convergence.RUNS.items():
        for name in runs:
            assert len(curves["gpt"][optimizer][name]) == STEPS
            assert len(line["raw"][f"gpt, {optimizer}, {name}"]) == 2
            key = f"gpt, {optimizer}, {name}: excess over margin"
            assert (key in line["checks"]) is (name != PLAIN)
    svg = plot.read_text()
    convergence_plot.main(str(saved), str(plot))
    assert plot.read_text() == svg
    texts = "".join(ElementTree.fromstring(svg).itertext())
    for label in (*STYLES, "byte-level GPT, SGD: time", "simulated, 4 hosts"):
        assert label in texts


def test_one_bit_adam_is_adamw_in_its_warm_up() -> None:
    task = regression()
    plain, ours = (
        convergence.train(task, "adamw", convergence.RUNS["adamw"][name], seed=0).training
        for name in (PLAIN, ONE_BIT_ADAM)
    )
    steps = int(convergence_plot.WARM_UP_PART * STEPS)
    assert ours[: steps + 1] == plain[: steps + 1]
    assert ours[steps + 1 :] != plain[steps + 1 :]


@pytest.mark.parametrize(("excess", "converges"), [(0.9, True), (1.1, False)])
def test_a_control_must_fail_where_an_algorithm_must_not(excess: float, converges: bool) -> None:
    assert convergence.outcome("onebit", excess).ok is converges
    for name in (*convergence.CONTROLS, *convergence.MOMENTUM_CONTROLS):
        assert convergence.outcome(name, excess).ok is not converges


def test_a_diverged_run_has_a_finite_loss() -> None:
    for loss in (math.nan, math.inf, 1e30):
        assert convergence.recorded(torch.tensor(loss)) == 1000.0
    assert convergence.recorded(torch.tensor(0.5)) == 0.5


def test_fewer_bits_take_less_time() -> None:
    seconds = [step_seconds(name)(99, 100) for name in (PLAIN, "fp16", "int8", "tbq", "onebit")]
    assert seconds == sorted(seconds, reverse=True)
    ours = step_seconds(ONE_BIT_ADAM)
    assert ours(0, 100) == seconds[0]
    # Its momentum is ready only after backward.
    assert seconds[-1] < ours(99, 100) < seconds[0]
