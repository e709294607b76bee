"""1-bit Adam on real ranks: its warm-up is AdamW, and afterwards it is the published algorithm."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient import RESIDUAL
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.optimizers import MomentumSync, OneBitAdam, momentum_hook
from tests.codecs.gradient.oracles import onebit
from tests.gradsync.optimizers.oracle import OneBitAdamOracle
from tests.support.rank_pool import RankContext, RankPool

SIZES = {"scalar": 1, "bias": 10, "weight": 9000, "large": 21_000}
BETAS = (0.8, 0.9)
LR = 0.02
WEIGHT_DECAY = {"scalar": 0.0, "bias": 0.0, "weight": 0.1, "large": 0.1}


class Quadratic(nn.Module):
    """Parameters whose loss is the scaled squared distance to a target for each rank and step."""

    def __init__(self, dtypes: dict[str, torch.dtype] | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, size in SIZES.items():
            values = torch.randn(size, generator=generator).to((dtypes or {}).get(name))
            if name == "weight":
                # Not contiguous, as the weights of a convolution in channels-last memory.
                values = values.view(90, 100).t()
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, rank: int, step: int, names: tuple[str, ...] = tuple(SIZES)) -> Tensor:
        return sum((self.loss_of(name, rank, step) for name in names), torch.zeros(()))

    def loss_of(self, name: str, rank: int, step: int) -> Tensor:
        index = list(SIZES).index(name)
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + index)
        size = SIZES[name]
        target = torch.randn(size, generator=generator)
        scale = 1 + torch.arange(size) / size
        distance = self.get_parameter(name).float().reshape(-1) - target
        return 0.5 * (scale * distance**2).sum()

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": [self.bias, self.scalar], "weight_decay": 0.0},
            {"params": [self.large, self.weight], "weight_decay": 0.1},
        ]


class Run:
    """A model with 1-bit Adam on one rank."""

    def __init__(
        self,
        context: RankContext,
        freeze_step: Any,
        *,
        dtypes: dict[str, torch.dtype] | None = None,
        ddp: dict[str, Any] | None = None,
        betas: tuple[float, float] = BETAS,
        **sync: Any,
    ) -> None:
        self.rank = context.rank
        self.model = Quadratic(dtypes)
        # Several buckets.
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.05, **(ddp or {}))
        self.optimizer = OneBitAdam(
            self.model.groups(),
            lr=LR,
            betas=betas,
            freeze_step=freeze_step,
            sync=MomentumSync(timeout=20.0, **sync),
        )
        self.sync = self.optimizer.sync
        self.ddp.register_comm_hook(self.sync, momentum_hook)

    def step(self, step: int, names: tuple[str, ...] = tuple(SIZES)) -> None:
        self.optimizer.zero_grad()
        self.ddp(self.rank, step, names).backward()
        self.optimizer.step()

    def snapshot(self) -> dict[str, Tensor]:
        """Return flat copies of all that must be equal on all ranks."""
        values = {}
        for name, parameter in self.model.named_parameters():
            values[name] = parameter.detach().clone().reshape(-1)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                label = "exp_avg" if key == "scaled_momentum" else key
                values[f"{name} {label}"] = torch.as_tensor(value).clone().reshape(-1)
        return values

    def residuals(self) -> dict[Any, Tensor]:
        """Return copies of what this rank has not sent."""
        if self.sync.synchroniser is None:
            return {}
        states = self.sync.synchroniser.states.by_key
        return {key: state[RESIDUAL].clone() for key, state in states.items() if state}


def equal(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def train_warm_up(context: RankContext, is_onebit: bool, accumulate: int) -> dict[str, Tensor]:
    context.init_process_group()
    dtypes = {"weight": torch.bfloat16, "bias": torch.bfloat16}
    model = Quadratic(dtypes)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizer: torch.optim.Optimizer
    if is_onebit:
        optimizer = OneBitAdam(model.groups(), LR, BETAS, freeze_step=100)
        ddp.register_comm_hook(optimizer.sync, momentum_hook)
    else:
        optimizer = torch.optim.AdamW(model.groups(), LR, BETAS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        optimizer.zero_grad()
        for part in range(accumulate):
            ddp.require_backward_grad_sync = part == accumulate - 1
            ddp(context.rank, step * accumulate + part).backward()
        optimizer.step()
        scheduler.step()
    dist.barrier()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (3, 2)])
def test_the_warm_up_is_that_of_adamw(pool: RankPool, world_size: int, accumulate: int) -> None:
    plain = pool.run(train_warm_up, world_size, False, accumulate)
    ours = pool.run(train_warm_up, world_size, True, accumulate)
    assert all(map(equal, plain, ours))


def test_one_process_trains_as_adamw_does() -> None:
    results = []
    for is_onebit in (False, True):
        model = Quadratic()
        if is_onebit:
            optimizer: Any = OneBitAdam(model.groups(), LR, BETAS, freeze_step=2)
        else:
            optimizer = torch.optim.AdamW(model.groups(), LR, BETAS)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(0, 0)
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure).detach()) for _ in range(6)]
        results.append((losses, model.state_dict()))
    assert results[0][0] == results[1][0]
    assert equal(results[0][1], results[1][1])


def train(
    context: RankContext, steps: int, freeze_step: Any, options: dict[str, Any]
) -> tuple[list[dict[str, Tensor]], list[dict[Any, Tensor]], list[tuple[Any, ...]]]:
    """Return the snapshot and the residuals of each step, and the units."""
    context.init_process_group()
    run = Run(context, freeze_step, **options)
    snapshots, residuals = [], []
    for step in range(steps):
        run.step(step)
        snapshots.append(run.snapshot())
        residuals.append(run.residuals())
    assert run.sync.synchroniser is not None
    units = [
        (unit.gradient, unit.start, unit.stop, unit.owner, unit.codec)
        for unit in run.sync.synchroniser.plan.units
        if unit.gradient != "flags"
    ]
    run.sync.close()
    return snapshots, residuals, units


# Names of the parameters by their position in the groups.
NAMES = {f"parameter {i}": name for i, name in enumerate(("bias", "scalar", "large", "weight"))}


@pytest.mark.parametrize(
    ("algorithm", "topology", "world_size", "tolerance"),
    [
        ("raw", "ps", 3, 4e-6),
        ("raw", "ring", 2, 4e-6),
        ("onebit", "ps", 2, 1e-4),
        ("onebit", "ring", 3, 1e-4),
        pytest.param("raw", "ps", 2, 4e-6, marks=pytest.mark.exhaustive),
        pytest.param("raw", "ring", 3, 4e-6, marks=pytest.mark.exhaustive),
        pytest.param("onebit", "ps", 3, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param("onebit", "ring", 2, 1e-4, marks=pytest.mark.exhaustive),
    ],
)
def test_training_is_that_of_the_slow_definition(
    pool: RankPool, world_size: int, algorithm: str, topology: str, tolerance: float
) -> None:
    steps, freeze_step = 9, 4
    options = {"algorithm": algorithm, "topology": topology}
    results = pool.run(train, world_size, steps, freeze_step, options)
    assert all(
        equal(a, b) for other in results[1:] for a, b in zip(results[0][0], other[0], strict=True)
    )
    partitions: dict[str, list[tuple[int, int, int, bool]]] = {name: [] for name in SIZES}
    for gradient, start, stop, owner, codec in results[0][2]:
        partitions[NAMES[gradient]].append((start, stop, owner, codec != "raw"))
    model = Quadratic()
    oracle = OneBitAdamOracle(
        {name: p.detach().double().numpy().ravel() for name, p in model.named_parameters()},
        world_size,
        partitions,
        lambda values: onebit(values.astype(np.float32)).astype(np.float64),
        topology=topology,
        freeze_step=freeze_step,
        lr=LR,
        betas=BETAS,
        eps=1e-8,
        weight_decay=WEIGHT_DECAY,
    )
    for step in range(steps):
        gradients = []
        for rank in range(world_size):
            for name, parameter in model.named_parameters():
                values = torch.from_numpy(oracle.parameters[name])
                parameter.data.copy_(values.view(parameter.shape))
            model.zero_grad()
            model(rank, step).backward()
            gradients.append(
                {n: p.grad.double().numpy().ravel() for n, p in model.named_parameters()}
            )
        oracle.step(gradients)
        snapshot = results[0][0][step]
        for name in SIZES:
            for ours, theirs in (
                (snapshot[name], oracle.parameters[name]),
                (snapshot[f"{name} exp_avg"], oracle.momentum[name]),
            ):
                np.testing.assert_allclose(ours.numpy(), theirs, rtol=tolerance, atol=tolerance)
    if algorithm == "onebit":
        assert {len(partitions[name]) for name in ("weight", "large")} <= {2, 3}
        assert all(compressed for *_, compressed in partitions["large"])


@pytest.mark.parametrize(
    ("algorithm", "topology"),
    [
        ("onebit", "ps"),
        ("tbq", "ring"),
        *(
            pytest.param(algorithm, topology, marks=pytest.mark.exhaustive)
            for algorithm, topology in (("onebit", "ring"), ("tbq", "ps"), ("int8", "ps"))
        ),
    ],
)
def test_no_momentum_is_lost(pool: RankPool, topology: str, algorithm: str) -> None:
    """N times all that was added to the common momentum, and what was not sent, is all that the
    ranks gave."""
    steps, freeze_step, world_size = 8, 3, 2
    options = {"algorithm": algorithm, "topology": topology}
    results = pool.run(train, world_size, steps, freeze_step, options)
    snapshots = results[0][0]
    model = Quadratic()
    for name in SIZES:
        added = torch.zeros(SIZES[name], dtype=torch.float64)
        given = torch.zeros_like(added)
        for step in range(freeze_step, steps):
            momentum, before = (snapshots[s][f"{name} exp_avg"].double() for s in (step, step - 1))
            added += world_size * (momentum - BETAS[0] * before)
            for n, parameter in model.named_parameters():
                parameter.data.copy_(snapshots[step - 1][n].view(parameter.shape))
            for rank in range(world_size):
                model.zero_grad()
                model(rank, step).backward()
                root = snapshots[step][f"{name} exp_avg_sq"].double().sqrt() + 1e-8
                gradient = model.get_parameter(name).grad.reshape(-1).double()
                given += (1 - BETAS[0]) * gradient / root
        unsent = torch.zeros_like(added)
        for _, residuals, _ in results:
            for (gradient, start, stop, _), residual in residuals[-1].items():
                if NAMES[gradient] == name:
                    unsent[start:stop] += residual.double()
        torch.testing.assert_close(added + unsent, given, rtol=0, atol=2e-5)
        assert (SIZES[name] > 4096) == bool(unsent.any())


def test_a_coordinator_changes_no_bit(pool: RankPool) -> None:
    runs = [
        pool.run(train, 2, 5, 2, {"algorithm": "tbq", "coordinator": coordinator})
        for coordinator in ("none", "always")
    ]
    for rank in range(2):
        for part in range(2):
            assert all(map(equal, runs[0][rank][part], runs[1][rank][part]))


def save(context: RankContext, run: Run) -> None:
    saved = [run.model.state_dict(), run.optimizer.state_dict(), run.sync.state_dict()]
    torch.save(saved, context.tmp / f"{context.rank}.pt")
    dist.barrier()


def load(context: RankContext, run: Run) -> None:
    files = [context.tmp / f"{rank}.pt" for rank in range(context.world_size)]
    saved = [torch.load(file, weights_only=True) for file in files]
    run.model.load_state_dict(saved[context.rank][0])
    run.optimizer.load_state_dict(saved[context.rank][1])
    run.sync.load_state_dicts([sync for _, _, sync in saved])


def resume(
    context: RankContext, saved_after: int, steps: int, freeze_step: Any, options: dict[str, Any]
) -> list[dict[Any, Tensor]]:
    """Return the ends of three runs: one as a whole, one from its middle, one that goes back."""
    context.init_process_group()
    first, second = Run(context, freeze_step, **options), Run(context, freeze_step, **options)
    for step in range(saved_after):
        first.step(step)
    save(context, first)
    load(context, second)
    # A checkpoint that is written before the next step has all that was loaded.
    dist.barrier()
    save(context, second)
    load(context, second)
    ends = []
    for run in (first, second, second):
        for step in range(saved_after, steps):
            run.step(step)
        ends.append({**run.snapshot(), **run.residuals()})
        load(context, second)
    for run in (first, second):
        run.sync.close()
    return ends


@pytest.mark.parametrize(
    ("saved_after", "freeze_step", "algorithm"),
    [(2, 4, "onebit"), (6, 4, "onebit"), (6, 4, "terngrad"), (14, "auto", "tbq")],
)
def test_training_resumes_bit_for_bit(
    pool: RankPool, saved_after: int, freeze_step: Any, algorithm: str
) -> None:
    options = {"algorithm": algorithm, "dtypes": {"weight": torch.bfloat16}}
    steps = saved_after + (24 if freeze_step == "auto" else 3)
    for first, second, third in pool.run(resume, 2, saved_after, steps, freeze_step, options):
        assert equal(first, second)
        assert equal(first, third)
        assert "large is_frozen" in first


def train_some(context: RankContext, case: str) -> list[dict[str, Tensor]]:
    """Return snapshots around steps in which some parameters have no gradient."""
    context.init_process_group()
    run = Run(context, 2, ddp={"find_unused_parameters": True})
    early = ("scalar", "weight", "large")
    for step in range(2):
        run.step(step, early)
    snapshots = [run.snapshot()]
    if case == "all ranks":
        run.step(2, ("large",))
    elif case == "one rank":
        run.step(2, ("large", "weight") if context.rank else ("large",))
    elif case == "first gradient":
        run.step(2)
        run.step(3)
    snapshots.append(run.snapshot())
    run.sync.close()
    return snapshots


def test_a_parameter_without_gradients_is_skipped(pool: RankPool) -> None:
    results = pool.run(train_some, 2, "all ranks")
    assert equal(results[0][1], results[1][1])
    before, after = results[0]
    for name in ("scalar", "weight"):
        for key in (name, f"{name} exp_avg", f"{name} step"):
            assert torch.equal(before[key], after[key])
    assert not torch.equal(before["large"], after["large"])


def test_a_gradient_on_one_rank_counts_as_zero_on_the_others(pool: RankPool) -> None:
    results = pool.run(train_some, 2, "one rank")
    assert equal(results[0][1], results[1][1])
    before, after = results[0]
    assert after["weight step"] == before["weight step"] + 1
    assert not torch.equal(before["weight exp_avg"], after["weight exp_avg"])


def test_a_late_parameter_is_trained_without_compression(pool: RankPool) -> None:
    results = pool.run(train_some, 2, "first gradient")
    assert equal(results[0][1], results[1][1])
    model = Quadratic()
    reference = torch.optim.AdamW([model.bias], LR, BETAS, weight_decay=0.0)
    for step in (2, 3):
        reference.zero_grad()
        (0.5 * (model(0, step, ("bias",)) + model(1, step, ("bias",)))).backward()
        reference.step()
    torch.testing.assert_close(results[0][1]["bias"], model.bias.detach())
    assert "bias is_frozen" not in results[0][1]


def train_with_a_pause(context: RankContext, closes: bool) -> list[dict[Any, Tensor]]:
    """Return the state after some steps, with the synchronisation closed and begun again or not."""
    context.init_process_group()
    run = Run(context, 2)
    for number in range(7):
        run.step(number)
        if closes and number == 4:
            saved = run.sync.state_dict()
            run.sync.close()
            run.sync.close()
            assert run.sync.state_dict().keys() == saved.keys() > {"units"}
    result = [run.snapshot(), run.residuals()]
    run.sync.close()
    return result


def test_steps_after_a_close_go_on_with_what_was_not_sent(pool: RankPool) -> None:
    for ours, theirs in zip(
        pool.run(train_with_a_pause, 2, True), pool.run(train_with_a_pause, 2, False), strict=True
    ):
        assert all(map(equal, ours, theirs))


def spoil(
    context: RankContext, bad: float, after_warm_up: bool, use_scaler: bool
) -> list[dict[Any, Tensor]]:
    """Return the state before and after a step with one bad element on rank 1, and later."""
    context.init_process_group()
    run = Run(context, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=use_scaler)

    def step(number: int, factor: float) -> dict[Any, Tensor]:
        run.optimizer.zero_grad()
        loss = run.ddp(context.rank, number) + factor * run.model.large[5]
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        return {**run.snapshot(), **run.residuals()}

    for number in range(5 if after_warm_up else 1):
        before = step(number, 0.0)
    history = copy.deepcopy(run.optimizer.state_dict()["variance_history"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        skipped = step(9, bad if context.rank == 1 else 0.0)
    has_warned = any("OneBitAdam has skipped a step" in str(one.message) for one in caught)
    assert has_warned != use_scaler
    assert run.optimizer.state_dict()["variance_history"] == history
    for number in range(10, 14):
        last = step(number, 0.0)
    run.sync.close()
    return [before, skipped, last]


@pytest.mark.parametrize(
    ("bad", "after_warm_up", "use_scaler"),
    [
        (math.nan, False, False),
        (math.inf, False, True),
        (math.nan, True, True),
        (-1e25, True, False),
        pytest.param(math.nan, True, False, marks=pytest.mark.exhaustive),
        pytest.param(math.inf, True, False, marks=pytest.mark.exhaustive),
        pytest.param(math.inf, True, True, marks=pytest.mark.exhaustive),
        pytest.param(-1e25, False, False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(
    pool: RankPool, bad: float, after_warm_up: bool, use_scaler: bool
) -> None:
    results = pool.run(spoil, 2, bad, after_warm_up, use_scaler)
    for before, skipped, last in results:
        assert equal(before, skipped)
        assert all(value.isfinite().all() for value in last.values())
        assert not torch.equal(skipped["large"], last["large"])
    common = results[0][2].keys() & {key for key in results[0][2] if isinstance(key, str)}
    assert all(torch.equal(results[0][2][key], results[1][2][key]) for key in common)


def train_with_scaler(context: RankContext, scale: float) -> dict[str, Tensor]:
    context.init_process_group()
    run = Run(context, 2)
    # Each rank may have a scale of its own.
    scaler = torch.amp.GradScaler("cpu", init_scale=scale * (1 + context.rank), enabled=scale > 0)
    for step in range(5):
        run.optimizer.zero_grad()
        loss = run.ddp(context.rank, step)
        if step < 2:
            # The scale is common as long as gradients are averaged.
            loss.backward()
            run.optimizer.step()
            continue
        scaler.scale(loss).backward()
        if step == 3:
            scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
    run.sync.close()
    return run.snapshot()


def test_a_loss_scale_changes_no_bit(pool: RankPool) -> None:
    scaled, plain = (pool.run(train_with_scaler, 2, scale) for scale in (1024.0, 0.0))
    assert all(map(equal, scaled, plain))


def train_auto(context: RankContext) -> tuple[int, dict[str, Tensor]]:
    context.init_process_group()
    run = Run(context, "auto")
    norms = []
    while not run.optimizer.is_frozen:
        run.step(len(norms))
        states = run.optimizer.state.values()
        norms.append(sum(float(state["exp_avg_sq"].double().sum()) for state in states))
    # The last norm is that of the frozen variance, which has another scale.
    stable = [s for s in range(10, len(norms) - 1) if abs(norms[s] / norms[s - 10] - 1) < 0.04]
    assert stable == []
    for step in range(len(norms), len(norms) + 3):
        run.step(step)
    run.sync.close()
    return len(norms), run.snapshot()


def test_all_ranks_freeze_the_variance_when_it_is_stable(pool: RankPool) -> None:
    (steps, snapshot), *others = pool.run(train_auto, 3)
    assert 10 < steps < 100
    assert all(other[0] == steps and equal(other[1], snapshot) for other in others)


def train_with_dead_elements(context: RankContext) -> tuple[Tensor, Tensor]:
    context.init_process_group()
    run = Run(context, 3)
    mask = torch.ones(SIZES["large"])
    mask[100:200] = 0.0
    run.model.large.register_hook(lambda gradient: gradient * mask)
    before = run.model.large.detach().clone()
    for step in range(8):
        run.step(step)
    run.sync.close()
    decay = (1 - LR * 0.1) ** 8
    return before[100:200] * decay, run.model.large.detach()[100:200]


def test_elements_that_never_had_a_gradient_stay(pool: RankPool) -> None:
    for expected, values in pool.run(train_with_dead_elements, 2):
        torch.testing.assert_close(values, expected)


def lose_a_rank(context: RankContext) -> str:
    context.init_process_group()
    run = Run(context, 1)
    run.sync._timeout = 1.0
    for step in range(4):
        if step == 2 and context.rank == 1:
            return ""
        try:
            run.step(step)
        except Exception as error:
            run.sync.close()
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_lost_rank_is_an_error(pool: RankPool) -> None:
    message = pool.run(lose_a_rank, 2)[0]
    assert message.startswith("Peer")
    assert "rank 1" in message


def train_without_hook(context: RankContext) -> list[str]:
    context.init_process_group()
    model = Quadratic()
    ddp = DistributedDataParallel(model)
    optimizer = OneBitAdam(model.parameters(), freeze_step=1)
    ddp(context.rank, 0).backward()
    with pytest.warns(UserWarning, match="its hook has not run") as warned:
        optimizer.step()
    return [str(warning.message) for warning in warned]


def test_a_forgotten_hook_is_named(pool: RankPool) -> None:
    assert all(len(messages) == 1 for messages in pool.run(train_without_hook, 2))


def train_before(context: RankContext) -> list[Any]:
    """Return the state of a run, the residuals, and what is needed to check the next step."""
    context.init_process_group()
    run = Run(context, 1)
    for step in range(4):
        run.step(step)
    saved = [run.model.state_dict(), run.optimizer.state_dict(), run.sync.state_dict()]
    result = copy.deepcopy([*saved, run.snapshot(), run.residuals()])
    run.sync.close()
    return result


def train_after(context: RankContext, before: list[Any]) -> tuple[Any, ...]:
    context.init_process_group()
    run = Run(context, 1)
    run.model.load_state_dict(before[0][0])
    run.optimizer.load_state_dict(before[0][1])
    run.sync.load_state_dicts([one[2] for one in before])
    run.optimizer.zero_grad()
    run.ddp(context.rank, 4).backward()
    gradient = run.model.large.grad.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.optimizer.step()
    result = run.snapshot(), gradient, run.residuals(), [str(w.message) for w in caught]
    run.sync.close()
    return result


def save_at_once(context: RankContext, before: list[Any]) -> list[Any]:
    """Return the state of a run that is saved before its first step."""
    context.init_process_group()
    sync = MomentumSync()
    sync.load_state_dicts([one[2] for one in before])
    return [*before[0][:2], copy.deepcopy(sync.state_dict())]


@pytest.mark.parametrize(("world_size", "is_saved_at_once"), [(1, False), (2, False), (2, True)])
def test_no_momentum_is_lost_when_the_number_of_ranks_changes(
    pool: RankPool, world_size: int, is_saved_at_once: bool
) -> None:
    """The momentum and what was not sent of it, in units of the mean, stay the same."""
    before = pool.run(train_before, 3)
    saved = pool.run(save_at_once, 2, before) if is_saved_at_once else before
    after = pool.run(train_after, world_size, saved)
    expected = BETAS[0] * before[0][3]["large exp_avg"].double()
    root = before[0][3]["large exp_avg_sq"].double().sqrt() + 1e-8
    expected += sum((1 - BETAS[0]) * g.double() / root / world_size for _, g, _, _ in after)
    result = after[0][0]["large exp_avg"].double()
    for total, residuals, size in (
        (expected, [r for *_, r in before], 3),
        (result, [r for _, _, r, _ in after], world_size),
    ):
        for one in residuals:
            for (gradient, start, stop, _), residual in one.items():
                if NAMES[gradient] == "large":
                    total[start:stop] += residual.double() / size
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    for _, _, _, messages in after:
        assert bool(messages) == (world_size > 1)


def test_a_single_rank_keeps_what_was_not_sent_until_it_has_the_gradient(pool: RankPool) -> None:
    saved = [one[2] for one in pool.run(train_before, 2)]
    unsent = {}
    for name in ("parameter 2", "parameter 3"):
        everything = MomentumSync()
        everything.load_state_dicts(saved)
        unsent[name] = torch.zeros(SIZES[NAMES[name]])
        everything.average({name: unsent[name]})
        assert unsent[name].any()
    sync = MomentumSync()
    sync.load_state_dicts(saved)
    first, second, late = (torch.zeros(SIZES[NAMES["parameter 2"]]) for _ in range(3))
    sync.average({"parameter 2": first})
    sync.average({"parameter 2": second})
    assert torch.equal(first, unsent["parameter 2"])
    assert not second.any()
    # A checkpoint that is saved now has the rest, and no more.
    resumed = MomentumSync()
    resumed.load_state_dicts([copy.deepcopy(sync.state_dict())])
    last = torch.zeros(SIZES[NAMES["parameter 3"]])
    resumed.average({"parameter 2": late, "parameter 3": last})
    assert not late.any()
    assert torch.equal(last, unsent["parameter 3"])
    resumed.average({"parameter 3": last.zero_()})
    assert not last.any()
    assert "loaded" not in resumed.state_dict()


def test_adamw_does_not_go_on_from_a_state_after_the_warm_up(pool: RankPool) -> None:
    model = Quadratic()
    adamw = torch.optim.AdamW(model.groups(), LR, BETAS)
    adamw.load_state_dict(pool.run(train_before, 2)[0][1])
    model(0, 4).backward()
    with pytest.raises(KeyError, match="exp_avg"):
        adamw.step()


def test_a_second_optimizer_cannot_use_the_synchronisation_of_another() -> None:
    models = Quadratic(), Quadratic()
    first, second = (OneBitAdam(model.groups(), LR, BETAS) for model in models)
    second.sync = first.sync
    models[1](0, 0).backward()
    second.step()
    first.sync.take_over([("parameter 0", models[0].bias)], first)
    with pytest.raises(ConfigError, match="sync must be used by one OneBitAdam"):
        second.step()
    models[0](0, 0).backward()
    first.step()
    first.sync.release()
    second.step()


def test_the_state_of_adamw_continues_in_the_warm_up() -> None:
    model = Quadratic()
    adamw = torch.optim.AdamW(model.groups(), LR, BETAS)
    ours = OneBitAdam(model.groups(), LR, BETAS)
    for step in range(3):
        model(0, step).backward()
        adamw.step()
    ours.load_state_dict(adamw.state_dict())
    assert not ours.is_frozen
    assert ours.state_dict()["variance_history"] == {"steps": 3, "norms": []}
    assert torch.equal(ours.state[model.large]["exp_avg"], adamw.state[model.large]["exp_avg"])


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = OneBitAdam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="gradients must be dense"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number of at least 0"),
        ({"eps": math.nan}, "eps must be a finite number"),
        ({"weight_decay": "0"}, "weight_decay must be a finite number"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers .*, got \(0.9, 1.0\)"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"freeze_step": 0}, "freeze_step must be a whole number of at least 1, got 0"),
        ({"freeze_step": "never"}, "freeze_step must be a whole number"),
        ({"sync": "ps"}, "sync must be a MomentumSync or None, got 'ps'"),
        ({"params": [torch.zeros(2, dtype=torch.complex64)]}, "params must be tensors of a float"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OneBitAdam(**{"params": [torch.zeros(2)], **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "zip"}, r"algorithm must be one of \['raw', .*'onebit'.*\], got 'zip'"),
        ({"algorithm": "raw", "codec_options": {"bits": 2}}, "codec_options must be None"),
        ({"topology": "star"}, "topology must be one of"),
        ({"coordinator": "replay"}, "coordinator must be one of"),
        ({"timeout": 0.0}, "timeout must be a time above 0"),
        ({"min_bytes": -1}, "min_bytes must be"),
        ({"check": 3}, "check must be a function"),
    ],
)
def test_bad_options_of_the_synchronisation_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MomentumSync(**options)


def test_no_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="states must be the states of all ranks"):
        MomentumSync().load_state_dicts([])


def train_after_an_overflow(
    context: RankContext, uses_scalar: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the scales of all steps, and the state after a late parameter was trained.

    Without a use of "scalar", the parameter of the last bucket, that bucket has no effect.
    """
    context.init_process_group()
    run = Run(context, 2, ddp={"find_unused_parameters": True})
    run.sync.attach(lambda: None, Tracer(), timeout=20.0, shares_overflows=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scales = []
    for step in range(8):
        run.optimizer.zero_grad()
        names = ("weight", "large", *(("bias",) if step >= 6 else ()))
        names += ("scalar",) if uses_scalar else ()
        loss = run.ddp(context.rank, step, names)
        factor = math.inf if step == 4 and context.rank == 1 else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(run.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    run.sync.close()
    return scales, run.snapshot()


@pytest.mark.parametrize("uses_scalar", [True, False])
def test_an_overflow_on_one_rank_changes_the_scale_on_all(
    pool: RankPool, uses_scalar: bool
) -> None:
    """With scales of their own, ranks would average late gradients in different units."""
    results = pool.run(train_after_an_overflow, 2, uses_scalar)
    assert results[0][0] == results[1][0] == [8.0] * 4 + [4.0] * 4
    assert equal(results[0][1], results[1][1])


def train_in_another_order(context: RankContext, is_shuffled: bool) -> str:
    """Return the error of a run whose ranks list two parameters of one shape in another order."""
    context.init_process_group()
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    # A mask, whose gradient is never used.
    model.register_parameter("mask", nn.Parameter(torch.tensor([0.0, -math.inf])))
    parameters = [*list(model.parameters())[1:], model.get_parameter("mask")]
    if is_shuffled and context.rank:
        parameters = parameters[2:4] + parameters[:2] + parameters[4:]
    optimizer = OneBitAdam(parameters, freeze_step=2, sync=MomentumSync(timeout=20.0))
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.register_comm_hook(optimizer.sync, momentum_hook)
    try:
        for _ in range(4):
            wrapped(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
    except ConfigError as error:
        return str(error)
    optimizer.sync.close()
    return ""


def test_another_order_of_parameters_is_an_error(pool: RankPool) -> None:
    message = (
        "params must be the same on all ranks, got others, or another order, on rank 1 than on "
        "rank 0. Make the groups from lists, not from sets."
    )
    assert pool.run(train_in_another_order, 2, True) == [message] * 2
    assert pool.run(train_in_another_order, 2, False) == ["", ""]


def refusal_of_options(context: RankContext, case: str) -> str:
    context.init_process_group()
    model = nn.Linear(6, 6)
    topology = ("ps", "ring")[context.rank] if case == "sync" else "ps"
    freeze_step = 4 + context.rank if case == "optimizer" else 4
    sync = MomentumSync(timeout=20.0, topology=topology)
    optimizer = OneBitAdam(model.parameters(), freeze_step=freeze_step, sync=sync)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(sync, momentum_hook)
    loss = wrapped(torch.ones(2, 6)).square().mean()
    with pytest.raises(ConfigError) as error:
        loss.backward()
    assert not optimizer.state
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("sync", "topology must be the same on all ranks, got 'ps' on rank 0 and 'ring' on rank 1"),
        ("optimizer", "freeze_step must be the same on all ranks, got 4 on rank 0 and 5 on rank 1"),
    ],
)
def test_options_that_differ_between_ranks_are_named(
    pool: RankPool, case: str, message: str
) -> None:
    assert all(text.startswith(message) for text in pool.run(refusal_of_options, 2, case))


def test_a_strategy_gives_its_timeout_unless_another_is_set() -> None:
    chosen, own = MomentumSync(), MomentumSync(timeout=7)
    for sync in (chosen, own):
        sync.attach(lambda: None, Tracer(), timeout=30.0, shares_overflows=False)
    assert (chosen._timeout, own._timeout) == (30.0, 7.0)
