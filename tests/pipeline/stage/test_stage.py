"""Stages run layer by layer give the gradients of one autograd graph over the whole, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dlres.core.rng import derive_seed, forked
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer, Gradients
from lightning_dlres.pipeline.stage.stage import Stage

CPU = torch.device("cpu")
SEED = 11
Layers = Sequence[Callable[[Tree], Tree]]


class Fork(nn.Module):
    """A layer that returns a dict of two tensors and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tree:
        return {"left": self.left(x), "right": (self.right(x), 2)}


class Join(nn.Module):
    """A layer that takes the output of `Fork`, and changes its inputs in place."""

    def forward(self, tree: Tree) -> Tensor:
        right, factor = tree["right"]
        return tree["left"].mul_(factor) + right.relu_()


class Wasteful(nn.Module):
    """A layer that returns an unused tensor, a constant, and a mask without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tree:
        return [self.linear(x), self.unused(x), x.detach() * 2, x > 0]


class SelectByMask(nn.Module):
    """A layer that takes the output of `Wasteful`."""

    def forward(self, tree: Tree) -> Tensor:
        return torch.where(tree[3], tree[0], tree[2])


class Residual(nn.Module):
    """A layer that returns its own input and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.linear = nn.Parameter(torch.full((6,), 0.5)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tree:
        return x, self.linear(x), self.shift


class Sum(nn.Module):
    """A layer that adds its inputs."""

    def forward(self, tree: Tree) -> Tensor:
        return sum(tree[1:], start=tree[0])


class Checkpointed(nn.Module):
    """A layer that recomputes its forward by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=False)


class Blind(nn.Module):
    """A layer that computes without autograd."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2


class Views(nn.Module):
    """A layer that returns a view of its input, which the next layer changes in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 3, 2).flatten(1)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def shared() -> list[nn.Module]:
    a, b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
    b.weight = a.weight
    return [a, nn.Tanh(), b]


NETWORKS: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)],
    "in place": lambda: [
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        nn.Hardtanh(inplace=True),
        nn.LeakyReLU(0.1, inplace=True),
    ],
    "in place first": lambda: [nn.ReLU(inplace=True), nn.Linear(6, 6)],
    "trees": lambda: [nn.Linear(6, 6), Fork(), Join(), nn.Linear(6, 6)],
    "unused outputs": lambda: [nn.Linear(6, 6), Wasteful(), SelectByMask(), nn.Linear(6, 6)],
    "own input and a parameter": lambda: [nn.Linear(6, 6), Residual(), Sum()],
    "identity": lambda: [nn.Identity(), nn.Linear(6, 6), nn.Identity(), nn.Identity()],
    "views": lambda: [nn.Linear(6, 6), Views(), nn.ReLU(inplace=True), nn.Linear(6, 6)],
    "frozen": lambda: [nn.Linear(6, 6), frozen(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 6)],
    "frozen first": lambda: [frozen(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 6)],
    "all frozen": lambda: [frozen(nn.Linear(6, 6)), nn.Tanh()],
    "shared parameter": shared,
    "no gradient": lambda: [nn.Linear(6, 6), Blind(), nn.Linear(6, 6)],
    "recomputed": lambda: [nn.Linear(6, 6), Checkpointed(), nn.Linear(6, 6)],
    "dropout": lambda: [nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3)],
    "statistics": lambda: [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6)],
}


def make(name: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*NETWORKS[name]())


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def stages_of(
    layers: Sequence[nn.Module], split: Sequence[int], by_layer: bool = False
) -> list[Stage]:
    stages, first = [], 0
    for count in split:
        own = layers[first : first + count]
        parameters = [trainable(layer) for layer in own]
        stages.append(
            Stage(
                own,
                parameters,
                first_layer=first,
                device=CPU,
                context=nullcontext,
                by_layer=by_layer,
            )
        )
        first += count
    return stages


def through_stages(
    layers: Sequence[nn.Module],
    split: Sequence[int],
    inputs: Tree,
    microbatch: int = 0,
    buffer: GradientBuffer | None = None,
) -> tuple[Tree, list[Tensor | None], Gradients]:
    """Run one micro-batch through all stages and back.

    Activations are detached between stages, as they are when sent.

    Returns:
        The output, the gradients of the inputs, and the gradients of the parameters.
    """
    stages, sums = stages_of(layers, split), buffer or GradientBuffer()
    activation = inputs
    for stage in stages:
        activation = stage.forward(microbatch, copied(activation), SEED)
    gradients: Sequence[Tensor | None] = [
        torch.ones_like(t) * 0.5 if t.requires_grad else None for t in tensors_of(activation)
    ]
    for stage in reversed(stages):
        gradients = stage.backward(microbatch, gradients, sums)
        assert stage.in_flight == 0
    return activation, list(gradients), sums.gradients


def copied(tree: Tree) -> Tree:
    return map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree)


def run_plainly(
    layers: Layers, inputs: Tensor, microbatch: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Run all layers with one autograd graph; gradients go into `.grad`."""
    leaf = inputs.detach().clone().requires_grad_(inputs.requires_grad)
    x: Any = leaf + 0 if leaf.requires_grad else leaf
    with forked(CPU):
        for index, layer in enumerate(layers):
            torch.manual_seed(derive_seed(SEED, microbatch, index))
            x = layer(x)
    if x.requires_grad:
        x.backward(torch.ones_like(x) * 0.5)
    return x.detach(), leaf.grad


SPLITS = [lambda n: (n,), lambda n: (1, n - 1), lambda n: (n - 1, 1), lambda n: (1,) * n]


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_backward_gives_the_gradients_of_autograd(name: str, needs_gradient: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 6, requires_grad=needs_gradient)
    reference = make(name)
    expected, expected_gradient = run_plainly(reference, x)
    for split in SPLITS:
        layers = make(name)
        output, (input_gradient,), gradients = through_stages(layers, split(len(layers)), x)
        assert torch.equal(output, expected)
        assert (input_gradient is None) == (expected_gradient is None)
        assert input_gradient is None or torch.equal(input_gradient, expected_gradient)
        for parameter, other in zip(layers.parameters(), reference.parameters(), strict=True):
            gradient = gradients.get(parameter)
            assert (gradient is None) == (other.grad is None)
            assert gradient is None or torch.equal(gradient, other.grad)
        for buffer, other in zip(layers.buffers(), reference.buffers(), strict=True):
            assert torch.equal(buffer, other)
        assert all(p.grad is None for p in layers.parameters()), (
            "the strategy delivers gradients later"
        )


def test_token_inputs_get_no_gradient() -> None:
    torch.manual_seed(0)
    layers = [nn.Embedding(7, 6), nn.Linear(6, 6)]
    tokens = torch.randint(7, (4, 5))
    _, (input_gradient,), gradients = through_stages(layers, (1, 1), tokens)
    assert input_gradient is None
    run_plainly(layers, tokens)
    for parameter in (layers[0].weight, *layers[1].parameters()):
        assert torch.equal(gradients[parameter], parameter.grad)


def test_gradients_are_summed_over_microbatches() -> None:
    layers, buffer = make("in place"), GradientBuffer()
    parts = torch.randn(3, 4, 6)
    for m, part in enumerate(parts):
        through_stages(layers, (2, 3), part, m, buffer)
        run_plainly(layers, part, m)
    for parameter in layers.parameters():
        assert torch.equal(buffer.gradients[parameter], parameter.grad)


def test_several_microbatches_can_be_in_flight() -> None:
    layers = make("dropout")
    (stage,), buffer = stages_of(layers, (4,)), GradientBuffer()
    parts = torch.randn(3, 4, 6)
    for m, part in enumerate(parts):
        stage.forward(m, part, SEED)
    assert stage.in_flight == 3
    for m in (1, 0, 2):
        stage.backward(m, [torch.full((4, 6), 0.5)], buffer)
    for m in (1, 0, 2):
        run_plainly(layers, parts[m], m)
    for parameter in layers.parameters():
        assert torch.equal(buffer.gradients[parameter], parameter.grad)
    stage.forward(5, parts[0], SEED)
    stage.drop_records()
    assert stage.in_flight == 0


@pytest.mark.parametrize("name", list(NETWORKS))
def test_one_graph_per_layer_gives_the_gradients_of_one_graph_per_stage(name: str) -> None:
    results = []
    for by_layer in (False, True):
        layers = make(name)
        (stage,), buffer = stages_of(layers, (len(layers),), by_layer), GradientBuffer()
        for microbatch in range(3):
            output = stage.forward(microbatch, torch.randn(2, 6), SEED)
            gradients = [torch.ones_like(t) for t in tensors_of(output)]
            stage.backward(microbatch, gradients, buffer)
        results.append([buffer.gradients.get(p) for p in layers.parameters()])
    for one, each in zip(*results, strict=True):
        assert (one is None) == (each is None)
        assert one is None or torch.equal(one, each)


def test_layer_done_is_called_from_the_last_layer_with_final_gradients() -> None:
    layers = make("trees")
    (stage,), buffer = stages_of(layers, (4,), by_layer=True), GradientBuffer()
    stage.forward(0, torch.randn(2, 6), SEED)
    seen: list[tuple[int, int]] = []
    stage.backward(
        0,
        [torch.ones(2, 6)],
        buffer,
        lambda position: seen.append((position, len(buffer.gradients))),
    )
    assert seen == [(3, 2), (2, 2), (1, 6), (0, 8)]


def test_dropout_depends_only_on_seed_microbatch_and_layer() -> None:
    layers = [nn.Dropout(0.5), nn.Dropout(0.5)]
    x = torch.ones(64)

    def outputs(split: tuple[int, ...], seed: int, microbatch: int) -> list[Tensor]:
        torch.manual_seed(seed * 17 + len(split))
        activations, activation = [], x
        for stage in stages_of(layers, split):
            activation = stage.forward(microbatch, activation, seed, for_backward=False)
            activations.append(activation)
        return activations

    assert torch.equal(outputs((2,), 1, 0)[-1], outputs((1, 1), 1, 0)[-1])
    assert not torch.equal(outputs((2,), 1, 0)[-1], outputs((2,), 2, 0)[-1])
    assert not torch.equal(outputs((2,), 1, 0)[-1], outputs((2,), 1, 1)[-1])
    first, second = outputs((1, 1), 1, 0)
    assert not torch.equal((first > 0), (second > 0)), "each layer has its own seed"


def test_the_global_random_state_does_not_change() -> None:
    (stage,) = stages_of(make("dropout"), (4,))
    before = torch.get_rng_state()
    stage.forward(0, torch.ones(2, 6), SEED)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_forward_without_backward_records_nothing() -> None:
    (stage,) = stages_of(make("plain"), (3,))
    with torch.no_grad():
        output = stage.forward(0, torch.ones(2, 6), SEED, for_backward=False)
    assert stage.in_flight == 0
    assert not output.requires_grad
    with pytest.raises(KeyError):
        stage.backward(0, [torch.ones(2, 6)], GradientBuffer())


def test_forward_runs_inside_the_given_context() -> None:
    layer = nn.Linear(6, 6)
    stage = Stage(
        [layer],
        [trainable(layer)],
        first_layer=0,
        device=CPU,
        context=lambda: torch.autocast("cpu", torch.bfloat16),
    )
    output = stage.forward(0, torch.ones(2, 6), SEED)
    assert output.dtype == torch.bfloat16
    buffer = GradientBuffer()
    stage.backward(0, [torch.ones_like(output)], buffer)
    assert buffer.gradients[layer.weight].dtype == torch.float32


def test_an_in_place_change_that_autograd_refuses_is_refused() -> None:
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.ReLU(inplace=True)]
    (stage,) = stages_of(layers, (3,))
    stage.forward(0, torch.randn(2, 6), SEED)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stage.backward(0, [torch.ones(2, 6)], GradientBuffer())


