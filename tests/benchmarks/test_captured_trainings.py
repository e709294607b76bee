"""Models of libraries train at 2, 3 and 4 stages under all schedules as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.support.capture.libraries import is_installed
from benchmarks.support.capture.runs import OURS, PLAIN, Runner
from benchmarks.support.capture.task import Task
from benchmarks.support.capture.verdicts import EQUAL, REFUSED, judge
from benchmarks.support.capture_models.names import NAMES

pytestmark = pytest.mark.exhaustive
FAMILIES = ("transformers", "torchvision")
# Models that are refused at the start, with the reason in docs/capture_table.md.
UNCUT = ("rwkv", "segformer", "dpt")
# Of two schedules, models with a loss of their own train under GPipe only: "auto" finds that.
PLACES = ((2, "auto"), (3, "gpipe"), (4, "auto"))
STEPS, SECONDS = 4, 120.0


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as started:
        yield started


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in FAMILIES for name in NAMES[family]]
)
def test_a_model_of_a_library_trains_at_any_number_of_stages(
    runner: Runner, tmp_path: Path, family: str, name: str
) -> None:
    if not is_installed(family):
        pytest.skip(f"{family} is not installed")
    common = Task(name=name, family=family, directory=str(tmp_path), is_even=True, steps=STEPS)
    plain = runner.run(PLAIN, common, 1, SECONDS)
    for stages, schedule in PLACES:
        task = replace(common, stages=stages, schedule=schedule)
        verdict = judge(plain, runner.run(OURS, task, stages, SECONDS))
        # Some of the models have fewer layers than four.
        has_too_few = verdict.kind == REFUSED and "at least one layer for each" in verdict.detail
        expected = REFUSED if name in UNCUT or (has_too_few and stages > 2) else EQUAL
        assert verdict.kind == expected, (stages, schedule, verdict.text(), verdict.report)
