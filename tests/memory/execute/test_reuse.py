"""Tests of memory reuse: a layer writes the gradient of its input over the input.

Gradients must be the same as without reuse. An input that has another reader must stay.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.call_tracker import CallTracker
from lightning_dlres.memory.execute.reuse.activations import _mask, signs_of
from lightning_dlres.memory.execute.reuse.formula_matching import match_formula
from lightning_dlres.memory.execute.reuse.install import ReusingForward, patch_reuse
from tests.support.examples import checkered, examples
from tests.support.reuse_steps import (
    ACTIONS,
    LAYERS,
    CountingOwner,
    Layers,
    RefusingOwner,
    assert_equal_tensors,
    backward_results,
    leaf_names,
    run_step,
    scripted_engine,
)
from tests.support.scripted_policy import ScriptedEngine


@pytest.mark.parametrize(("name", "action", "late"), checkered(LAYERS, ACTIONS, [False, True]))
def test_reuse_gives_the_gradients_of_separate_memory(
    name: str, action: MemoryAction | None, late: bool
) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    net = Layers(make())
    separate, _ = run_step(net, shape, scripted_engine(), RefusingOwner)
    reused, num_reused = run_step(net, shape, scripted_engine(action, late))
    assert_equal_tensors(separate, reused)
    assert num_reused == (0 if "relu" in name else 1)
    for expected, actual in zip(run_step(net, shape, None)[0], reused, strict=True):
        torch.testing.assert_close(actual, expected)
        # A convolution with reuse works on a part of the batch, which may add in another order.
        assert "conv" in name or torch.equal(actual, expected)


# Nets by name: constructor, shape of the input, and number of storages to reuse.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "gelu, linear": (lambda: Layers(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)), (5, 6), 3),
    "norm, linear": (lambda: Layers(nn.LayerNorm(6), nn.Linear(6, 4)), (5, 6), 2),
    "conv, relu, conv": (
        lambda: Layers(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        (8, 3, 9, 9),
        2,
    ),
    "relu in place": (
        lambda: Layers(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)),
        (8, 3, 9, 9),
        2,
    ),
    "channels last": (
        lambda: Layers(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        ),
        (8, 3, 9, 9),
        2,
    ),
    "batch norm, relu": (
        lambda: Layers(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        (8, 3, 9, 9),
        3,
    ),
    "silu, group norm": (lambda: Layers(nn.SiLU(), nn.GroupNorm(2, 6)), (9, 6, 5), 2),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", NETS)
def test_consecutive_layers_reuse_memory(name: str, action: MemoryAction | None) -> None:
    make, shape, expected_reuses = NETS[name]
    torch.manual_seed(1)
    net = make()
    separate, _ = run_step(net, shape, scripted_engine(), RefusingOwner)
    scripted = scripted_engine(action)
    reused, num_reused = run_step(net, shape, scripted)
    assert_equal_tensors(separate, reused)
    assert num_reused == expected_reuses
    for expected, actual in zip(run_step(net, shape, None)[0], reused, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    scripted.start_step()
    assert scripted.byte_counter.now == 0
    assert scripted.tier.used_bytes == 0


class SharedInput(nn.Module):
    """Linear layer whose input has another reader.

    Args:
        reader: Kind of the other reader, a key of `REUSES_BY_READER`.
    """

    def __init__(self, reader: str) -> None:
        super().__init__()
        self.reader, self.linear, self.other = reader, nn.Linear(6, 4), nn.Linear(6, 4)
        self.other_reference: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if self.reader == "earlier":
            return x.sin().sum() + self.linear(x)
        if self.reader == "later":
            y = self.linear(x)
            return (x * x).sum() + y
        if self.reader == "output":
            x = x.sigmoid()
        y = self.linear(x)
        make_reference = {
            "python": lambda: x,
            "view": lambda: x[1:],
            "detached": lambda: x.detach(),
            "numpy": lambda: x.detach().numpy(),
            "storage": lambda: x.untyped_storage(),
        }.get(self.reader)
        self.other_reference = make_reference() if make_reference is not None else None
        if self.reader == "functional":
            return y + nn.functional.linear(x, self.other.weight)
        return y


# Number of storages that may be reused, by the other reader of the input. Backward runs in reverse
# order: readers that come later in forward have finished before the linear layer starts.
REUSES_BY_READER = {
    "earlier": 0,
    "output": 0,
    "later": 1,
    "functional": 1,
    **dict.fromkeys(("python", "view", "detached", "numpy", "storage"), 0),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("reader", REUSES_BY_READER)
def test_memory_with_other_readers_is_not_overwritten(
    reader: str, action: MemoryAction | None
) -> None:
    torch.manual_seed(1)
    net = SharedInput(reader)
    torch.manual_seed(3)
    x = torch.randn(5, 6, requires_grad=True)
    plain = backward_results(net, x, net(x).square().sum())
    scripted = scripted_engine(action)
    owner = CountingOwner(scripted)
    with scripted.hooks(net.parameters()), patch_reuse(net, ["linear"], owner):
        loss = net(x).square().sum()
    before = None if net.other_reference is None else _bytes_of(net.other_reference)
    assert_equal_tensors(plain, backward_results(net, x, loss))
    assert owner.num_reused == REUSES_BY_READER[reader]
    if before is not None:
        assert before == _bytes_of(net.other_reference)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, Tensor):
        return value.detach().contiguous().numpy().tobytes()
    return bytes(value) if isinstance(value, torch.UntypedStorage) else value.tobytes()


class Attention(nn.Module):
    """Attention with three layers that read the same storage."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x * 1.0)
        q, k, v = (part(y) for part in self.parts)
        return nn.functional.scaled_dot_product_attention(q, k, v) + x


