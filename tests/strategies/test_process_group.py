"""Further runs in the processes of a run that has failed, as in a search that tries on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_dlres import PeerLostError, PeerTimeoutError
from lightning_dlres.strategies.process_group import DEFAULT_GROUP, DefaultGroup
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Classifier, batches


class FailsOnRankZero(Classifier):
    """A model that fails on rank 0, where another rank waits for its gradients."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.global_rank == 0:
            raise ValueError("no step")


def fit(context: RankContext, strategy: str, model: Classifier) -> dict[str, Tensor]:
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        plugins=[context.environment],
        gradient_clip_val=0.1,
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(model, batches())
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def fit_after_failures(context: RankContext, strategy: str) -> tuple[list[str], dict[str, Tensor]]:
    """Return the errors of two runs that fail, and the weights of a third one."""
    errors = []
    for _ in range(2):
        with pytest.raises((ValueError, PeerLostError)) as raised:
            fit(context, strategy, FailsOnRankZero())
        errors.append(str(raised.value))
    return errors, fit(context, strategy, Classifier())


@pytest.mark.parametrize(
    "strategy", ["dlres_hetero_pipe", "dlres_compressed_ddp", "dlres_parameter_server"]
)
def test_a_run_after_failed_ones_trains(pool: RankPool, strategy: str) -> None:
    first, second = pool.run(fit_after_failures, 2, strategy)
    assert first[0] == ["no step"] * 2
    assert all("gave up: ValueError: no step" in error for error in second[0])
    expected = pool.run(fit, 2, strategy, Classifier())[0]
    for weights in (first[1], second[1]):
        assert weights.keys() == expected.keys()
        assert all(torch.allclose(weights[name], expected[name], atol=1e-6) for name in expected)


def join(context: RankContext, group: DefaultGroup, wait_seconds: float = 60.0) -> Any:
    group.join(context.environment, None, limit=timedelta(seconds=60), wait_seconds=wait_seconds)
    return torch.distributed.group.WORLD


def join_again(context: RankContext) -> tuple[bool, bool, str]:
    """Return whether the group stays after a run, and after a failed one on rank 1; and the error
    of a further run that rank 1 does not begin."""
    first = join(context, DEFAULT_GROUP)
    stays = join(context, DEFAULT_GROUP) is first
    if context.rank == 1:
        DEFAULT_GROUP.note_failure()
    stays_after_failure = join(context, DEFAULT_GROUP) is first
    message = ""
    if context.rank == 0:
        with pytest.raises(PeerTimeoutError) as raised:
            join(context, DEFAULT_GROUP, 0.1)
        message = str(raised.value)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total.item() == 2.0
    return stays, stays_after_failure, message


def test_a_failure_on_any_rank_gives_all_a_new_group(pool: RankPool) -> None:
    outcomes = pool.run(join_again, 2)
    assert [outcome[:2] for outcome in outcomes] == [(True, False)] * 2
    assert "rank 0 waited 0.1 s for rank 1 to begin the run" in outcomes[0][2]


def keep_group_of_user(context: RankContext) -> bool:
    context.init_process_group()
    group = torch.distributed.group.WORLD
    DEFAULT_GROUP.note_failure()
    return join(context, DEFAULT_GROUP) is group


def test_a_group_of_other_code_stays(pool: RankPool) -> None:
    assert pool.run(keep_group_of_user, 2) == [True, True]