def test_a_tied_embedding_sums_sparse_and_dense_gradients() -> None:
    table = nn.Embedding(5, 6, sparse=True)
    layers = [table, lambda x: F.linear(x, table.weight)]
    stage = Stage(
        layers, [[table.weight], [table.weight]], first_layer=0, device=CPU, context=nullcontext
    )
    tokens = torch.tensor([1, 1, 4])
    buffer = GradientBuffer()
    for m in range(2):
        stage.forward(m, tokens, SEED)
        stage.backward(m, [torch.ones(3, 5)], buffer)
    for _ in range(2):
        layers[1](table(tokens)).sum().backward()
    assert torch.allclose(buffer.gradients[table.weight], table.weight.grad.to_dense())


@pytest.mark.parametrize("outside", [True, False])
def test_only_parameters_of_the_stage_get_gradients(outside: bool) -> None:
    """Tensors outside of the layers and frozen parameters keep their `.grad`."""
    torch.manual_seed(1)
    outside_tensor = torch.ones(6, requires_grad=True)
    linear = nn.Linear(6, 6)
    linear.bias.requires_grad_(False)
    layers = [linear, (lambda x: x * outside_tensor) if outside else nn.Tanh()]
    stage = Stage(layers, [[linear.weight], []], first_layer=0, device=CPU, context=nullcontext)
    sums = GradientBuffer()
    for microbatch in range(2):
        output = stage.forward(microbatch, torch.randn(4, 6), SEED)
        stage.backward(microbatch, [torch.ones_like(output)], sums)
    assert set(sums.gradients) == {linear.weight}
    assert outside_tensor.grad is None
    assert linear.bias.grad is None
    assert linear.weight.grad is None
