"""Order of the work of a GPU: a stream that records the calls stands for that of the GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.gradient import State, ThresholdQuantisation
from lightning_dlres.gradsync.execute import executor
from tests.gradsync.execute.test_structure import plan_for
from tests.support.gradient_sync import open_sync
from tests.support.rank_pool import RankContext, RankPool

COUNTS = {"a": 20_000, "b": 9000, "c": 301}


class RecordedStream:
    """Stream that knows which thread works in it, and which marks that thread has waited for."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.marks = self.kept = 0

    @property
    def is_working(self) -> bool:
        return bool(getattr(self._local, "depth", 0))

    @property
    def waited(self) -> set[int]:
        """Marks that the calling thread has waited for."""
        if not hasattr(self._local, "waited"):
            self._local.waited = set()
        waited: set[int] = self._local.waited
        return waited

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    @contextmanager
    def working(self) -> Iterator[None]:
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    def wait(self, mark: int) -> None:
        self.waited.add(mark)

    def keep(self, tensor: Tensor) -> None:
        self.kept += 1


class CheckedCodec(ThresholdQuantisation):
    """Codec that notes calls outside of the stream, or ahead of the gradient's mark."""

    def __init__(self, stream: RecordedStream) -> None:
        super().__init__()
        self.stream, self.wrong, self.calls = stream, 0, 0
        # Mark of the gradients of the running step.
        self.ready = 0

    def _check(self) -> None:
        self.calls += 1
        self.wrong += not self.stream.is_working or self.ready not in self.stream.waited

    @override
    def compress(self, values: Tensor, state: State, payload: Tensor, **options: Any) -> None:
        self._check()
        super().compress(values, state, payload, **options)

    @override
    def expand(self, payload: Tensor, out: Tensor, **options: Any) -> None:
        self._check()
        super().expand(payload, out, **options)


def synchronise(context: RankContext, topology: str) -> dict[str, Any]:
    """Return the wrong and all calls, and the state of the stream in callbacks."""
    stream = RecordedStream()
    codec = CheckedCodec(stream)
    sends, callbacks, main_waits = [], [], []
    message_of = executor.message_of

    def checked_message(*args: Any) -> Any:
        sends.append(stream.is_working)
        return message_of(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "stream_beside", lambda device: stream)
        patch.setattr(executor, "message_of", checked_message)
        plan = plan_for(context.world_size, topology, COUNTS)
        with open_sync(context, plan, {"tbq": codec}) as opened:
            for step in range(3):
                gradients = {name: torch.randn(count) for name, count in COUNTS.items()}
                # The executor takes the next mark behind the gradients.
                codec.ready = stream.marks + 1
                finished = threading.Event()

                def on_done(error: Any, finished: threading.Event = finished) -> None:
                    callbacks.append(stream.is_working)
                    finished.set()

                opened.sync.start(step, gradients, on_done)
                assert finished.wait(20)
            before = len(stream.waited)
            codec.ready = stream.marks + 1
            opened.sync.run(3, {name: torch.randn(count) for name, count in COUNTS.items()})
            # This thread has waited for the mark behind the means.
            main_waits.append(len(stream.waited) - before)
    return {
        "wrong": codec.wrong,
        "calls": codec.calls,
        "kept": stream.kept,
        "sends": sends,
        "callbacks": callbacks,
        "main_waits": main_waits,
    }


@pytest.mark.parametrize("topology", ["ps", "ring"])
def test_all_work_is_in_the_stream_and_after_the_gradients(pool: RankPool, topology: str) -> None:
    for result in pool.run(synchronise, 2, topology):
        assert result["calls"]
        assert result["wrong"] == 0
        # Each gradient is one unit.
        assert result["kept"] == 4 * len(COUNTS)
        assert result["sends"]
        assert all(result["sends"])
        assert result["callbacks"] == [True] * 3
        assert result["main_waits"] == [1]
