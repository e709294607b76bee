"""`dlres fit`, `validate`, `test`, `predict`: LightningCLI with this package's strategies."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI

import lightning_dlres  # noqa: F401 (registers the strategies)


def run_trainer(command: str, options: Sequence[str]) -> int:
    """Build Trainer, model and data from the options, and call the Trainer's method `command`."""
    arguments = [command, *options]
    # LightningCLI warns if it gets arguments both here and on the process's command line.
    LightningCLI(
        args=None if arguments == sys.argv[1:] else arguments, parser_kwargs={"prog": "dlres"}
    )
    return 0
