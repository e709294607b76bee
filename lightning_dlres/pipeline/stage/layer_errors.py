"""Errors of layers: lack of memory, and micro-batches that are too small or no samples at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_dlres.core.errors import UnsupportedStepError, add_note

# Part of the message of the RuntimeError that torch raises when the CPU has no memory left; torch
# has no exception class for it.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


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
            f"{cut}If the layer needs more samples, as BatchNorm does, use larger batches "
            "(drop_last=True in the DataLoader for a small last batch), or "
            "HeteroPipeStrategy(microbatches=...) with fewer micro-batches."
        ) from error


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
