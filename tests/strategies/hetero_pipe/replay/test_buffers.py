"""Buffers outside of the pipelined layers equal those of a single device on every rank, however
often the step runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlres import UnsupportedStepError
from lightning_dlres.strategies.hetero_pipe.replay.buffers import NonPipelinedBuffers
from lightning_dlres.strategies.hetero_pipe.step.module_search import find_pipelined_module
from tests.strategies.hetero_pipe.replay.user_state.test_value_types import Model, replay
from tests.support.parity import relative
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    batches,
    differences_in,
    fit,
    no_differences_in,
    trainer_for,
)


class Norms(Classifier):
    """A model that normalises before and after the pipelined module."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.BatchNorm1d(16), nn.BatchNorm1d(5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.after(self.net(self.before(batch[0])))
        loss = F.cross_entropy(out, batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.observed += [float(self.before.running_var.sum()), float(self.after.running_mean[0])]


class Centre(Classifier):
    """A model with a running centre that it changes in place, a queue that it replaces, and a count
    that checkpoints leave out. The loss depends on all of them."""

    def __init__(self, later: bool = False) -> None:
        super().__init__()
        self.from_step = 3 if later else 0
        self.register_buffer("centre", torch.zeros(5))
        self.register_buffer("queue", torch.zeros(6, 5))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
        self.centre_too = self.centre

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        scale = 1.0 + 0.1 * self.count
        loss = F.cross_entropy(out - self.centre + self.queue.mean(0), batch[1]) * scale
        if batch_idx >= self.from_step:
            with torch.no_grad():
                self.centre.lerp_(out.mean(0), 0.1)
                self.queue = torch.cat([out.mean(0, keepdim=True), self.queue])[:6]
                self.count += 1
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.observed += [float(self.centre.sum()), float(self.queue.sum()), float(self.count)]
        assert self.centre_too is self.centre


class LazyBuffers(Classifier):
    """A model whose first step registers buffers: one that checkpoints leave out, two that share
    a tensor, and one that has been registered as None. The second step deletes one.

    Attributes:
        checks_buffers: True: the step looks for its buffers among the registered ones. False: it
            uses `hasattr`.
    """

    def __init__(self, checks_buffers: bool = False) -> None:
        super().__init__()
        self.checks_buffers = checks_buffers
        self.register_buffer("late", None)
        self.register_buffer("early", torch.ones(2))
        self.register_buffer("twin", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        if not ("centre" in self._buffers if self.checks_buffers else hasattr(self, "centre")):
            self.register_buffer("centre", torch.zeros(5))
            self.register_buffer("count", torch.zeros(()), persistent=False)
            self.late = torch.zeros(3)
        elif hasattr(self, "early"):
            del self.early
            self.twin = self.late
        with torch.no_grad():
            self.centre.lerp_(out.mean(0), 0.1)
            self.count += 1
            self.late += 1
        return F.cross_entropy(out - self.centre, batch[1]) * (1 + self.count / 9)

    def on_train_batch_end(self, *args: Any) -> None:
        assert not vars(self).keys() & {"centre", "count", "late", "early", "twin"}
        names = ["late", "early", "twin", "centre", "count"]
        buffers = dict(self.named_buffers(remove_duplicate=False))
        self.observed += [float(buffers[n].sum()) if n in buffers else -1.0 for n in names]
        self.observed += [names.index(n) for n in self.state_dict() if n in names]
        self.observed += [self.twin is self.late]


class NewShapes(Classifier):
    """A model with a shared buffer that gets a new shape in every step, and a buffer whose old
    tensor an attribute keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("seen_too", self.seen)
        self.register_buffer("last", torch.zeros(5))
        self.before_last = self.last

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.before_last = self.last
        self.seen = self.seen_too = torch.cat([self.seen, out.detach().mean().reshape(1)])
        self.last = out.detach().mean(0)
        return F.cross_entropy(out - self.before_last, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1
        self.observed += [float(self.seen_too.sum()), float(self.last[0])]
        self.observed += [float(self.before_last[0]), self.seen is self.seen_too]


CASES = {
    "lazy, hasattr": Case(LazyBuffers, "auto", "gpipe"),
    "lazy, registered": Case(lambda: LazyBuffers(checks_buffers=True), "gpipe", "gpipe"),
    "new shapes": Case(NewShapes, "gpipe", "gpipe"),
    "norms, gpipe": Case(Norms, "gpipe", "gpipe"),
    "norms, auto": Case(Norms, "auto", "gpipe"),
    "centre, gpipe": Case(Centre, "gpipe", "gpipe"),
    "centre, auto": Case(Centre, "auto", "gpipe"),
}


TWO_REPLICAS = {"centre, auto": CASES["centre, auto"]}


def compare_with_plain_training(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES if context.world_size == 2 else TWO_REPLICAS)


def test_buffers_equal_a_single_device_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(compare_with_plain_training, 2) == no_differences_in(CASES)


def test_buffers_equal_a_single_device_over_two_replicas(pool: RankPool) -> None:
    assert pool.run(compare_with_plain_training, 4) == no_differences_in(TWO_REPLICAS, 4)


def fit_with_1f1b(context: RankContext) -> list[str]:
    """Return the errors of 1F1B: at the first check, and when a later batch changes the buffer."""
    messages = []
    for make in (Norms, Centre, lambda: Centre(later=True)):
        with pytest.raises(UnsupportedStepError) as error:
            fit(context, Case(make, "1f1b"))
        messages.append(str(error.value))
    return messages


def test_1f1b_refuses_changed_buffers_by_name(pool: RankPool) -> None:
    for messages in pool.run(fit_with_1f1b, 2):
        for message, name in zip(messages, ("after.", "centre", "centre"), strict=True):
            assert f"training_step changes '{name}" in message


def test_buffers_are_restored_after_every_run() -> None:
    model: Any = Centre()
    buffers = NonPipelinedBuffers(find_pipelined_module(model, None).layers, torch.device("cpu"))
    before = buffers.snapshot()
    for _ in range(2):
        buffers.isolate(before)
        model.register_buffer("added", torch.ones(2))
        model.centre += 1
        assert model.centre_too is not model.centre
        assert sorted(buffers.diff(before)) == ["added", "centre"]
        buffers.restore(before)
        assert model.centre is before["centre"].tensor
        assert float(model.centre.sum()) == 0.0
        assert not hasattr(model, "added")


@pytest.mark.parametrize(
    ("old", "new", "is_changed"),
    [
        (float("nan"), float("nan"), False),
        (0.0, 0.0, False),
        (0.0, -0.0, True),
        (-0.0, 0.0, True),
        (float("nan"), 0.0, True),
    ],
)
def test_buffer_has_changed_if_its_bits_have(old: float, new: float, is_changed: bool) -> None:
    model: Any = Centre()
    model.centre.fill_(old)
    buffers = NonPipelinedBuffers(find_pipelined_module(model, None).layers, torch.device("cpu"))
    before = buffers.snapshot()
    buffers.isolate(before)
    model.centre.fill_(new)
    assert list(buffers.diff(before)) == (["centre"] if is_changed else [])


def test_buffer_that_becomes_none_is_restored_and_sent() -> None:
    model: Any = Centre()
    buffers = NonPipelinedBuffers(find_pipelined_module(model, None).layers, torch.device("cpu"))
    before = buffers.snapshot()
    buffers.isolate(before)
    model.queue = None
    changes = buffers.diff(before)
    buffers.restore(before)
    assert model.queue is before["queue"].tensor
    assert list(changes) == ["queue"]
    buffers.apply(changes)
    assert model.queue is None


def buffers_of(model: Any) -> NonPipelinedBuffers:
    return NonPipelinedBuffers(find_pipelined_module(model, None).layers, torch.device("cpu"))


def run_on_one_of_two_ranks(step: Callable[[Any], None]) -> tuple[Any, Any]:
    """Run a step on one of two equal models, and apply its changes to both."""
    models: tuple[Any, Any] = Centre(), Centre()
    buffers = buffers_of(models[0])
    before = buffers.snapshot()
    buffers.isolate(before)
    step(models[0])
    changes = buffers.diff(before)
    buffers.restore(before)
    for model in models:
        buffers_of(model).apply(changes)
    return models


def test_new_buffer_is_registered_on_every_rank() -> None:
    def step(model: Any) -> None:
        model.register_buffer("new", torch.ones(2))
        model.register_buffer("hidden", torch.ones(2), persistent=False)
        model.register_buffer("centre", model.centre, persistent=False)
        del model.count

    for model in run_on_one_of_two_ranks(step):
        assert list(dict(model.named_buffers())) == ["centre", "queue", "new", "hidden"]
        assert {"new", "queue"} == {n for n in model.state_dict() if not n.startswith("net")}
        assert not hasattr(model, "count")


def test_buffer_of_a_module_in_a_list_is_registered_on_every_rank() -> None:
    def make() -> Model:
        return Model(parts=[nn.Module()])

    def step(model: Any) -> None:
        model.parts[0].register_buffer("shown", torch.ones(2))
        model.parts[0].register_buffer("hidden", torch.ones(2), persistent=False)

    leader, follower, plain, _ = replay(make, step)
    for model in (leader, follower, plain):
        assert list(dict(model.parts[0].named_buffers())) == ["shown", "hidden"]
        assert list(model.parts[0].state_dict()) == ["shown"]


def test_buffers_share_tensors_as_on_the_rank_of_the_step() -> None:
    def share(model: Any) -> None:
        model.register_buffer("a", torch.ones(2))
        model.register_buffer("b", model.a)
        model.register_buffer("c", model.centre)
        model.centre += 1

    for model in run_on_one_of_two_ranks(share):
        assert model.a is model.b
        assert model.c is model.centre is model.centre_too
        assert model.c.tolist() == [1.0] * 5


def test_buffers_part_as_on_the_rank_of_the_step() -> None:
    model: Any = Centre()
    model.register_buffer("shared", model.centre)
    buffers = buffers_of(model)
    before = buffers.snapshot()
    buffers.isolate(before)
    model.shared = torch.ones(5)
    changes = buffers.diff(before)
    buffers.restore(before)
    buffers.apply(changes)
    assert model.centre is model.centre_too
    assert model.centre.tolist() == [0.0] * 5
    assert model.shared.tolist() == [1.0] * 5


def save_during_run(context: RankContext, path: str) -> dict[str, Tensor]:
    """Return the state of a plain run, and save the state of a pipeline at the same step."""
    plain_state = {}
    for run_context in (None, context):
        seed_everything(3, verbose=False)
        model = Centre()
        trainer = trainer_for(run_context, max_steps=3, max_epochs=1)
        trainer.fit(model, batches())
        if run_context is None:
            plain_state = {name: value.clone() for name, value in model.state_dict().items()}
        else:
            trainer.save_checkpoint(path)
    return plain_state


def test_checkpoint_has_the_values_of_a_single_device(pool: RankPool, tmp_path: Path) -> None:
    expected = pool.run(save_during_run, 2, str(tmp_path / "buffers.ckpt"))[0]
    state = torch.load(tmp_path / "buffers.ckpt", weights_only=False)["state_dict"]
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(state[name], value) <= 1e-5, name
