"""Training loaders of different length on different ranks.

A rank whose loader has ended repeats its last batch, with the weight zero, until the loaders of all
ranks have ended. Otherwise, the other ranks would wait for its gradients for ever. Lightning's loop
sees loaders of equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.strategies.connection import Connection


class UnevenLoader:
    """Loader that yields as many batches as the longest one on any rank.

    Attributes of the rank's own loader are found here, too.

    Args:
        loader: Loader of this rank.
        length: Batches of the longest loader, or None if the length on some rank is unknown.
            Then, the ranks ask each other before each batch.
        any_rank: Returns True on all ranks if its argument is True on any.
        next_batch: Returns the number of the next batch in the epoch.
        name: Name of this rank in errors.

    Attributes:
        first_batch: Number in the epoch of the loader's first batch.
        has_begun: True once the loader was iterated over.
    """

    def __init__(
        self,
        loader: Any,
        *,
        length: int | None,
        any_rank: Callable[[bool], bool],
        next_batch: Callable[[], int],
        name: str,
    ) -> None:
        self._loader, self._length, self._any_rank = loader, length, any_rank
        self._next_batch, self._name = next_batch, name
        # Number in the epoch of the first repeated batch, once it is known.
        self._end = float("inf")
        self.first_batch, self.has_begun = 0, False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the length of the loader on some rank is unknown")
        return self._length

    @property
    def has_length(self) -> bool:
        """True if the lengths of all ranks are known."""
        return self._length is not None

    def has_data(self, batch_idx: int) -> bool:
        """Return False if a batch of the current epoch repeats the last one."""
        return batch_idx < self._end

    def __iter__(self) -> Iterator[Any]:
        # A run that resumes inside an epoch begins at a later batch.
        self.first_batch, self._end = self._next_batch(), float("inf")
        self.has_begun = True
        count, last = 0, None
        for batch in self._loader:
            count, last = count + 1, batch
            if self._length is None:
                self._any_rank(True)
            yield batch
        self._end = self.first_batch + count
        if not count and not self.first_batch:
            raise ConfigError(
                f"the training loader must have at least one batch on each rank, got 0 on "
                f"{self._name}. Give every rank a part of the data."
            )
        while self._is_continued(count):
            if not count:
                # Its own batches were all used before the checkpoint.
                last = next(iter(self._loader))
            count += 1
            yield last

    def _is_continued(self, count: int) -> bool:
        """Return True if the loader of some rank has another batch."""
        if self._length is None:
            return self._any_rank(False)
        return count < self._length


def with_equal_length(
    loader: Any, trainer: Trainer, connection: Connection, *, is_weighted: bool
) -> UnevenLoader | None:
    """Return a loader as long as the longest one on any rank; called by all ranks.

    None if all are equally long, and gradients need no weights.

    Args:
        loader: Training loader of this rank.
        trainer: Trainer of the run.
        connection: Connection to the other ranks.
        is_weighted: True if gradients are weighted by samples in any case.

    Raises:
        ConfigError: If `training_step` takes batches out of an iterator: their samples are not
            known before it has run.
    """
    lengths = [int(row[0]) for row in connection.gather([length_of(loader)])]
    if not is_weighted and len(set(lengths)) == 1 and lengths[0] >= 0:
        return None
    step = trainer.lightning_module.training_step
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise ConfigError(
            "training_step must take a batch if the ranks' loaders differ in length or "
            "share_samples is set, got dataloader_iter. Use training_step(self, batch, batch_idx)."
        )
    return UnevenLoader(
        loader,
        length=None if min(lengths) < 0 else max(lengths),
        any_rank=connection.any_rank,
        next_batch=lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready,
        name=f"rank {connection.rank}",
    )


def samples_of(batch: Any, loaders: object) -> int:
    """Return the samples of a batch, as Lightning finds them; 1 if it finds none.

    A batch of several loaders counts as 1: the parts may have different numbers of samples.

    Args:
        batch: The batch. Rows of its first tensor may be something else than samples.
        loaders: Training loaders of the Trainer.

    Raises:
        ConfigError: If there are several loaders, and the ranks' lengths are known to differ.
    """
    several = _several(loaders)
    if several:
        if any(isinstance(one, UnevenLoader) and one.has_length for one in several):
            raise _refusal_of_several()
        return 1
    with suppress(MisconfigurationException):
        return max(extract_batch_size(batch), 1)
    return 1


def weight_of(rank: int, samples: Sequence[float], loaders: object) -> float:
    """Return the weight of a rank's loss: its samples over the mean of all ranks.

    Args:
        rank: The rank.
        samples: Samples of each rank in the step; 0 for one that repeats a batch.
        loaders: Training loaders of the Trainer.

    Raises:
        ConfigError: If there are several loaders, and one of a rank has ended before those of
            another rank. A batch has parts of each loader, but a gradient has only one weight.
    """
    if 0 in samples and _several(loaders):
        raise _refusal_of_several()
    return samples[rank] * len(samples) / sum(samples)


def _several(loaders: object) -> list[object]:
    """Return the loaders if there are several; an empty list for one."""
    if not isinstance(loaders, (list, tuple, dict)):
        return []
    values = list(loaders.values()) if isinstance(loaders, dict) else list(loaders)
    return _several(values[0]) if len(values) == 1 else values


def _refusal_of_several() -> ConfigError:
    return ConfigError(
        "the training loaders must have the same length on all ranks if there are several, got "
        "others. Give every rank as many batches of each, or use one loader."
    )


def length_of(loader: Any) -> float:
    """Return the batches of a loader; -1 if it cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1
