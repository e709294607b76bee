"""Training with servers of other hosts, and with servers that end and start again."""

from __future__ import annotations

import resource
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from lightning_dlres.callbacks import ResourceReport
from lightning_dlres.core.comm.rank_addresses import LOOPBACK
from lightning_dlres.core.wire import connections
from lightning_dlres.core.wire.keys import CurveKeys, create_keys, load_keys, load_public_key
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.strategies.parameter_server import server_hosting
from tests.strategies.parameter_server.test_training import Regression, distance, fit
from tests.support.rank_pool import RankContext, RankFailure, RankPool

MODEL: dict[str, Any] = {"model": {"optimizer": "adamw"}, "ranks": 2}


def fit_on_hosts(context: RankContext, *args: Any, **arguments: Any) -> dict[str, Any]:
    """Return the result of `fit` on ranks that believe to be on hosts of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_hosting, "host_identity", lambda: str(context.rank))
        patch.setattr(server_hosting, "listening_addresses", lambda all_: [LOOPBACK] * len(all_))
        make = server_hosting.ParameterServer

        def encrypted(**options: Any) -> ParameterServer:
            assert options["curve"] is not None
            assert len(options["allowed"]) == context.world_size
            return make(**options)

        patch.setattr(server_hosting, "ParameterServer", encrypted)
        return fit(context, *args, **arguments)


def test_embedded_servers_encrypt_between_hosts(pool: RankPool) -> None:
    one, other = (pool.run(run, 2, {}, **MODEL) for run in (fit, fit_on_hosts))
    assert distance(one[0]["weights"], other[1]["weights"]) == 0


def test_the_report_has_the_servers_and_all_workers(pool: RankPool, tmp_path: Path) -> None:
    report = partial(ResourceReport, tmp_path)
    pool.run(fit_on_hosts, 2, {"embedded_servers": 2}, callbacks=(report,), **MODEL)
    text = (tmp_path / "report.md").read_text()
    assert "## Parameter servers" in text
    servers, workers = text.split("Workers", 1)
    assert "0 of 2" in servers
    assert "1 of 2" in servers
    assert workers.count("active") == 2


def test_servers_of_other_hosts_need_keys(pool: RankPool, tmp_path: Path) -> None:
    for name in ("server", "trainer", "stranger"):
        create_keys(tmp_path, name)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                ParameterServer(
                    curve=load_keys(tmp_path / "server.key_secret"),
                    allowed=[load_public_key(tmp_path / "trainer.key")],
                )
            )
            for _ in range(2)
        ]
        options: dict[str, Any] = {
            "servers": [server.address for server in servers],
            "server_key": str(tmp_path / "server.key"),
            "timeout": 60,
        }
        (embedded, _) = pool.run(fit, 2, {"embedded_servers": 2}, **MODEL)
        own = pool.run(fit, 2, {**options, "key": str(tmp_path / "trainer.key_secret")}, **MODEL)
        assert all(distance(embedded["weights"], rank["weights"]) == 0 for rank in own)
        options |= {"key": str(tmp_path / "stranger.key_secret"), "timeout": 3}
        with pytest.raises(RankFailure, match="its encryption keys match"):
            pool.run(fit, 2, options, **MODEL)


def fit_with_few_connections(context: RankContext, *args: Any, **arguments: Any) -> None:
    """Fit with a server that can hold the two connections of one rank only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "_LEAST_CONNECTIONS", 2)
        patch.setattr(resource, "getrlimit", lambda kind: (1, 1))
        fit(context, *args, **arguments)


def test_a_run_with_too_many_ranks_ends_at_once(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match="workers must be at most 1 for this server, got 2"):
        pool.run(fit_with_few_connections, 2, {"timeout": 300}, **MODEL)
    assert time.monotonic() - start < 60


def fit_with_a_buffer_of_each_rank(context: RankContext, *args: Any, **arguments: Any) -> None:
    """Fit a model whose buffer has another shape on each rank."""

    def make(**model: Any) -> Regression:
        module = Regression(**model)
        module.register_buffer("own", torch.zeros(context.rank + 1))
        return module

    fit(context, *args, **arguments, kind=make)  # type: ignore[arg-type]


def test_a_model_that_differs_between_ranks_is_refused(pool: RankPool) -> None:
    message = r"got own of \(1,\) in torch.float32 on rank 0 and own of \(2,\) in .* on rank 1"
    with pytest.raises(RankFailure, match=message):
        pool.run(fit_with_a_buffer_of_each_rank, 2, {"timeout": 300}, **MODEL)


class RestartedServer:
    """Server that ends without warning, and starts again from its snapshot, again and again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server = self._start(0)
        self.address = self._server.address
        self.restarts = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._server.close()

    def _start(self, port: int) -> ParameterServer:
        return ParameterServer(port=port, snapshot=self._directory, snapshot_every=0.2)

    def _run(self) -> None:
        port = int(self.address.rpartition(":")[2])
        last = -1
        while not self._ends.wait(0.05):
            updates = self._server.status().last_version
            # In steps of their own, so that the run ends after some restarts.
            if updates >= last + 10:
                self._server.close()
                self._server = self._start(port)
                last = updates
                self.restarts += 1


def test_servers_that_start_again_change_nothing(pool: RankPool, tmp_path: Path) -> None:
    arguments = {**MODEL, "max_epochs": 4, "gradient_clip_val": 0.1}
    undisturbed = pool.run(fit, 2, {"embedded_servers": 2}, **arguments)
    servers = [RestartedServer(tmp_path / str(index)) for index in range(2)]
    try:
        options = {"servers": [server.address for server in servers], "timeout": 60}
        ours = pool.run(fit, 2, options, **arguments)
    finally:
        for server in servers:
            server.close()
    assert all(server.restarts > 1 for server in servers)
    assert all(distance(undisturbed[0]["weights"], rank["weights"]) == 0 for rank in ours)


def test_a_server_that_has_lost_the_parameters_is_named(pool: RankPool, tmp_path: Path) -> None:
    """It was started without a directory for snapshots."""
    first = ParameterServer()
    address, port = first.address, int(first.address.rpartition(":")[2])
    restarted: list[ParameterServer] = []

    def restart() -> None:
        while first.status().last_version < 5:
            pass
        first.close()
        restarted.append(ParameterServer(port=port))

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        with pytest.raises(RankFailure, match="has lost the parameters"):
            pool.run(fit, 1, {"servers": [address]}, max_epochs=100, **{**MODEL, "ranks": 1})
    finally:
        thread.join()
        restarted[0].close()


def test_a_stranger_gets_no_answer() -> None:
    """CURVE hides even the existence of the protocol."""
    keys = CurveKeys.generate()
    with ParameterServer(curve=keys, allowed=[CurveKeys.generate().public]) as server:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(server.address)
        socket.send_multipart([b"hello", b""])
        assert not socket.poll(300)
        context.destroy(linger=0)
