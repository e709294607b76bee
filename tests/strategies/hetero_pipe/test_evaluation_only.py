"""Modules and steps that are cut for training are validated, tested and used without any training,
with each layer on one rank."""

from __future__ import annotations

import builtins
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_dlres import ConfigError, UnsupportedStepError
from lightning_dlres.pipeline.execute.runtime import error_of_layer
from lightning_dlres.pipeline.stage.layer_call import call_with_changes, with_changes_made
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import trainer_for

WIDTH = 6
SPLIT = {"plan": None, "profile": None}


class Block(nn.Module):
    """A block with a module that another block has, too, and an auxiliary value as attribute."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(WIDTH, WIDTH), shared
        self.auxiliary: Any = 0.0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.shared(self.linear(x)).tanh() * scale
        self.auxiliary = y.square().mean()
        return y


class Network(nn.Module):
    """A module with skip connections, decisions by values, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = Block(self.shared), Block(self.shared)
        self.head = nn.Linear(2 * WIDTH, 1)
        self.offset = nn.Parameter(torch.full((WIDTH,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x) + self.offset
        y = self.shared(skip)
        if bool(y.mean() > 0):
            y = self.second(y, scale=y.abs().max().item())
        y = self.second(y)
        output: Tensor = self.head(torch.cat([skip, y], 1)) + self.first.auxiliary
        return output


class Evaluates(LightningModule):
    """A model whose pipelined module is `net`, or, without it, the step with its two modules."""

    def __init__(self, is_step: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.is_step = is_step
        if is_step:
            self.encoder, self.decoder = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        else:
            self.net = Network()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.decoder(self.encoder(x).relu()) if self.is_step else self.net(x)
        return output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch), batch if self.is_step else batch[:, :1])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self(batch).square().mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", self(batch).mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    return DataLoader(torch.randn(10, WIDTH, generator=generator), batch_size=4)  # type: ignore[arg-type]


def evaluate(context: RankContext | None, is_step: bool, checkpoint: Path) -> Any:
    """Validate, test and predict with a new model each; train the last one if it can be cut.

    Returns:
        All results, and the largest number of stages.
    """
    results: list[Any] = []
    held = 0
    for stage in ("validate", "test", "predict"):
        model = Evaluates(is_step)
        trainer = trainer_for(
            context, **SPLIT, module=None if is_step else "net", stages="auto", max_epochs=1
        )
        options = {} if stage == "predict" else {"verbose": False}
        path = None if stage == "validate" else checkpoint
        result = getattr(trainer, stage)(model, loader(), ckpt_path=path, **options)
        results.append(torch.cat(result) if stage == "predict" else result[0].popitem()[1])
        own = context is not None and trainer.strategy.plan  # type: ignore[attr-defined]
        held = max(held, len(own.split) if own else 0)
    if is_step:
        trainer.fit(model, loader())
        results.append(trainer.validate(model, loader(), verbose=False)[0].popitem()[1])
    return results, held


def save_checkpoint(path: Path, is_step: bool) -> None:
    model, trainer = Evaluates(is_step), trainer_for(None, max_epochs=1)
    trainer.fit(model, loader())
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("is_step", [False, True])
def test_evaluation_without_training_equals_one_device(
    pool: RankPool, tmp_path: Path, is_step: bool
) -> None:
    path = tmp_path / "trained.ckpt"
    save_checkpoint(path, is_step)
    expected, _ = evaluate(None, is_step, path)
    for results, stages in pool.run(evaluate, 2, is_step, path):
        assert stages == 2
        for result, plain in zip(results, expected, strict=True):
            torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-6)


class Remembers(nn.Module):
    """A module that keeps state in attributes of many kinds, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.means: list[float] = []
        self.counts = {"rows": 0}
        self.total, self.largest = torch.zeros(WIDTH), np.zeros(1)
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.dropout(self.linear(x), 0.3) * random.uniform(0.9, 1.1)
        self.means.append(float(y.mean()))
        self.counts["rows"] += len(x)
        self.total += y.sum(0)
        np.maximum(self.largest, y.float().max().numpy(), out=self.largest)
        self.mean.update(y)
        return y


class Overwrites(nn.Module):
    """A module that changes its inputs, and that cannot take small batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor, part: Tensor) -> Tensor:
        if len(x) < 4:
            raise ValueError("small")
        state.mul_(2).add_(1)
        part += x.mean(0)[: len(part)]
        output: Tensor = self.linear(x)
        return output


