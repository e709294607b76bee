"""Where samples are decoded and put together into a batch: in the caller, in threads, or in
processes, which look at the same memory as the caller does.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.multiprocessing

from lightning_dlres.core.checks import one_of, whole_number
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.cache.samples import Sample, Samples
from lightning_dlres.prefetch.loading.collating import Collator
from lightning_dlres.prefetch.loading.items import decode_item
from lightning_dlres.prefetch.loading.local_samples import LocalSamples, set_up_worker
from lightning_dlres.prefetch.loading.page_locked import pinned
from lightning_dlres.prefetch.order.sequence import mixed
from lightning_dlres.prefetch.storage.labels import class_of
from lightning_dlres.prefetch.storage.readers import Reader

Workers = Literal["thread", "process"]
Decode = Callable[[Sample], Any]
Collate = Callable[[list[Any]], Any]
_WATCH_SECONDS = 0.5


@dataclass(frozen=True)
class BatchMaker:
    """Makes a batch of samples.

    Args:
        decode: of one sample; None: tensors where a data set of tensors was put in, else the
            samples themselves.
        collate: of the list of what `decode` returns; None: torch's `default_collate`, or the list
            where samples are not decoded.
        encoding: as in `SampleTable`.
        classes: names of the folders that samples lie in. Each item becomes a pair of itself and
            the number of its sample's class. (): samples have no labels.
    """

    decode: Decode | None
    collate: Collate | None
    encoding: str
    classes: tuple[str, ...] = ()

    @functools.cached_property
    def _default_collate(self) -> Collator:
        return Collator()

    @functools.cached_property
    def _labels(self) -> dict[str | None, int]:
        return {name: number for number, name in enumerate(self.classes)}

    def __call__(self, samples: Samples | LocalSamples) -> Any:
        """Return the batch."""
        decode = self.decode
        if decode is None and self.encoding == "tensors":
            decode = decode_item
        found: list[Any]
        if self.classes:
            labels = self._labels
            found = [
                (_decoded(sample, decode) if decode else sample, labels[class_of(sample.key)])
                for sample in samples
            ]
        else:
            found = [_decoded(sample, decode) if decode else sample for sample in samples]
        if self.collate is not None:
            return self.collate(found)
        return self._default_collate(found) if decode else found


def _decoded(sample: Sample, decode: Decode) -> Any:
    try:
        return decode(sample)
    except Exception as error:
        # Since Python 3.11 an error takes notes.
        if hasattr(error, "add_note"):
            error.add_note(f"This was in decoding sample {sample.key!r} (number {sample.number}).")
        raise


class DecodePool:
    """Runs a `BatchMaker` on what arrives, a few batches at a time.

    Args:
        maker: what is run.
        num_workers: how many at a time; 0: in the caller, when the batch is asked for.
        kind: "thread" for decoding that lets go of the interpreter's lock (most image decoders),
            "process" for any other.
        pin_memory: whether tensors of a batch go to page-locked memory; without a GPU they do not.
        reads: what processes read samples with that they get unread, and for how many seconds they
            try; None: they get none.

    Raises:
        ConfigError: a bad number or kind, or what cannot be sent to a process.
    """

    def __init__(
        self,
        maker: BatchMaker,
        num_workers: int = 0,
        kind: Workers = "thread",
        pin_memory: bool = False,
        reads: tuple[Reader, float] | None = None,
    ) -> None:
        whole_number("num_workers", num_workers, "num_workers=2", least=0)
        one_of("worker_type", kind, get_args(Workers), "worker_type='thread'")
        if num_workers and kind == "process":
            _check_can_be_sent(maker)
        self._maker, self.num_workers, self._kind = maker, num_workers, kind
        self._reads = reads
        # A process that gets tensors from another one has them in memory that is not page-locked.
        self._pins = pin_memory and torch.cuda.is_available()
        self._executor: Executor | None = None

    def submit(self, samples: Samples | LocalSamples) -> Callable[[], Any]:
        """Start to make a batch, and return what waits for it; the samples are held until it is
        made."""
        if not self.num_workers:
            return lambda: self._made(samples)
        executor = self._started()
        if self._kind == "thread":
            return executor.submit(self._made, samples).result
        future = executor.submit(_made_in_worker, samples)
        return lambda: self._result(future, samples)

    def close(self) -> None:
        """End threads and processes."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def _made(self, samples: Samples | LocalSamples) -> Any:
        batch = self._maker(samples)
        return pinned(batch) if self._pins else batch

    def _result(self, future: Future[Any], held: Samples | LocalSamples) -> Any:
        batch = future.result()
        return pinned(batch) if self._pins else batch

    def _started(self) -> Executor:
        if self._executor is None:
            if self._kind == "thread":
                self._executor = ThreadPoolExecutor(self.num_workers, "dlres-decode")
            else:
                context = torch.multiprocessing.get_context()
                # The parent that the system knows of is this process, or the server that forks.
                served = context.get_start_method() == "forkserver"
                self._executor = ProcessPoolExecutor(
                    self.num_workers,
                    mp_context=context,
                    initializer=_start_worker,
                    initargs=(None if served else os.getpid(), self._maker, self._reads),
                )
        return self._executor


def _check_can_be_sent(maker: BatchMaker) -> None:
    try:
        # As the pool will send it.
        ForkingPickler.dumps(maker)
    except Exception as error:  # whatever their own ways of pickling may raise
        raise ConfigError(
            "decode and collate must be functions of a module with worker_type='process', not "
            "lambdas or functions inside of others, which cannot be sent to another process, got: "
            f"{error}. Use worker_type='thread'."
        ) from error


# In a worker process: what makes its batches.
_maker: BatchMaker | None = None


def _start_worker(
    parent: int | None, maker: BatchMaker, reads: tuple[Reader, float] | None
) -> None:
    global _maker
    _maker = maker
    if reads is not None:
        set_up_worker(*reads)
    # As many processes as there are cores compute already.
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int | None) -> None:
    """A worker whose parent was killed would wait for ever, and keep the cache in use."""
    if parent is None:
        starter = multiprocessing.parent_process()
        assert starter is not None
        # Not with "fork": its workers hold the pipe open that this listens to, for each other.
        starter.join()
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _made_in_worker(samples: Samples | LocalSamples) -> Any:
    """In a worker process: what is random follows from the samples, not from the worker."""
    assert _maker is not None
    seed = mixed(samples.epoch_seed + int(samples.numbers[0]))
    if torch.cuda.is_initialized():
        torch.manual_seed(seed % 2**63)
    else:
        # The line above would note a stack trace for every accelerator that is not in use yet.
        torch.default_generator.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return _maker(samples)
