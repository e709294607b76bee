"""Values that a step leaves on the module have the same types on other ranks, or do not arrive."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attribute_changes import (
    fingerprints,
    unsendable_values,
)
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attributes import UserState
from lightning_dlres.strategies.hetero_pipe.replay.user_state.containers import pack, unpack
from tests.support.sent_trees import send


class Tags(set): ...  # type: ignore[type-arg]


class FrozenTags(frozenset): ...  # type: ignore[type-arg]


class History(list): ...  # type: ignore[type-arg]


class Window(deque): ...  # type: ignore[type-arg]


class Table(dict): ...  # type: ignore[type-arg]


class Ordered(OrderedDict): ...  # type: ignore[type-arg]


class Defaults(defaultdict): ...  # type: ignore[type-arg]


class Votes(Counter): ...  # type: ignore[type-arg]


class Triple(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Versioned(tuple):  # type: ignore[type-arg]
    """A tuple that can have attributes."""


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


class AttributeTable(dict):  # type: ignore[type-arg]
    """A dict whose items are also its attributes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.__dict__ = self


class Strict(list):  # type: ignore[type-arg]
    """A list whose constructor and methods are not those of a list."""

    def __init__(self, name: str, *, limit: int) -> None:
        super().__init__()
        self.name, self.limit, self.ids = name, limit, {1, 2}

    def __iter__(self) -> Any:
        raise NotImplementedError

    def append(self, item: Any) -> None:
        raise NotImplementedError


class Slotted(list):  # type: ignore[type-arg]
    """A list with state outside of its items and attributes."""

    __slots__ = ("name",)


class Colour(Enum):
    RED = 1


class Name(str):
    __slots__ = ()


class Number(int):
    __slots__ = ()


class Real(float):
    __slots__ = ()


class Image(Tensor): ...


class Opaque:
    """An object that cannot be sent."""


@dataclass
class Single:
    """An object with one attribute."""

    value: Any


@dataclass
class Record:
    """A data class, which `core.wire` carries."""

    value: Any = 0
    names: Any = field(default_factory=list)


@dataclass
class Items(list):  # type: ignore[type-arg]
    """A data class that is also a list."""

    value: Any = 0


