"""Memory of copies is used again, not while ZeroMQ may send it, and little of it is kept."""

from __future__ import annotations

import msgspec
import pytest
import torch
import zmq
from torch import Tensor

from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.shard import Shard
from lightning_dlres.paramserver.execute.server.spare_tensors import SpareTensors
from tests.support.paramserver_shards import (
    TOKEN,
    make_setup,
    push_of,
    small_keys,
    started_shard,
)


class Tracker(zmq.MessageTracker):
    """Tracker that a test ends."""

    done = False


def test_memory_is_used_again_once_it_is_sent() -> None:
    spare, tracker = SpareTensors(), Tracker()
    first = torch.arange(4.0)
    second = spare.copy(first)
    spare.keep(first, [tracker])
    third = spare.copy(second)
    assert len({one.data_ptr() for one in (first, second, third)}) == 3
    assert torch.equal(first, torch.arange(4.0))
    tracker.done = True
    fourth = spare.copy(third + 1)
    assert fourth.data_ptr() == first.data_ptr()
    assert torch.equal(fourth, torch.arange(1.0, 5.0))


def test_free_memory_is_found_beside_memory_that_is_sent() -> None:
    spare, free = SpareTensors(), torch.zeros(4)
    spare.keep(torch.zeros(4), [Tracker()])
    spare.keep(free)
    assert spare.copy(torch.ones(4)).data_ptr() == free.data_ptr()
    assert spare.copy(torch.ones(4)).data_ptr() != free.data_ptr()


def test_tensors_of_other_shapes_are_apart() -> None:
    spare = SpareTensors()
    spare.keep(torch.zeros(2))
    assert spare.copy(torch.ones(3)).shape == (3,)
    assert spare.copy(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_a_sixteenth_of_the_parameters_is_kept_of_the_shapes_of_late() -> None:
    nbytes, kept = 1 << 30, 64 << 20
    spare, step = SpareTensors(nbytes), 1 << 20
    # No page of these tensors is ever touched.
    tensors: list[Tensor] = [torch.empty(step + n, dtype=torch.uint8) for n in range(128)]
    for one in tensors:
        spare.keep(one)
    held = sum(tensor.nbytes for kept_ones in spare._kept.values() for tensor, _ in kept_ones)
    assert kept - 2 * step < held <= kept
    assert held == spare._nbytes
    shapes = [shape for _, shape in spare._kept]
    assert shapes == [one.shape for one in tensors[-len(shapes) :]]


@pytest.mark.parametrize("is_held", [False, True])
def test_updates_use_the_memory_of_a_server_again(is_held: bool) -> None:
    keys = small_keys([3] * 5)
    shard = started_shard(make_setup(keys, workers=1))
    update_all(shard, 1, is_held)
    # They stay referenced, so no other tensor can get their memory.
    first = [*gradients_of(shard), *spares_of(shard)]
    assert len(first) == len(keys) + 1
    for number in (2, 3):
        update_all(shard, number, is_held)
        assert all(any(one is other for other in first) for one in gradients_of(shard))


def update_all(shard: Shard, number: int, is_held: bool) -> None:
    for key in shard.setup.keys:
        shard.push(*push_of(key, 0, number, 1.0, is_held=is_held))
    if is_held:
        numbers = msgspec.msgpack.encode([(key.index, number) for key in shard.setup.keys])
        commit = protocol.Commit(job=TOKEN, worker=0, incarnation=1, scale=1.0)
        list(shard.commit(commit, memoryview(numbers)))
    assert all(state.applied == [number] for state in shard.states.values())


def gradients_of(shard: Shard) -> list[Tensor]:
    return [state.gradient for state in shard.states.values()]


def spares_of(shard: Shard) -> list[Tensor]:
    (spare,) = {id(state.spare): state.spare for state in shard.states.values()}.values()
    return [tensor for kept in spare._kept.values() for tensor, _ in kept]
