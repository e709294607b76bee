"""Layers are measured as they run in training, and the measurement changes nothing."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks, set_share
from benchmarks.support.testbed import Host, Testbed, reason_unavailable
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.profile import layer_times
from lightning_dlres.pipeline.profile.layer_times import LayerMeasurement, measure_layers
from tests.support import throttled_process as throttled

CPU = torch.device("cpu")


class Wraps(nn.Linear):
    """A linear layer that returns a list."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Any:
        return [super().forward(x)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(0.5),
        nn.Linear(4, 4).requires_grad_(False),
        nn.Sigmoid(),
    )


def measure(modules: Any, inputs: Any, **options: Any) -> list[LayerMeasurement]:
    measurements, _, _ = measure_layers(
        list(modules), lambda index, module: module, inputs, CPU, nullcontext, **options
    )
    return measurements


@pytest.mark.parametrize("training", [True, False])
def test_a_measurement_changes_nothing(training: bool) -> None:
    model, x = network().train(training), torch.randn(3, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state, original_x = torch.get_rng_state(), x.clone()
    measurements = measure(model, x)
    assert len(measurements) == 6
    assert all(layer.forward > 0 for layer in measurements)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(x, original_x)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training == training for module in model)


def test_a_slower_device_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    # One second passes between two readings of the clock.
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    (layer,) = measure([nn.Linear(2, 2)], torch.ones(2, 2), slowdown=3.0, repeats=2)
    assert (layer.forward, layer.backward) == (3.0, 3.0)


def test_a_throttled_processor_shows_its_sustained_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    # The process gets a fifth of a processor: one second of its time takes five of wall time.
    monkeypatch.setattr("time.perf_counter", lambda: 5.0 * next(ticks))
    monkeypatch.setattr("time.process_time", lambda: float(next(ticks)))
    (layer,) = measure([nn.Linear(2, 2)], torch.ones(2, 2), repeats=3)
    assert (layer.forward, layer.backward) == (5.0, 5.0), "wall time"


def test_sizes_are_those_of_one_microbatch() -> None:
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)]
    first, relu, last = (layer.sizes for layer in measure(layers, torch.randn(16, 4)))
    assert (first.input_bytes, first.output_bytes) == (16 * 4 * 4, 16 * 8 * 4)
    assert first.saved_bytes == relu.saved_bytes == 0, "inputs and outputs are not in saved_bytes"
    assert last.gradient_output_bytes == last.output_bytes == 16 * 2 * 4
    # Backward of the last layer: gradients of its output, input, weight and bias.
    assert last.workspace_bytes >= (16 * 2 + 16 * 8 + 16 + 2) * 4

    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x)

    (gated,) = measure([Gated()], torch.randn(16, 4).requires_grad_())
    assert gated.sizes.saved_bytes == 16 * 4 * 4, "what sigmoid returned"
    (tokens,) = measure([nn.Embedding(5, 3)], torch.tensor([1, 4]))
    assert (tokens.sizes.input_bytes, tokens.sizes.gradient_output_bytes) == (16, 24)


def test_equal_layers_are_measured_once() -> None:
    runs = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(x.shape)
            return super().forward(x)

    measurements = measure(
        [Counted(4, 4, bias=i == 3) for i in range(4)], torch.randn(2, 4), repeats=2
    )
    # The first layer has an input without gradient, the next two are equal, the last has a bias.
    # Each runs once for its sizes, once to warm up and twice to be timed. The two equal layers are
    # measured on two copies: chained in one run (a warm-up round and two timed rounds), then each
    # on its own (a warm-up round and one timed round).
    assert len(runs) == 2 * (1 + 1 + 2) + (1 + 2 * (1 + 2) + 2 * (1 + 1))
    assert measurements[1] == measurements[2]


