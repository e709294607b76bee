"""Decoding and collation of batches: in the caller's thread, in other threads, or in processes.

Worker processes read samples of a cache from the same memory as the caller.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor
from torch.utils.data import default_collate

from lightning_dlres.core.checks import one_of, whole_number
from lightning_dlres.core.errors import ConfigError, PeerLostError, PeerTimeoutError, add_note
from lightning_dlres.core.rng import seed_all_devices
from lightning_dlres.prefetch.cache.samples import Sample, Samples
from lightning_dlres.prefetch.loading.items import decode_item
from lightning_dlres.prefetch.loading.local_samples import LocalSamples, set_up_worker
from lightning_dlres.prefetch.loading.page_locked import pin_batch
from lightning_dlres.prefetch.order.sequence import splitmix64
from lightning_dlres.prefetch.storage.labels import class_of
from lightning_dlres.prefetch.storage.local_reads import BufferPool
from lightning_dlres.prefetch.storage.readers import Reader

Workers = Literal["thread", "process"]
Decode = Callable[[Sample], Any]
Collate = Callable[[list[Any]], Any]
# Seconds between the checks with which a worker notices the end of its parent.
_WATCH_SECONDS = 0.5
# Seconds between the checks if workers have been stopped, while a batch is awaited.
_CHECK_SECONDS = 1.0
# Minimum size, in bytes, of a tensor whose memory is reused. The allocator itself keeps smaller
# blocks for the next tensor. It may return larger blocks to the system; then the next tensor of
# that size causes a page fault for each page.
_MIN_REUSED_BYTES = 1 << 20
# Number of free buffers to keep. Only a few batches are in use at a time.
_MAX_FREE_BUFFERS = 4


@dataclass(frozen=True)
class BatchMaker:
    """Function that makes a batch of samples.

    Attributes:
        decode: Function of one sample. None: `decode_item` decodes samples with the encoding
            "tensors"; other samples stay as they are.
        collate: Function of the list of decoded samples. None: torch's `default_collate`, or the
            list itself if samples are not decoded.
        encoding: As in `SampleTable`.
        classes: Class names, which are the folders of the samples. Each item becomes the pair
            (item, class index). (): samples have no labels.
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
        """Return the batch.

        Raises:
            RuntimeError: If the user's code raises StopIteration, which would end the epoch.
        """
        try:
            return self._make(samples)
        except StopIteration as error:
            raise RuntimeError(
                "decode and collate must not raise StopIteration, got one, as of next(iterator) at "
                "an iterator's end. Use next(iterator, default)."
            ) from error

    def _make(self, samples: Samples | LocalSamples) -> Any:
        decode = self.decode
        if decode is None and self.encoding == "tensors":
            decode = decode_item
        items: list[Any]
        if self.classes:
            labels = self._labels
            items = [
                (_decode(sample, decode) if decode else sample, labels[class_of(sample.key)])
                for sample in samples
            ]
        else:
            items = [_decode(sample, decode) if decode else sample for sample in samples]
        if self.collate is not None:
            return self.collate(items)
        return self._default_collate(items) if decode else items


def _decode(sample: Sample, decode: Decode) -> Any:
    try:
        return decode(sample)
    except Exception as error:
        add_note(error, f"Raised while decoding {sample!r}.")
        raise


