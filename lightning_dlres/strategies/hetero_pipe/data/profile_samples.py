"""Training samples on which the layers of a run are profiled.

They come from a copy of the loader, and the random state is restored afterwards. So training sees
the same batches as without profiling.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader

from lightning_dlres import _compat
from lightning_dlres.core import rng
from lightning_dlres.pipeline.profile.config import ProfileConfig, ProfileSamples
from lightning_dlres.pipeline.stage.microbatch import cut_batch, microbatch_sizes, samples_in
from lightning_dlres.strategies.hetero_pipe.data.loader_copy import copy_loader
from lightning_dlres.strategies.hetero_pipe.data.sharding import undo_sharding
from lightning_dlres.strategies.hetero_pipe.step.single_device_view import single_device_view
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep, StepContext


def read_samples(
    trainer: Trainer, context: StepContext, config: ProfileConfig, microbatches: int
) -> ProfileSamples:
    """Return a few training samples, read without an effect on the loader.

    Only rank 0 may call this. Its caller sends the samples to the other ranks.

    Args:
        trainer: Trainer of the run.
        context: Context of the user's steps.
        config: Options of the profile.
        microbatches: Number of micro-batches of a training batch.

    Raises:
        NoCopyError: If the loader cannot be copied.
    """
    rewind_random_state = rng.rewinder(context.device)
    try:
        loader = _compat.train_loader(trainer)
        batch_size = _resolved(config.batch, getattr(loader, "batch_size", None))
        microbatch_size = _resolved(
            config.microbatch, -(-batch_size // microbatches) if batch_size else None
        )
        num_profiled = _resolved(config.samples, microbatch_size)
        with single_device_view("The loader's code"):
            # Read at least two samples. One alone cannot show if a layer's output for a sample
            # depends on other samples.
            data, num_read = _few_samples(loader, max(num_profiled, 2) if num_profiled else None)
        data = trainer.precision_plugin.convert_input(data)
        # The user's transfer hooks may count calls or draw random numbers. Undo these effects: the
        # other ranks do not run the hooks here, so the ranks' states would differ.
        with LightningStep(context, (data,), is_trial=True).undone():
            data = trainer.strategy.batch_to_device(data, torch.device("cpu"))
        whole_batch, num_samples = data, num_read or samples_in(data) or 1
        split = context.split_batch or cut_batch
        # The user's split_batch need not count samples along the first dimension. The number of
        # samples in a batch that the loader made is then unknown, and the batch is not cut.
        uncut = context.split_batch is not None and num_read is None
        if num_profiled == 1 and num_samples > 1 and not uncut:
            data, num_samples = split(data, [1, num_samples - 1])[0], 1
        if microbatch_size is None:
            # The loader has no `batch_size`. Take the samples that were read as a whole batch: they
            # are one, if the loader made it.
            batch_size = num_samples
            microbatch_size = max(microbatch_sizes(num_samples, microbatches))
        num_parts = 1 if uncut else max(1, num_samples // microbatch_size)
        sizes = [microbatch_size] * (num_parts - 1)
        sizes.append(num_samples - sum(sizes))
        batches = [data] if num_parts == 1 else list(split(data, sizes))
        inputs = []
        for part in batches:
            step = LightningStep(context, context.trial_args(part), keeps_batch=True, is_trial=True)
            with torch.no_grad():
                inputs.append(step.module_inputs())
        # A batch with fewer samples than micro-batches gives one micro-batch per sample.
        num_microbatches = min(microbatches, batch_size or microbatches)
        return ProfileSamples(inputs, batches, num_microbatches, whole_batch)
    finally:
        rewind_random_state()


def _resolved(option: int | str, default: int | None) -> Any:
    """Return the option, or the default if the option is "auto"."""
    return option if isinstance(option, int) else default


def _few_samples(loader: Any, samples: int | None) -> tuple[Any, int | None]:
    """Return one batch and its number of samples.

    Args:
        loader: Loader of the training data; a copy of it is read.
        samples: Number of samples in the batch; None for a batch that the loader makes.

    Returns:
        The batch and its number of samples; None for the number if the loader made the batch.
    """
    loader = copy_loader(loader)
    undo_sharding(loader)
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    is_indexable = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if is_indexable and callable(collate) and samples is not None:
        # The dataset may not accept integer indices. Then the loader's own batch is taken below.
        with suppress(Exception):
            count = min(samples, len(dataset))
            return collate([dataset[index] for index in range(count)]), count
    # Lightning's training loop wraps loaders in the same way, to accept a list or dict of them.
    if not isinstance(loader, CombinedLoader):
        loader = CombinedLoader(loader, "max_size_cycle")
    batch, _, _ = next(iter(loader))
    return batch, None
