"""Training goes on, and ends with the same weights, through all faults that a job may meet."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.support.forkserver import ForkServer
from tests.support.chaos_proxy import Chaos
from tests.support.paramserver_cluster import Cluster, closing_cluster
from tests.support.rank_pool import ADDRESSES

WORKERS, SERVERS = 3, 2
CHAOS = Chaos(drop=0.03, duplicate=0.03, delay=0.1, seconds=0.1)


@pytest.fixture(scope="module")
def forks(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    """Fork server for servers and workers."""
    server = ForkServer(request.config.stash[ADDRESSES][0])
    yield server
    server.close()


def undisturbed(forks: ForkServer, tmp_path: Path, steps: int, max_norm: float) -> bytes:
    """Return the final weights of a run without faults."""
    cluster = Cluster(
        forks,
        tmp_path / "undisturbed",
        workers=WORKERS,
        servers=SERVERS,
        steps=steps,
        max_norm=max_norm,
    )
    with closing_cluster(cluster):
        weights = cluster.finish()
    assert weights == [weights[0]] * WORKERS
    return weights[0]


def digest(data: bytes) -> str:
    """Return a short text that stands for bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


def inject(cluster: Cluster, fault: str) -> None:
    """Inject a fault, named by its kind and its victims."""
    kind, *victims = fault.split()
    numbers = [int(victim) for victim in victims]
    if kind == "server":
        cluster.kill_server(numbers[0])
        cluster.restart_server(numbers[0])
    elif kind == "snapshot":
        cluster.kill_server_in_snapshot(numbers[0])
        cluster.restart_server(numbers[0])
    elif kind == "worker":
        cluster.kill_worker(numbers[0])
        cluster.replace_worker(numbers[0])
    elif kind == "both":
        cluster.kill_server(numbers[0])
        cluster.kill_worker(numbers[1])
        cluster.start_replacement(numbers[1])
        cluster.restart_server(numbers[0])
    elif kind == "pause":
        error = cluster.pause_worker_past_deadline(numbers[0])
        assert "shut this process out" in error
    else:
        assert kind == "full"
        cluster.fill_disk(numbers[0])


def run(
    forks: ForkServer, tmp_path: Path, steps: int, faults: Sequence[str], max_norm: float, seed: int
) -> None:
    """Train with faults, spread over all steps, and compare with an undisturbed run."""
    expected = undisturbed(forks, tmp_path, steps, max_norm)
    cluster = Cluster(
        forks,
        tmp_path / "chaos",
        workers=WORKERS,
        servers=SERVERS,
        steps=steps,
        chaos=CHAOS,
        seed=seed,
        max_norm=max_norm,
        snapshot_seconds=0.4,
        deadline=5.0,
    )
    with closing_cluster(cluster):
        for position, fault in enumerate(faults):
            cluster.wait_step((position + 1) * steps // (len(faults) + 1))
            inject(cluster, fault)
        weights = cluster.finish()
        counts = sum((proxy.counts for proxy in cluster.proxies), Counter[str]())
    assert [digest(data) for data in weights] == [digest(expected)] * WORKERS
    assert min(counts[kind] for kind in ("dropped", "duplicated", "delayed")) > 0


# With clipping, each update also waits for a commit.
@pytest.mark.parametrize("max_norm", [0.5, pytest.param(0.0, marks=pytest.mark.exhaustive)])
def test_training_survives_faults(forks: ForkServer, tmp_path: Path, max_norm: float) -> None:
    run(forks, tmp_path, 25, ["server 0", "worker 1", "both 1 2", "snapshot 0"], max_norm, 1)


FAULTS = [
    *("server 0", "worker 1", "snapshot 1", "full 0", "server 1", "pause 2"),
    *("server 0", "both 1 0", "worker 2", "server 1", "worker 0", "server 0"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_training_survives_all_faults(
    forks: ForkServer, tmp_path: Path, max_norm: float, seed: int
) -> None:
    run(forks, tmp_path, 200, FAULTS, max_norm, seed)
