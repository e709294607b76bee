"""Trainer that trains on one CPU and prints nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer


def trainer(directory: Path, **options: Any) -> Trainer:
    """Return a quiet Trainer; `options` replace its defaults."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 2,
        "default_root_dir": directory,
        "max_epochs": 2,
    }
    return Trainer(**{**defaults, **options})
