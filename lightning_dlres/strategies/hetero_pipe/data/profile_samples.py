"""Training samples on which the layers of a run are profiled.

They come from a copy of the loader, and the random state is restored afterwards. So training sees
the same batches as without profiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_dlres import _compat
from lightning_dlres.core import rng
from lightning_dlres.core._compat import registered_buffers
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.profile.config import ProfileConfig, ProfileSamples
from lightning_dlres.pipeline.stage.layer_errors import noting_micro_batch
from lightning_dlres.pipeline.stage.microbatch import cut_batch, microbatch_sizes, samples_in
from lightning_dlres.strategies.hetero_pipe.data.loader_copy import copy_loader
from lightning_dlres.strategies.hetero_pipe.data.sharding import undo_sharding
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attributes import UserState
from lightning_dlres.strategies.hetero_pipe.replay.user_state.reading import reading_of
from lightning_dlres.strategies.hetero_pipe.step.cutting import module_inputs
from lightning_dlres.strategies.hetero_pipe.step.single_device_view import single_device_view
from lightning_dlres.strategies.hetero_pipe.step.step_context import StepContext
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep

# Samples on which a training step is compared with parts of them.
_STEP_SAMPLES = 16


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
        ConfigError: If the loader is empty.
        SkippedSamplesError: If `training_step` skips the samples.
    """
    rewind_random_state = rng.rewinder(context.device)
    try:
        # `train_dataloader` is called again for training, and may count its calls.
        with context.state.read().restored(), _datamodule_restored(trainer):
            loader = _compat.train_loader(trainer)
        batch_size = _resolved(config.batch, _batch_size_of(loader))
        microbatch_size = _resolved(
            config.microbatch, -(-batch_size // microbatches) if batch_size else None
        )
        num_profiled = _resolved(config.samples, microbatch_size)
        # If the loader does not tell its batch size, only a batch of its own shows it. At least two
        # samples are read: one alone cannot show if a layer's output for a sample depends on other
        # samples.
        num_requested = max(num_profiled, 2) if num_profiled and microbatch_size else None
        if num_requested and context.pipelined.is_step:
            # Few samples may not show what the step does with a whole batch.
            num_requested = max(num_requested, min(batch_size or 0, _STEP_SAMPLES))
        data, num_read = _read_on_cpu(trainer, context, loader, num_requested)
        num_samples = num_read or samples_in(data) or 1
        if microbatch_size is None:
            batch_size = num_samples
            microbatch_size = max(microbatch_sizes(num_samples, microbatches))
        batches = [data]
        # The user's split_batch need not count samples along the first dimension. The number of
        # samples in a batch that the loader made is then unknown, and the batch is not cut.
        if context.split_batch is None or num_read is not None:
            batches = _microbatches(context, data, num_samples, num_profiled, microbatch_size)
        inputs: list[Tree] = []
        if not context.pipelined.is_step:
            with noting_micro_batch(microbatch_size, batch_size or num_samples):
                inputs = [module_inputs(context, part) for part in batches]
        # A batch with fewer samples than micro-batches gives one micro-batch per sample.
        num_microbatches = min(microbatches, batch_size or microbatches)
        return ProfileSamples(inputs, batches, num_microbatches, data)
    finally:
        rewind_random_state()


def _datamodule_restored(trainer: Trainer) -> AbstractContextManager[None]:
    """Return a context manager that gives the datamodule its attributes back."""
    data = getattr(trainer, "datamodule", None)
    return nullcontext() if data is None else reading_of("trainer.datamodule", data).restored()


@contextmanager
def _module_restored(module: nn.Module) -> Iterator[None]:
    """Context manager that gives a module and those in it their attributes and buffers back.

    They are layers, whose state no run of the step restores.
    """
    state = UserState(module.named_modules).isolate()
    buffers = [registered_buffers(inner)[0] for inner in module.modules()]
    kept = [dict(named) for named in buffers]
    for named in buffers:
        named.update({name: None if b is None else b.detach().clone() for name, b in named.items()})
    try:
        yield
    finally:
        state.restore()
        for named, before in zip(buffers, kept, strict=True):
            named.clear()
            named.update(before)


def _batch_size_of(loader: Any) -> int | None:
    """Return the number of samples in a batch of a loader; None if the loader does not tell it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    # A batch sampler of another class may make batches of several sizes.
    source = batch_sampler if type(batch_sampler) is BatchSampler else loader
    size = getattr(source, "batch_size", None)
    return size if isinstance(size, int) else None


def _read_on_cpu(
    trainer: Trainer, context: StepContext, loader: Any, samples: int | None
) -> tuple[Any, int | None]:
    """Return one batch on the CPU, and its number of samples; see `_few_samples`."""
    with single_device_view("The loader's code"):
        data, num_read = _few_samples(loader, samples)
    data = trainer.precision_plugin.convert_input(data)
    # The user's transfer hooks may count calls or draw random numbers. Undo these effects: the
    # other ranks do not run the hooks here, so the ranks' states would differ.
    undone = LightningStep(context, (data,), is_trial=True).undone()
    with _module_restored(context.pipelined.module), undone:
        return trainer.strategy.batch_to_device(data, torch.device("cpu")), num_read


def _microbatches(
    context: StepContext,
    batch: Any,
    num_samples: int,
    num_profiled: int | None,
    microbatch_size: int,
) -> list[Any]:
    """Return the first samples of a batch as micro-batches of at most `microbatch_size` samples.

    Args:
        context: Context of the user's steps.
        batch: The batch.
        num_samples: Number of samples in the batch.
        num_profiled: Number of samples to return; None for all.
        microbatch_size: Number of samples in the largest micro-batch of a training batch.
    """
    split = context.split_batch or cut_batch
    if num_profiled is not None and num_profiled < num_samples:
        batch = split(batch, [num_profiled, num_samples - num_profiled])[0]
        num_samples = num_profiled
    sizes = microbatch_sizes(num_samples, -(-num_samples // microbatch_size))
    return [batch] if len(sizes) == 1 else list(split(batch, sizes))


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
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        # With batch_size=None, the items of the dataset are whole batches.
        is_indexable = False
    if is_indexable and callable(collate) and samples is not None:
        # The dataset may not accept integer indices. Then the loader's own batch is taken below.
        with suppress(Exception):
            count = min(samples, len(dataset))
            return collate([dataset[index] for index in range(count)]), count
    # Lightning's training loop wraps loaders in the same way, to accept a list or dict of them.
    if not isinstance(loader, CombinedLoader):
        loader = CombinedLoader(loader, "max_size_cycle")
    for batch, _, _ in loader:
        return batch, None
    raise ConfigError(
        "The training set must not be empty, got no batch from its loader. Pass a loader with at "
        "least one batch."
    )
