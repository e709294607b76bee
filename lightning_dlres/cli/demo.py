"""Command `dlres demo`: show the strategy `dlres_hetero_pipe` on one machine in two minutes.

Three CPU processes of different speeds train a GPT on real text. The speeds are emulated: a slower
process sleeps after its computations. All ranks run the same code; only rank 0 prints.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from rich.console import Console

from lightning_dlres.callbacks import ResourceReport
from lightning_dlres.cli.progress import StepProgress
from lightning_dlres.core.tables import render
from lightning_dlres.demos.byte_gpt import ByteGPT
from lightning_dlres.demos.source_text import SourceTextDataModule
from lightning_dlres.pipeline.plan.plan import PipelinePlan, consecutive_replicas, even_split
from lightning_dlres.strategies import HeteroPipeStrategy

# Relative speeds of the ranks, which are emulated by sleeping. A sleeping rank uses no CPU, so all
# together need less than two cores.
SPEEDS = (0.25, 0.5, 1.0)
# Micro-batches of a step.
MICROBATCHES = 12
# Context of the model, in bytes.
CONTEXT = 128
# Maximum difference of the validation losses with and without the pipeline, in nats per byte.
LOSS_TOLERANCE = 1e-4

HEADLINE = """\
Three devices train one GPT as a pipeline. They are CPU processes with emulated speeds: {speeds}.
The model has {depth} blocks and {parameters:.2f} million parameters. It learns bytes of the source
of Python's standard library. This takes about {duration}.
"""
PREDICTION = """\
Predicted time of a step: {seconds:.3f} s; with the even split {even:.3f} s (ratio {ratio:.2f}).
"""
RESULTS = """\
Checkpoint: {checkpoint} (an ordinary Lightning checkpoint)
Plan:       {plan} (to use it: HeteroPipeStrategy(plan={plan!r}))
Report:     {report}, with timeline.png (the work of each device) and trace.json for
            https://ui.perfetto.dev
