"""`dlres fit`, `validate`, `test`, `predict`: LightningCLI, which knows our strategies by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI

import lightning_dlres  # noqa: F401 (registers the strategies)


def run_trainer(command: str, options: Sequence[str]) -> int:
    """Build Trainer, model and data from the options, and run the Trainer's method of that name."""
    arguments = [command, *options]
    # LightningCLI warns of arguments that it gets both here and on the process's command line.
    LightningCLI(
        args=None if arguments == sys.argv[1:] else arguments, parser_kwargs={"prog": "dlres"}
    )
    return 0
