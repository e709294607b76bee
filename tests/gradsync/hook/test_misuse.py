"""Wrong uses of the hook's state raise, or change nothing; none silently changes gradients."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.core.errors import ConfigError, PeerTimeoutError
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from tests.support.rank_pool import RankContext, RankPool


def train(context: RankContext, misuse: str, scale: Any = 1.0) -> tuple[str, list[torch.Tensor]]:
    """Return the message of a `ConfigError`, empty if there was none, and the weights at the end.

    Args:
        context: This rank.
        misuse: "named twice" gives the same names again; "two modules" and "late names" give those
            of another module, before or after the first step; "some names" gives names to the first
            layer only; "closed" closes the state between two steps; "late states" loads states
            between two steps; "loss scale" is for a bad `scale`; "" uses the state well.
        scale: Loss scale of the state.
    """
    context.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 1))
    wrapped = DistributedDataParallel(model)
    algorithm = "powersgd" if misuse == "late states" else "int8"
    options = {"topology": "ps", "coordinator": "none", "min_bytes": 0}
    state = GradientSyncState(algorithm=algorithm, **options)  # type: ignore[arg-type]
    message = ""
    try:
        names = list(model.named_parameters())
        state.name_parameters(names[:2] if misuse == "some names" else names)
        if misuse == "named twice":
            state.name_parameters(model.named_parameters())
        if misuse == "names after open":
            state.open(torch.device("cpu"))
            state.name_parameters(nn.Linear(20, 3).named_parameters(prefix="other"))
        if misuse == "two modules":
            state.name_parameters(nn.Linear(20, 300).named_parameters(prefix="0"))
        state.loss_scale = scale
        wrapped.register_comm_hook(state, compressed_hook)
        for step in range(4):
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            if misuse == "closed" and step == 2:
                state.close()
            wrapped(inputs * (1 + context.rank)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            if misuse == "late states" and step == 2:
                saved = state.state_dict()
                state.close()
                state.load_state_dicts([saved] * 2)
            if misuse == "late names" and step == 2:
                state.name_parameters(nn.Linear(20, 3).named_parameters(prefix="other"))
    except ConfigError as error:
        message = str(error)
    state.close()
    return message, [parameter.detach() for parameter in model.parameters()]


def test_names_that_are_given_twice_change_nothing(pool: RankPool) -> None:
    (_, expected), *_ = pool.run(train, 2, "")
    for message, weights in pool.run(train, 2, "named twice"):
        assert not message
        assert all(map(torch.equal, weights, expected))


def test_names_of_another_module_are_refused(pool: RankPool) -> None:
    for misuse in ("two modules", "names after open", "late names"):
        for message, _ in pool.run(train, 2, misuse):
            assert "parameters must be those of one module, named before the first step" in message


def test_names_of_some_parameters_are_refused(pool: RankPool) -> None:
    for message, _ in pool.run(train, 2, "some names"):
        assert "parameters must name all parameters of the module, got no name" in message
        assert "shape (1, 300)" in message


def test_training_with_a_closed_state_is_refused(pool: RankPool) -> None:
    for message, _ in pool.run(train, 2, "closed"):
        assert "state must be open during training" in message


def test_states_are_not_loaded_into_a_closed_state(pool: RankPool) -> None:
    for message, _ in pool.run(train, 2, "late states"):
        assert "state must be open during training" in message


def train_with(context: RankContext, *options: dict[str, Any]) -> str:
    """Return the error of a step, in which each rank has options of its own."""
    context.init_process_group()
    model = nn.Linear(20, 300)
    wrapped = DistributedDataParallel(model)
    own = dict(options[context.rank])
    states, reverses_names = own.pop("states", None), own.pop("reverses_names", False)
    state = GradientSyncState(timeout=20.0, **own)
    names = list(model.named_parameters())
    state.name_parameters(reversed(names) if reverses_names else names)
    if states is not None:
        state.load_state_dicts(states)
    wrapped.register_comm_hook(state, compressed_hook)
    message = ""
    try:
        wrapped(torch.ones(2, 20)).square().mean().backward()
    except ConfigError as error:
        message = str(error)
    state.close()
    return message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            [{"algorithm": "int8"}, {"algorithm": "powersgd"}],
            "algorithm must be the same on all ranks, got 'int8' on rank 0 and 'powersgd' on rank "
            "1. Give all ranks the same options.",
        ),
        ([{"algorithm": "none"}, {"algorithm": "auto"}], "algorithm must be the same"),
        ([{"topology": "ps"}, {"topology": "ring"}], "topology must be the same"),
        ([{"min_bytes": 0}, {"min_bytes": 1}], "min_bytes must be the same"),
        ([{"transport": "zmq"}, {}], "transport must be the same"),
        (
            [{"algorithm": "tbq"}, {"algorithm": "tbq", "codec_options": {"threshold": 0.01}}],
            "codec_options must be the same on all ranks, got None on rank 0 and {'threshold'",
        ),
        (
            [{}, {"states": [{"step": 4, "algorithm": "none"}] * 2}],
            "step must be the same on all ranks, got 0 on rank 0 and 4 on rank 1.",
        ),
        (
            [{}, {"reverses_names": True}],
            "parameters must be the same on all ranks, got 2 names with the checksum",
        ),
    ],
)
def test_unlike_options_are_refused_on_all_ranks(
    pool: RankPool, options: list[dict[str, Any]], expected: str
) -> None:
    for message in pool.run(train_with, 2, *options):
        assert message.startswith(expected)


@pytest.mark.parametrize("algorithm", ["none", "int8", "powersgd"])
def test_equal_options_pass(pool: RankPool, algorithm: str) -> None:
    options = {"algorithm": algorithm, "topology": "ps", "coordinator": "none", "min_bytes": 0}
    assert pool.run(train_with, 2, options, dict(reversed(options.items()))) == ["", ""]


GOOD: dict[str, Any] = {"step": 3, "algorithm": "int8", "units": []}


@pytest.mark.parametrize(
    ("states", "got"),
    [
        ([], "got \\[\\]"),
        (None, "got None"),
        (GOOD, "got 'dict'"),
        ([GOOD, None], "got 'NoneType'"),
        ([{"state_dict": 1}], "got \"dict \\['state_dict'\\]\""),
        ([{**GOOD, "step": "3"}], "results of state_dict"),
        ([{**GOOD, "units": [{"gradient": "weight"}]}], "results of state_dict"),
        ([GOOD, {**GOOD, "step": 4}], "steps \\[3, 4\\]"),
    ],
)
def test_other_things_than_states_are_refused(states: Any, got: str) -> None:
    with pytest.raises(ConfigError, match=got):
        GradientSyncState().load_state_dicts(states)


@pytest.mark.parametrize("scale", [0.0, math.nan, -1.0, None])
def test_a_bad_loss_scale_is_refused(pool: RankPool, scale: Any) -> None:
    for message, _ in pool.run(train, 2, "loss scale", scale):
        assert "loss_scale must be a finite number above 0" in message


def is_initialized_after_close(context: RankContext) -> bool:
    """Return True if a state that is closed before it is opened leaves the default group alone."""
    context.init_process_group()
    model = nn.Linear(8, 8)
    state = GradientSyncState(algorithm="int8")
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    wrapped(torch.ones(1, 8)).sum().backward()
    state.close()
    return dist.is_initialized()


def test_a_state_closed_after_its_first_step_leaves_the_default_group(pool: RankPool) -> None:
    assert pool.run(is_initialized_after_close, 2) == [True, True]


def hooked(
    model: nn.Module, group: dist.ProcessGroup | None = None, **options: Any
) -> tuple[DistributedDataParallel, GradientSyncState]:
    wrapped = DistributedDataParallel(model, process_group=group)
    state = GradientSyncState(
        algorithm="int8", topology="ps", coordinator="none", min_bytes=0, **options
    )
    state.name_parameters(model.named_parameters())
    wrapped.register_comm_hook(state, compressed_hook)
    return wrapped, state


def train_in_groups(context: RankContext) -> str:
    context.init_process_group()
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    group = groups[context.rank // 2]
    wrapped, _ = hooked(nn.Linear(4, 2), group)
    try:
        wrapped(torch.ones(3, 4)).sum().backward()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_process_group_of_some_ranks_is_refused(pool: RankPool) -> None:
    for rank, message in enumerate(pool.run(train_in_groups, 3)):
        assert "process_group of DistributedDataParallel must be one of all 3 ranks" in message
        assert f"got one of {1 if rank == 2 else 2}." in message


def close_two_states(context: RankContext, transport: str) -> list[str]:
    """Return the errors of two states that the ranks close in different orders."""
    context.init_process_group()
    states = []
    for _ in range(2):
        wrapped, state = hooked(nn.Linear(4, 2), transport=transport, timeout=20.0)
        wrapped(torch.ones(3, 4)).sum().backward()
        states.append(state)
    errors = []
    for state in reversed(states) if context.rank else states:
        try:
            state.close()
        except ConfigError as error:
            errors.append(str(error))
    # What is left must be collectable.
    del states, state, wrapped
    gc.collect()
    return errors


@pytest.mark.parametrize("transport", ["gloo", "zmq"])
def test_states_that_are_closed_in_different_orders_are_refused(
    pool: RankPool, transport: str
) -> None:
    for errors in pool.run(close_two_states, 2, transport):
        assert len(errors) == 2
        assert "Close the states in the same order on all ranks." in errors[0]


def close_late(context: RankContext) -> str:
    context.init_process_group()
    wrapped, state = hooked(nn.Linear(4, 2), timeout=1.0)
    wrapped(torch.ones(3, 4)).sum().backward()
    message = ""
    if context.rank == 0:
        with pytest.raises(PeerTimeoutError) as caught:
            state.close()
        message = str(caught.value)
    return message


def test_a_rank_that_does_not_close_its_state_is_an_error_of_the_others(pool: RankPool) -> None:
    message, _ = pool.run(close_late, 2)
    assert "`close` waited 1 s for the other ranks, and some rank did not call it" in message


def close_after_the_group(context: RankContext) -> None:
    context.init_process_group()
    wrapped, state = hooked(nn.Linear(4, 2))
    wrapped(torch.ones(3, 4)).sum().backward()
    dist.destroy_process_group()
    state.close()


def test_a_state_may_be_closed_after_the_process_group(pool: RankPool) -> None:
    pool.run(close_after_the_group, 2)
