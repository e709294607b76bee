"""Training over several hosts through the Trainer, and over ZeroMQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dlres.gradsync.hook import planned_sync
from tests.strategies.compressed_ddp.test_training import COMPRESS_ALL, distance, equal, fit
from tests.support.rank_pool import RankContext, RankPool

# Hosts of three ranks: a letter for each rank.
HOSTS = "aba"


def fit_on_hosts(
    context: RankContext, hosts: str, options: dict[str, Any], **arguments: Any
) -> dict[str, Any]:
    """Return the result of `fit` on a rank whose host has a letter of `hosts`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_sync, "host_identity", lambda: hosts[context.rank])
        return fit(context, options, **arguments)


def test_uncompressed_gradients_are_those_of_ddp(pool: RankPool) -> None:
    plain = pool.run(fit, 3, None)
    options = {"algorithm": "raw", "transport": "zmq"}
    ours = pool.run(fit_on_hosts, 3, HOSTS, options)
    assert all(equal(ours[0]["weights"], other["weights"]) for other in ours)
    assert distance(plain[0]["weights"], ours[0]["weights"]) < 1e-6


def test_the_transport_changes_no_weight(pool: RankPool) -> None:
    options = {"algorithm": "int8", **COMPRESS_ALL}
    one, other = (pool.run(fit, 2, {**options, "transport": t}) for t in ("gloo", "zmq"))
    assert all(equal(a["weights"], b["weights"]) for a, b in zip(one, other, strict=True))


def test_a_resumed_run_continues_exactly(pool: RankPool, tmp_path: Path) -> None:
    options = {"algorithm": "onebit", **COMPRESS_ALL}
    job = fit_on_hosts, 3, HOSTS, options
    whole = pool.run(*job, directory=str(tmp_path), max_steps=16)
    resumed = pool.run(*job, resume=str(tmp_path / "step=8.ckpt"), max_steps=16)
    assert all(equal(whole[0]["weights"], other["weights"]) for other in (*whole, *resumed))
    saved = torch.load(tmp_path / "step=8.ckpt", weights_only=True)["dlres_gradient_sync"]
    # Only the first rank of each host has residuals.
    assert [bool(one["units"]) for one in saved] == [True, True, False]


@pytest.mark.parametrize(
    "counts", [(4, 24, 40), pytest.param((40, 4, 24), marks=pytest.mark.exhaustive)]
)
def test_uneven_loaders_train_as_without_hosts(
    pool: RankPool, counts: tuple[int, int, int]
) -> None:
    """A rank whose samples have ended is alone on its host, or shares it with one that has some."""
    options = {"algorithm": "raw", **COMPRESS_ALL}
    flat = pool.run(fit, 3, options, counts=counts)
    ours = pool.run(fit_on_hosts, 3, HOSTS, options, counts=counts)
    assert all(equal(ours[0]["weights"], other["weights"]) for other in ours)
    assert distance(flat[0]["weights"], ours[0]["weights"]) < 1e-5
    compressed = pool.run(
        fit_on_hosts, 3, HOSTS, {"algorithm": "tbq", **COMPRESS_ALL}, counts=counts
    )
    assert all(equal(compressed[0]["weights"], other["weights"]) for other in compressed)


def test_steps_that_overflow_leave_no_residual(pool: RankPool) -> None:
    """The first steps overflow, until the scaler has lowered its scale."""
    options = {"algorithm": "tbq", **COMPRESS_ALL}
    scaler = {"init_scale": 2.0**20, "growth_interval": 10**6}
    ranks = pool.run(fit_on_hosts, 3, HOSTS, options, scaler=scaler, max_epochs=4)
    assert all(equal(ranks[0]["weights"], other["weights"]) for other in ranks)
    assert all(value.isfinite().all() for value in ranks[0]["weights"].values())
    losses = ranks[0]["losses"]
    assert sum(losses[-8:]) < sum(losses[:8])
