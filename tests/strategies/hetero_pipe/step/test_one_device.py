"""On one device nothing is cut: training is plain training, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from lightning_dlres import PipelinePlan
from lightning_dlres.pipeline.report.timeline import measure
from lightning_dlres.strategies.hetero_pipe.plain_steps import PlainSteps
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Classifier, batches, trainer_for


class Random(Classifier):
    """Everything that differs with the number of micro-batches, and steps that a pipeline
    refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 12), nn.Dropout(0.5), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 5)
        )
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        if batch_idx == 2:
            return None
        noise = self.net(torch.randn_like(batch[0])).square().mean()
        return {"loss": super().training_step(batch, batch_idx) + 0.1 * noise, "steps": self.steps}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean())


def trained(context: RankContext | None) -> dict[str, Tensor]:
    seed_everything(3, verbose=False)
    model = Random()
    options: dict[str, Any] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    # With several stages this callback is refused.
    options["callbacks"] = [EMAWeightAveraging(decay=0.8)]
    if context is not None:
        options |= {"stages": "auto", "microbatches": "auto", "plan": None}
    trainer = trainer_for(context, precision="bf16-mixed", **options)
    trainer.fit(model, batches(), batches())
    if context is not None:
        assert trainer.strategy.schedule == "gpipe"
        found = measure(((0,),), {0: trainer.strategy.tracer.spans()})
        assert found is not None
        assert 0 < found.bubble < 1
    logged = {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}
    drawn = {"drawn": torch.rand(1), "steps": torch.tensor(model.steps)}
    return {**model.state_dict(), **logged, **drawn}


def unlike_plain_training(context: RankContext) -> list[str]:
    expected, found = trained(None), trained(context)
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(expected[name], found[name])]


def is_plain(context: RankContext, options: dict[str, Any]) -> bool:
    defaults: dict[str, Any] = {"stages": "auto", "microbatches": "auto", "plan": None}
    kinds = []

    class Looks(Classifier):
        def on_train_start(self) -> None:
            kinds.append(isinstance(self.trainer.strategy._runner, PlainSteps))

    model: LightningModule = Looks()
    trainer_for(context, **{**defaults, **options}, max_steps=1).fit(model, batches())
    return kinds == [True]


def test_equal_to_plain_training(pool: RankPool) -> None:
    assert pool.run(unlike_plain_training, 1) == [[]]


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"memory_limit": "1GiB"}, True),
        ({"microbatches": 2}, False),
        ({"schedule": "1f1b"}, False),
        ({"plan": PipelinePlan(replicas=((0,),), split=(5,))}, False),
    ],
    ids=str,
)
def test_what_is_asked_for_is_done(pool: RankPool, options: dict[str, Any], plain: bool) -> None:
    assert pool.run(is_plain, 1, options) == [plain]
