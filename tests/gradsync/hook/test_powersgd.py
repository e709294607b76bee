"""PowerSGD compresses as torch's own hook does, bit for bit, and its state can be saved."""

from __future__ import annotations

import copy
import gc
import io
import math
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from tests.support.linear_loss import means_of_steps
from tests.support.rank_pool import RankContext, RankPool

# Shapes of the parameters. Torch compresses only matrices, and puts those of one shape together.
# All sizes are multiples of 64 bytes. A resumed run has another order of parameters in its first
# buckets, which must not change their alignment: some processors would round products differently.
SHAPES = {"first": (48, 32), "bias": (48,), "second": (32, 64), "third": (48, 32), "last": (16,)}
# First step that is compressed.
START = 2


class GivenGradients(nn.Module):
    """Module whose parameters get the inputs of `forward` as gradients."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())  # type: ignore[return-value]


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(
    context: RankContext,
    steps: Sequence[int],
    options: dict[str, Any] | None,
    *,
    plain: dict[str, Any] | None = None,
    saved: bytes | None = None,
    accumulate: int = 1,
    overflows: Sequence[int] = (),
    scales: Sequence[float] | None = None,
    finds_unused: bool = False,
) -> tuple[list[dict[str, Tensor]], bytes, list[str]]:
    """Return the means of all steps that did not overflow, the saved state, and the warnings.

    Args:
        context: This rank.
        steps: Numbers of the steps, which choose the gradients.
        options: `codec_options` of `GradientSyncState`; None uses torch's hook.
        plain: Options of torch's hook.
        saved: States of all ranks to continue from.
        accumulate: Backwards of a step, of which the last one synchronises.
        overflows: Steps with an infinite gradient on rank 0.
        scales: Factor of the loss in each step; None: always 1.
        finds_unused: True lets DDP look for unused parameters. There are none.
    """
    context.init_process_group()
    model = GivenGradients()
    wrapped = DistributedDataParallel(model, find_unused_parameters=finds_unused)
    state = None
    with pytest.WarningsRecorder(_ispytest=True) as record:
        if options is None:
            wrapped.register_comm_hook(PowerSGDState(None, **(plain or {})), powerSGD_hook)
        else:
            state = GradientSyncState(
                algorithm="powersgd", codec_options=options, keeps_previous=True
            )
            state.name_parameters(model.named_parameters())
            if saved is not None:
                # Only tensors and primitive types pass.
                state.load_state_dicts(torch.load(io.BytesIO(saved), weights_only=True))
            wrapped.register_comm_hook(state, compressed_hook)
        means = []
        for index, step in enumerate(steps):
            model.zero_grad()
            scale = 1.0 if scales is None else scales[index]
            for part in range(accumulate):
                values = gradients(context.rank, step * accumulate + part)
                if step in overflows and context.rank == 0:
                    values["second"][3, 3] = math.inf
                if state is not None:
                    state.loss_scale = scale
                wrapped.require_backward_grad_sync = part == accumulate - 1
                (wrapped(values) * scale).backward()
            if step in overflows:
                assert state is not None
                state.undo_step()
            else:
                means.append({n: p.grad.clone() / scale for n, p in model.named_parameters()})
    buffer = io.BytesIO()
    if state is not None:
        torch.save(copy.deepcopy(state.state_dict()), buffer)
        state.close()
    return (
        means,
        buffer.getvalue(),
        [str(w.message) for w in record if "PowerSGD" in str(w.message)],
    )


def merged(saved: Sequence[bytes]) -> bytes:
    """Return the states of all ranks as one checkpoint."""
    buffer = io.BytesIO()
    torch.save([torch.load(io.BytesIO(one), weights_only=True) for one in saved], buffer)
    return buffer.getvalue()


def assert_same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> None:
    for means, others in zip(one, other, strict=True):
        for name in SHAPES:
            assert torch.equal(means[name], others[name]), name


def assert_near(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compare tensors of about 1 that may differ by rounding."""
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