@pytest.mark.parametrize("action", ACTIONS)
def test_the_last_of_several_readers_reuses_the_memory(action: MemoryAction | None) -> None:
    net = Attention()
    plain, _ = run_step(net, (2, 5, 6), None)
    reused, num_reused = run_step(net, (2, 5, 6), scripted_engine(action))
    assert_equal_tensors(plain, reused)
    assert num_reused == 2


def deep_net() -> nn.Module:
    return Layers(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6)
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_a_retained_graph_keeps_its_storages(action: MemoryAction | None) -> None:
    def step(scripted: ScriptedEngine | None) -> list[Tensor]:
        torch.manual_seed(3)
        net = deep_net()
        x = torch.randn(5, 6, requires_grad=True)
        if scripted is None:
            loss = net(x).square().sum()
            loss.backward(retain_graph=True)
            return backward_results(net, x, loss)
        owner = CountingOwner(scripted)
        with scripted.hooks(net.parameters()), patch_reuse(net, leaf_names(net), owner):
            loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        assert owner.num_reused == 0
        return backward_results(net, x, loss)

    assert_equal_tensors(step(None), step(scripted_engine(action)))


def test_a_second_backward_raises_an_error_that_names_the_cause() -> None:
    net, scripted = SharedInput("later"), scripted_engine()
    x = torch.randn(5, 6, requires_grad=True)
    with scripted.hooks(net.parameters()), patch_reuse(net, ["linear"], scripted.owner):
        loss = net(x).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def double_backward_results(
    net: nn.Module, shape: tuple[int, ...], scripted: ScriptedEngine | None
) -> list[Tensor]:
    """Run a step on a copy of `net` whose loss contains a gradient; return its results."""
    torch.manual_seed(3)
    net = copy.deepcopy(net)
    x = torch.randn(shape, requires_grad=True, dtype=torch.float64)

    def loss_with_gradient() -> Tensor:
        y = net(x).square().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return y + gradient.square().sum()

    if scripted is None:
        return backward_results(net, x, loss_with_gradient())
    with (
        scripted.hooks([*net.parameters(), *net.buffers()]),
        patch_reuse(net, leaf_names(net), scripted.owner),
    ):
        loss = loss_with_gradient()
    return backward_results(net, x, loss)


@pytest.mark.parametrize("action", ACTIONS)
def test_double_backward_gives_the_gradients_of_plain_autograd(action: MemoryAction | None) -> None:
    for make, shape in LAYERS.values():
        torch.manual_seed(1)
        net = Layers(make()).double()
        plain = double_backward_results(net, shape, None)
        reused = double_backward_results(net, shape, scripted_engine(action))
        torch.testing.assert_close(reused, plain)


