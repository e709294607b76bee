"""On one device there are no stages or micro-batches, and training equals plain training
bitwise."""

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


class DependsOnMicrobatches(Classifier):
    """A model whose results depend on the number of micro-batches, with steps that a pipeline
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


def train(context: RankContext | None) -> dict[str, Tensor]:
    seed_everything(3, verbose=False)
    model = DependsOnMicrobatches()
    options: dict[str, Any] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    # A pipeline of several stages does not allow this callback.
    options["callbacks"] = [EMAWeightAveraging(decay=0.8)]
    if context is not None:
        options |= {"stages": "auto", "microbatches": "auto", "plan": None}
    trainer = trainer_for(context, precision="bf16-mixed", **options)
    trainer.fit(model, batches(), batches())
    if context is not None:
        assert trainer.strategy.schedule == "gpipe"
        timeline = measure(((0,),), {0: trainer.strategy.tracer.spans()})
        assert timeline is not None
        assert 0 < timeline.bubble < 1
    logged = {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}
    drawn = {"drawn": torch.rand(1), "steps": torch.tensor(model.steps)}
    return {**model.state_dict(), **logged, **drawn}


def differences_from_plain_training(context: RankContext) -> list[str]:
    expected, actual = train(None), train(context)
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(expected[name], actual[name])]


def uses_plain_steps(context: RankContext, options: dict[str, Any]) -> bool:
    defaults: dict[str, Any] = {"stages": "auto", "microbatches": "auto", "plan": None}
    is_plain = []

    class RecordsRunner(Classifier):
        def on_train_start(self) -> None:
            is_plain.append(isinstance(self.trainer.strategy._runner, PlainSteps))

    model: LightningModule = RecordsRunner()
    trainer_for(context, **{**defaults, **options}, max_steps=1).fit(model, batches())
    return is_plain == [True]


def test_training_on_one_device_equals_plain_training(pool: RankPool) -> None:
    assert pool.run(differences_from_plain_training, 1) == [[]]


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
def test_options_that_need_a_pipeline_use_one(
    pool: RankPool, options: dict[str, Any], plain: bool
) -> None:
    assert pool.run(uses_plain_steps, 1, options) == [plain]
