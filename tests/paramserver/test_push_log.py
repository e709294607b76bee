"""The log of a worker's pushes keeps each push until it is durable, also for a successor."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.paramserver.execute.worker.state.push_log import (
    NOT_COMMITTED,
    LogEntry,
    PushLog,
)
from tests.support.examples import randoms

CAPACITY = 16 << 10
KEYS = 3


def taken_over(path: Path, capacity: int = CAPACITY) -> PushLog:
    """Return a log that has taken over that of a predecessor."""
    log = PushLog(capacity, path)
    log.take_over()
    return log


def put(log: PushLog, key: int, number: int, payload: bytes, details: bytes = b"d") -> LogEntry:
    """Append an entry and seal it; there must be room."""
    entry = log.append(key, number, details, len(payload))
    assert entry is not None
    entry.payload[:] = payload
    log.seal(entry)
    return entry


@dataclass
class Model:
    """Pushes that the log must have: details, payload and scale by key and number."""

    pushes: dict[tuple[int, int], tuple[bytes, bytes, float]] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(KEYS), 0))
    durable: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(KEYS), 0))

    def check(self, log: PushLog) -> None:
        for (key, number), (details, payload, scale) in self.pushes.items():
            entry = log.get(key, number)
            assert entry is not None
            assert (entry.details, bytes(entry.payload)) == (details, payload)
            assert entry.scale == scale
        for key in range(KEYS):
            numbers = [number for other, number in self.pushes if other == key]
            assert log.latest(key) == max(numbers, default=0)

    def note_durable(self, log: PushLog, key: int, number: int) -> None:
        log.note_durable(key, number)
        self.durable[key] = max(self.durable[key], number)
        for own in [own for own in self.pushes if own[0] == key and own[1] <= number]:
            del self.pushes[own]


@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 120))
def test_a_log_is_like_its_model(seed: int, steps: int) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "log")
        log, model = taken_over(path), Model()
        for _ in range(steps):
            action, key = (
                draw.choice(["append"] * 6 + ["durable"] * 3 + OTHERS),
                draw.randrange(KEYS),
            )
            if action == "append":
                again = (key, model.latest[key]) in model.pushes and draw.random() < 0.2
                number = model.latest[key] + (not again)
                details, payload = (
                    draw.randbytes(draw.randrange(90)),
                    draw.randbytes(draw.choice([0, 1, 64, 1000, 3000])),
                )
                entry = log.append(key, number, details, len(payload))
                if entry is None:
                    assert model.pushes
                    continue
                entry.payload[:] = payload
                log.seal(entry)
                model.latest[key] = number
                model.pushes[key, number] = (details, payload, NOT_COMMITTED)
            elif action == "commit" and (key, model.latest[key]) in model.pushes:
                entry = log.get(key, model.latest[key])
                assert entry is not None
                log.commit(entry, 0.5)
                push = model.pushes[key, model.latest[key]]
                model.pushes[key, model.latest[key]] = (*push[:2], 0.5)
            elif action == "durable":
                number = draw.randint(model.durable[key], model.latest[key])
                model.note_durable(log, key, number)
            elif action in ("killed", "killed within a push"):
                if action == "killed within a push":
                    torn = log.append(key, model.latest[key] + 1, b"torn", 500)
                    if torn is not None:
                        torn.payload[:100] = draw.randbytes(100)
                log = taken_over(path)
                # Bytes of freed entries may still be there. The servers say what they have.
                for other in range(KEYS):
                    log.note_durable(other, model.durable[other])
            model.check(log)


OTHERS = ["commit", "killed", "killed within a push"]


@given(damaged=st.integers(0, 4), offset=st.integers(0, 700), draw=randoms)
def test_a_successor_skips_damaged_entries(damaged: int, offset: int, draw) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "log")
        log = taken_over(path)
        payloads = [draw.randbytes(700) for _ in range(5)]
        entries = [put(log, 0, 1 + n, payload) for n, payload in enumerate(payloads)]
        data = bytearray(path.read_bytes())
        first = entries[damaged].offset + entries[damaged].nbytes - 704
        data[first + min(offset, 699)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        successor = taken_over(path)
        for number, payload in enumerate(payloads, 1):
            entry = successor.get(0, number)
            if number == damaged + 1:
                assert entry is None
            else:
                assert entry is not None
                assert bytes(entry.payload) == payload


@pytest.mark.parametrize("path", [None, "log"])
def test_a_full_log_has_room_when_pushes_are_durable(path: str | None, tmp_path: Path) -> None:
    log = PushLog(CAPACITY) if path is None else taken_over(tmp_path / path)
    number = 0
    while (entry := log.append(0, number + 1, b"", 3000)) is not None:
        log.seal(entry)
        number += 1
    assert number == CAPACITY // (3000 + 128 + 8)
    log.note_durable(0, number - 1)
    for _ in range(3 * number):
        number += 1
        put(log, 0, number, bytes(3000))
        log.note_durable(0, number - 1)
    assert log.get(0, number) is not None
    assert log.append(1, 1, b"", CAPACITY) is None


def test_bytes_that_zeromq_reads_are_not_overwritten(tmp_path: Path) -> None:
    class Tracker:
        done = False

    log, tracker = PushLog(CAPACITY), Tracker()
    entry = put(log, 0, 1, b"x" * 9000)
    entry.trackers.append(tracker)  # type: ignore[arg-type]
    log.note_durable(0, 1)
    assert log.append(0, 2, b"", 9000) is None
    tracker.done = True
    assert log.append(0, 2, b"", 9000) is not None


def test_a_paused_predecessor_does_not_write_to_its_successors_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    paused = taken_over(path)
    put(paused, 0, 1, b"a" * 100)
    successor = taken_over(path)
    put(successor, 0, 2, b"b" * 100)
    put(paused, 0, 2, b"c" * 100)
    paused.close(remove=True)
    entries = [taken_over(path).get(0, number) for number in (1, 2)]
    assert [bytes(entry.payload[:1]) for entry in entries if entry is not None] == [b"a", b"b"]
    successor.close(remove=True)
    # The file is that of the last successor.
    assert path.exists()
    taken_over(path).close(remove=True)
    assert os.listdir(tmp_path) == []


def test_a_successor_finds_more_room_than_its_predecessor(tmp_path: Path) -> None:
    put(taken_over(tmp_path / "log"), 0, 1, b"a")
    log = taken_over(tmp_path / "log", 4 * CAPACITY)
    assert log.capacity == 4 * CAPACITY
    put(log, 0, 2, bytes(3 * CAPACITY))
    assert log.get(0, 1) is not None


def test_a_log_without_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"free space, got .*No space left on device"):
        taken_over(tmp_path / "log")


def test_a_push_after_the_copy_was_mapped_is_found(tmp_path: Path) -> None:
    paused = taken_over(tmp_path / "log")
    successor = PushLog(CAPACITY, tmp_path / "log")
    # The servers have not yet heard of the successor.
    put(paused, 0, 1, b"abc")
    successor.take_over()
    assert successor.get(0, 1) is not None


def test_of_two_processes_that_take_over_one_is_refused(tmp_path: Path) -> None:
    first, second = (PushLog(CAPACITY, tmp_path / "log") for _ in range(2))
    with pytest.raises(ConfigError, match="of two processes"):
        first.take_over()
    second.take_over()


@pytest.mark.parametrize("end", [lambda log: log.close(remove=False), lambda log: None])
def test_the_file_stays_for_a_successor(tmp_path: Path, end: Callable[[PushLog], None]) -> None:
    log = taken_over(tmp_path / "log")
    put(log, 2, 7, b"abc")
    end(log)
    entry = taken_over(tmp_path / "log").get(2, 7)
    assert entry is not None
    assert bytes(entry.payload) == b"abc"
