"""Recomputation gives the same gradients to the bit, and leaves the same buffers and random
state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.core.wire.tree import Tree, tensors_of
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer
from lightning_dlres.pipeline.stage.stage import Stage

CPU = torch.device("cpu")


class PowerIteration(nn.Module):
    """A layer whose output depends on a buffer that every forward replaces or changes."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("u", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            new = nn.functional.normalize(self.weight @ self.u, dim=0)
            if self.replaces:
                self.u = new
            else:
                self.u.copy_(new)
        return x @ self.weight / (self.u.clone() @ self.weight @ self.u.clone())


class Pair(nn.Module):
    """A layer that returns nested containers, with a mask and a detached tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * 2, {"mask": x > 0, "kept": x.detach()}


class Unpair(nn.Module):
    """A layer that takes the output of `Pair`."""

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return torch.where(pair[1]["mask"], pair[0], pair[1]["kept"])


NETWORKS: dict[str, Callable[[], list[nn.Module]]] = {
    "dropout": lambda: [nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)],
    "batch norm": lambda: [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 6)],
    "in place": lambda: [nn.Linear(6, 6), nn.Dropout(0.3, inplace=True), nn.ReLU(inplace=True)],
    "in place first": lambda: [nn.ReLU(inplace=True), nn.Linear(6, 6)],
    "buffer changed": lambda: [PowerIteration(False), nn.Tanh(), nn.Linear(6, 6)],
    "buffer replaced": lambda: [nn.Linear(6, 6), PowerIteration(True), nn.Tanh()],
    "trees": lambda: [nn.Linear(6, 6), Pair(), Unpair(), nn.Linear(6, 6)],
    "block": lambda: [nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 6))],
    "frozen": lambda: [nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)],
}
# Forwards (m) and backwards (~m) of four micro-batches, interleaved as 1F1B does.
ORDER = (0, 1, 2, ~0, 3, ~1, ~2, ~3)


def run(make: Callable[[], list[nn.Module]], recomputed: Sequence[int], when: str) -> Any:
    """Return outputs, gradients, buffers and random state after four micro-batches.

    Args:
        make: Makes the layers.
        recomputed: Positions of the recomputed layers.
        when: "before" calls `recompute` before each backward; "late" leaves it to `backward`.
    """
    torch.manual_seed(0)
    layers = make()
    stage = Stage(
        layers,
        [[p for p in layer.parameters() if p.requires_grad] for layer in layers],
        first_layer=3,
        device=CPU,
        context=nullcontext,
        recomputed={position: layers[position] for position in recomputed},
    )
    buffer, outputs, input_gradients = GradientBuffer(), list[Tree](), list[Tensor | None]()
    inputs = [torch.randn(5, 6).requires_grad_(m % 2 == 0) for m in range(4)]
    for action in ORDER:
        if action >= 0:
            x = inputs[action].detach().clone().requires_grad_(inputs[action].requires_grad)
            outputs.append(stage.forward(action, x, seed=7))
        else:
            m = ~action
            if when == "before":
                stage.recompute(m)
            ones = [torch.ones_like(t) if t.requires_grad else None for t in tensors_of(outputs[m])]
            input_gradients += stage.backward(m, ones, buffer)
    assert stage.in_flight == 0
    named = {n: p for i, layer in enumerate(layers) for n, p in layer.named_parameters(f"{i}")}
    state = {n: b for i, layer in enumerate(layers) for n, b in layer.named_buffers(f"{i}")}
    return (
        [t.detach() for tree in outputs for t in tensors_of(tree)],
        input_gradients,
        [buffer.gradients.get(p) for p in named.values()],
        [state[name] for name in sorted(state)],
        torch.get_rng_state(),
    )


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif a is None:
        assert b is None
    else:
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)


@pytest.mark.parametrize("when", ["before", "late"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_recomputation_is_exact_to_the_bit(kind: str, when: str) -> None:
    count = len(NETWORKS[kind]())
    plain = run(NETWORKS[kind], [], "late")
    for recomputed in (range(count), [0], [count - 1], range(0, count, 2)):
        assert_same(plain, run(NETWORKS[kind], list(recomputed), when))


def test_a_recomputed_layer_keeps_its_inputs_only() -> None:
    saved: list[int] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t):
                return torch.sigmoid(super().forward(x))

        @staticmethod
        def pack(tensor: Tensor) -> Any:
            copy = tensor.detach().clone()
            saved.append(id(copy))
            weakref.finalize(copy, saved.remove, id(copy))
            return copy

    layer = Watched(4, 4)
    stage = Stage(
        [layer],
        [list(layer.parameters())],
        first_layer=0,
        device=CPU,
        context=nullcontext,
        recomputed={0: layer},
    )
    stage.forward(0, torch.randn(2, 4), seed=0)
    assert not saved
    stage.recompute(0)
    assert saved
    stage.backward(0, [torch.ones(2, 4)], GradientBuffer())
    assert not saved


def test_dropped_records_leave_nothing_in_flight() -> None:
    layer = nn.Linear(4, 4)
    stage = Stage(
        [layer], [[]], first_layer=0, device=CPU, context=nullcontext, recomputed={0: layer}
    )
    stage.forward(0, torch.randn(2, 4), seed=0)
    stage.drop_records()
    assert stage.in_flight == 0
    stage.forward(0, torch.randn(2, 4), seed=0)
    stage.backward(0, [None], GradientBuffer())
