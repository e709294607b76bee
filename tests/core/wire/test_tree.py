"""Tests of trees: every kind survives a round trip, and other objects are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.core.wire.tree import flatten, map_tensors, tensors_of, unflatten
from tests.support.examples import examples

HERE = __name__
T = TypeVar("T")


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    derived: Any = dataclasses.field(init=False, default="made without __init__")


class Encoding(UserDict[str, Any]):
    """A mapping as tokenizers return them."""


class ModelOutput(OrderedDict[str, Any]):
    """A data class that is a mapping too, as in transformers; see the decorator below."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            self[field.name] = getattr(self, field.name)


@dataclasses.dataclass
class Logits(ModelOutput):
    logits: Any = None
    hidden: Any = None


class Trap:
    """A class that must never be instantiated by a message."""

    def __init__(self, *_: object) -> None:
        raise AssertionError("a message must not choose the code that runs")


def on_the_wire(tree: Any) -> Any:
    """Flatten a tree, encode and decode its structure with msgpack, and rebuild it."""
    structure, tensors = flatten(tree)
    return unflatten(msgspec.msgpack.decode(msgspec.msgpack.encode(structure)), tensors)


def same(a: Any, b: Any) -> bool:
    """Return True if two trees have the same types and values, bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a is b
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, (dict, UserDict)):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))


NUMERIC = [np.bool_, np.uint8, np.int16, np.uint32, np.int64, np.float16, np.float64, np.complex64]
arrays = hnp.arrays(st.sampled_from(NUMERIC), hnp.array_shapes(min_dims=0, max_dims=2, min_side=0))
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**63, max_value=2**200),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
)
leaves = st.one_of(
    plain,
    arrays,
    arrays.filter(lambda a: a.size > 0).map(lambda a: a.flat[0]),
    st.builds(torch.zeros, st.lists(st.integers(0, 2), max_size=3)),
    st.sampled_from([torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1")]),
)
keys = st.one_of(st.text(max_size=3), st.integers(), st.none(), st.tuples(st.integers(), st.text()))


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.text(max_size=3), children, max_size=3)
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=3),
        named.map(Encoding),
        named.map(OrderedDict),
        st.builds(Point, children, children),
        st.builds(Sample, children, children),
        st.builds(Frozen, children),
    )


@settings(max_examples=examples(150))
@given(st.recursive(leaves, containers, max_leaves=12))
def test_every_tree_survives_a_round_trip(tree: Any) -> None:
    assert same(on_the_wire(tree), tree)


def test_contiguous_numpy_arrays_are_not_copied() -> None:
    array = np.arange(6.0).reshape(2, 3)
    (tensor,) = tensors_of(array)
    assert tensor.data_ptr() == array.ctypes.data
    assert same(on_the_wire(array.T), array.T)
    assert same(on_the_wire(array[:, ::-1]), array[:, ::-1])


def test_classes_of_libraries_survive_a_round_trip() -> None:
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    again = on_the_wire(packed)
    assert isinstance(again, PackedSequence)
    assert torch.equal(again.batch_sizes, packed.batch_sizes)
    output = on_the_wire(Logits(logits=torch.ones(2), hidden=(1, 2)))
    assert type(output) is Logits
    assert output["logits"] is output.logits
    assert output.hidden == (1, 2)


def test_a_field_that_was_never_set_stays_unset() -> None:
    sample = Sample(1)
    del sample.image
    assert not hasattr(on_the_wire(sample), "image")


@dataclasses.dataclass
class Counted(Generic[T]):
    """A data class with attributes that are not fields."""

    values: T
    count = 0

    def __post_init__(self) -> None:
        self.count = len(self.values)  # type: ignore[arg-type]

    @functools.cached_property
    def first(self) -> Any:
        return self.values[0]  # type: ignore[index]


def test_other_attributes_are_sent_and_cached_ones_are_computed_again() -> None:
    sent = Counted[Any](torch.arange(3))
    assert int(sent.first) == 0
    received = map_tensors(lambda t: t + 5, sent)
    assert received.count == 3
    assert int(received.first) == 5


def test_map_tensors_keeps_the_order_and_other_values() -> None:
    tree = {"a": torch.tensor(1), "b": [torch.tensor(2), "x"], "c": Point(torch.tensor(3), None)}
    assert [int(t) for t in tensors_of(tree)] == [1, 2, 3]
    doubled = map_tensors(lambda t: t * 2, tree)
    assert [int(t) for t in tensors_of(doubled)] == [2, 4, 6]
    assert doubled["b"][1] == "x"
    assert doubled["c"].y is None


def itself() -> list[Any]:
    tree: list[Any] = []
    tree.append(tree)
    return tree


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (range(3), "builtins.range"),
        (int, "builtins.type"),
        (len, "builtin_function_or_method"),
        (np.array(["text"]), "<U4"),
        (np.array([None]), "object"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (itself(), "contains itself"),
    ],
    ids=["object", "set", "range", "type", "function", "text", "objects", "date", "itself"],
)
def test_an_object_that_cannot_be_sent_is_named(thing: object, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*collate function"):
        flatten({"batch": [thing]})


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    [
        ("transformers.cache_utils", "DynamicCache", "use_cache=False"),
        ("PIL.Image", "Image", "pil_to_tensor"),
    ],
)
def test_objects_of_known_libraries_get_specific_advice(
    module: str, name: str, advice: str
) -> None:
    kind = type(name, (), {"__module__": module})
    with pytest.raises(ConfigError, match=advice) as error:
        flatten([type("Child", (kind,), {})()])
    assert "collate" not in str(error.value)


def test_an_iterator_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="Make a list"):
        flatten([iter([1])])


# Tags: "c" data class, "n" named tuple, "m" other mapping.
@pytest.mark.parametrize(
    "structure",
    [
        ["c", "no.such.module:Sample", []],
        ["c", f"{HERE}:NoSuchClass", []],
        ["c", f"{HERE}:Sample.__init__", []],
        ["n", f"{HERE}:Trap", []],
        ["m", f"{HERE}:Trap", []],
        ["c", f"{HERE}:Trap", []],
        ["n", "builtins:tuple", []],
        ["m", "builtins:list", []],
        ["c", f"{HERE}:Point", []],
        ["n", f"{HERE}:Sample", []],
        ["m", "os:getcwd", []],
        ["m", "subprocess:Popen", [[["v", "args"], ["v", "true"]]]],
    ],
    ids=lambda structure: structure[0] + " " + structure[1],
)
def test_only_imported_containers_of_data_are_built(structure: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        unflatten(structure, [])


@pytest.mark.parametrize(
    "tree",
    [defaultdict(list, a=1), types.MappingProxyType({"a": 1})],
    ids=lambda t: type(t).__name__,
)
def test_mappings_with_unusual_constructors_survive_or_are_refused_at_once(tree: Any) -> None:
    try:
        structure, tensors = flatten(tree)
    except ConfigError:
        return
    assert unflatten(structure, tensors) == tree


class Text(str):
    """A subclass of str."""


@pytest.mark.parametrize(
    "leaf",
    [Text("x"), "\ud800", np.arange(3, dtype=">i4")],
    ids=["subclass of str", "surrogate", "byte order"],
)
def test_every_accepted_leaf_can_be_encoded(leaf: Any) -> None:
    with contextlib.suppress(ConfigError):
        on_the_wire([leaf])


@pytest.mark.parametrize(
    "structure",
    [
        [],
        ["?", 1],
        ["t", 5],
        ["c", 3, []],
        ["k", "dtype", "nope"],
        ["k", "device", "nope"],
        ["l", 3],
        ["i", "x"],
    ],
    ids=str,
)
def test_a_malformed_structure_is_a_protocol_error(structure: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        unflatten(structure, [])


class Picky(UserDict[str, Any]):
    """A mapping that requires certain keys."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.first = data["first"]


