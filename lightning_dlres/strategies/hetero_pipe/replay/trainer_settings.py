"""Objects of the Trainer whose settings user code may change in a training step.

Examples are the learning rate, the position of a scheduler, limits of the loops, and the difficulty
of a data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_dlres._compat import given_train_loaders


def settings_owners(trainer: Trainer) -> dict[str, Any]:
    """Return the objects that hold settings, by their path: the Trainer, its loops, parameter
    groups, schedulers, the datamodule, data sets and samplers. A missing one is None."""
    owners: dict[str, Any] = {"trainer": trainer, "trainer.fit_loop": trainer.fit_loop}
    owners["trainer.fit_loop.epoch_loop"] = trainer.fit_loop.epoch_loop
    for index, optimizer in enumerate(trainer.optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            owners[f"trainer.optimizers[{index}].param_groups[{group_index}]"] = group
    for index, config in enumerate(trainer.lr_scheduler_configs):
        owners[f"trainer.lr_scheduler_configs[{index}].scheduler"] = config.scheduler
    owners["trainer.datamodule"] = getattr(trainer, "datamodule", None)
    loaders = trainer.train_dataloader
    # The step is tried before the loop begins.
    loaders = given_train_loaders(trainer) if loaders is None else loaders
    for index, loader in enumerate(_loaders_in(loaders)):
        for name in ("dataset", "sampler", "batch_sampler"):
            owners[f"trainer.train_dataloader[{index}].{name}"] = getattr(loader, name, None)
    return owners


def _loaders_in(loaders: Any) -> Iterator[Any]:
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        for loader in loaders:
            yield from _loaders_in(loader)
    else:
        yield loaders