# Options of `GradientSyncState`, and the same ones of torch's hook.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "rank": ({"rank": 3}, {"matrix_approximation_rank": 3}),
    "cold": ({"warm_start": False}, {"warm_start": False}),
    "no feedback": ({"error_feedback": False}, {"use_error_feedback": False}),
    "ratio and seed": (
        {"least_ratio": 1.1, "seed": 4, "rank": 8},
        {"min_compression_rate": 1.1, "random_seed": 4, "matrix_approximation_rank": 8},
    ),
}


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", CASES)
def test_means_are_those_of_torchs_hook(pool: RankPool, case: str, accumulate: int) -> None:
    options, plain = CASES[case]
    ours = pool.run(train, 2, range(7), {"start_step": START, **options}, accumulate=accumulate)
    expected = pool.run(
        train,
        2,
        range(7),
        None,
        plain={"start_powerSGD_iter": START, **plain},
        accumulate=accumulate,
    )
    for (means, _, _), (others, _, _) in zip(ours, expected, strict=True):
        for mean, other in zip(means, others, strict=True):
            # Torch adds errors to the other gradients, whose mean is zero apart from rounding.
            assert all(
                torch.equal(mean[name], other[name]) for name in ("first", "second", "third")
            )
            assert_near(mean, other)


@pytest.mark.parametrize(
    ("case", "step"),
    # Without a warm start, the resumed run draws the matrices of its first step in another order of
    # the parameters, so it does not continue exactly.
    [
        pytest.param(case, step, marks=[] if step == 4 else pytest.mark.exhaustive)
        for case in CASES
        for step in (1, 4)
        if (case, step) != ("cold", 4)
    ],
)
def test_a_resumed_run_continues(pool: RankPool, case: str, step: int) -> None:
    """Its first buckets have the parameters in another order, so matrices are at other addresses.
    Some processors multiply them with other rounding then."""
    options = {"start_step": START, **CASES[case][0]}
    whole = pool.run(train, 2, range(8), options)
    first = pool.run(train, 2, range(step), options)
    second = pool.run(
        train, 2, range(step, 8), options, saved=merged([saved for _, saved, _ in first])
    )
    for (means, state, _), (rest, other_state, warnings) in zip(whole, second, strict=True):
        for mean, other in zip(means[step:], rest, strict=True):
            assert_near(mean, other)
        assert not warnings
        one, other = (torch.load(io.BytesIO(s), weights_only=True) for s in (state, other_state))
        assert one["powersgd"]["iteration"] == other["powersgd"]["iteration"] == 8
        errors, others = one["powersgd"]["errors"], other["powersgd"]["errors"]
        assert_near(errors, others)


def test_powersgd_has_another_group_than_the_search_for_unused_parameters(pool: RankPool) -> None:
    """Both call all-reduce at the same time. In one group, gloo would end the process.

    The means are not those of a run without the search: it changes the order of the buckets, and so
    the random matrices.
    """
    (means, _, _), (others, _, _) = pool.run(
        train, 2, range(12), {"start_step": START}, finds_unused=True
    )
    assert_same(means, others)


def test_saved_matrices_are_dropped_if_the_option_rank_changes(pool: RankPool) -> None:
    saved = [one for _, one, _ in pool.run(train, 2, range(4), {"start_step": START, "rank": 2})]
    options = {"start_step": START, "rank": 4}
    results = pool.run(train, 2, range(4, 7), options, saved=merged(saved))
    for means, _, messages in results:
        assert_same(means, results[0][0])
        assert "was dropped for ['first', 'second', 'third']" in messages[0]


def unsent(saved: Sequence[bytes], name: str) -> Tensor:
    """Return the sum of all ranks' errors of a parameter: flat, float64."""
    states = [torch.load(io.BytesIO(one), weights_only=True).get("powersgd") for one in saved]
    zero = torch.zeros(SHAPES[name], dtype=torch.float64).view(-1)
    return sum((s["errors"][name].double() for s in states if s and s["errors"]), zero)