def test_a_mapping_that_requires_certain_keys_survives_or_is_refused() -> None:
    with contextlib.suppress(ConfigError):
        on_the_wire(Picky({"first": 1}))


class Mode(str, enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("member", [Mode.FAST, Level.ONE])
def test_an_enum_member_survives_or_is_refused(member: enum.Enum) -> None:
    with contextlib.suppress(ConfigError):
        assert map_tensors(lambda t: t, {"mode": member})["mode"] is member


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Local:
    """A class that another rank cannot find by name, like one defined in a function."""


Local.__qualname__ = "make.<locals>.Local"


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (Access.READ | Access.WRITE, "Access"),
        (Local(), "Local"),
        (np.ma.masked_array([1.0, 2.0], mask=[False, True]), "MaskedArray"),
        (np.ones((2, 2)).view(np.matrix), "matrix"),
    ],
    ids=["flags", "local class", "masked array", "matrix"],
)
def test_objects_that_would_change_on_the_way_are_refused_by_the_sender(
    thing: Any, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be sent to another rank"):
        flatten([thing])


class Length(float):
    """A number of a user's class."""


class Word(str):
    """A text of a user's class."""


@pytest.mark.parametrize(("kind", "base"), [(Word, str), (Length, float)])
def test_a_value_of_a_subclass_is_refused_only_with_attributes(kind: Any, base: type) -> None:
    value = kind("1.5")
    (arrived,) = on_the_wire([value])
    assert (type(arrived), arrived) == (base, base("1.5"))
    value.unit = "m"
    with pytest.raises(ConfigError, match=r"Its attributes \['unit'\] would not arrive"):
        flatten([value])


class Blob(bytes):
    """Bytes of a user's class."""


def test_numbers_of_any_size_and_class_arrive_as_plain_numbers() -> None:
    huge = -(10**5000)
    assert on_the_wire([Length(1.5), Blob(b"x"), huge]) == [1.5, b"x", huge]
    # The format of earlier versions.
    assert unflatten(["i", str(2**70)], []) == 2**70
