"""Copies from the mirror, also in a process that user code has forked."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from lightning_dlres.mirror.execute.fetching import ThreadFetcher

CHILD_SECONDS = 60


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
