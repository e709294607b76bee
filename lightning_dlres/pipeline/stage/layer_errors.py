"""Errors of layers: lack of memory, and micro-batches that are too small or no samples at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_dlres.core.errors import UnsupportedStepError, add_note

# Part of the message of the RuntimeError that torch raises when the CPU has no memory left; torch
# has no exception class for it.
_CPU_ALLOCATOR = "DefaultCPUAllocator"
# Part of the message of the ValueError that BatchNorm raises in training mode.
_TOO_FEW_VALUES = "more than 1 value per channel"


def is_lack_of_memory(error: Exception) -> bool:
    """Return whether an error says that a device or the host has no memory left."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        type(error) is RuntimeError and _CPU_ALLOCATOR in str(error)
    )


@contextmanager
def explaining_single_samples(is_single: bool, cut: str = "") -> Iterator[None]:
    """Context manager that explains a layer's error on a micro-batch of one sample.

    Args:
        is_single: False passes all errors on.
        cut: Sentence about the batch that was cut; empty for none.

    Raises:
        UnsupportedStepError: In the place of the layer's error.
    """
    try:
        yield
    except Exception as error:
        is_explained = isinstance(error, UnsupportedStepError) or is_lack_of_memory(error)
        if not is_single or is_explained:
            raise
        raise UnsupportedStepError(
            f"A layer fails on a micro-batch of one sample ({type(error).__name__}: {error}). "
            f"{cut}{_advice(error)}"
        ) from error


def _advice(error: Exception) -> str:
    """Return the ways out of a layer's error on a micro-batch of one sample."""
    if isinstance(error, ValueError) and _TOO_FEW_VALUES in str(error):
        return (
            "If the layer is to train, use larger batches (drop_last=True in the DataLoader for a "
            "small last batch), or HeteroPipeStrategy(microbatches=...) with fewer micro-batches. "
            "If it is not, as in a frozen teacher, put it into eval mode in the constructor of the "
            "LightningModule: layers are measured before hooks such as on_fit_start run."
        )
    return (
        "If the layer needs more samples, use larger batches (drop_last=True in the DataLoader for "
        "a small last batch), or HeteroPipeStrategy(microbatches=...) with fewer micro-batches. If "
        "it keeps something of a whole batch, such as the hidden state of the last one, use "
        "microbatches=1."
    )


@contextmanager
def noting_micro_batch(rows: int, batch_rows: int) -> Iterator[None]:
    """Context manager that adds a note to a layer's error on a part of a batch.

    Args:
        rows: Rows of the micro-batch.
        batch_rows: Rows of the batch; with as many there is no note.
    """
    try:
        yield
    except Exception as error:
        is_explained = isinstance(error, UnsupportedStepError) or is_lack_of_memory(error)
        if rows < batch_rows and not is_explained:
            add_note(
                error,
                f"Raised on a micro-batch, {rows} of {batch_rows} rows of the batch. If rows are "
                "no samples, such as the nodes of graphs, use HeteroPipeStrategy(microbatches=1).",
            )
        raise