def test_equal_layers_in_a_row_are_also_timed_as_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    original = layer_times._Runner.__init__

    def recording_init(self: Any, call: Any, copies: Any = None) -> None:
        runs.append(len(copies or [0]))
        original(self, call, copies)

    monkeypatch.setattr(layer_times._Runner, "__init__", recording_init)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    measurements = measure([nn.Linear(2, 4), *blocks, nn.Linear(4, 1)], torch.ones(2, 2), repeats=2)
    assert runs.count(3) == 1
    assert [layer.run_overhead_seconds is not None for layer in measurements] == [
        False,
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("kind", ["another shape", "another structure", "indices"])
def test_a_layer_that_does_not_accept_its_own_output_is_timed_alone(kind: str) -> None:
    modules: dict[str, tuple[nn.Module, Any]] = {
        "another shape": (nn.Linear(4, 2), torch.ones(2, 4)),
        "another structure": (Wraps(), torch.ones(2, 4)),
        "indices": (nn.Identity(), torch.arange(4)),
    }
    module, inputs = modules[kind]
    call = layer_times.LayerCall(module, lambda _, m: m, 0, inputs, CPU, nullcontext)
    timed = layer_times._measure_sizes(call, None)
    layer_times._measure_times(timed, 2, layer_times.ComputeClock(CPU), 1, 0.0)
    assert timed.run_overhead_seconds is None
    assert timed.forward > 0


class Member:
    """Layer that returns more than its module's output, unless it is the last one."""

    def __init__(self, module: nn.Module, is_last: bool) -> None:
        self.module, self.role = module, "last" if is_last else ""

    def __call__(self, x: Any) -> Any:
        output = self.module(x if isinstance(x, Tensor) else x[0])
        return output if self.role else (output, "more")


def test_the_last_of_equal_layers_may_return_less() -> None:
    chain = [nn.Linear(4, 4) for _ in range(4)]
    inputs = torch.randn(2, 4).requires_grad_(), "more"
    _, output, _ = measure_layers(
        chain, lambda index, module: Member(module, index == 3), inputs, CPU, nullcontext, repeats=1
    )
    assert isinstance(output, Tensor)


def test_large_layers_have_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = layer_times.initialised_copy
    monkeypatch.setattr(
        layer_times,
        "initialised_copy",
        lambda module, device: made.append(0) or original(module, device),
    )
    chain = [nn.Linear(64, 64) for _ in range(6)]
    measure(chain, torch.randn(2, 64).requires_grad_(), repeats=1)
    assert len(made) == 1 + 6, "one for its sizes, and as many as there are layers"
    made.clear()
    monkeypatch.setattr(layer_times, "FLUSH_BYTES", 100_000)
    measure(chain, torch.randn(2, 64).requires_grad_(), repeats=1)
    # Weights, their gradients, input and output take about 34 KB.
    assert len(made) == 1 + 2


def test_layers_on_meta_are_measured_with_initial_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    assert len(measure(model, torch.randn(3, 4))) == 3
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_tokens_trees_and_layers_without_a_gradient_are_measured() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.mul_(2), x > 0

    class Pick(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return torch.where(pair[1], pair[0], 0.0).detach()

    modules = [nn.Embedding(5, 3), Pair(), Pick(), nn.Linear(3, 2)]
    assert len(measure(modules, torch.tensor([1, 4]))) == 4


def test_a_frozen_batch_norm_is_measured_in_its_own_mode() -> None:
    # In training mode it refuses a single sample.
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4).eval()]
    assert len(measure(layers, torch.randn(1, 4))) == 2
    with pytest.raises(UnsupportedStepError, match=r"one sample .*use larger batches .*eval mode"):
        measure([nn.Linear(4, 4), nn.BatchNorm1d(4)], torch.randn(1, 4))


def test_each_layer_is_bound_by_its_index() -> None:
    modules = [nn.Linear(2, 2, bias=i == 1) for i in range(3)]
    ran: list[tuple[int, bool]] = []

    def bind(index: int, module: nn.Module) -> Any:
        def run(x: Tensor) -> Any:
            ran.append((index, module is modules[index]))
            return module(x)

        return run

    measure_layers(modules, bind, torch.ones(1, 2), CPU, nullcontext)
    assert set(ran) == {(0, False), (1, False), (2, False)}, "copies, never the module itself"


def test_measuring_layers_on_meta_keeps_the_random_state() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    generator = torch.get_rng_state()
    measure(model, torch.ones(1, 4))
    assert torch.equal(torch.get_rng_state(), generator)


def test_inputs_may_hold_numpy_numbers() -> None:
    class Scaled(nn.Linear):
        def forward(self, inputs: tuple[Tensor, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(inputs[0]) * inputs[1]

    measure([Scaled(4, 4)], (torch.ones(1, 4), 1 / np.sqrt(4)))


def test_inputs_may_hold_numpy_arrays() -> None:
    class Shifted(nn.Linear):
        def forward(self, inputs: tuple[Tensor, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(inputs[0]) + torch.from_numpy(inputs[1])

    measure([Shifted(4, 4)], (torch.ones(1, 4), np.ones(4, dtype=np.float32)))


@pytest.mark.root
def test_the_wall_time_ratio_includes_pauses_of_a_throttled_process() -> None:
    if reason := reason_unavailable():
        pytest.skip(reason)
    with Testbed([Host()]) as bed:
        hosts = RankStarter(bed, [throttled.__name__])
        ranks = Ranks(hosts, throttled.__name__, world_size=1, timeout=120.0)
        set_share(bed.hosts[0], 0.2)
        (answer,) = ranks.ask({})
    # A fifth of a processor: five seconds of wall time per CPU second, more on a busy machine.
    assert answer["wall_per_cpu_second"] > 4.0


class PerSampleGradient(nn.Linear):
    """Layer that torch refuses to run where saved tensors are recorded."""

    def forward(self, x: Tensor) -> Tensor:
        gradients: Tensor = torch.vmap(torch.func.grad(lambda row: row.tanh().sum()))(x)
        return super().forward(x) * gradients


def test_a_layer_that_cannot_be_recorded_is_measured() -> None:
    (layer,) = measure([PerSampleGradient(64, 64)], torch.randn(8, 64))
    # At least the gradients, of 8 x 64 numbers, are saved.
    assert layer.sizes.saved_bytes >= 8 * 64 * 4
    assert layer.sizes.output_bytes == 8 * 64 * 4
