"""Settings of a process of the benchmark: one thread, and no advice."""

from __future__ import annotations

import logging
import warnings

import torch


def be_quiet() -> None:
    """Use one thread, and print no warnings."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