class Collator:
    """Collate function like torch's `default_collate`, but in one thread and in reused memory.

    Torch copies large tensors with all of its threads. While other threads read ahead, torch's
    threads wait for each other, and that takes many times as long as the copy itself. The page
    faults of new memory also take several times as long as the copy into it. So the memory of
    earlier batches is reused for large tensors.
    """

    def __init__(self) -> None:
        self._buffers = BufferPool(_MAX_FREE_BUFFERS)

    def __call__(self, items: Any) -> Any:
        """Return what `default_collate` returns for a list or tuple of items."""
        if not items:
            return default_collate(items)
        first = items[0]
        if all(type(item) is Tensor for item in items):
            return self._stack(items) if _is_plain(items) else default_collate(items)
        if type(first) in (tuple, list) and _are_alike(items):
            return [self(column) for column in zip(*items, strict=True)]
        if type(first) is dict and all(
            type(item) is dict and first.keys() == item.keys() for item in items
        ):
            return {key: self([item[key] for item in items]) for key in first}
        return default_collate(items)

    def _stack(self, tensors: Any) -> Tensor:
        try:
            arrays = [tensor.numpy() for tensor in tensors]
        except TypeError:
            # NumPy has no such dtype, bfloat16 for instance.
            return torch.stack(list(tensors))
        stacked = self._empty((len(tensors), *tensors[0].shape), tensors[0].dtype)
        np.stack(arrays, out=stacked.numpy())
        return stacked

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _MIN_REUSED_BYTES:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self._buffers.get(nbytes)).view(dtype).view(shape)


def _are_alike(items: Any) -> bool:
    return all(type(item) is type(items[0]) and len(item) == len(items[0]) for item in items)


def _is_plain(tensors: Any) -> bool:
    """Return true if NumPy can stack these tensors as they are."""
    first = tensors[0]
    return all(
        tensor.shape == first.shape
        and tensor.dtype is first.dtype
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor.is_quantized
        for tensor in tensors
    )


