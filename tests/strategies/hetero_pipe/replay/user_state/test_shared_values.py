"""Objects that several names refer to are one object on every rank, as in plain training."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.strategies.hetero_pipe.replay.user_state.test_value_types import (
    Model,
    Opaque,
    Record,
    replay,
)
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, differences_in, no_differences_in


def start() -> Model:
    """Return a model with two names for one tensor, and containers that hold another."""
    shared, held = torch.zeros(2), torch.ones(3)
    model = Model(a=shared, b=shared, c=torch.full((2,), 5.0), held=held, items=[held])
    model.pair, model.array, model.table = (held, 1), np.zeros(2), {"array": None}  # type: ignore[assignment]
    return model


def two_names_for_a_list(model: Any) -> None:
    model.x = model.y = [torch.zeros(2)]


def two_names_for_a_tensor(model: Any) -> None:
    model.x = model.y = torch.ones(2)


def two_names_for_a_record(model: Any) -> None:
    model.x = model.y = Record([1.0])


def two_names_for_an_array(model: Any) -> None:
    model.x = {"deep": np.ones(3)}
    model.y = model.x["deep"]


def tensor_twice_in_a_list(model: Any) -> None:
    tensor = torch.zeros(2)
    model.x = [tensor, tensor, torch.zeros(2)]


def container_in_two_containers(model: Any) -> None:
    inner = {"count": 1}
    model.x, model.y = {"inner": [inner]}, (inner, deque([inner], maxlen=3))
    model.items.append(inner)
    model.z = defaultdict(list, key=[inner])


def tuple_in_two_names(model: Any) -> None:
    model.x = (torch.zeros(1), [2.0])
    model.y = [model.x, model.x[1]]


def known_containers_in_new_ones(model: Any) -> None:
    model.x = {"items": model.items, "table": [model.table]}


def known_tensors_in_new_containers(model: Any) -> None:
    model.x = [model.a, {"held": model.held}]
    model.table["array"] = model.array
    model.a += 1
    model.array += 1


def known_tensor_under_a_new_name(model: Any) -> None:
    model.x = model.c
    model.c += 1


def known_tensor_in_a_tuple(model: Any) -> None:
    model.pair[0].add_(1)
    model.x = model.pair[0]


def names_that_move_on(model: Any) -> None:
    model.a, model.b, model.c = model.b, model.c, torch.full((2,), 9.0)


def names_that_swap(model: Any) -> None:
    model.b, model.c = model.c, model.b
    model.c += 1


STEPS = [
    two_names_for_a_list,
    two_names_for_a_tensor,
    two_names_for_a_record,
    two_names_for_an_array,
    tensor_twice_in_a_list,
    container_in_two_containers,
    tuple_in_two_names,
    known_containers_in_new_ones,
    known_tensors_in_new_containers,
    known_tensor_under_a_new_name,
    known_tensor_in_a_tuple,
    names_that_move_on,
    names_that_swap,
]


def names_by_object(model: Any) -> list[list[str]]:
    """Return, for each object with several names, all of its names."""
    names: dict[int, list[str]] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, (Tensor, np.ndarray, list, deque, dict, Record)):
            names.setdefault(id(value), []).append(name)
            if len(names[id(value)]) > 1:
                return
        if isinstance(value, (list, tuple, deque)):
            for index, item in enumerate(value):
                visit(f"{name}[{index}]", item)
        elif isinstance(value, (dict, Record)):
            parts = value if isinstance(value, dict) else vars(value)
            for key, item in parts.items():
                visit(f"{name}[{key!r}]", item)

    for name, value in vars(model).items():
        if not name.startswith("_"):
            visit(name, value)
    return sorted(group for group in names.values() if len(group) > 1)


def text_of(model: Any) -> str:
    """Return the user's attributes as text."""
    return str({name: value for name, value in vars(model).items() if not name.startswith("_")})


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_names_refer_to_the_same_objects_as_in_plain_training(step: Callable[[Any], None]) -> None:
    leader, follower, plain, _ = replay(start, step)
    for model in (leader, follower):
        assert text_of(model) == text_of(plain)
        assert names_by_object(model) == names_by_object(plain)


def test_a_shared_value_that_cannot_be_sent_stays_on_the_rank_of_the_step() -> None:
    def step(model: Any) -> None:
        model.x = model.y = [Opaque()]
        model.z = {"list": model.x}

    leader, follower, _, _ = replay(start, step)
    assert leader.x is leader.y is leader.z["list"]
    assert not hasattr(follower, "x")


class Shares(Classifier):
    """A model whose step gives two names to a new list, and moves tensors from name to name."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.before_last = self.third_last = torch.zeros(5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        self.recent = self.history = [out.detach().mean(0)]
        self.third_last, self.before_last = self.before_last, self.last
        self.last = out.detach().mean(0)
        return torch.nn.functional.cross_entropy(out - self.third_last, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.recent.append(torch.ones(5))
        self.observed += [float(sum(t[0] for t in self.history)), self.recent is self.history]
        self.observed += [float(t[0]) for t in (self.last, self.before_last, self.third_last)]


CASES = {"shares, gpipe": Case(Shares, "gpipe"), "shares, auto": Case(Shares, "auto")}


def compare_with_plain_training(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def test_shared_objects_equal_plain_training_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(compare_with_plain_training, 2) == no_differences_in(CASES)
