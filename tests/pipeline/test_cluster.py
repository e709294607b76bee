"""Powers are what a reader would compute by hand, and measuring leaves no trace."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dlres.pipeline.cluster import measure_layers, powers_of

CPU = torch.device("cpu")


def test_a_rank_of_half_the_speed() -> None:
    assert powers_of([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]) == [1.0, 0.5]
    assert powers_of([[4.0, 8.0], [1.0, 2.0], [2.0, 4.0]]) == [0.25, 1.0, 0.5]
    assert powers_of([[0.5, 0.25]]) == [1.0]


def test_one_disturbed_layer_changes_no_power() -> None:
    assert powers_of([[1.0, 1.0, 1.0], [2.0, 50.0, 2.0]]) == [1.0, 0.5]
    assert powers_of([[1.0, 1.0, 90.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]) == [1.0, 0.5, 1.0]


def test_layers_that_take_no_measurable_time_do_not_count() -> None:
    assert powers_of([[0.0, 1.0, 1.0], [0.0, 2.0, 2.0]]) == [1.0, 0.5]
    assert powers_of([[0.0, 0.0], [0.0, 0.0]]) == [1.0, 1.0]


@given(
    st.lists(st.floats(1e-5, 10.0), min_size=1, max_size=6),
    st.lists(st.sampled_from([1.0, 2.0, 4.0, 8.0]), min_size=1, max_size=4),
)
def test_powers_are_the_inverse_of_slowdowns(layers: list[float], slowdowns: list[float]) -> None:
    fastest = min(slowdowns)
    found = powers_of([[seconds * s for seconds in layers] for s in slowdowns])
    assert found == pytest.approx([fastest / s for s in slowdowns])
    assert max(found) == 1.0


# --- Measuring.


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


def measure(modules: Any, inputs: Any, **options: Any) -> list[float]:
    return measure_layers(
        list(modules), lambda index, module: module, inputs, CPU, nullcontext, **options
    )


@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_no_trace(training: bool) -> None:
    model, x = network().train(training), torch.randn(3, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator, seen = torch.get_rng_state(), x.clone()
    seconds = measure(model, x)
    assert len(seconds) == 6
    assert all(s > 0 for s in seconds)
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(x, seen)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training == training for module in model)


def test_a_slower_device_is_emulated() -> None:
    times = iter(range(100))
    slow = pytest.MonkeyPatch()
    with slow.context() as patch:
        # Each run of a layer takes one tick.
        patch.setattr("time.perf_counter", lambda: float(next(times)))
        assert measure(network()[:2], torch.ones(2, 4), slowdown=3.0, repeats=2) == [3.0, 3.0]


def test_the_fastest_of_the_runs_after_the_first_counts() -> None:
    stamps = iter([0.0, 0.1, 1.0, 6.0, 10.0, 12.0])
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("time.perf_counter", lambda: next(stamps))
        assert measure([nn.Linear(2, 2)], torch.ones(1, 2), repeats=2) == [2.0]


def test_layers_without_storage_are_measured_with_values_of_their_own() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    assert len(measure(model, torch.randn(3, 4))) == 3
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_tokens_trees_and_layers_without_a_gradient() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.mul_(2), x > 0

    class Pick(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return torch.where(pair[1], pair[0], 0.0).detach()

    modules = [nn.Embedding(5, 3), Pair(), Pick(), nn.Linear(3, 2)]
    assert len(measure(modules, torch.tensor([1, 4]))) == 4


def test_each_layer_is_bound_by_its_index() -> None:
    modules = [nn.Linear(2, 2) for _ in range(3)]
    bound: list[tuple[int, bool]] = []

    def bind(index: int, module: nn.Module) -> Any:
        bound.append((index, module is modules[index]))
        return module

    measure_layers(modules, bind, torch.ones(1, 2), CPU, nullcontext)
    assert bound == [(0, False), (1, False), (2, False)], "copies, never the module itself"


def test_measuring_without_storage_leaves_the_generator_alone() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    generator = torch.get_rng_state()
    measure(model, torch.ones(1, 4))
    assert torch.equal(torch.get_rng_state(), generator)


def test_numpy_numbers_beside_the_activations() -> None:
    class Scaled(nn.Linear):
        def forward(self, inputs: tuple[Tensor, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(inputs[0]) * inputs[1]

    measure([Scaled(4, 4)], (torch.ones(1, 4), 1 / np.sqrt(4)))


def test_numpy_arrays_beside_the_activations() -> None:
    class Shifted(nn.Linear):
        def forward(self, inputs: tuple[Tensor, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(inputs[0]) + torch.from_numpy(inputs[1])

    measure([Shifted(4, 4)], (torch.ones(1, 4), np.ones(4, dtype=np.float32)))
