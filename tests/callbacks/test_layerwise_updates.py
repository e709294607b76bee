"""Updates amid backward are taken only in steps whose gradients no other code needs."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlres.callbacks import ParameterMirror
from tests.support.mirror_models import CLASSES, WIDTH, data
from tests.support.models import QUIET


class Small(LightningModule):
    """A classifier with a few layers, trained by SGD with a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9, fused=True)


class Fetching(Small):
    """Batches are fetched in the training step."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


class ClippingStep(Small):
    """The optimizer's step is replaced by one that clips; a schedule then wraps that one."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        step = optimizer.step

        def clipping(optimizer: Any, closure: Any) -> Any:
            loss = closure()
            nn.utils.clip_grad_value_(self.parameters(), 1e-3)
            step()
            return loss

        optimizer.step = types.MethodType(clipping, optimizer)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Scheduled(Small):
    """A schedule wraps the optimizer's own step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Unfused(Small):
    """Plain kernels update the parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9, foreach=False)


def train(make: type[Small], batches: int, **options: Any) -> tuple[list[float], list[bool]]:
    """Return losses, and True for each step that updated layers amid backward."""
    seed_everything(3, verbose=False)
    module, kinds = make(), []
    callbacks = options.get("callbacks", [])

    class Watched(ParameterMirror):
        def on_train_batch_end(self, *args: Any) -> None:
            assert self.mirror is not None
            kinds.append(self.mirror._gradients.is_layerwise)
            super().on_train_batch_end(*args)

    options["callbacks"] = [Watched(update="layerwise") for _ in callbacks]
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=3, **{**QUIET, **options})
    trainer.fit(module, data(8 * batches))
    return module.losses, kinds


@pytest.mark.parametrize("make", [Small, Fetching])
def test_only_the_last_batch_of_an_accumulation_updates_layers(make: type[Small]) -> None:
    options = {"accumulate_grad_batches": 3}
    plain, _ = train(make, 8, **options)
    ours, kinds = train(make, 8, callbacks=[ParameterMirror()], **options)
    assert ours == plain
    # The two steps that are measured belong to the first accumulation.
    assert kinds == [number % 8 in (2, 5, 7) for number in range(3 * 8)]


@pytest.mark.parametrize("make", [ClippingStep, Scheduled])
def test_a_replaced_step_is_noticed_below_the_wrapper_of_a_schedule(make: type[Small]) -> None:
    plain, _ = train(make, 5)
    ours, kinds = train(make, 5, callbacks=[ParameterMirror()])
    assert ours == plain
    assert any(kinds) == (make is Scheduled)


@pytest.mark.parametrize(
    ("precision", "is_layerwise"),
    [("64-true", True), ("bf16-true", True), ("bf16-mixed", True), ("loss scaler", False)],
)
def test_all_precisions_without_a_loss_scaler_update_layers(
    precision: str, is_layerwise: bool
) -> None:
    def options() -> dict[str, Any]:
        if precision != "loss scaler":
            return {"precision": precision}
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler)}

    # The fused kernel of SGD is wrong for bfloat16 in some versions of torch.
    plain, _ = train(Unfused, 5, **options())
    ours, kinds = train(Unfused, 5, callbacks=[ParameterMirror()], **options())
    assert ours == plain
    assert any(kinds) == is_layerwise
