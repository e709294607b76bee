"""Trainer that trains on one CPU and prints nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from tests.support.models import QUIET


def trainer(directory: Path, **options: Any) -> Trainer:
    """Return a quiet Trainer; `options` replace its defaults."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "num_sanity_val_steps": 2,
        "default_root_dir": directory,
        "max_epochs": 2,
    }
    return Trainer(**{**QUIET, **defaults, **options})