class Model(LightningModule):
    """A model with attributes that the test sets."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def state_of(model: Model) -> UserState:
    return UserState(lambda: [("", model)])


def replay(make: Callable[[], Model], step: Callable[[Any], None]) -> tuple[Any, Any, Any, Tree]:
    """Run a step on a leader and apply its changes on the leader and a follower.

    Returns:
        The leader, the follower, a model in plain training, and the changes.
    """
    leader, follower, plain = make(), make(), make()
    isolated = state_of(leader).isolate()
    step(leader)
    changes = isolated.diff()
    fingerprints(changes)
    isolated.restore()
    state_of(leader).apply(changes, isolated.unsendable)
    state_of(follower).apply(send(changes), {})
    step(plain)
    return leader, follower, plain, changes


def types_in(value: Any) -> Any:
    """Return the types of a value and of everything inside it."""
    if isinstance(value, dict):
        inside: Any = [(types_in(k), types_in(v)) for k, v in dict.items(value)]
    elif isinstance(value, (set, frozenset)):
        inside = sorted(str(types_in(item)) for item in value)
    elif isinstance(value, (list, tuple, deque)):
        items = list.__iter__(value) if isinstance(value, list) else iter(value)
        inside = [types_in(item) for item in items]
    else:
        inside = None
    return type(value), inside


def strict() -> Strict:
    result = Strict("a", limit=3)
    result.extend([1, {2}])
    return result


def with_attributes() -> Table:
    table = Table(a=1)
    table.version, table.seen = 3, Tags([4])  # type: ignore[attr-defined]
    return table


SENDABLE: dict[str, Callable[[], Any]] = {
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset("ab"),
    "set subclass": lambda: Tags("ab"),
    "frozenset subclass": lambda: FrozenTags("ab"),
    "list subclass": lambda: History([1, 2]),
    "deque": lambda: deque([1, 2], maxlen=3),
    "deque without limit": lambda: deque([1, 2]),
    "deque subclass": lambda: Window([1, 2], 3),
    "dict subclass": lambda: Table(b=1, a=2),
    "dict subclass with attributes": with_attributes,
    "dict that is its namespace": lambda: AttributeTable({"a": {1}}),
    "ordered dict": lambda: OrderedDict(b=1, a=2),
    "ordered dict subclass": lambda: Ordered(b=1, a=2),
    "default dict": lambda: defaultdict(int, a=1),
    "default dict without default": lambda: defaultdict(None, a=1),
    "default dict subclass": lambda: Defaults(list, a=[1]),
    "default dict of user's": lambda: defaultdict(Table, a=Table()),
    "counter": lambda: Counter("aab"),
    "counter of a type": lambda: Counter[str]("aab"),
    "counter subclass": lambda: Votes("aab"),
    "tuple subclass": lambda: Triple((1, {2}, 3)),
    "named tuple": lambda: Pair(1, {2}),
    "own constructor": strict,
    "nested": lambda: {"a": [deque([{1}, Table(x=(frozenset([2]),))])]},
    "keys": lambda: {frozenset([1]): 1, (1, FrozenTags([2])): 2, Colour.RED: 3},
    "leaves": lambda: [1, 2.0, 1j, "a", b"b", None, True, Colour.RED, np.float32(1), Path("a")],
    "torch": lambda: (torch.Size([1, 2]), torch.float32, torch.device("cpu")),
    "data class": lambda: Record(1, ["a"]),
}
UNSENDABLE: dict[str, Callable[[], Any]] = {
    "str subclass": lambda: Name("a"),
    "int subclass": lambda: Number(1),
    "float subclass": lambda: Real(1),
    "inside a list": lambda: [Name("a")],
    "inside a data class": lambda: Record(Name("a")),
    "key of a dict": lambda: {Name("a"): 1},
    "parameter": lambda: nn.Parameter(torch.ones(1)),
    "tensor subclass": lambda: torch.ones(1).as_subclass(Image),
    "sparse tensor": lambda: torch.ones(2).to_sparse(),
    "masked array": lambda: np.ma.masked_array([1.0], [True]),
    "list with slots": lambda: Slotted([1]),
    "data class that is a list": Items,
    "data class with a set": lambda: Record({1}),
    "local class": lambda: type("Local", (list,), {})([1]),
    "lambda as default": lambda: defaultdict(lambda: 0),
    "result of torch": lambda: torch.max(torch.ones(1, 1), 1),
    "user list": lambda: UserList([1]),
    "holds itself": lambda: (items := History()).append(items) or items,  # type: ignore[func-returns-value]
    "object": Opaque,
}


@pytest.mark.parametrize("kind", SENDABLE)
@pytest.mark.parametrize("place", ["attribute", "item", "entry", "in an object"])
def test_value_arrives_with_its_type(kind: str, place: str) -> None:
    make = SENDABLE[kind]

    def step(model: Any) -> None:
        if place == "attribute":
            model.value = make()
        elif place == "item":
            model.items.append(make())
        elif place == "entry":
            model.table["new"] = make()
        else:
            model.record.value = make()

    def value_of(model: Any) -> Any:
        if place == "attribute":
            return model.value
        if place == "item":
            return model.items[0]
        return model.table["new"] if place == "entry" else model.record.value

    def make_model() -> Model:
        return Model(items=[], table={}, record=Record())

    leader, follower, plain, changes = replay(make_model, step)
    assert not unsendable_values(changes)
    expected = value_of(plain)
    for model in (leader, follower):
        value = value_of(model)
        assert types_in(value) == types_in(expected)
        assert list.__eq__(value, expected) if isinstance(value, list) else value == expected
        assert getattr(value, "maxlen", None) == getattr(expected, "maxlen", None)
        assert getattr(value, "default_factory", 0) == getattr(expected, "default_factory", 0)
        if not isinstance(value, (Enum, Record)):
            attributes = {k: v for k, v in getattr(value, "__dict__", {}).items() if k[0] != "_"}
            for name, inner in attributes.items():
                assert types_in(inner) == types_in(getattr(expected, name))
                assert inner == getattr(expected, name)


@pytest.mark.parametrize("kind", UNSENDABLE)
def test_value_of_another_type_is_reported_and_not_replaced(kind: str) -> None:
    make = UNSENDABLE[kind]
    values = []

    def step(model: Any) -> None:
        values.append(make())
        model.record.value = values[-1]
        model.table["new"] = values[-1]

    leader, follower, _, changes = replay(lambda: Model(record=Record("old"), table={}), step)
    name = type(values[0]).__name__
    assert unsendable_values(changes) == {"record.value": name, "table.new": name}
    assert leader.record.value is values[0]
    assert leader.table == {"new": values[0]}
    assert follower.record.value == "old"
    assert follower.table == {}


def test_dict_that_is_its_namespace_stays_so() -> None:
    def step(model: Any) -> None:
        model.value = AttributeTable({"a": {1}})

    _, follower, _, _ = replay(Model, step)
    follower.value.a = 3
    assert follower.value == {"a": 3}


def test_unpacking_refuses_a_class_that_is_no_container_of_this_kind() -> None:
    tag, path, *content = pack(Tags("a"))
    assert unpack([tag, path, *content]) == {"a"}
    for tag_of_other, path_of_other in (
        (tag, f"{__name__}:History"),
        (tag, f"{__name__}:Missing"),
        ("int", "builtins:int"),
    ):
        with pytest.raises(ProtocolError, match=r"on every rank"):
            unpack([tag_of_other, path_of_other, *content])


def test_unpacking_refuses_a_factory_that_this_rank_lacks() -> None:
    tag, path, _, *content = pack(defaultdict(list, a=[1]))
    for factory in (f"{__name__}:Missing", "no_such_module:factory"):
        with pytest.raises(ProtocolError, match="must be the factory of a defaultdict"):
            unpack([tag, path, factory, *content])


def test_packing_copies_tensors() -> None:
    tensor = torch.zeros(1)
    packed = pack({"a": deque([tensor])})
    tensor += 1
    assert float(unpack(packed)["a"][0]) == 0.0
    with pytest.raises(ConfigError, match="Opaque"):
        pack(deque([Opaque()]))


# --- Members, keys and items that cannot be sent.


def test_other_ranks_get_no_member_in_the_place_of_one_that_cannot_be_sent() -> None:
    def step(model: Any) -> None:
        model.seen |= {"new", Opaque()}

    leader, follower, _, changes = replay(lambda: Model(seen={"old"}), step)
    assert list(unsendable_values(changes).values()) == ["Opaque"]
    assert follower.seen == {"old", "new"}
    assert {type(member) for member in leader.seen} == {str, Opaque}


def test_other_ranks_keep_a_member_that_cannot_be_sent() -> None:
    def step(model: Any) -> None:
        model.seen.add("new")
        model.seen.remove("old")

    members: list[Opaque] = []

    def make() -> Model:
        members.append(Opaque())
        return Model(seen={"old", members[-1]})

    leader, follower, _, changes = replay(make, step)
    assert not unsendable_values(changes)
    assert leader.seen == {"new", members[0]}
    assert follower.seen == {"new", members[1]}


def test_member_that_is_removed_and_cannot_be_sent_is_removed_where_the_step_ran() -> None:
    def step(model: Any) -> None:
        model.seen.clear()

    leader, follower, _, changes = replay(lambda: Model(seen={"old", Opaque()}), step)
    assert list(unsendable_values(changes).values()) == ["Opaque"]
    assert leader.seen == set()
    assert [type(member) for member in follower.seen] == [Opaque]


def test_member_of_a_set_that_the_model_holds_is_that_of_each_rank() -> None:
    def step(model: Any) -> None:
        model.seen.add(model.part)

    leader, follower, _, _ = replay(lambda: Model(seen=set(), part=Opaque()), step)
    assert leader.seen == {leader.part}
    assert follower.seen == {follower.part}


@dataclass(frozen=True)
class Point:
    x: int


def test_equal_objects_in_sets_are_replaced() -> None:
    def step(model: Any) -> None:
        model.seen.remove(Point(1))
        model.seen |= {Point(2), float("nan")}

    leader, follower, plain, _ = replay(lambda: Model(seen={Point(1), Point(3)}), step)
    for model in (leader, follower):
        assert len(model.seen) == len(plain.seen) == 3
        assert model.seen > {Point(2), Point(3)}


def test_key_that_cannot_be_sent_is_reported() -> None:
    def step(model: Any) -> None:
        model.table[Opaque()] = 1
        model.table["a"] = 2

    leader, follower, _, changes = replay(lambda: Model(table={}), step)
    assert list(unsendable_values(changes).values()) == ["Opaque"]
    assert follower.table == {"a": 2}
    assert sorted(leader.table.values()) == [1, 2]


def test_key_that_the_model_holds_is_that_of_each_rank() -> None:
    def step(model: Any) -> None:
        model.table[model.part] += 1

    def make() -> Model:
        part = Opaque()
        return Model(part=part, table={part: 0})

    leader, follower, _, _ = replay(make, step)
    assert leader.table == {leader.part: 1}
    assert follower.table == {follower.part: 1}


def test_items_after_one_that_cannot_be_sent_have_their_index() -> None:
    def step(model: Any) -> None:
        model.items += [Opaque(), "a"]

    leader, follower, _, _ = replay(lambda: Model(items=["old"]), step)
    assert [type(item) for item in leader.items] == [str, Opaque, str]
    assert follower.items == ["old", None, "a"]


# --- Changes that Python's equality does not show.

UNLIKE: dict[str, tuple[Any, Any]] = {
    "0 and False": (0, False),
    "True and 1": (True, 1),
    "1 and 1.0": (1, 1.0),
    "signed zero": (0.0, -0.0),
    "complex signed zero": (0j, complex(-0.0, 0.0)),
    "complex and float": (1 + 0j, 1.0),
    "tuple": ((0, 1), (False, 1)),
    "nested tuple": ((1, (0.0,)), (1, (-0.0,))),
    "frozenset": (frozenset([1]), frozenset([True])),
    "NumPy number": (np.float32(0.0), np.float32(-0.0)),
    "NumPy and Python number": (np.float64(1.0), 1.0),
}


def is_exactly(value: Any, expected: Any) -> bool:
    return repr(value) == repr(expected) and types_in(value) == types_in(expected)


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "attribute": (lambda m: m.value, lambda m, v: setattr(m, "value", v)),
    "list": (lambda m: m.items[0], lambda m, v: m.items.__setitem__(0, v)),
    "deque": (lambda m: m.window[0], lambda m, v: m.window.__setitem__(0, v)),
    "dict": (lambda m: m.table["a"], lambda m, v: m.table.__setitem__("a", v)),
    "set": (lambda m: next(iter(m.seen)), lambda m, v: (m.seen.clear(), m.seen.add(v))),  # type: ignore[func-returns-value]
    "key": (
        lambda m: next(iter(m.by_key)),
        lambda m, v: (m.by_key.clear(), m.by_key.update({v: 1})),
    ),  # type: ignore[func-returns-value]
    "object": (lambda m: m.part.value, lambda m, v: setattr(m.part, "value", v)),
}


def model_with(value: Any) -> Model:
    return Model(
        value=value,
        items=[value],
        window=deque([value]),
        table={"a": value},
        seen={value},
        by_key={value: 1},
        part=Single(value),
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", UNLIKE)
def test_change_to_an_equal_value_is_undone_and_sent(kind: str, place: str) -> None:
    old, new = UNLIKE[kind]
    read, write = PLACES[place]
    model = model_with(old)
    isolated = state_of(model).isolate()
    write(model, new)
    isolated.restore()
    assert is_exactly(read(model), old)
    for one in replay(lambda: model_with(old), lambda m: write(m, new))[:3]:
        assert is_exactly(read(one), new)


@pytest.mark.parametrize("place", [place for place in PLACES if place != "key"])
@pytest.mark.parametrize("kind", ["float", "complex", "tuple", "NumPy"])
def test_another_nan_is_no_change(kind: str, place: str) -> None:
    def nan() -> Any:
        value = float("nan")
        by_kind = {"complex": complex(value, 0.0), "tuple": (value, 1)}
        return np.float64(value) if kind == "NumPy" else by_kind.get(kind, value)

    model = model_with(nan())
    isolated = state_of(model).isolate()
    PLACES[place][1](model, nan())
    assert isolated.diff() == {}


def test_setting_that_becomes_an_equal_number_is_undone_and_sent() -> None:
    group: dict[str, Any] = {"lr": 1}
    state = UserState(lambda: [], settings=lambda: {"group": group})
    isolated = state.isolate()
    group["lr"] = 1.0
    changes = isolated.diff()
    isolated.restore()
    assert is_exactly(group["lr"], 1)
    state.apply(send(changes), {})
    assert is_exactly(group["lr"], 1.0)


@pytest.mark.parametrize("make", [dict, OrderedDict, Table])
def test_order_of_a_dict_is_undone_and_sent(make: Any) -> None:
    def step(model: Any) -> None:
        # As a cache does that drops its oldest entry.
        model.table["a"] = model.table.pop("a")
        model.table["d"] = 4
        model.table.pop("b")

    model: Any = Model(table=make(a=1, b=2, c=3))
    isolated = state_of(model).isolate()
    step(model)
    isolated.restore()
    assert list(model.table.items()) == [("a", 1), ("b", 2), ("c", 3)]
    leader, follower, plain, _ = replay(lambda: Model(table=make(a=1, b=2, c=3)), step)
    assert list(leader.table.items()) == list(follower.table.items()) == list(plain.table.items())


@pytest.mark.parametrize(
    "make", [Table, Tags, History, Window, Ordered, Defaults, Votes, lambda: Versioned((1, 2))]
)
def test_attributes_of_containers_are_undone_and_sent(make: Any) -> None:
    def make_model() -> Model:
        value = make()
        value.version, value.inner = 0, {"n": 0}
        return Model(value=value)

    def step(model: Any) -> None:
        model.value.version += 1
        model.value.inner["n"] += 1

    model: Any = make_model()
    isolated = state_of(model).isolate()
    step(model)
    isolated.restore()
    assert (model.value.version, model.value.inner) == (0, {"n": 0})
    for one in replay(make_model, step)[:2]:
        assert (one.value.version, one.value.inner) == (1, {"n": 1})


TUPLES: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (torch.zeros(1), 1),
    "nested tuple": lambda: ((torch.zeros(1),), 1),
    "named tuple": lambda: Pair(torch.zeros(1), np.zeros(1)),
    "tuple subclass": lambda: Versioned((torch.zeros(1), [1])),
}


@pytest.mark.parametrize("kind", TUPLES)
def test_tensors_in_tuples_are_undone_and_sent(kind: str) -> None:
    def tensor_of(model: Any) -> Tensor:
        first = model.value[0]
        return first if isinstance(first, Tensor) else first[0]

    def step(model: Any) -> None:
        tensor_of(model).add_(1)

    model = Model(value=TUPLES[kind]())
    isolated = state_of(model).isolate()
    assert isolated.diff() == {}
    step(model)
    isolated.restore()
    assert float(tensor_of(model)) == 0.0
    for one in replay(lambda: Model(value=TUPLES[kind]()), step)[:3]:
        assert float(tensor_of(one)) == 1.0
        assert type(one.value) is type(TUPLES[kind]())
