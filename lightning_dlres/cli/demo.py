"""`dlres demo`: the whole story of `dlres_hetero_pipe` on one machine, in about two minutes.

Three CPU processes of unlike speed train a GPT on real text. The speeds are emulated: a slower
process sleeps after it has computed, and so uses less of the CPU. Every rank runs this file from
top to bottom; rank 0 speaks.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from lightning_dlres.cli.byte_gpt import ByteGPT
from lightning_dlres.cli.progress import StepProgress
from lightning_dlres.cli.source_text import SourceTextDataModule
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes
from lightning_dlres.pipeline.plan import PipelinePlan, even_split
from lightning_dlres.strategies import HeteroPipeStrategy

# They add up to less than two cores, which is what the demo asks of a machine.
SPEEDS = (0.25, 0.5, 1.0)
MICROBATCHES = 12
CONTEXT = 128
SAME = 1e-4


@dataclass(frozen=True)
class Size:
    """How large the model is, and how long it is trained."""

    width: int
    depth: int
    batch_size: int
    steps: int
    trial_steps: int
    validation_batches: int
    text: str
    longest: timedelta


FULL = Size(96, 8, 24, 200, 12, 8, "4MiB", timedelta(seconds=110))
QUICK = Size(32, 5, 12, 8, 5, 2, "1MiB", timedelta(seconds=30))


def demo(options: Sequence[str]) -> int:
    """Run the demo and return its exit status."""
    settings = _parser().parse_args(options)
    size = QUICK if settings.quick else FULL
    if settings.steps is not None:
        size = msgspec.structs.replace(size, steps=settings.steps)
    return 0
