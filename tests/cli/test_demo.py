"""Test of a small `dlres demo`: three ranks complete it, and its output appears once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_dlres import PipelinePlan
from lightning_dlres.cli.demo import SPEEDS, demo
from lightning_dlres.demos.byte_gpt import ByteGPT
from tests.support.scripts import StartScript

OUTPUT = [
    r"^Three devices train one GPT",
    r"^\| stage \| device .* measured power",
    r"^Predicted time of a step: [\d.]+ s; with the even split [\d.]+ s \(ratio [\d.]+\)",
    r"^Even split$",
    r"^ +6/6 steps, [\d.]+ s/step, [\d.]+ bits/byte$",
    r"^Measured split$",
    r"^ +8/8 steps, [\d.]+ s/step, [\d.]+ bits/byte$",
    r"^dlres: step .* measured .* predicted; bubble .* as the simulated even split",
    r"^Bits per byte .*: 8\.\d\d before, 7\.\d\d after\.$",
    r"^Median time of a step: [\d.]+ s; with the even split [\d.]+ s\.",
    r"validation loss of the pipeline",
    r"difference .*: within the tolerance of 1e-04$",
    r"^Checkpoint: +out/gpt\.ckpt",
    r"^Plan: +out/plan\.json",
    r"^Report: +out/report\.md",
]


def test_the_demo_prints_all_its_output_once(start_script: StartScript, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    # The command takes the place of a script: `python -m lightning_dlres demo`.
    launcher = ("-m", "lightning_dlres")
    handle = start_script(Path("demo"), "--quick", "--out", "out", launcher=launcher, cwd=work)
    assert handle.wait() == 0, handle.output()
    handle.wait_for_no_children()
    lines = iter(handle.output().splitlines())
    # Each search begins after the line of the one before, so the order of lines counts.
    for regex in OUTPUT:
        assert any(re.search(regex, line) for line in lines), f"{regex!r} in:\n{handle.output()}"
    assert handle.output().count("Three devices") == 1
    assert "warning" not in handle.output().lower()
    assert {p.relative_to(work).as_posix() for p in work.rglob("*") if p.is_file()} == {
        "out/gpt.ckpt",
        "out/plan.json",
        "out/report.md",
        "out/timeline.png",
        "out/trace.json",
    }
    plan = PipelinePlan.load(work / "out/plan.json")
    assert plan.stages == len(plan.powers) == len(SPEEDS)
    model = ByteGPT.load_from_checkpoint(work / "out/gpt.ckpt")
    assert len(model.net) == sum(plan.split)


@pytest.mark.parametrize("steps", ["0", "many"])
def test_an_invalid_number_of_steps_is_refused(
    steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo(["--steps", steps])
    assert f"must be a whole number of at least 1, got '{steps}'" in capsys.readouterr().err