class DecodePool:
    """Pool of workers that make batches.

    Args:
        maker: Function that makes one batch.
        num_workers: Number of threads or processes. 0: the caller makes each batch when it
            waits for it.
        kind: "thread" for a `decode` that releases the interpreter lock, as most image decoders do;
            "process" for any other.
        pin_memory: True: tensors of a batch are copied into page-locked memory, if there is a GPU.
        reader: Reader for worker processes that read samples themselves. None: workers receive
            samples that have been read.
        timeout: Seconds after which a read of a worker process fails, and after which one that has
            been stopped is an error.

    Raises:
        ConfigError: If an argument is out of its range, or cannot be sent to a process.
    """

    def __init__(
        self,
        maker: BatchMaker,
        num_workers: int = 0,
        kind: Workers = "thread",
        pin_memory: bool = False,
        reader: Reader | None = None,
        timeout: float = 30.0,
    ) -> None:
        whole_number("num_workers", num_workers, "num_workers=2", least=0)
        one_of("worker_type", kind, get_args(Workers), "worker_type='thread'")
        if num_workers and kind == "process":
            _check_can_be_sent(maker)
        self._maker, self.num_workers, self._kind = maker, num_workers, kind
        self._reader, self._timeout = reader, timeout
        # Page-lock in this process, because the tensors of a worker process arrive in memory that
        # is not page-locked.
        self._pins_memory = pin_memory and torch.cuda.is_available()
        self._executor: Executor | None = None

    def submit(self, samples: Samples | LocalSamples) -> Callable[[], Any]:
        """Start to make a batch; return a function that waits for the batch and returns it.

        The function holds the samples, so that they stay in the cache until the batch is made.
        """
        if not self.num_workers:
            return lambda: self._make(samples)
        executor = self._running_executor()
        if self._kind == "thread":
            return executor.submit(self._make, samples).result
        future = executor.submit(_make_in_worker, samples)
        return lambda: self._result(future, samples)

    def close(self) -> None:
        """End threads and processes."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def _make(self, samples: Samples | LocalSamples) -> Any:
        batch = self._maker(samples)
        return pin_batch(batch) if self._pins_memory else batch

    def _result(self, future: Future[Any], held: Samples | LocalSamples) -> Any:
        try:
            self._wait(future)
            batch = future.result()
        except BrokenProcessPool:
            raise PeerLostError(
                "A worker process that makes batches has ended before it made its batch: it was "
                "killed, for instance for lack of memory, or decode or collate ended it. Use fewer "
                "workers or smaller batches, or worker_type='thread' to see an error of decode."
            ) from None
        return pin_batch(batch) if self._pins_memory else batch

    def _wait(self, future: Future[Any]) -> None:
        """Wait until a batch is made, or its maker has failed.

        Raises:
            PeerTimeoutError: If a worker process has been stopped for longer than the timeout.
        """
        stopped_since: float | None = None
        while not futures.wait([future], timeout=_CHECK_SECONDS).done:
            stopped, now = _stopped_children(), time.monotonic()
            stopped_since = (stopped_since or now) if stopped else None
            if stopped_since is None or now - stopped_since < self._timeout:
                continue
            for pid in stopped:
                # The pool's end would wait for it.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise PeerTimeoutError(
                f"Worker processes that make batches must run, got {stopped} stopped for "
                f"{self._timeout:g} s. They have been ended. Start again, and stop the whole "
                "process group to pause a run."
            )

    def _running_executor(self) -> Executor:
        if self._executor is None:
            if self._kind == "thread":
                self._executor = ThreadPoolExecutor(self.num_workers, "dlres-decode")
            else:
                context = torch.multiprocessing.get_context()
                # With "forkserver", the parent of a worker in the process table is the fork server.
                # Otherwise it is this process.
                is_forked_by_server = context.get_start_method() == "forkserver"
                self._executor = ProcessPoolExecutor(
                    self.num_workers,
                    mp_context=context,
                    initializer=_start_worker,
                    initargs=(
                        None if is_forked_by_server else os.getpid(),
                        self._maker,
                        None if self._reader is None else (self._reader, self._timeout),
                    ),
                )
        return self._executor


def _check_can_be_sent(maker: BatchMaker) -> None:
    try:
        # The executor pickles its arguments in the same way.
        ForkingPickler.dumps(maker)
    except Exception as error:  # a user's own __reduce__ may raise anything
        raise ConfigError(
            "With worker_type='process', decode and collate must be defined at the top level of a "
            "module, because lambdas and nested functions cannot be sent to another process, got: "
            f"{error}. Use worker_type='thread'."
        ) from error


# Batch maker of this worker process; None in other processes.
_maker: BatchMaker | None = None


def _start_worker(
    parent: int | None, maker: BatchMaker, reader: tuple[Reader, float] | None
) -> None:
    global _maker
    _maker = maker
    if reader is not None:
        set_up_worker(*reader)
    # One thread each: the workers together already keep all cores busy.
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int | None) -> None:
    """End this worker after the process that uses it has ended.

    Otherwise a worker of a killed process would wait forever and keep the cache in use.

    Args:
        parent: Process id of the process that uses the worker. None: the worker was started by a
            fork server.
    """
    if parent is None:
        starter = multiprocessing.parent_process()
        assert starter is not None
        # `join` waits for the end of a pipe. A worker of the fork server holds no pipe of another
        # worker. With "fork", each worker holds those of the others open, so `join` would never
        # return.
        starter.join()
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _make_in_worker(samples: Samples | LocalSamples) -> Any:
    """Make a batch in a worker process.

    The first sample of the batch seeds the random generators. So random numbers do not depend on
    the worker.
    """
    assert _maker is not None
    seed = splitmix64(samples.epoch_seed + int(samples.sample_ids[0]))
    seed_all_devices(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        return _maker(samples)
    except Exception as error:
        raise _sendable(error) from None


def _sendable(error: Exception) -> Exception:
    """Return an error, or one with its text if another process cannot make it again.

    The pool takes such an error for the end of a worker.
    """
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        text = "".join(traceback.format_exception(error))
        return RuntimeError(f"{type(error).__name__}: {error}\n\nIn the worker process:\n{text}")
    return error


def _stopped_children() -> list[int]:
    """Return the ids of child processes that a signal has stopped; Linux tells them."""
    stopped = []
    for child in multiprocessing.active_children():
        with suppress(OSError):
            # The command's name, in parentheses, may itself contain spaces and parentheses.
            state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T" and child.pid is not None:
                stopped.append(child.pid)
    return stopped
