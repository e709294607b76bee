"""Workers that clip one gradient in different ways get an error, and gradients keep their range."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.consistency import UnequalClippingError
from lightning_dlres.paramserver.execute.server.key_state import KeyState
from lightning_dlres.paramserver.execute.server.shard import Shard
from lightning_dlres.paramserver.plan.keys import Key
from tests.support.paramserver_shards import TOKEN, make_setup, push_of, small_keys, started_shard

Push = tuple[protocol.Push, memoryview]


def shard_of(workers: int = 2) -> tuple[Shard, Key]:
    setup = make_setup(small_keys([3]), workers)
    return started_shard(setup), setup.keys[0]


def commit_of(worker: int, number: int, scale: float) -> tuple[protocol.Commit, memoryview]:
    commit = protocol.Commit(job=TOKEN, worker=worker, incarnation=1, scale=scale)
    return commit, memoryview(msgspec.msgpack.encode([(0, number)]))


def with_value(push: Push, clip_value: float) -> Push:
    return msgspec.structs.replace(push[0], clip_value=clip_value), push[1]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", ["norm", "value"])
def test_a_gradient_that_only_some_clip_is_an_error(first: int, kind: str) -> None:
    shard, key = shard_of()
    clipped = push_of(key, first, 1, 1.0, is_held=kind == "norm")
    if kind == "value":
        clipped = with_value(clipped, 0.5)
    shard.push(*clipped)
    with pytest.raises(UnequalClippingError, match="clipped in one way on all ranks, got two"):
        shard.push(*push_of(key, 1 - first, 1, 1.0))
    # The other worker, which waits, gets the reason, too.
    assert "in one way" in shard.failure
    assert shard.states[0].updates == 0


@pytest.mark.parametrize("scale", [0.25, float("nan")])
def test_another_factor_for_an_update_is_an_error(scale: float) -> None:
    shard, key = shard_of()
    for worker in range(2):
        shard.push(*push_of(key, worker, 1, 1.0, is_held=True))
    for worker in (0, 1, 0):
        list(shard.commit(*commit_of(worker, 1, 0.5)))
    with pytest.raises(UnequalClippingError):
        list(shard.commit(*commit_of(1, 1, scale)))
    assert shard.failure


def test_equal_factors_may_come_late_and_be_nan() -> None:
    shard, key = shard_of()
    for number, scale in enumerate((float("nan"), 0.5, 1.0), 1):
        for worker in range(2):
            shard.push(*push_of(key, worker, number, 1.0, is_held=True))
        for worker in (0, 1, 1, 0):
            list(shard.commit(*commit_of(worker, number, scale)))
    # A commit of an earlier update says nothing about the present one.
    list(shard.commit(*commit_of(0, 2, 0.5)))
    assert not shard.failure
    assert shard.states[0].updates == 3


def test_another_clipping_in_the_next_step_is_no_error() -> None:
    shard, key = shard_of()
    for number, value in ((1, 0.0), (2, 0.5), (3, 0.0)):
        for worker in range(2):
            shard.push(*with_value(push_of(key, worker, number, 1.0), value))
    assert shard.states[0].updates == 3
    assert float(shard.states[0].parameter[0]) == -2.5


@pytest.mark.parametrize(("dtype", "gradient"), [(torch.float16, 4e4), (torch.float32, 3e38)])
def test_a_mean_that_fits_is_finite_in_half_precision(dtype: torch.dtype, gradient: float) -> None:
    key = msgspec.structs.replace(small_keys([3])[0], dtype=str(dtype).removeprefix("torch."))
    key = msgspec.structs.replace(key, nbytes=3 * dtype.itemsize)
    state = KeyState.new(key, 2)
    data: Any = torch.full((3,), gradient, dtype=dtype).view(torch.uint8).numpy().data
    for is_first in (True, False):
        state.add(data, None, is_first=is_first, parts=2)
    if not state.divides_first:
        state.gradient.div_(2)
    assert bool(state.gradient.isfinite().all()) == (dtype == torch.float16)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_worker_without_a_gradient_clips_like_the_others(order: tuple[int, int]) -> None:
    """Its optimizer has nothing to clip."""
    shard, key = shard_of()
    pushes = {0: push_of(key, 0, 1, 1.0, is_held=True), 1: push_of(key, 1, 1, 1.0)}
    pushes[1] = msgspec.structs.replace(pushes[1][0], has_gradient=False), memoryview(b"")
    for worker in order:
        answers = shard.push(*pushes[worker])
    assert [answer.kind for answer in answers] == [protocol.MERGED] * 2
    list(shard.commit(*commit_of(0, 1, 0.5)))
    assert float(shard.states[0].parameter[0]) == -0.25


def test_rounding_of_the_factor_is_no_other_clipping() -> None:
    shard, key = shard_of()
    for worker in range(2):
        shard.push(*push_of(key, worker, 1, 1.0, is_held=True))
    list(shard.commit(*commit_of(0, 1, 0.5)))
    list(shard.commit(*commit_of(1, 1, 0.5 * (1 + 1e-15))))
    assert not shard.failure


def test_a_commit_is_answered_with_the_value_once() -> None:
    """A worker that clips nothing commits nothing, and one that commits later has the value."""
    shard, key = shard_of()
    for worker in range(2):
        shard.push(*push_of(key, worker, 1, 1.0, is_held=True))
    first = [answer for _, answer in shard.commit(*commit_of(0, 1, 0.5))]
    assert [(one.worker, one.kind) for one in first] == [(0, protocol.VALUE), (1, protocol.VALUE)]
    assert not list(shard.commit(*commit_of(1, 1, 0.5)))
