"""Each push changes a parameter once through all faults of a network, and "ssp" keeps its bound."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlres import register_codec
from lightning_dlres.codecs import base as registry
from lightning_dlres.codecs.gradient import State
from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.consistency import Answer
from lightning_dlres.paramserver.execute.server.shard import Shard
from tests.support.paramserver_shards import TOKEN, make_setup, push_of, small_keys, started_shard
from tests.support.stepped_codec import SteppedCodec

STEPS = 6
seeds = st.integers(0, 1 << 32)


@dataclass
class Worker:
    """Model of a worker: its latest push, and the one whose value it has."""

    pushed: int = 0
    landed: int = 0


def value_of(worker: int, number: int) -> float:
    """Return the gradient of a push: sums of these are exact, and no two are equal."""
    return float(1 << (3 * number + worker))


def commit_of(worker: int, number: int, scale: float) -> tuple[protocol.Commit, memoryview]:
    commit = protocol.Commit(job=TOKEN, worker=worker, incarnation=1, scale=scale)
    # msgpack of [[0, number]]
    return commit, memoryview(bytes([0x91, 0x92, 0, number]))


class Network:
    """Workers that push in order, and a network that loses, repeats and reorders all messages."""

    def __init__(self, shard: Shard, seed: int, *, is_held: bool = False) -> None:
        self.shard, self.draw, self.is_held = shard, random.Random(seed), is_held
        self.workers = [Worker() for _ in range(shard.setup.workers)]
        self.pushes: list[tuple[int, int]] = []
        self.most_ahead = 0
        self.granted_ahead = 0

    def run(self, steps: int) -> None:
        while any(worker.landed < steps for worker in self.workers):
            index = self.draw.randrange(len(self.workers))
            worker = self.workers[index]
            if worker.pushed == worker.landed < steps:
                worker.pushed += 1
                self.pushes.append((index, worker.pushed))
            elif self.draw.random() < 0.3:
                self.answer(self.pull(index, worker.pushed))
            if self.pushes and self.draw.random() < 0.8:
                position = self.draw.randrange(len(self.pushes))
                who, number = self.pushes[position]
                if self.draw.random() < 0.6:
                    del self.pushes[position]
                if self.draw.random() < 0.8:
                    self.deliver(who, number)

    def deliver(self, worker: int, number: int) -> None:
        push = push_of(
            self.shard.setup.keys[0],
            worker,
            number,
            value_of(worker, number),
            is_held=self.is_held,
        )
        for answer in self.shard.push(*push):
            self.answer(answer)

    def pull(self, worker: int, number: int) -> Answer:
        return self.shard.pull(
            protocol.KeyRequest(job=TOKEN, worker=worker, incarnation=1, key=0, number=number)
        )

    def answer(self, answer: Answer) -> None:
        """Let an answer arrive, or get lost."""
        worker = self.workers[answer.worker]
        applied = self.shard.states[0].applied
        if answer.kind == protocol.VALUE:
            assert applied[answer.worker] >= answer.number
            self.granted_ahead = max(self.granted_ahead, applied[answer.worker] - min(applied))
        self.most_ahead = max(self.most_ahead, max(applied) - min(applied))
        if self.draw.random() < 0.3:
            return
        if answer.kind == protocol.VALUE and answer.number == worker.pushed:
            worker.landed = answer.number
        elif answer.kind == protocol.BEHIND:
            self.pushes += [
                (answer.worker, number) for number in range(answer.number + 1, worker.pushed + 1)
            ]
        elif answer.kind == protocol.MERGED and answer.number == worker.pushed:
            commit = commit_of(answer.worker, answer.number, 1.0)
            for _ in range(self.draw.randrange(3)):
                for _, reply in self.shard.commit(*commit):
                    self.answer(reply)


def expected_sum(workers: int, steps: int) -> float:
    total = sum(value_of(w, n) for w in range(workers) for n in range(1, steps + 1))
    return -total / workers


@given(seed=seeds, is_held=st.booleans())
def test_a_synchronous_job_applies_each_push_once(seed: int, is_held: bool) -> None:
    shard = started_shard(make_setup(small_keys([3]), 2))
    Network(shard, seed, is_held=is_held).run(STEPS)
    state = shard.states[0]
    assert (state.updates, state.applied) == (STEPS, [STEPS] * 2)
    assert torch.equal(state.parameter, torch.full((3,), expected_sum(2, STEPS)))


@given(seed=seeds, staleness=st.sampled_from([None, 0, 1, 2]))
def test_an_asynchronous_job_applies_each_push_once(seed: int, staleness: int | None) -> None:
    setup = make_setup(
        small_keys([3]),
        2,
        consistency="asp" if staleness is None else "ssp",
        staleness=staleness or 0,
    )
    shard = started_shard(setup)
    network = Network(shard, seed)
    network.run(STEPS)
    state = shard.states[0]
    assert (state.updates, state.applied) == (2 * STEPS, [STEPS] * 2)
    assert torch.equal(state.parameter, torch.full((3,), expected_sum(2, STEPS)))
    if staleness is not None:
        # A worker has its value only within the bound, so it is at most one push beyond.
        assert network.granted_ahead <= staleness
        assert network.most_ahead <= staleness + 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adamax])
def test_one_push_of_each_worker_moves_as_far_as_one_joint_step(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    keys, workers = small_keys([3]), 4
    options: Any = {"optimizer": optimizer, "consistency": "asp"}
    shard = started_shard(make_setup(keys, workers, **options))
    joint = torch.nn.Parameter(torch.zeros(3))
    joint.grad = torch.full((3,), 3.0)
    optimizer([joint], lr=1.0).step()
    for worker in range(workers):
        shard.push(*push_of(keys[0], worker, 1, 3.0))
    torch.testing.assert_close(shard.states[0].parameter.detach(), joint.detach())


@given(seed=seeds)
def test_synchronous_gradients_are_merged_in_the_order_of_workers(seed: int) -> None:
    values, key = [1.0, 2.0**-24, -1.0], small_keys([1])[0]
    shard, order = started_shard(make_setup([key], 3)), list(range(3))
    random.Random(seed).shuffle(order)
    for worker in order:
        shard.push(*push_of(key, worker, 1, values[worker]))
    total = torch.tensor([values[0]]) + values[1] + values[2]
    assert torch.equal(shard.states[0].parameter, -total / 3)


def test_a_restarted_synchronous_server_gets_all_pushes_again() -> None:
    setup = make_setup(small_keys([2]), 2)
    expected = started_shard(setup)
    Network(expected, 0).run(STEPS)
    shard = started_shard(setup)
    network = Network(shard, 1)
    network.run(STEPS)
    network.shard = started_shard(setup)
    for worker in network.workers:
        worker.landed -= 1
    network.run(STEPS)
    assert torch.equal(network.shard.states[0].parameter, expected.states[0].parameter)


def ssp_shard(staleness: int) -> Shard:
    return started_shard(make_setup(small_keys([1]), 2, consistency="ssp", staleness=staleness))


def test_a_withheld_value_is_released_when_the_slower_worker_pushes() -> None:
    shard = ssp_shard(1)
    key = shard.setup.keys[0]
    shard.push(*push_of(key, 0, 1, 1.0))
    (withheld,) = shard.push(*push_of(key, 0, 2, 1.0))
    assert (withheld.kind, withheld.workers) == (protocol.WAITING, (1,))
    answers = shard.push(*push_of(key, 1, 1, 1.0))
    assert {(one.worker, one.kind, one.number) for one in answers} == {
        (1, protocol.VALUE, 1),
        (0, protocol.VALUE, 2),
    }


def test_no_worker_waits_for_one_that_was_shut_out() -> None:
    shard = ssp_shard(0)
    key = shard.setup.keys[0]
    shard.members.shut_out_silent(1.0)
    shard.members.admit(protocol.Request(job=TOKEN, worker=0, incarnation=1), "", 61.5)
    (withheld,) = shard.push(*push_of(key, 0, 1, 1.0))
    assert withheld.kind == protocol.WAITING
    for second in range(2, 63):
        silent, released = shard.shut_out_silent(float(second))
        if silent:
            break
    assert silent == [1]
    assert [(index, one.worker, one.kind) for index, one in released] == [(0, 0, protocol.VALUE)]


def test_a_worker_that_rejoins_is_as_far_as_the_slowest_other_one() -> None:
    shard = ssp_shard(5)
    key = shard.setup.keys[0]
    for number in (1, 2, 3):
        shard.push(*push_of(key, 0, number, 1.0))
    shard.rejoin(1)
    assert shard.states[0].applied == [3, 3]
    # A restarted server has forgotten that, and learns it from the base of the next push.
    restarted = ssp_shard(5)
    (answer,) = restarted.push(*push_of(key, 1, 4, 1.0, base=3))
    assert (answer.kind, restarted.states[0].applied) == (protocol.VALUE, [0, 4])


def test_a_commit_needs_a_synchronous_job() -> None:
    shard = ssp_shard(0)
    with pytest.raises(ProtocolError, match="needs consistency 'bsp'"):
        list(shard.commit(*commit_of(0, 1, 1.0)))


def test_a_commit_of_another_number_changes_nothing() -> None:
    key = small_keys([1])[0]
    shard = started_shard(make_setup([key], 1))
    shard.push(*push_of(key, 0, 1, 2.0, is_held=True))
    kinds = [
        answer.kind for number in (0, 2) for _, answer in shard.commit(*commit_of(0, number, 1.0))
    ]
    assert kinds == [protocol.VALUE, protocol.BEHIND]
    assert shard.states[0].parameter.item() == 0.0
    assert [answer.kind for _, answer in shard.commit(*commit_of(0, 1, 0.5))] == [protocol.VALUE]
    assert shard.states[0].parameter.item() == -1.0


class GrowsByStep(SteppedCodec):
    """Codec whose payload means something else at each step."""

    name = "grows by step"

    def compress(self, values: Tensor, state: State, payload: Tensor, **_: Any) -> None:
        raise NotImplementedError

    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        values = payload.view(torch.float32) * scale * (self.step + 1)
        out.copy_(out + values if accumulate else values)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_payload_is_decoded_at_the_step_of_its_codec(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process of a worker may be at another step of its codec than the others."""
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))
    register_codec(GrowsByStep)
    (key,) = small_keys([5000])
    setup = msgspec.structs.replace(make_setup([key], 2), codec=GrowsByStep.name)
    shard = started_shard(setup)
    for worker in order:
        push, data = push_of(key, worker, 1, 1.0)
        shard.push(
            msgspec.structs.replace(push, codec=GrowsByStep.name, codec_step=10 * worker), data
        )
    # The mean of 1 and 11, with a learning rate of 1.
    assert (shard.states[0].parameter == -6.0).all()
