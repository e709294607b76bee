"""Times of single pulls, with and without a snapshot of the server at the same time."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import torch

from benchmarks.support.parameter_server.contenders import make_parameters
from benchmarks.support.parameter_server.jobs import open_session, packed_options
from lightning_dlres.paramserver import protocol

# Layers of the model: 101 MB of parameters, and twice as many bytes of optimizer state.
_LAYERS = 96
_KEY_BYTES = 1 << 20
# Time limit of all pulls of one call of `PullTimer.pull`, in seconds.
_DEADLINE = 60.0


class PullTimer:
    """Only worker of a job that pulls one key after the other.

    Args:
        server: Address of the server.
        token: Token of the job, in hexadecimal digits.
        directory: Directory of the server's snapshots.
    """

    def __init__(self, server: str, token: str, directory: Path) -> None:
        self._directory, parameters = directory, make_parameters(_LAYERS)
        optimizer = torch.optim.AdamW(parameters.values())
        self._session = open_session(
            parameters,
            optimizer,
            token=bytes.fromhex(token),
            worker=0,
            workers=1,
            servers=[server],
            key_bytes=_KEY_BYTES,
        )
        options = packed_options(optimizer)
        keys = self._session.exchange.keys
        for one in keys:
            self._session.push(one.key.index, parameters[one.key.name], options)
        self._session.wait()
        self._session.land()
        # Biases are small, so their pulls would be the fast ones.
        self._large = itertools.cycle([one for one in keys if one.key.nbytes == _KEY_BYTES])

    def pull(self, count: int, *, in_snapshot: bool) -> list[float]:
        """Return the seconds of pulls, all of them during a snapshot, or none.

        There are fewer than `count` if the time limit comes first.

        Raises:
            RuntimeError: If the time limit comes before the first pull.
        """
        seconds: list[float] = []
        deadline = time.monotonic() + _DEADLINE
        while len(seconds) < count and time.monotonic() < deadline:
            if not in_snapshot and self._is_in_snapshot():
                time.sleep(0.01)
                continue
            if in_snapshot and not self._is_in_snapshot():
                exchange = self._session.exchange
                self._session._links[0].post(protocol.SNAPSHOT, exchange.request())
            before = self._is_in_snapshot()
            elapsed = self._pull_one()
            if before == in_snapshot == self._is_in_snapshot():
                seconds.append(elapsed)
        if not seconds:
            raise RuntimeError(f"no pull with in_snapshot={in_snapshot} in {_DEADLINE:g} s")
        return seconds

    def _is_in_snapshot(self) -> bool:
        return any(self._directory.glob("*.snapshot.partial"))

    def _pull_one(self) -> float:
        exchange, one = self._session.exchange, next(self._large)
        start = time.perf_counter()
        with exchange.lock:
            exchange.expect(one.key.index, one.number, is_queued=False)
            request = exchange.key_request(one.key.index, one.number)
            self._session._links[0].post(protocol.PULL, request)
        self._session.wait()
        elapsed = time.perf_counter() - start
        self._session.land()
        return elapsed