Next:       dlres fit --config examples/configs/hetero_pipe.yaml
In your own script: Trainer(strategy="dlres_hetero_pipe", accelerator="cpu", devices=2)"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the demo's model and training.

    Attributes:
        width: Width of the model.
        depth: Number of blocks of the model.
        batch_size: Number of windows in a batch.
        steps: Number of training steps with the measured split.
        trial_steps: Number of training steps with the even split.
        validation_batches: Number of batches in each validation.
        text: Maximum size of the text, such as "4MiB".
        duration: Approximate duration of the demo, for the headline.
    """

    width: int
    depth: int
    batch_size: int
    steps: int
    trial_steps: int
    validation_batches: int
    text: str
    duration: str


FULL = Size(
    width=96,
    depth=8,
    batch_size=24,
    steps=150,
    trial_steps=12,
    validation_batches=8,
    text="4MiB",
    duration="two minutes",
)
QUICK = Size(
    width=32,
    depth=5,
    batch_size=12,
    steps=8,
    trial_steps=6,
    validation_batches=2,
    text="1MiB",
    duration="twenty seconds",
)
# Maximum time of each training without --steps. A slow machine then trains fewer steps.
MAX_TRAINING_TIME = timedelta(seconds=100)


def demo(options: Sequence[str]) -> int:
    """Run the demo and return its exit status."""
    settings = _parser().parse_args(options)
    size = QUICK if settings.quick else FULL
    max_training_time = MAX_TRAINING_TIME if settings.steps is None else None
    size = replace(size, steps=settings.steps or size.steps)
    _prepare_process()
    return _Demo(size, max_training_time, settings.out).run()


class _Demo:
    """The demo: one method per part, and `run`, which calls them in order."""

    def __init__(self, size: Size, max_training_time: timedelta | None, out: Path) -> None:
        self.size, self.max_training_time, self.out = size, max_training_time, out
        self.checkpoint, self.plan_file = out / "gpt.ckpt", out / "plan.json"
        self.report = ResourceReport(out)
        self.data = SourceTextDataModule(CONTEXT, size.batch_size, size.text)

    def run(self) -> int:
        self.introduce()
        plan = self.measure()
        even = msgspec.structs.replace(
            plan,
            replicas=consecutive_replicas(plan.world_size, plan.stages),
            split=even_split(len(plan.layers), plan.stages),
            recompute=(),
        )
        self.show(plan, even)
        even_seconds = self.try_even_split(even)
        loss, seconds = self.train(plan)
        _say(
            f"Median time of a step: {seconds:.3f} s; with the even split {even_seconds:.3f} s. "
            f"The measured split is {even_seconds / seconds:.1f} times as fast.\n"
        )
        is_same = self.compare_with_plain_trainer(loss) if _is_rank_zero() else True
        return 0 if is_same else 1

    def introduce(self) -> None:
        """Print the headline."""
        parameters = sum(p.numel() for p in self.model().parameters()) / 1e6
        speeds = ", ".join(f"{speed:g}" for speed in SPEEDS)
        size = self.size
        _say(
            HEADLINE.format(
                speeds=speeds, depth=size.depth, parameters=parameters, duration=size.duration
            )
        )

    def measure(self) -> PipelinePlan:
        """Profile the layers on every rank without training; return the plan."""
        _say("Starting the processes and timing every layer on each of them ...\n")
        strategy = self.strategy(stages=len(SPEEDS))
        self.trainer(strategy, 0).fit(self.model(), self.data)
        assert strategy.plan is not None
        return strategy.plan

    def show(self, plan: PipelinePlan, even: PipelinePlan) -> None:
        """Print the measured split beside the even one, and the predicted times of a step."""
        rows = [
            [
                stage,
                f"rank {rank}",
                SPEEDS[rank],
                f"{plan.powers[rank]:.2f}",
                plan.split[stage],
                even.split[even.position(rank)[1]],
                f"{plan.busy_seconds(stage):.2f} s",
                f"{even.busy_seconds(even.position(rank)[1]):.2f} s",
            ]
            for stage, rank in enumerate(plan.replicas[0])
        ]
        columns = ["stage", "device", "speed", "measured power"]
        columns += ["layers", "layers if even", "compute time per step", "compute time if even"]
        _say(render("The layers that each device gets, beside an even split", columns, rows))
        assert plan.predicted_seconds is not None
        assert plan.even_seconds is not None
        ratio = plan.even_seconds / plan.predicted_seconds
        _say(PREDICTION.format(seconds=plan.predicted_seconds, even=plan.even_seconds, ratio=ratio))

    def try_even_split(self, even: PipelinePlan) -> float:
        """Train a few steps with the even split; return the median time of a step in seconds."""
        progress = self.progress("Even split", self.size.trial_steps)
        trainer = self.trainer(self.strategy(plan=even), self.size.trial_steps, progress)
        trainer.fit(self.model(), self.data)
        return progress.median_seconds

    def train(self, plan: PipelinePlan) -> tuple[float, float]:
        """Train with the measured split.

        Returns:
            The validation loss in nats per byte, and the median time of a step in seconds.
        """
        model, progress = self.model(), self.progress("Measured split", self.size.steps)
        strategy = self.strategy(plan=plan)
        trainer = self.trainer(strategy, self.size.steps, progress, self.report)
        before = trainer.validate(model, self.data, verbose=False)[0]
        trainer.fit(model, self.data)
        trainer.save_checkpoint(self.checkpoint)
        if trainer.is_global_zero:
            self.plan_file.write_text(plan.to_json())
        after = trainer.validate(model, self.data, verbose=False)[0]
        if self.max_training_time is not None and len(progress.seconds) < self.size.steps:
            _say(f"Stopped after {self.max_training_time.seconds} s to keep the demo short.")
        if self.report.line is not None:
            _say(self.report.line)
        _say(
            "Bits per byte of validation text: "
            f"{before['val_bits_per_byte']:.2f} before, {after['val_bits_per_byte']:.2f} after."
        )
        return after["val_loss"], progress.median_seconds

    def compare_with_plain_trainer(self, loss: float) -> bool:
        """Validate the checkpoint in a plain Trainer; return True if its loss is the same.

        Args:
            loss: Validation loss of the pipeline, in nats per byte.
        """
        trainer = self.trainer("auto", 0, devices=1)
        model = ByteGPT.load_from_checkpoint(self.checkpoint)
        plain = trainer.validate(model, self.data, verbose=False)[0]["val_loss"]
        difference = abs(plain - loss)
        is_same = difference <= LOSS_TOLERANCE
        _say(
            "The checkpoint in a plain Trainer, on one device and without the strategy:\n"
            f"  validation loss of the pipeline  {loss:.6f}\n"
            f"  validation loss of plain Trainer {plain:.6f}\n"
            f"  difference {difference:.1e}: "
            f"{'within' if is_same else 'ABOVE'} the tolerance of {LOSS_TOLERANCE:.0e}\n"
        )
        if is_same:
            report = self.out / "report.md"
            _say(
                RESULTS.format(checkpoint=self.checkpoint, plan=str(self.plan_file), report=report)
            )
        else:
            print(
                f"dlres: the validation losses must differ by at most {LOSS_TOLERANCE:.0e}, got "
                f"{difference:.1e}. Report this with {self.plan_file}.",
                file=sys.stderr,
            )
        return is_same

    def model(self) -> ByteGPT:
        """Return a new model; all have the same initial parameters."""
        seed_everything(0, verbose=False)
        return ByteGPT(self.size.width, self.size.depth, context=CONTEXT)

    def strategy(self, **options: Any) -> HeteroPipeStrategy:
        """Return a new strategy with emulated speeds and these options."""
        return HeteroPipeStrategy(microbatches=MICROBATCHES, emulate_speed=SPEEDS, **options)

    def progress(self, title: str, steps: int) -> StepProgress:
        return StepProgress(title, steps, Console())

    def trainer(
        self,
        strategy: HeteroPipeStrategy | str,
        steps: int,
        *callbacks: Callback,
        devices: int = len(SPEEDS),
    ) -> Trainer:
        return Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            max_steps=steps,
            max_time=self.max_training_time,
            limit_val_batches=self.size.validation_batches,
            num_sanity_val_steps=0,
            gradient_clip_val=1.0,
            callbacks=list(callbacks),
            default_root_dir=self.out,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlres demo",
        description="Train a small GPT on three CPU processes of different, emulated speeds.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("dlres_demo"),
        metavar="DIR",
        help="directory for checkpoint, plan and report (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=_steps, metavar="N", help=f"training steps (default: {FULL.steps})"
    )
    parser.add_argument("--quick", action="store_true", help="use a tiny model and a few steps")
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _prepare_process() -> None:
    """Silence Lightning, and compute with one thread."""
    # The demo prints its progress itself.
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # One thread per process, so that the emulated speeds are comparable.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _is_rank_zero() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _say(text: str) -> None:
    if _is_rank_zero():
        print(text, flush=True)