@pytest.mark.parametrize("after", [1, 3])
def test_nothing_is_lost_on_another_number_of_ranks(pool: RankPool, after: int) -> None:
    options = {"start_step": START}
    first = pool.run(train, 2, range(5), options)
    second = pool.run(
        train, after, range(5, 9), options, saved=merged([saved for _, saved, _ in first])
    )
    warning = (
        "The checkpoint has PowerSGD's errors of 2 ranks, and this run has 3: each rank got their "
        "mean."
    )
    for means, _, warnings in second:
        assert_same(means, second[0][0])
        assert warnings == [warning] * (after > 1)
    for name in SHAPES:
        given = sum(gradients(r, s)[name].double() for s in range(5) for r in range(2)) / 2
        given += (
            sum(gradients(r, s)[name].double() for s in range(5, 9) for r in range(after)) / after
        )
        got = sum(means[name].double() for means in first[0][0] + second[0][0]).view(-1)
        got = got + unsent([saved for _, saved, _ in second], name) / after
        torch.testing.assert_close(got, given.view(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("step", [2, 4])
def test_a_step_that_overflows_leaves_no_trace(pool: RankPool, step: int) -> None:
    """Later means may differ from those without the step, which has drawn random matrices. So only
    the sums of means and errors are checked."""
    options = {"start_step": START}
    ours = pool.run(train, 2, range(7), options, overflows=[step])
    errors = [unsent([saved], "second") for _, saved, _ in ours]
    assert all(error.isfinite().all() for error in errors)
    for name in SHAPES:
        taken = [s for s in range(7) if s != step]
        given = sum(gradients(r, s)[name].double() for s in taken for r in range(2))
        got = 2 * sum(means[name].double() for means in ours[0][0]).view(-1)
        got = got + unsent([saved for _, saved, _ in ours], name)
        torch.testing.assert_close(got, given.view(-1), rtol=0, atol=1e-4)


def test_the_loss_scale_leaves_no_trace(pool: RankPool) -> None:
    options = {"start_step": START}
    plain = pool.run(train, 2, range(6), options)
    scaled = pool.run(train, 2, range(6), options, scales=[1024.0, 2.0, 0.5, 8.0, 8.0, 1024.0])
    for (means, _, _), (others, _, _) in zip(plain, scaled, strict=True):
        for one, other in zip(means, others, strict=True):
            for name in SHAPES:
                torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


class Unsupported(nn.Module):
    """Module with parameters that torch's hook cannot handle.

    Args:
        kind: "scalar" adds a scalar parameter, "sparse" one with sparse gradients, "buckets" a
            second matrix, for a second bucket, and "dtypes" one with another dtype.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))
        self.other: Any = {
            "scalar": lambda: nn.Parameter(torch.tensor(1.0)),
            "sparse": lambda: nn.Embedding(4, 2, sparse=True),
            "buckets": lambda: nn.Parameter(torch.zeros(64, 64)),
            "dtypes": lambda: nn.Parameter(torch.zeros(64, 64, dtype=torch.float64)),
        }[kind]()

    def forward(self) -> Tensor:
        if isinstance(self.other, nn.Embedding):
            return self.weight.sum() + self.other(torch.tensor([1])).sum()
        return self.weight.sum() * self.other.sum()


def refusal(context: RankContext, kind: str) -> str:
    """Return the error of training with parameters of a kind; see `Unsupported`."""
    context.init_process_group()
    model = Unsupported(kind)
    options: dict[str, Any] = {"start_step": 2}
    if kind == "dtypes":
        # Compresses in the first step already.
        options = {"start_step": 0, "error_feedback": False, "warm_start": False}
    state = GradientSyncState(algorithm="powersgd", codec_options=options)
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01 if kind == "buckets" else 25)
    wrapped.register_comm_hook(state, compressed_hook)
    # Several buckets are refused only from the second step on, when DDP has formed its lasting
    # buckets, or if the first step is compressed.
    for _ in range(2):
        try:
            wrapped().backward()
        except Exception:
            break
    state.close()
    return f"{type(state.failure).__name__}: {state.failure}"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("scalar", "algorithm must be 'int8' or another codec for scalar or complex parameters"),
        ("sparse", "algorithm must be 'int8' or another codec with sparse gradients"),
        ("buckets", "algorithm must not be 'powersgd' with several buckets of gradients over gloo"),
        ("dtypes", "algorithm must not be 'powersgd' with several buckets of gradients over gloo"),
    ],
)
def test_what_torchs_hook_cannot_handle_is_refused(pool: RankPool, kind: str, message: str) -> None:
    for error in pool.run(refusal, 2, kind):
        assert error.startswith(f"ConfigError: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1"),
        ({"start_step": 1}, "start_step must be a whole number of at least 2"),
        ({"error_feedback": 1}, "error_feedback must be"),
        ({"bits": 2}, "codec_options must be some of"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientSyncState(algorithm="powersgd", codec_options=options)


def means_and_errors(
    context: RankContext, dtype: torch.dtype, steps: int
) -> tuple[list[float], float]:
    """Return a bias's mean gradient of each step, and its largest error after the last one."""
    context.init_process_group()
    model = nn.Linear(64, 48).to(dtype)
    state = GradientSyncState(algorithm="powersgd", codec_options={"start_step": START})
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    means = []
    for _ in range(steps):
        model.zero_grad()
        # The ranks' gradients are 5 and -4 in every step.
        (
            wrapped(torch.zeros(1, 64, dtype=dtype)).sum() * (-4.0 if context.rank else 5.0)
        ).backward()
        means.append(float(model.bias.grad[0]))
    errors = state.state_dict()["powersgd"]["errors"]
    state.close()
    return means, float(errors["bias"].abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_not_compressed_stay_exact(pool: RankPool, dtype: torch.dtype) -> None:
    for means, error in pool.run(means_and_errors, 2, dtype, 150):
        assert set(means) == {0.5}
        assert error == 0


def resumed_errors(context: RankContext) -> list[float]:
    """Return the sums of a step's means and errors, with a loss scale, after a small error."""
    context.init_process_group()
    model = nn.Linear(64, 48).to(torch.float16)
    error = {name: torch.full((p.numel(),), 2e-8) for name, p in model.named_parameters()}
    state = GradientSyncState(algorithm="powersgd", codec_options={"start_step": START})
    empty = copy.deepcopy(state.state_dict())
    saved = {**empty["powersgd"], "iteration": START, "errors": error}
    state.load_state_dicts([{**empty, "powersgd": saved}] * 2)
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    state.loss_scale = 65536.0
    (wrapped(torch.zeros(1, 64, dtype=torch.float16)).sum() * 0).backward()
    state.loss_scale = 1.0
    left = state.state_dict()["powersgd"]["errors"]
    sums = [float(p.grad.float().mean()) / 65536 for p in model.parameters()]
    state.close()
    return [s + float(left[name].mean()) for s, name in zip(sums, left, strict=True)]


def test_small_errors_of_half_gradients_survive_a_checkpoint(pool: RankPool) -> None:
    """Without the loss scale, they are below the least number of float16."""
    for sums in pool.run(resumed_errors, 2):
        assert sums == pytest.approx([2e-8, 2e-8], rel=0.02)


def threads_after_runs(context: RankContext) -> list[int]:
    """Return the number of threads of this process after each of several short runs."""
    context.init_process_group()
    counts = []
    for _ in range(4):
        model = GivenGradients()
        state = GradientSyncState(algorithm="powersgd", codec_options={"start_step": START})
        state.name_parameters(model.named_parameters())
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(state, compressed_hook)
        for step in range(START + 2):
            wrapped(gradients(context.rank, step)).backward()
        state.close()
        # A second call does nothing.
        state.close()
        del wrapped, state
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_a_closed_state_leaves_no_group(pool: RankPool) -> None:
    """Torch would destroy the group at the end of the process, which sometimes aborted it."""
    for first, *_, last in pool.run(threads_after_runs, 2):
        assert last == first


def close_with_a_held_group(context: RankContext) -> list[Any]:
    """Return what another thread holds of the hook's group after `close`."""
    context.init_process_group()
    state = GradientSyncState(algorithm="powersgd", codec_options={"start_step": START})
    model = GivenGradients()
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    wrapped(gradients(context.rank, 0)).backward()
    assert state._power_sgd is not None
    held = [state._power_sgd._group]
    thread = threading.Timer(0.3, held.clear)
    thread.start()
    state.close()
    left = [type(group).__name__ for group in held]
    thread.join()
    return left


def test_close_waits_until_other_threads_have_released_the_group(pool: RankPool) -> None:
    """The last one to release it would wait for the end of its own thread, which aborts."""
    assert pool.run(close_with_a_held_group, 2) == [[], []]


def steps_after_a_return(context: RankContext, before: int) -> list[list[dict[str, Tensor]]]:
    """Return the means of three steps, and of the same steps after a return to the first."""
    context.init_process_group()
    model = GivenGradients()
    wrapped = DistributedDataParallel(model)
    state = GradientSyncState(algorithm="powersgd", codec_options={"start_step": START})
    state.name_parameters(model.named_parameters())
    wrapped.register_comm_hook(state, compressed_hook)

    def means_of(steps: range) -> list[dict[str, Tensor]]:
        return means_of_steps(wrapped, partial(gradients, context.rank), steps)

    means_of(range(before))
    saved: list[Any] = [None] * context.world_size
    dist.all_gather_object(saved, copy.deepcopy(state.state_dict()))
    runs = [means_of(range(before, before + 3))]
    state.load_state_dicts(saved)
    runs.append(means_of(range(before, before + 3)))
    state.close()
    return runs


@pytest.mark.parametrize("before", [0, START + 2])
def test_a_run_that_returns_to_an_earlier_step_repeats_it(pool: RankPool, before: int) -> None:
    for first, second in pool.run(steps_after_a_return, 2, before):
        assert_same(first, second)
