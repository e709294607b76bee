"""Plans that change during a fit, and PowerSGD, through the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dlres.strategies.compressed_ddp import step_recorder
from tests.gradsync.hook.test_replanning import FAST, SLOW, VirtualNetwork
from tests.strategies.compressed_ddp.test_training import Regression, equal, fit
from tests.support.rank_pool import RankContext, RankPool

AUTO = {"algorithm": "auto", "topology": "auto", "min_bytes": 0}
LOW_RANK = {"algorithm": "powersgd", "codec_options": {"rank": 1, "start_step": 2}}


def fit_over_a_virtual_network(
    context: RankContext, speeds: dict[int, float], codec_seconds: float, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights, and the printed lines about changes of the plan.

    For `speeds` and `codec_seconds` see `VirtualNetwork`; `options` are the strategy's.
    """
    network = VirtualNetwork(speeds, context.world_size, codec_seconds)
    lines: list[str] = []
    step = Regression.training_step

    def counting_step(module: Regression, batch: Any, batch_idx: int) -> torch.Tensor:
        network.step = module.trainer.fit_loop.total_batch_idx
        return step(module, batch, batch_idx)

    with network.replacing_the_real_one(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Regression, "training_step", counting_step)
        patch.setattr(step_recorder, "rank_zero_info", lines.append)
        result = fit(context, options, max_epochs=2)
    return result["weights"], [line for line in lines if "drifted" in line]


def test_a_plan_that_changes_trains_as_ddp_and_is_printed_once(pool: RankPool) -> None:
    """A sum of two gradients has one order only, so the weights are equal bit for bit."""
    speeds = {0: FAST, 6: SLOW}
    # At a second per element, no codec is worth its time.
    ranks = pool.run(fit_over_a_virtual_network, 2, speeds, 1.0, AUTO)
    plain = pool.run(fit, 2, None, max_epochs=2)
    for (weights, lines), expected in zip(ranks, plain, strict=True):
        assert equal(weights, expected["weights"])
        (line,) = lines
        assert line.startswith("dlres: gradient synchronisation: none became raw (")


def test_powersgd_trains_near_ddp_and_resumes_exactly(pool: RankPool, tmp_path: Path) -> None:
    # An epoch has 8 steps, so the checkpoint of step 8 is between two epochs.
    options: dict[str, Any] = {"counts": (32, 32), "max_steps": 16}
    plain = pool.run(fit, 2, None, **options)
    whole = pool.run(fit, 2, LOW_RANK, directory=str(tmp_path), **options)
    assert equal(whole[0]["weights"], whole[1]["weights"])
    for name, weight in plain[0]["weights"].items():
        torch.testing.assert_close(whole[0]["weights"][name], weight, rtol=0, atol=0.1)
    assert not equal(whole[0]["weights"], plain[0]["weights"])
    path = str(tmp_path / "step=8.ckpt")
    resumed = pool.run(fit, 2, LOW_RANK, resume=path, **options)
    for one in resumed:
        assert equal(one["weights"], whole[0]["weights"])
    # DDPStrategy can continue from the checkpoint, too, without the errors.
    pool.run(fit, 2, None, resume=path, **options)


def test_powersgd_with_accumulation_and_a_gradient_scaler(pool: RankPool) -> None:
    """The first steps overflow, until the scaler has lowered its scale."""
    scaler = {"init_scale": 2.0**20, "growth_interval": 10**6}
    ranks = pool.run(fit, 2, LOW_RANK, scaler=scaler, accumulate_grad_batches=2, max_epochs=3)
    assert equal(ranks[0]["weights"], ranks[1]["weights"])
    assert all(value.isfinite().all() for value in ranks[0]["weights"].values())
