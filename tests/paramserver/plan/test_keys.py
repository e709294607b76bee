"""Keys cover every parameter once, and servers get about equal bytes."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.paramserver.plan.keys import ParameterInfo, balanced_servers, make_keys

SHAPES = st.lists(st.integers(0, 9000), min_size=0, max_size=2).map(tuple)


def parameter(name: str, shape: tuple[int, ...], *, is_divisible: bool = True) -> ParameterInfo:
    return ParameterInfo(
        name=name,
        shape=shape,
        dtype="float32",
        itemsize=4,
        optimizer=0,
        group=0,
        is_divisible=is_divisible,
    )


@given(st.lists(st.tuples(SHAPES, st.booleans()), max_size=6), st.integers(1, 4))
def test_keys_cover_every_element_once(shapes: list[tuple[tuple[int, ...], bool]], n: int) -> None:
    parameters = [
        parameter(f"p{i}", shape, is_divisible=divisible)
        for i, (shape, divisible) in enumerate(shapes)
    ]
    keys = make_keys(parameters, n, 64 << 10)
    assert [key.index for key in keys] == list(range(len(keys)))
    for one in parameters:
        own = [key for key in keys if key.name == one.name]
        assert own[0].start == 0
        assert [key.start for key in own[1:]] == [key.start + key.count for key in own[:-1]]
        assert sum(key.count for key in own) == one.count
        assert all(key.nbytes == 4 * key.count for key in own)
        assert all(key.start % 4096 == 0 for key in own)
        if one.is_divisible:
            assert all(key.nbytes <= 64 << 10 for key in own)
        else:
            assert len(own) == 1
        if len(own) == 1:
            assert own[0].shape == one.shape


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 3))
def test_the_largest_load_is_near_the_least_possible(sizes: list[int], servers: int) -> None:
    def largest(chosen: tuple[int, ...] | list[int]) -> int:
        return max(
            sum(size for size, one in zip(sizes, chosen, strict=True) if one == server)
            for server in range(servers)
        )

    best = min(largest(chosen) for chosen in product(range(servers), repeat=len(sizes)))
    assert 3 * largest(balanced_servers(sizes, servers)) <= 4 * best


def test_equal_keys_are_dealt_out_in_turn() -> None:
    assert balanced_servers([5] * 7, 3) == [0, 1, 2, 0, 1, 2, 0]
