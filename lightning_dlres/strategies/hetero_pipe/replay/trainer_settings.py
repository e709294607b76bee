"""Settings of the Trainer that user code changes in a training step: the learning rate, the
position of a scheduler, limits of the loops, the difficulty of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """Return the objects that hold them, by name."""
    found: dict[str, Any] = {"trainer": trainer, "trainer.fit_loop": trainer.fit_loop}
    found["trainer.fit_loop.epoch_loop"] = trainer.fit_loop.epoch_loop
    for number, optimizer in enumerate(trainer.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            found[f"trainer.optimizers[{number}].param_groups[{index}]"] = group
    for number, config in enumerate(trainer.lr_scheduler_configs):
        found[f"trainer.lr_scheduler_configs[{number}].scheduler"] = config.scheduler
    found["trainer.datamodule"] = getattr(trainer, "datamodule", None)
    for number, loader in enumerate(_leaves(trainer.train_dataloader)):
        for name in ("dataset", "sampler", "batch_sampler"):
            found[f"trainer.train_dataloader[{number}].{name}"] = getattr(loader, name, None)
    return found


def _leaves(loaders: Any) -> Iterator[Any]:
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        for each in loaders:
            yield from _leaves(each)
    else:
        yield loaders
