"""Which training samples the profile of a run measures (Method E, E5), and how.

They come straight from the dataset, beside the loader, and random state is put back: training sees
the same batches as without profiling."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader

from lightning_dlres import _compat
from lightning_dlres.core import rng
from lightning_dlres.pipeline.profile.config import ProfileConfig, ProfileSamples
from lightning_dlres.pipeline.stage.microbatch import cut_batch, microbatch_sizes, samples_in
from lightning_dlres.strategies.hetero_pipe.data.loader_copy import a_copy
from lightning_dlres.strategies.hetero_pipe.data.sharding import undo_sharding
from lightning_dlres.strategies.hetero_pipe.step.one_device import single_device_view
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep, StepContext


def read_samples(
    trainer: Trainer, context: StepContext, config: ProfileConfig, microbatches: int
) -> ProfileSamples:
    """Read a few training samples, beside the loader; on one rank."""
    # Of a single one it cannot be told whether the model treats samples one by one.
    rewind_random_state = rng.held(context.device)
    try:
        loader = _compat.train_loader(trainer)
        batch = _whole(config.batch, getattr(loader, "batch_size", None))
        size = _whole(config.microbatch, -(-batch // microbatches) if batch else None)
        wanted = _whole(config.samples, size)
        with single_device_view("The loader's code"):
            data, read = _few_samples(loader, max(wanted, 2) if wanted else None)
        data = trainer.precision_plugin.convert_input(data)
        # Hooks of the transfer may count or draw: this rank must not be ahead of the others.
        with LightningStep(context, (data,), is_trial=True).undone():
            data = trainer.strategy.batch_to_device(data, torch.device("cpu"))
        takes_index = len(inspect.signature(context.module.training_step).parameters) > 1
        together, found = data, read or samples_in(data) or 1
        split = context.split_batch or cut_batch
        # A split of the user's may count samples otherwise than by the first dimension.
        whole = context.split_batch is not None and read is None
        if wanted == 1 and found > 1 and not whole:
            data, found = split(data, [1, found - 1])[0], 1
        if size is None:
            # The loader makes whole batches only.
            batch, size = found, max(microbatch_sizes(found, microbatches))
        parts = 1 if whole else max(1, found // size)
        sizes = [size] * (parts - 1) + [found - size * (parts - 1)]
        batches = [data] if parts == 1 else list(split(data, sizes))
        inputs = []
        for part in batches:
            args = (part, 0) if takes_index else (part,)
            with torch.no_grad():
                inputs.append(
                    LightningStep(context, args, keeps_batch=True, is_trial=True).module_inputs()
                )
        known = min(microbatches, batch or microbatches)
        return ProfileSamples(inputs, batches, known, together)
    finally:
        rewind_random_state()


def _whole(asked: int | str, otherwise: int | None) -> Any:
    return asked if isinstance(asked, int) else otherwise


def _few_samples(loader: Any, samples: int | None) -> tuple[Any, int | None]:
    """Return a batch, and how many samples it has where that is known."""
    loader = a_copy(loader)
    undo_sharding(loader)
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if indexed and callable(collate) and samples is not None:
        # Its sampler may yield other keys: what the loader itself does is what counts.
        with suppress(Exception):
            count = min(samples, len(dataset))
            return collate([dataset[index] for index in range(count)]), count
    # As Lightning's training loop does, which takes a list or dict of loaders too.
    if not isinstance(loader, CombinedLoader):
        loader = CombinedLoader(loader, "max_size_cycle")
    batch, _, _ = next(iter(loader))
    return batch, None
