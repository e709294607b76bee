"""Containers and numbers of the user's types equal those of a single device on every rank."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, differences_in, no_differences_in


class Tags(set):  # type: ignore[type-arg]
    """A set that counts its members' letters."""

    def letters(self) -> int:
        return sum(map(len, self))


class History(list):  # type: ignore[type-arg]
    """A list with a name."""

    name = ""


class Unsendable:
    """An object that cannot be sent."""


class ReplacesContainers(Classifier):
    """A model that replaces its containers in every step. Hooks use the methods of their types."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.history, self.window = Tags(), History(), deque([0.0], maxlen=2)
        self.votes, self.sizes = Counter[str](), defaultdict[str, int](int)
        self.cache, self.seen = OrderedDict(a=1, b=2), {"old"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.tags = Tags([*self.tags, f"step {self.global_step}"])
        self.history = History([*self.history, float(loss)])
        self.history.name = f"{batch_idx}"
        self.window = deque([*self.window, float(loss)], maxlen=2)
        self.votes = self.votes + Counter({"a": 1})
        self.sizes = defaultdict(int, {**self.sizes, "a": self.sizes["a"] + 1})
        self.cache.move_to_end(next(iter(self.cache)))
        self.seen = {*self.seen, batch_idx}
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.tags.add("hook")
        self.history.append(0.0)
        self.window.append(1.0)
        self.observed += [self.tags.letters(), *self.history, len(self.history.name), *self.window]
        self.observed += [self.votes["none"], self.votes["a"], self.sizes["none"], self.sizes["a"]]
        self.observed += [*self.cache.values(), len(self.seen)]


class ChangesTypes(Classifier):
    """A model with numbers that become equal numbers of another type, and a value that stays
    NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: dict[str, Any] = {"first": 0}
        self.best, self.sign = {"loss": float("nan")}, [0.0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.flags["first"] = False
        self.best["loss"] = float("nan")
        self.sign[0] = -0.0
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.observed += [self.flags["first"] is False, len(str(self.sign[0]))]


class KeepsObjects(Classifier):
    """A model whose set gets objects that cannot be sent to other ranks, and numbers that can."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = {"old"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen |= {batch_idx, Unsendable()}
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        assert None not in self.seen
        self.observed.append(
            len([member for member in self.seen if not hasattr(member, "__dict__")])
        )


class KeepsScores(Metric):
    """A metric whose list becomes a tensor, and the tensor a list."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", [], dist_reduce_fx="cat")

    def update(self, scores: Tensor) -> None:
        if isinstance(self.scores, Tensor):
            self.scores = [self.scores, scores]
        else:
            self.scores = dim_zero_cat([*self.scores, scores])

    def compute(self) -> Tensor:
        return dim_zero_cat(self.scores).sum()


class ChangesMetric(Classifier):
    """A model with a metric whose state changes its type."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = KeepsScores()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metric.update(self.net_output(batch))
        return loss

    def net_output(self, batch: Any) -> Tensor:
        """Return one score for every sample of a batch."""
        return batch[0].mean(1)  # type: ignore[no-any-return]

    def on_train_batch_end(self, *args: Any) -> None:
        self.observed += [float(self.metric.compute()), self.metric.update_count]


CASES = {
    "containers": Case(ReplacesContainers, expected_schedule="gpipe"),
    "containers, gpipe": Case(ReplacesContainers, "gpipe"),
    "types": Case(ChangesTypes, "gpipe"),
    "objects": Case(KeepsObjects, expected_schedule="gpipe"),
    "objects, gpipe": Case(KeepsObjects, "gpipe"),
    "metric": Case(ChangesMetric, expected_schedule="1f1b"),
    "metric, gpipe": Case(ChangesMetric, "gpipe"),
}


def compare_with_plain_training(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def test_values_equal_a_single_device_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(compare_with_plain_training, 2) == no_differences_in(CASES)
