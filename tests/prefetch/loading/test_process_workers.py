"""Worker processes that make batches: their errors, their end, and their halt."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_dlres.core.errors import PeerLostError, PeerTimeoutError
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.loading import workers
from lightning_dlres.prefetch.loading.loader import PrefetchLoader


class CodecError(Exception):
    """An error that cannot be made again from its text, as in some libraries."""

    def __init__(self, name: str, *, code: int) -> None:
        super().__init__(f"{name} has code {code}")


def raise_codec_error(sample: Sample) -> None:
    raise CodecError(sample.key, code=7)


def exit_at_once(sample: Sample) -> None:
    os._exit(3)


def stop(sample: Sample) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.fixture
def batches_of(tmp_path: Path) -> Iterator[Callable[..., PrefetchLoader]]:
    """Return a function that opens a loader with one worker process for a decode."""
    for index in range(6):
        (tmp_path / f"{index}.bin").write_bytes(bytes([index]))
    opened: list[PrefetchLoader] = []

    def open_loader(decode: Callable[[Sample], object], timeout: float = 60.0) -> PrefetchLoader:
        config = host_config(tmp_path, timeout=timeout)
        options = {"batch_size": 2, "decode": decode, "collate": list, "num_workers": 1}
        opened.append(PrefetchLoader("none", config, worker_type="process", **options))
        return opened[-1]

    yield open_loader
    for loader in opened:
        loader.close()


def test_an_error_that_cannot_be_sent_arrives_as_text(
    batches_of: Callable[..., PrefetchLoader],
) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)CodecError: \d.bin has code 7.*raise_codec_error"):
        next(iter(batches_of(raise_codec_error)))


def test_a_worker_that_ends_is_named(batches_of: Callable[..., PrefetchLoader]) -> None:
    with pytest.raises(PeerLostError, match="worker process that makes batches has ended"):
        next(iter(batches_of(exit_at_once)))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux tells stopped processes")
def test_a_stopped_worker_is_an_error(
    batches_of: Callable[..., PrefetchLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_CHECK_SECONDS", 0.02)
    with pytest.raises(PeerTimeoutError, match=r"got \[\d+\] stopped for 0.2 s"):
        next(iter(batches_of(stop, timeout=0.2)))
