"""Copies from the mirror, also in a process that user code has forked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_dlres.mirror.execute import fetching
from lightning_dlres.mirror.execute.fetching import ThreadFetcher
from tests.support.waiting import wait_until

CHILD_SECONDS = 60
SECONDS = 20.0


@pytest.fixture
def busy() -> Iterator[tuple[ThreadFetcher, threading.Event]]:
    """A fetcher whose thread does nothing until the event is set."""
    fetcher, end = ThreadFetcher(), threading.Event()
    fetcher._executor.submit(end.wait, SECONDS)
    yield fetcher, end
    end.set()
    fetcher.close()


@example(0)
@example(1)
@example(3 << 20)
@given(st.integers(0, 9 << 20))
def test_all_bytes_are_copied(nbytes: int) -> None:
    source = (torch.arange(nbytes) % 251).to(torch.uint8)
    fetcher = ThreadFetcher()
    # Both threads copy parts of these, or one of them copies all.
    targets = [torch.zeros_like(source) for _ in range(3)]
    for started in [fetcher.start(source, target) for target in targets]:
        started.wait()
        assert started.seconds() >= 0
    for target in targets:
        assert torch.equal(target, source)
    fetcher.close()


def test_the_thread_needs_no_wait() -> None:
    source = torch.arange(1 << 20).view(torch.uint8)
    target = torch.zeros_like(source)
    fetcher = ThreadFetcher()
    started = fetcher.start(source, target)
    wait_until(lambda: torch.equal(target, source), "the thread has copied all", SECONDS)
    started.wait()
    fetcher.close()


def test_a_wait_needs_no_thread(busy: tuple[ThreadFetcher, threading.Event]) -> None:
    source = torch.arange(1 << 20).view(torch.uint8)
    target = torch.zeros_like(source)
    started = busy[0].start(source, target)
    started.wait()
    assert torch.equal(target, source)
    assert started.seconds() > 0


def test_an_interrupted_wait_leaves_nothing_out(
    busy: tuple[ThreadFetcher, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.arange(1 << 20).view(torch.uint8)
    target = torch.zeros_like(source)
    started = busy[0].start(source, target)

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fetching.np, "copyto", interrupt)
        with pytest.raises(KeyboardInterrupt):
            started.wait()
    assert not torch.equal(target, source)
    busy[1].set()
    started.wait()
    assert torch.equal(target, source)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_copies_without_the_thread() -> None:
    fetcher = ThreadFetcher()
    source = torch.arange(8 << 20).view(torch.uint8)
    first, second = torch.zeros_like(source), torch.zeros_like(source)
    # The copy may be under way at the fork, or over.
    started = fetcher.start(source, first)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(CHILD_SECONDS)
            started.wait()
            fetcher.start(source, second).wait()
            status = int(not (torch.equal(first, source) and torch.equal(second, source)))
        finally:
            os._exit(status)
    started.wait()
    assert torch.equal(first, source)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    fetcher.close()
