"""A metric that applies another rank's changes, or merges partial states, equals one that saw all
batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MinMetric,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import Running

from lightning_dlres.core.wire.tree import tensors_of
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates
from tests.support.sent_trees import send

Batch = tuple[Tensor, ...]


def classes(step: int, samples: int = 8) -> Batch:
    g = torch.Generator().manual_seed(step)
    return torch.rand(samples, 3, generator=g), torch.randint(3, (samples,), generator=g)


def scores(step: int, samples: int = 8) -> Batch:
    g = torch.Generator().manual_seed(step)
    return torch.rand(samples, generator=g), torch.arange(samples) % 2


def values(step: int, samples: int = 8) -> Batch:
    return scores(step, samples)[:1]


def numbers(step: int, samples: int = 8) -> Batch:
    return scores(step, samples)[0], values(step + 1000, samples)[0]


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "accuracy": (lambda: MulticlassAccuracy(num_classes=3), classes),
    "mean": (MeanMetric, values),
    "sum": (SumMetric, values),
    "squared error": (MeanSquaredError, numbers),
    "list": (lambda: BinaryAUROC(thresholds=None), scores),
    "cat": (CatMetric, values),
    "max": (MaxMetric, values),
    "min": (MinMetric, values),
    "pearson": (PearsonCorrCoef, numbers),
    "collection with groups": (
        lambda: MetricCollection(
            [
                MulticlassAccuracy(num_classes=3),
                MulticlassPrecision(num_classes=3),
                MulticlassF1Score(num_classes=3),
            ]
        ),
        classes,
    ),
    "collection of lists": (
        lambda: MetricCollection(
            {"a": BinaryAUROC(thresholds=None), "b": BinaryAveragePrecision(thresholds=None)}
        ),
        scores,
    ),
}
# Kinds whose state cannot be merged from parts of a batch.
UNMERGEABLE = {"max", "min", "pearson"}


class Holder(nn.Module):
    """A module with one metric, or a collection."""

    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self.metric = metric

    def feed(self, batch: Batch, forward: bool) -> Any:
        metric: Any = self.metric
        return metric(*batch) if forward else metric.update(*batch)


def metrics_in(holder: Holder) -> list[Metric]:
    metric = holder.metric
    if isinstance(metric, MetricCollection):
        return [m for _, m in sorted(metric.items(copy_state=True))]
    assert isinstance(metric, Metric)
    return [metric]


def assert_alike(actual: Holder, expected: Holder) -> None:
    """Compare state, number of updates, last value and result."""
    for one, other in zip(metrics_in(actual), metrics_in(expected), strict=True):
        assert one.update_count == other.update_count
        assert one.metric_state.keys() == other.metric_state.keys()
        for key, state in other.metric_state.items():
            own = one.metric_state[key]
            if isinstance(state, list):
                own, state = (torch.cat([torch.atleast_1d(t) for t in s]) for s in (own, state))
            assert torch.allclose(own, state), key
        last = [tensors_of(m._forward_cache) for m in (one, other)]
        assert len(last[0]) == len(last[1])
        assert all(map(torch.allclose, *last))
        assert torch.allclose(one.compute(), other.compute())


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "update"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_rank_applies_the_changes_of_every_step(kind: str, forward: bool) -> None:
    make, data = KINDS[kind]
    leader, follower, direct = Holder(make()), Holder(make()), Holder(make())
    states, follower_states = MetricStates(leader), MetricStates(follower)
    for step in range(4):
        before = states.snapshot()
        if step == 2:
            for holder in (leader, direct):
                holder.metric.reset()  # type: ignore[operator]
        leader.feed(data(step), forward)
        direct.feed(data(step), forward)
        follower_states.apply(send(states.diff(before)))
        assert_alike(follower, direct)
        assert_alike(leader, direct)


@pytest.mark.parametrize("kind", KINDS)
def test_diff_without_changes_is_empty(kind: str) -> None:
    make, data = KINDS[kind]
    holder = Holder(make())
    states = MetricStates(holder)
    assert states.diff(states.snapshot()) == {}
    holder.feed(data(0), True)
    assert states.diff(states.snapshot()) == {}


def test_diff_of_a_growing_list_has_only_the_new_items() -> None:
    holder = Holder(BinaryAUROC(thresholds=None))
    states, counts = MetricStates(holder), []
    for step in range(5):
        before = states.snapshot()
        holder.feed(scores(step), False)
        changes = states.diff(before)
        counts.append(sum(t.numel() for t in tensors_of(changes)))
    assert counts == [16] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_isolated_restores_all_states(kind: str) -> None:
    make, data = KINDS[kind]
    holder, direct = Holder(make()), Holder(make())
    states = MetricStates(holder)
    for step in range(2):
        holder.feed(data(step), True)
        direct.feed(data(step), True)
    with states.isolated():
        holder.feed(data(7), True)
        states.reset()
        holder.feed(data(8), False)
    assert_alike(holder, direct)
    with contextlib.suppress(KeyError), states.isolated():
        holder.feed(data(9), True)
        raise KeyError
    assert_alike(holder, direct)


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "update"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNMERGEABLE])
def test_partial_states_merge_into_the_batch(kind: str, forward: bool) -> None:
    """Two ranks see two micro-batches each, and a third sees none. All end as if with one batch."""
    make, data = KINDS[kind]
    workers, idle, direct = [Holder(make()) for _ in range(2)], Holder(make()), Holder(make())
    for step in range(3):
        batch, parts = data(step), []
        for rank, worker in enumerate(workers):
            states = MetricStates(worker)
            before = states.snapshot()
            states.reset()
            for start in (4 * rank, 4 * rank + 2):
                worker.feed(tuple(t[start : start + 2] for t in batch), forward)
            parts.append(send(states.partial_states()))
            states.restore(before)
        for holder in (*workers, idle):
            MetricStates(holder).merge(parts)
        direct.feed(batch, forward)
        for holder in (*workers, idle):
            assert_alike(holder, direct)


def test_merging_with_an_empty_part() -> None:
    holder, other = Holder(MeanMetric()), Holder(MeanMetric())
    states = MetricStates(holder)
    states.merge([MetricStates(other).partial_states()])
    assert holder.metric.update_count == 0
    other.feed((torch.tensor([1.0, 3.0]),), False)
    states.merge([{}, MetricStates(other).partial_states()])
    assert holder.metric.compute() == 2.0  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_first_unmergeable_names_the_metric(kind: str) -> None:
    name = MetricStates(Holder(KINDS[kind][0]())).first_unmergeable()
    assert (name == "metric") if kind in UNMERGEABLE else (name is None)


def test_metrics_have_the_names_of_the_module() -> None:
    holder = Holder(MetricCollection({"a": SumMetric(), "b": MeanMetric()}))
    states = MetricStates(nn.ModuleDict({"inner": holder, "loose": MaxMetric()}))
    assert set(states.metrics) == {"inner.metric.a", "inner.metric.b", "loose"}
    for name, metric in states.metrics.items():
        assert states.name_of(metric) == name
    assert states.name_of(MeanMetric()) is None


def test_snapshots_and_diffs_are_copies() -> None:
    holder = Holder(SumMetric())
    states = MetricStates(holder)
    before = states.snapshot()
    holder.feed((torch.ones(3),), True)
    changes = states.diff(before)
    holder.feed((torch.ones(3),), True)
    follower = Holder(SumMetric())
    MetricStates(follower).apply(changes)
    assert follower.metric.compute() == 3.0  # type: ignore[operator]
    states.restore(before)
    holder.feed((torch.ones(1),), True)
    states.restore(before)
    assert holder.metric.update_count == 0


# --- Changes that are hard to notice.


def results_of_leader_and_follower(
    make: Callable[[], Metric], step: Callable[[Any], Any]
) -> tuple[Tensor, Tensor]:
    """Run `step` on a metric with one update; return its result and that of a follower, which
    applies the changes."""
    leader, follower = Holder(make()), Holder(make())
    for holder in (leader, follower):
        holder.feed((torch.tensor(1.0),), False)
    states = MetricStates(leader)
    before = states.snapshot()
    step(leader.metric)
    MetricStates(follower).apply(states.diff(before))
    return leader.metric.compute(), follower.metric.compute()  # type: ignore[operator]


def reset_and_update_once(metric: Any) -> None:
    metric.reset()
    metric.update(5.0)


def reset_and_update_twice(metric: Any) -> None:
    metric.reset()
    metric.update(5.0)
    metric.update(6.0)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (MeanMetric, reset_and_update_once),
        (CatMetric, reset_and_update_twice),
        (lambda: Running(MeanMetric(), 2), lambda metric: metric(3.0)),
    ],
    ids=["reset and as many updates", "list: reset and more updates", "running, by forward"],
)
def test_diff_has_every_change(make: Callable[[], Metric], step: Callable[[Any], Any]) -> None:
    result, expected = results_of_leader_and_follower(make, step)
    assert torch.equal(result, expected)


def test_diff_of_a_growing_list_in_a_collection_has_only_the_new_items() -> None:
    holder = Holder(KINDS["collection of lists"][0]())
    states, counts = MetricStates(holder), []
    for step in range(5):
        before = states.snapshot()
        holder.feed(scores(step), False)
        counts.append(sum(t.numel() for t in tensors_of(states.diff(before))))
    assert counts == counts[:1] * 5


# --- States that change their type, or to an equal value.


class Changeable(Metric):
    """A metric with one state, which `update` replaces, and an attribute that is a number."""

    full_state_update = False

    def __init__(self, default: Any, reduction: str | None = "cat") -> None:
        super().__init__()
        self.add_state("state", default, dist_reduce_fx=reduction)
        self.number: float = 0

    def update(self, value: Any) -> None:
        self.state = value

    def compute(self) -> Tensor:
        items = self.state if isinstance(self.state, list) else [self.state]
        return torch.cat([torch.atleast_1d(item) for item in items])


VALUES: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.ones(2), torch.zeros(1)],
    "empty list": list,
    "tensor": lambda: torch.ones(3),
    "scalar tensor": lambda: torch.ones(()),
    "tensor of integers": lambda: torch.ones(3, dtype=torch.int64),
}


def describe(state: Any) -> str:
    return f"{type(state).__name__} {state} {getattr(state, 'dtype', '')}"


@pytest.mark.parametrize("new", VALUES)
@pytest.mark.parametrize("old", VALUES)
def test_state_may_become_a_list_or_a_tensor(old: str, new: str) -> None:
    leader, follower = Holder(Changeable([])), Holder(Changeable([]))
    for holder in (leader, follower):
        holder.feed((VALUES[old](),), False)
    states, follower_states = MetricStates(leader), MetricStates(follower)
    before = states.snapshot()
    leader.feed((VALUES[new](),), False)
    follower_states.apply(send(states.diff(before)))
    for one in (leader, follower):
        assert describe(one.metric.state) == describe(VALUES[new]())
    states.restore(before)
    assert describe(leader.metric.state) == describe(VALUES[old]())
    assert leader.metric.update_count == 1


@pytest.mark.parametrize("default", ["list", "tensor"])
@pytest.mark.parametrize("state", ["list", "tensor"])
def test_parts_of_a_changed_type_merge(default: str, state: str) -> None:
    make = (lambda: []) if default == "list" else (lambda: torch.empty(0))
    worker, other = Holder(Changeable(make())), Holder(Changeable(make()))
    worker.feed((VALUES[state](),), False)
    states = MetricStates(worker)
    before, parts = states.snapshot(), []
    for value in ([torch.tensor(4.0)], torch.tensor([5.0])):
        states.reset()
        assert describe(worker.metric.state) == describe(make())
        worker.feed((value,), False)
        parts.append(send(states.partial_states()))
    states.restore(before)
    states.merge(parts)
    other.feed((VALUES[state](),), False)
    MetricStates(other).merge(parts[::-1])
    expected = VALUES[state]() if state == "tensor" else torch.cat(VALUES[state]())
    for holder, added in ((worker, [4.0, 5.0]), (other, [5.0, 4.0])):
        result = holder.metric.compute()  # type: ignore[operator]
        assert torch.equal(result, torch.cat([expected, torch.tensor(added)]))


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_list_that_has_a_reduction_of_tensors_cannot_be_merged(reduction: str) -> None:
    holder = Holder(Changeable(torch.zeros(3), reduction))
    assert MetricStates(holder).first_unmergeable() is None
    holder.feed(([torch.ones(3)],), False)
    assert MetricStates(holder).first_unmergeable() == "metric"


@pytest.mark.parametrize(("old", "new"), [(0.0, -0.0), (-0.0, 0.0)])
def test_diff_has_the_sign_of_zero(old: float, new: float) -> None:
    leader, follower = Holder(Changeable([])), Holder(Changeable([]))
    for holder in (leader, follower):
        holder.feed((torch.tensor([old]),), False)
        holder.metric.number = old
    states = MetricStates(leader)
    before = states.snapshot()
    metric: Any = leader.metric
    metric.state, metric.number = torch.tensor([new]), new
    MetricStates(follower).apply(send(states.diff(before)))
    assert str(follower.metric.state) == str(torch.tensor([new]))
    assert str(follower.metric.number) == str(new)


def test_diff_without_changes_is_empty_with_nan() -> None:
    holder = Holder(Changeable([]))
    holder.feed((torch.tensor([float("nan")]),), False)
    states, metric = MetricStates(holder), cast("Any", holder.metric)
    metric.number = float("nan")
    before = states.snapshot()
    metric.number, metric.state = float("nan"), torch.tensor([float("nan")])
    assert states.diff(before) == {}


@pytest.mark.parametrize(("old", "new"), [(0, False), (False, 0), (1, 1.0), (True, False)])
def test_number_that_changes_its_type_is_undone_and_sent(old: Any, new: Any) -> None:
    leader, follower = Holder(Changeable([])), Holder(Changeable([]))
    for holder in (leader, follower):
        holder.metric.number = old
    states = MetricStates(leader)
    before = states.snapshot()
    leader.metric.number = new
    changes = states.diff(before)
    states.restore(before)
    assert repr(leader.metric.number) == repr(old)
    MetricStates(follower).apply(send(changes))
    assert repr(follower.metric.number) == repr(new)
