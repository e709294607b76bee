"""Sizes of a layer that are computed without a run equal the sizes that a run measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.core.wire.tree import tensors_of
from lightning_dlres.pipeline.profile.layer_times import LayerMeasurement, measure_layers

CPU = torch.device("cpu")


class Residual(nn.Module):
    """A layer that saves several tensors of the size of its input; some operations are in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.relu(self.linear(self.norm(x))))
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x)[0], x.transpose(0, 1)


class Tied(nn.Module):
    """A layer that uses one weight twice, and another not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.ones(32, 32)), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x @ self.weight) @ self.weight.T


class Masked(nn.Module):
    """A layer with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(32, 32), torch.ones(32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.mask
        return out


class Fails(nn.Linear):
    """A layer that raises an error unless its input is a tensor without values."""

    def __init__(self, error: Exception) -> None:
        super().__init__(4, 8)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            raise self.error
        return super().forward(x)


class ReadsValues(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.detach().sum())


class Counts(nn.Linear):
    """A layer that counts the runs of all its copies."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Counts.runs += 1
        return super().forward(x)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(32, 64), lambda: torch.randn(4, 7, 32, requires_grad=True)),
    "frozen": (
        lambda: nn.Linear(32, 64).requires_grad_(False),
        lambda: torch.randn(4, 32, requires_grad=True),
    ),
    "residual": (Residual, lambda: torch.randn(4, 7, 32, requires_grad=True)),
    "first": (Residual, lambda: torch.randn(4, 7, 32)),
    "in place": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(32, 8)),
        lambda: torch.randn(4, 32, requires_grad=True),
    ),
    "embedding": (lambda: nn.Embedding(100, 32), lambda: torch.randint(100, (4, 7))),
    "attention": (Attention, lambda: torch.randn(4, 7, 32, requires_grad=True)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)),
        lambda: torch.randn(4, 3, 16, 16, requires_grad=True),
    ),
    "tied": (Tied, lambda: torch.randn(4, 32, requires_grad=True)),
    "mask": (Masked, lambda: torch.randn(4, 32, requires_grad=True)),
    "no weights": (nn.GELU, lambda: torch.randn(4, 32, requires_grad=True)),
}


def measure(modules: Any, inputs: Any, limit: int | None) -> tuple[list[LayerMeasurement], Any]:
    """Return the measurements within a memory limit in bytes, and the output of the last layer."""
    measurements, output, load = measure_layers(
        modules, lambda _, m: m, inputs, CPU, nullcontext, repeats=1, limit=limit
    )
    load()
    return measurements, output


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_without_a_run_equal_those_of_a_run(name: str) -> None:
    make, inputs = LAYERS[name]
    (measured,), output = measure([make()], inputs(), None)
    (computed,), zeros = measure([make()], inputs(), 0)
    assert math.isnan(computed.forward)
    assert math.isnan(computed.backward)
    assert computed.sizes == measured.sizes
    for zero, value in zip(tensors_of(zeros), tensors_of(output), strict=True):
        assert (zero.shape, zero.dtype, zero.requires_grad) == (
            value.shape,
            value.dtype,
            value.requires_grad,
        )


def test_sizes_are_right_under_mixed_precision() -> None:
    def measured(limit: int | None) -> list[LayerMeasurement]:
        x = torch.randn(4, 7, 32, requires_grad=True)
        return measure_layers(
            [Residual()],
            lambda _, m: m,
            x,
            CPU,
            lambda: torch.autocast("cpu", torch.bfloat16),
            repeats=1,
            limit=limit,
        )[0]

    assert measured(0)[0].sizes == measured(None)[0].sizes


def test_a_huge_layer_on_meta_has_sizes() -> None:
    with torch.device("meta"):
        layer = nn.Linear(1 << 20, 1 << 20)
    x = torch.randn(1, 1 << 20)
    (measurement,), output = measure([layer], x, 1 << 30)
    # Four tebibytes of gradient.
    assert measurement.sizes.workspace_bytes >= 1 << 42
    assert measurement.sizes.output_bytes == x.numel() * 4
    assert output.shape == x.shape


def test_only_layers_that_fit_are_run() -> None:
    Counts.runs = 0
    layers = [nn.Linear(16, 16), Counts(16, 1000), nn.Linear(1000, 2)]
    measurements, _ = measure(layers, torch.randn(4, 16), limit=100_000)
    assert [math.isnan(layer.forward) for layer in measurements] == [False, True, False]
    # One run, without values.
    assert Counts.runs == 1
    assert measure(layers, torch.randn(4, 16), limit=1_000_000)[0][1].sizes == measurements[1].sizes


def test_the_memory_of_backward_counts() -> None:
    # 8000 bytes each: the input, the output, the output's gradient and, in the second layer only,
    # the input's gradient.
    measurements, _ = measure([nn.Linear(2, 2), nn.GELU()], torch.randn(1000, 2), limit=30_000)
    assert [math.isnan(layer.forward) for layer in measurements] == [False, True]


def test_a_layer_that_reads_values_is_run() -> None:
    measurements, _ = measure([ReadsValues(4, 400)], torch.randn(2, 4), limit=1000)
    assert measurements[0].forward > 0


def test_an_out_of_memory_error_of_a_run_marks_the_layer() -> None:
    measurements, _ = measure(
        [Fails(torch.OutOfMemoryError("full")), nn.ReLU()], torch.ones(2, 4), None
    )
    assert [math.isnan(layer.forward) for layer in measurements] == [True, False]
    assert measurements[0].sizes.output_bytes == 2 * 8 * 4


@pytest.mark.parametrize("error", [NotImplementedError("no"), RuntimeError("no"), MemoryError()])
def test_another_error_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        measure([Fails(error)], torch.ones(2, 4), None)
