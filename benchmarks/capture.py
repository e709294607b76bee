"""Training of the listed models as pipelines, against plain training, beside torch's `pipeline()`.

    python -m benchmarks.capture                         all models, two stages
    python -m benchmarks.capture --quick                 a covering dozen
    python -m benchmarks.capture --models gpt2,t5 --stages 3 --schedule gpipe
    python -m benchmarks.capture --unnamed --without-peer     our strategy chooses what is cut
    python -m benchmarks.capture --table docs/capture_table.md

Each model of `benchmarks.support.capture_models` is trained for 20 steps: plainly by a Trainer on
one device, by `HeteroPipeStrategy`, and by `torch.distributed.pipelining.pipeline()`. Losses and
weights must be those of plain training. Each training runs in processes of its own with a deadline.
transformers and torchvision are needed for two of the three families; `make bench NAME=capture`
installs them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.support.capture.libraries import is_installed
from benchmarks.support.capture.runs import OURS, PEER, PLAIN, Run, Runner
from benchmarks.support.capture.tables import (
    SUMMARY_COLUMNS,
    CaseRow,
    by_family,
    counts,
    document,
    summary_rows,
)
from benchmarks.support.capture.task import Task
from benchmarks.support.capture.verdicts import DIFFERS, EQUAL, NO_REFERENCE, Verdict, judge
from benchmarks.support.capture_models.names import NAMES
from benchmarks.support.report import at_least, conclude, hardware, table

NAME = "capture"
# Share of equal cases that the project aims at.
TARGET = 0.9
# Deadline of a training, in seconds; only a hang reaches it.
DEADLINE_SECONDS = 180.0
# Models that together have the structures of the list: skips, encoder and decoder, tied weights,
# images, sound, two towers, BatchNorm, and recurrent layers.
QUICK = (
    *("gpt2", "llama", "gemma3_text", "bert", "t5", "whisper", "clip", "vit"),
    *("resnet18", "swin_t", "unet", "lstm_classifier"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, and return the exit status: 2 if no model can be made, else 0."""
    chosen = _parsed(argv)
    names = selected(chosen)
    for family in dict.fromkeys(names.values()):
        if not is_installed(family):
            print(f"left out, because {family} is not installed: {family}", file=sys.stderr)
    names = {name: family for name, family in names.items() if is_installed(family)}
    if not names:
        print("no model can be made. Run: make bench NAME=capture", file=sys.stderr)
        return 2

    def measure(case: tuple[str, str]) -> CaseRow:
        row = measured(runner, *case, chosen)
        report(row, with_peer=chosen.peer_errors)
        return row

    with Runner() as runner, ThreadPoolExecutor(chosen.jobs) as pool:
        rows = list(pool.map(measure, names.items()))
    print(f"\n{table(SUMMARY_COLUMNS, summary_rows(rows))}", flush=True)
    if chosen.table is not None:
        chosen.table.write_text(document(rows, _settings(chosen)))
    total = counts(rows)
    raw = {
        "stages": chosen.stages,
        "schedule": chosen.schedule,
        "even": chosen.even,
        "unnamed": chosen.unnamed,
        "steps": chosen.steps,
        "all": total,
        "by_family": by_family(rows),
        "cases": {
            row.name: {
                "ours": _without_report(row.ours),
                "peer": _without_report(row.peer),
            }
            for row in rows
        },
    }
    checks = {"share of equal cases": at_least(total["ours_equal_share"], TARGET)}
    conclude(NAME, checks, raw)
    return 0


def selected(chosen: argparse.Namespace) -> dict[str, str]:
    """Return the families of the chosen cases, by name.

    Raises:
        SystemExit: If a name is unknown.
    """
    families = {name: family for family, names in NAMES.items() for name in names}
    names = list(families)
    if chosen.models:
        names = chosen.models.split(",")
        if unknown := [name for name in names if name not in families]:
            raise SystemExit(f"--models must name listed models, got {unknown}.")
    elif chosen.quick:
        names = list(QUICK)
    if chosen.family:
        names = [name for name in names if families[name] == chosen.family]
    return {name: families[name] for name in names}