class UsesMemory(LightningModule):
    """Model whose steps use what its modules have kept, also in hooks of inner modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = Remembers(), Remembers()
        self.features: dict[str, Any] = {}
        self.calls = 0
        self.third = Overwrites()
        compiled = torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager")
        self.compiled = cast(nn.Module, compiled)
        self.scales = nn.ParameterList([torch.full((WIDTH,), 0.7)])
        self.register_buffer("state", torch.zeros(WIDTH))
        self.plain = torch.zeros(WIDTH)
        for name in ("first", "second"):
            inner = self.get_submodule(f"{name}.linear")
            inner.register_forward_hook(partial(self.keep, name))

    def keep(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features[name] = output
        self.calls += 1
        self.log(f"mean of {name}", output.mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        y = self.second(self.first(batch) + torch.rand(WIDTH))
        with torch.autocast("cpu", enabled=False):
            exact = self.compiled(self.first(batch))
        try:
            y = y + self.third(exact, self.state, self.plain[2:])
        except ValueError as error:
            y = y + len(str(error))
        y = y * self.scales[0] + self.state + self.plain
        self.log("precision", torch.finfo(exact.dtype).eps)
        self.log("sum", y.double().sum() + self.features["first"].sum() * self.calls)
        for module in (self.first, self.second):
            assert isinstance(module, Remembers)
            y = y + module.total + module.counts["rows"] + float(module.largest[0])
            y = y + sum(module.means) + module.mean.compute()
        self.log("memory", y.double().mean())


def use_memory(context: RankContext | None) -> tuple[dict[str, float], list[float], float]:
    seed_everything(3, verbose=False)
    model, trainer = (
        UsesMemory(),
        trainer_for(context, **SPLIT, stages="auto", precision="bf16-mixed"),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Forward hooks")
        result = dict(trainer.test(model, loader(), verbose=False)[0])
    return result, model.second.means, float(torch.rand(()))


def test_what_a_call_changes_beside_its_result_reaches_all_ranks(pool: RankPool) -> None:
    expected = use_memory(None)
    assert expected[0]["precision"] == torch.finfo(torch.float32).eps
    assert pool.run(use_memory, 2) == [expected] * 2


class Appends(nn.Module):
    """A module with a block that adds to a list that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        y: Tensor = self.second(self.first(x))
        seen.append(y)
        return y


def call(layer: nn.Module, *args: Any) -> tuple[Any, Any]:
    inputs = (args, {})
    return inputs, call_with_changes("net.block", inputs, lambda: layer(*args))


def test_a_layer_that_changes_a_list_is_refused() -> None:
    with pytest.raises(UnsupportedStepError, match=r"'net\.block' must not change the lists"):
        call(Appends(), torch.zeros(1, 2), [])


def test_inputs_that_are_no_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be sent"):
        call(nn.Identity(), object())


class Changes(nn.Module):
    """A module that changes its input."""

    def forward(self, x: Tensor, same: Tensor) -> Tensor:
        x += same
        return x * 2


def test_changes_of_inputs_are_made_on_other_ranks() -> None:
    _, result = call(Changes(), torch.zeros(2), torch.ones(2))
    inputs = ((torch.zeros(2), torch.ones(2)), {})
    output = with_changes_made(inputs, result)
    assert output.tolist() == [2.0, 2.0]
    assert inputs[0][0].tolist() == [1.0, 1.0]


def test_exceptions_of_python_are_raised_on_all_ranks_and_others_named() -> None:
    kinds = [k for k in vars(builtins).values() if isinstance(k, type) and issubclass(k, Exception)]
    made = [error_of_layer("rank 1", kind.__name__, "small") for kind in kinds]
    same = [type(error) is kind for error, kind in zip(made, kinds, strict=True)]
    assert all("small" in str(error) for error in made)
    assert same.count(False) <= 4
    unicode = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")
    for error in (KeyError(3), StopIteration(None), ValueError("short", (1, {"k": 2})), unicode):
        again = error_of_layer("rank 1", type(error).__name__, str(error), error.args)
        assert (type(again), again.args, str(again)) == (type(error), error.args, str(error))
    other = error_of_layer("rank 1", "OutOfMemoryError", "small")
    assert isinstance(other, UnsupportedStepError)
    assert "on rank 1: OutOfMemoryError: small" in str(other)
