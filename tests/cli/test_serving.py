"""Commands that serve stop in order at the first signal, and at once at the second."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from lightning_dlres.cli.serving import stop_event

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def restored_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored_handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_the_second_signal_is_not_caught(number: signal.Signals) -> None:
    stopped = stop_event()
    assert not stopped.is_set()
    signal.raise_signal(number)
    assert stopped.is_set()
    assert [signal.getsignal(one) for one in SIGNALS] == [signal.SIG_DFL] * 2