def measured(runner: Runner, name: str, family: str, chosen: argparse.Namespace) -> CaseRow:
    """Train a case plainly and by both contenders, and return the verdicts."""
    with tempfile.TemporaryDirectory(prefix="dlres-capture-") as directory:
        task = Task(
            name=name,
            family=family,
            directory=directory,
            stages=chosen.stages,
            schedule=chosen.schedule,
            is_even=chosen.even,
            is_named=not chosen.unnamed,
            steps=chosen.steps,
        )
        plain = runner.run(PLAIN, task, 1, chosen.deadline)
        verdicts = {}
        for contender in (OURS, PEER):
            if contender == PEER and chosen.without_peer:
                verdicts[contender] = Verdict(NO_REFERENCE, "not run")
                continue
            run = runner.run(contender, task, chosen.stages, chosen.deadline)
            verdicts[contender] = judge(plain, run)
            if contender == OURS and verdicts[OURS].kind == DIFFERS:
                verdicts[OURS] = with_rounding(verdicts[OURS], runner, plain, run, task, chosen)
        return CaseRow(name, family, verdicts[OURS], verdicts[PEER])


def with_rounding(
    verdict: Verdict,
    runner: Runner,
    plain: Run,
    run: Run,
    task: Task,
    chosen: argparse.Namespace,
) -> Verdict:
    """Return a verdict with the difference that micro-batches alone make.

    Training on micro-batches rounds differently. Some models amplify this within 20 steps. Then
    plain training on micro-batches differs from that on batches, too, and the pipeline equals it.
    """
    # In a directory of its own: the weights of the other plain training are still needed.
    directory = Path(task.directory, "cut")
    directory.mkdir()
    cut_task = replace(task, directory=str(directory), is_cut=True)
    cut = runner.run(PLAIN, cut_task, 1, chosen.deadline)
    alone, ours = judge(plain, cut), judge(cut, run)
    detail = (
        f"{verdict.detail}; plain training on micro-batches {alone.text()}; ours to that: "
        f"{ours.text()}"
    )
    return replace(verdict, detail=detail)


def report(row: CaseRow, *, with_peer: bool) -> None:
    """Print the verdicts on a case, and the whole errors of ours, and of the peer if asked for."""
    text = f"{row.name}: {row.layers()}; ours {row.ours.text()}; peer {row.peer.text()}"
    for verdict in (row.ours, row.peer) if with_peer else (row.ours,):
        if verdict.kind != EQUAL and verdict.report:
            text += "\n" + textwrap.indent(verdict.report, "    ")
    print(text, flush=True)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{NAME}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", help="names of models, separated by commas")
    parser.add_argument("--family", choices=list(NAMES), help="only this family")
    parser.add_argument("--quick", action="store_true", help="a covering dozen of models")
    parser.add_argument("--stages", type=int, default=2, help="stages and processes")
    parser.add_argument(
        "--schedule", choices=("auto", "gpipe", "1f1b"), default="auto", help="schedule of ours"
    )
    parser.add_argument(
        "--even", action="store_true", help="cut ours where the peer is cut, not by a plan"
    )
    parser.add_argument(
        "--unnamed", action="store_true", help="without module=, as our strategy chooses"
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--without-peer", action="store_true", help="train only plainly and ours")
    parser.add_argument("--peer-errors", action="store_true", help="print the peer's tracebacks")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_SECONDS, help="seconds for each training"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the docs page")
    return parser.parse_args(argv)


def _settings(chosen: argparse.Namespace) -> str:
    libraries = ", ".join(
        f"{name} {found}"
        for name in ("torch", "lightning", "transformers", "torchvision")
        if (found := _version(name))
    )
    return (
        f"{date.today()} · {hardware()} · {libraries} · {chosen.stages} stages, "
        f"schedule `{chosen.schedule}`, {'even cuts' if chosen.even else 'cuts by the plan'}, "
        f"{'what is cut chosen by the strategy' if chosen.unnamed else 'the whole model cut'}, "
        f"{chosen.steps} steps"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _without_report(verdict: Verdict) -> dict[str, object]:
    return {key: value for key, value in asdict(verdict).items() if key != "report"}


if __name__ == "__main__":
    raise SystemExit(main())
