"""Memory of mirrors ends with the tensors that need it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlres.callbacks import ParameterMirror
from lightning_dlres.core.host.slab import Slab
from tests.support.models import QUIET

# Bytes of the parameters of `Layers`, each in a piece of whole alignments.
PARAMETERS = 4 * (4 * 128 * 128 + 512)


class Layers(LightningModule):
    """Layers that train and are tested."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class LiveSlabs:
    """Bytes of the slabs that are alive.

    Attributes:
        peak: Largest number of bytes since it was set.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, slab: Slab) -> None:
        self.now += slab.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(slab.data.untyped_storage(), self._remove, slab.nbytes)

    def _remove(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> LiveSlabs:
    live, make = LiveSlabs(), Slab.__init__

    def counted(slab: Slab, *args: Any, **options: Any) -> None:
        make(slab, *args, **options)
        live.add(slab)

    monkeypatch.setattr(Slab, "__init__", counted)
    return live


def make_trainer(callback: ParameterMirror) -> Trainer:
    return Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[callback], **QUIET)


def test_runs_keep_no_memory_of_earlier_ones(slabs: LiveSlabs) -> None:
    module, loader, callback = Layers(), DataLoader(torch.randn(32, 128), 8), ParameterMirror()
    trainer = make_trainer(callback)
    trainer.fit(module, loader)
    gc.collect()
    # Parameters, gradients and two tensors of history; biases have none in the mirror.
    assert slabs.now <= 4 * PARAMETERS
    slabs.peak = slabs.now
    trainer.test(module, loader, verbose=False)
    gc.collect()
    # An evaluation has places for parameters only.
    assert slabs.peak <= 5 * PARAMETERS
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    gc.collect()
    # The gradients of the last step, and the optimizer of the first fit, are gone.
    assert slabs.now <= 4 * PARAMETERS
    del module, trainer, loader, callback
    gc.collect()
    assert slabs.now == 0
