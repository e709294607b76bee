"""Tests of `dlres plan`: on started ranks, followed by `dlres fit`, and for a cluster file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dlres.cli.main import main
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.profile.ranks import rank_device
from tests.support.commands import CONFIG, TINY, assert_trained, run_command_in
from tests.support.rank_pool import RankContext, RankOutcome, RankPool
from tests.support.scripts import RunScript

CLUSTER = """
kinds:
  fast: {power: 1.0, memory: 24GiB}
  slow: {power: 0.25, memory: 8GiB}
hosts:
  - devices: [fast]
  - devices: [slow]
links:
  between_hosts: {bandwidth: 500Mbit/s, latency: 200us}
measured_on: fast
"""


def plan_for_a_cluster(
    pool: RankPool, directory: Path, run: Callable[..., int] = run_command_in
) -> RankOutcome:
    (directory / "cluster.yaml").write_text(CLUSTER)
    limit = "--trainer.strategy.init_args.memory_limit=10GiB"
    options = ("plan", f"--config={CONFIG}", "--cluster=cluster.yaml", *TINY, limit)
    (outcome,) = pool.run_expecting_errors(run, 1, str(directory), *options)
    return outcome


def test_a_plan_for_a_remote_cluster(pool: RankPool, tmp_path: Path) -> None:
    outcome = plan_for_a_cluster(pool, tmp_path)
    assert outcome.value == 0, outcome
    assert "Pipeline plan" in outcome.output
    assert "Predicted step" in outcome.output
    plan = PipelinePlan.load(tmp_path / "plan.json")
    assert plan.is_measured
    assert plan.powers == (1.0, 0.25)
    assert plan.cluster is not None
    # The least of the limits of the file and of the strategy counts.
    assert [device.memory_limit for device in plan.cluster.devices] == [10 << 30, 8 << 30]
    assert plan.cluster.link(0, 1).bytes_per_second == 500e6 / 8


def run_with_little_memory(context: RankContext, directory: str, *options: str) -> int:
    """Run `dlres` in a directory, as a rank that sees little free memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_device, "available_bytes", lambda: 1000)
        return run_command_in(context, directory, *options)


def test_a_machine_without_memory_for_a_layer_is_refused(pool: RankPool, tmp_path: Path) -> None:
    outcome = plan_for_a_cluster(pool, tmp_path, run_with_little_memory)
    assert outcome.value == 2, outcome
    assert "layer 'net.0' cannot be measured here" in outcome.output
    assert "more micro-batches" in outcome.output
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.exhaustive
def test_plan_starts_its_ranks(run_script: RunScript, tmp_path: Path) -> None:
    options = (f"--config={CONFIG}", *TINY, "--out=p.json")
    # The command takes the place of a script: `python -m lightning_dlres plan`.
    result = run_script(Path("plan"), *options, launcher=("-m", "lightning_dlres"), cwd=tmp_path)
    assert result.returncode == 0, result.output
    assert PipelinePlan.load(tmp_path / "p.json").world_size == 2


def test_fit_trains_with_a_plan_that_ranks_made(pool: RankPool, tmp_path: Path) -> None:
    options = (f"--config={CONFIG}", *TINY)
    outcomes = pool.run_expecting_errors(
        run_command_in, 2, str(tmp_path), "plan", *options, "--out=p.json"
    )
    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes
    plan = PipelinePlan.load(tmp_path / "p.json")
    assert plan.is_measured
    assert plan.world_size == 2
    with_plan = ("--trainer.strategy.init_args.plan=p.json",)
    outcomes = pool.run_expecting_errors(
        run_command_in, 2, str(tmp_path), "fit", *options, *with_plan
    )
    assert_trained(outcomes, tmp_path)
    assert "profiling" not in outcomes[0].output


def test_bad_options_end_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "missing" / "plan.json"
    for option, words in {
        f"--out={out}": "--out must be a file in an existing folder",
        "--trainer.strategy.init_args.microbatches=-1": "microbatches must be",
    }.items():
        assert main(["plan", f"--config={CONFIG}", option]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kinds: {}\nhosts: []\n", "at least one device"),
        ("kinds: {a: {power: 1}}\nhosts: [{devices: [b]}]\n", "unknown kinds ['b']"),
        ("kinds: {a: {power: 0}}\nhosts: [{devices: [a]}]\n", "power must be positive"),
        ("kinds: {a: {powr: 1}}\nhosts: []\n", "must be a file with kinds"),
        (
            "kinds: {a: {power: 1}}\nhosts: [{devices: [a, a]}]\n"
            "links: {within_host: {bandwidth: fast}}\n",
            "bandwidth",
        ),
    ],
)
def test_a_bad_cluster_file_is_refused(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert main(["plan", f"--config={CONFIG}", f"--cluster={path}"]) == 2
    assert words in capsys.readouterr().err
    assert main(["plan", f"--config={CONFIG}", f"--cluster={tmp_path / 'nowhere.yaml'}"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err