@pytest.mark.parametrize("name", ["linear", "conv2d", "gelu", "relu", "layer norm"])
def test_reuse_under_autocast_gives_the_gradients_of_separate_memory(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    net = Layers(make())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, _ = run_step(net, shape, None)
        separate, _ = run_step(net, shape, scripted_engine(), RefusingOwner)
        reused, num_reused = run_step(net, shape, scripted_engine())
    assert_equal_tensors(separate, reused)
    # A convolution with reuse works on a part of the batch, which may add in another order.
    if name != "conv2d":
        assert_equal_tensors(plain, reused)
    # No formula covers a norm under autocast.
    assert num_reused == (name in ("linear", "conv2d", "gelu"))


def test_patches_keep_class_state_dict_and_hooks() -> None:
    net, scripted, calls = deep_net(), scripted_engine(), []
    keys, kinds = list(net.state_dict()), [type(m) for m in net.modules()]
    net[0].register_forward_hook(lambda *_: calls.append("forward"))
    net[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    x = torch.randn(5, 6, requires_grad=True)
    with scripted.hooks(net.parameters()), patch_reuse(net, leaf_names(net), scripted.owner):
        assert list(net.state_dict()) == keys
        assert [type(m) for m in net.modules()] == kinds
        net(x).sum().backward()
        copy.deepcopy(net)(x)
        pickle.loads(pickle.dumps(net[1]))(torch.randn(5, 8))
    assert calls[:2] == ["forward", "backward"]
    assert all("forward" not in vars(module) for module in net.modules())


def test_a_copied_module_does_not_reuse_memory() -> None:
    net, scripted = deep_net(), scripted_engine()
    with scripted.hooks(net.parameters()), patch_reuse(net, leaf_names(net), scripted.owner):
        other = copy.deepcopy(net)
    patched = [m for m in other.modules() if "forward" in vars(m)]
    assert patched
    for module in patched:
        forward = vars(module)["forward"]
        assert isinstance(forward, ReusingForward)
        assert forward.module is module
        assert forward.owner is None


class LinearSubclass(nn.Linear):
    """Subclass, which has no formula."""


# Calls that no formula covers: module, and constructor of the input.
UNSUPPORTED: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
    "subclass": (LinearSubclass(6, 4), lambda: torch.randn(5, 6)),
    "transposed": (nn.Linear(6, 4), lambda: torch.randn(6, 5).T),
    "strided rows": (nn.Linear(6, 4), lambda: torch.randn(5, 12)[:, :6]),
    "mixed dtypes": (nn.Linear(6, 4), lambda: torch.randn(5, 6).double()),
    "wrong features": (nn.Linear(6, 4), lambda: torch.randn(5, 7)),
    "circular": (
        nn.Conv2d(3, 4, 3, padding_mode="circular", padding=1),
        lambda: torch.randn(4, 3, 9, 9),
    ),
    "uneven padding": (nn.Conv2d(3, 4, 2, padding="same"), lambda: torch.randn(4, 3, 9, 9)),
    "no batch": (nn.Conv2d(3, 4, 3), lambda: torch.randn(3, 9, 9)),
    "one sample": (nn.Conv2d(3, 4, 3), lambda: torch.randn(1, 3, 9, 9)),
    "wrong channels": (nn.BatchNorm2d(4), lambda: torch.randn(4, 3, 9, 9)),
    "layer without a formula": (nn.Dropout(), lambda: torch.randn(5, 6)),
    "in place": (nn.SiLU(inplace=True), lambda: torch.randn(5, 6)),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_no_formula_matches_an_unsupported_call(name: str) -> None:
    module, make = UNSUPPORTED[name]
    x = make().requires_grad_()
    assert match_formula(module, [x.view_as(x)], {}) is None
    with torch.no_grad():
        assert match_formula(nn.Linear(6, 4), [torch.randn(5, 6)], {}) is None


@settings(max_examples=examples(100))
@given(
    values=st.lists(
        st.sampled_from([-1.5, -0.0, 0.0, 2.0, float("nan"), float("inf")]), min_size=1
    ),
    times=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_signs_round_trip(values: list[float], times: int, dtype: torch.dtype) -> None:
    tensor = torch.tensor(values * times, dtype=dtype)
    signs = signs_of(tensor)
    assert len(signs) == -(-len(tensor) // 8)
    assert torch.equal(_mask(signs, tensor.shape, tensor.stride()), ~(tensor <= 0))


def test_signs_round_trip_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dlres.memory.execute.reuse.activations._CHUNK", 64)
    tensor = torch.randn(7, 3, 5, 4).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    mask = _mask(signs_of(tensor), tensor.shape, tensor.stride())
    assert torch.equal(mask, tensor > 0)
    x = torch.randn(7, 3, 5, 4, requires_grad=True)
    net = Layers(nn.ReLU())
    assert_equal_tensors(
        run_step(net, x.shape, None)[0], run_step(net, x.shape, scripted_engine())[0]
    )


@pytest.mark.parametrize("operation", ["add", "set", "relu"])
def test_a_change_of_the_output_in_place_gives_the_plain_gradients(operation: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            y = self.linear(x)
            if operation == "add":
                y += x
            elif operation == "set":
                y[:, 0] = 0.0
            else:
                y = y.relu_()
            return y

    net = Net()
    assert_equal_tensors(
        run_step(net, (2, 5, 6), None)[0], run_step(net, (2, 5, 6), scripted_engine())[0]
    )


class UndefinedGradient(torch.autograd.Function):
    """Function whose backward returns an undefined gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def test_an_undefined_gradient_stays_undefined() -> None:
    net = Layers(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    x = torch.randn(5, 6, requires_grad=True)
    scripted = scripted_engine()
    with scripted.hooks(net.parameters()), patch_reuse(net, leaf_names(net), scripted.owner):
        loss = UndefinedGradient.apply(net(x)).sum() + x.sum()
    loss.backward()
    assert all(p.grad is None for p in net.parameters())


def test_a_shallow_copy_computes_with_its_own_weights() -> None:
    net, scripted, tracker = nn.Linear(6, 4), scripted_engine(), CallTracker()
    root, x = nn.Sequential(net), torch.randn(5, 6, requires_grad=True)
    with (
        scripted.hooks(net.parameters()),
        tracker.tracking(),
        patch_reuse(root, ["0"], scripted.owner, tracker),
    ):
        other = copy.copy(net)
        other._parameters = {"weight": nn.Parameter(torch.zeros(4, 6)), "bias": None}
        assert torch.equal(other(x * 1.0), torch.zeros(5, 4))
        assert torch.equal(net(x * 1.0), type(net).forward(net, x))
        other(x * 1.0)
        assert torch.equal(net.forward(x * 1.0), type(net).forward(net, x))


def test_memory_of_an_array_is_not_written_to() -> None:
    net, scripted = nn.Linear(6, 4), scripted_engine()
    array = np.ones((5, 6), np.float32)
    position = nn.Parameter(torch.ones(6))
    owner = CountingOwner(scripted)
    with scripted.hooks(net.parameters()), patch_reuse(nn.Sequential(net), ["0"], owner):
        x = torch.from_numpy(array)
        x += position
        loss = net(x).sum()
        del x
    loss.backward()
    assert owner.num_reused == 0
    assert (array == 2.0).all()


def test_memory_that_another_process_shares_is_not_written_to() -> None:
    net, scripted = nn.Linear(6, 4), scripted_engine()
    owner = CountingOwner(scripted)
    with scripted.hooks(net.parameters()), patch_reuse(nn.Sequential(net), ["0"], owner):
        x = torch.randn(5, 6, requires_grad=True) * 1.0
        x.detach().share_memory_()
        loss = net(x).sum()
        del x
    loss.backward()
    assert owner.num_reused == 0


def test_gradients_in_another_layout_keep_their_strides() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.head = nn.GELU(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(x * 1.0).permute(0, 2, 3, 1))

    net = Net()
    strides = []
    for scripted in (None, scripted_engine()):
        x = torch.randn(2, 3, 4, 5, requires_grad=True)
        inner = x * 1.0
        inner.register_hook(lambda gradient: strides.append(gradient.stride()))
        if scripted is None:
            net(inner).sum().backward()
        else:
            with (
                scripted.hooks(net.parameters()),
                patch_reuse(net, ["act", "head"], scripted.owner),
            ):
                loss = net(inner).sum()
            loss.backward()
    assert strides[0] == strides[1]


def test_batched_gradients_equal_those_of_plain_autograd() -> None:
    net = Layers(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    x = torch.randn(5, 6, requires_grad=True)
    output_gradients = torch.randn(3, 5, 4)

    def step() -> Tensor:
        (gradient,) = torch.autograd.grad(net(x), x, output_gradients, is_grads_batched=True)
        return gradient

    plain, scripted = step(), scripted_engine()
    with scripted.hooks(net.parameters()), patch_reuse(net, leaf_names(net), scripted.owner):
        reused = step()
    torch.testing.assert_close(reused, plain)
