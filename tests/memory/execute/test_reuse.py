"""Reuse: layers overwrite their input with its gradient, exactly, if there is no other reader."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
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
from tests.support.examples import examples
from tests.support.scripted_policy import ScriptedEngine

ACTIONS = [*MemoryAction, None]  # None: each action in turn


def engine(action: MemoryAction | None = MemoryAction.KEEP, late: bool = False) -> ScriptedEngine:
    every = list(MemoryAction)
    return ScriptedEngine(lambda number, _: action or every[number % len(every)], late=late)


class Layers(nn.Sequential):
    """Layers behind an operation whose output requires a gradient and has no other reader."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.0)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (3, 5, 6)),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), (7, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), (9, 4, 12)),
    "conv2d": (lambda: nn.Conv2d(3, 5, 3, stride=2, padding=1), (17, 3, 9, 8)),
    "conv2d same": (lambda: nn.Conv2d(3, 5, 3, padding="same", dilation=2), (2, 3, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, bias=False, padding="valid"), (4, 2, 5, 6, 4)),
    "layer norm": (lambda: nn.LayerNorm((4, 6)), (5, 7, 4, 6)),
    "layer norm without weights": (lambda: nn.LayerNorm(6, elementwise_affine=False), (5, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (9, 6, 5)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(6), (9, 6)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(6, momentum=None), (4, 6, 3, 5)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(3, affine=False), (4, 3, 3, 5, 2)),
    "batch norm without statistics": (
        lambda: nn.BatchNorm2d(6, track_running_stats=False),
        (4, 6, 3, 5),
    ),
    "batch norm in evaluation": (lambda: nn.BatchNorm2d(6).eval(), (4, 6, 3, 5)),
    "gelu": (lambda: nn.GELU(), (5, 40)),
    "gelu by tanh": (lambda: nn.GELU("tanh"), (5, 40)),
    "silu": (lambda: nn.SiLU(), (5, 40)),
    "relu": (lambda: nn.ReLU(), (5, 41)),
    "relu in place": (lambda: nn.ReLU(inplace=True), (5, 41)),
}


def gradients(net: nn.Module, x: Tensor, loss: Tensor) -> list[Tensor]:
    """Return the loss, all gradients, and the buffers."""
    tensors = [x, *net.parameters()]
    for tensor in tensors:
        tensor.grad = None
    loss.backward()
    found = [t.grad for t in tensors if t.grad is not None]
    return [loss.detach(), *found, *(b.clone() for b in net.buffers())]


def require_same(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    assert len(expected) == len(found) > 0
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


class Watching:
    """Owner that counts the memory that it hands over."""

    def __init__(self, scripted: ScriptedEngine) -> None:
        self._owner, self.handed_over = scripted.owner, 0
        self.recording_unpacked = scripted.owner.recording_unpacked

    def take_ownership(self, tensor: Tensor, unpacked: list[Any]) -> bool:
        found = self._owner.take_ownership(tensor, unpacked)
        self.handed_over += found
        return found


def names_of(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if name and not list(module.children())]


class Refusing(Watching):
    """Owner that hands no memory over."""

    def take_ownership(self, tensor: Tensor, unpacked: list[Any]) -> bool:
        return False


def trained(
    net: nn.Module,
    shape: tuple[int, ...],
    scripted: ScriptedEngine | None,
    owner_of: Callable[[ScriptedEngine], Watching] = Watching,
) -> tuple[list[Tensor], int]:
    """Return the results of a step, and how often memory was reused."""
    torch.manual_seed(3)
    net = copy.deepcopy(net)
    x = torch.randn(shape, requires_grad=True)
    if scripted is None:
        return gradients(net, x, net(x).square().sum()), 0
    owner = owner_of(scripted)
    with (
        scripted.hooks([*net.parameters(), *net.buffers()]),
        patch_reuse(net, names_of(net), owner),
    ):
        loss = net(x).square().sum()
    return gradients(net, x, loss), owner.handed_over


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_equal_those_in_separate_memory(
    name: str, action: MemoryAction | None, late: bool
) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    net = Layers(make())
    separate, _ = trained(net, shape, engine(), Refusing)
    found, handed_over = trained(net, shape, engine(action, late))
    require_same(separate, found)
    assert handed_over == (0 if "relu" in name else 1)
    for expected, one in zip(trained(net, shape, None)[0], found, strict=True):
        torch.testing.assert_close(one, expected)
        # A convolution of fewer samples may add sums up in another order.
        assert "conv" in name or torch.equal(one, expected)


def block(*layers: nn.Module) -> nn.Module:
    return Layers(*layers)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "gelu, linear": (lambda: block(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)), (5, 6), 3),
    "norm, linear": (lambda: block(nn.LayerNorm(6), nn.Linear(6, 4)), (5, 6), 2),
    "conv, relu, conv": (
        lambda: block(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        (8, 3, 9, 9),
        2,
    ),
    "relu in place": (
        lambda: block(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)),
        (8, 3, 9, 9),
        2,
    ),
    "channels last": (
        lambda: block(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(
            memory_format=torch.channels_last  # type: ignore[call-overload]
        ),
        (8, 3, 9, 9),
        2,
    ),
    "batch norm, relu": (
        lambda: block(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        (8, 3, 9, 9),
        3,
    ),
    "silu, group norm": (lambda: block(nn.SiLU(), nn.GroupNorm(2, 6)), (9, 6, 5), 2),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", NETS)
def test_consecutive_layers_reuse_memory(name: str, action: MemoryAction | None) -> None:
    make, shape, count = NETS[name]
    torch.manual_seed(1)
    net = make()
    separate, _ = trained(net, shape, engine(), Refusing)
    scripted = engine(action)
    found, handed_over = trained(net, shape, scripted)
    require_same(separate, found)
    assert handed_over == count
    for expected, one in zip(trained(net, shape, None)[0], found, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    scripted.forget()
    assert scripted.byte_counter.now == 0
    assert scripted.tier.used_bytes == 0


class Reader(nn.Module):
    """Linear layer whose input has another reader."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear, self.other = how, nn.Linear(6, 4), nn.Linear(6, 4)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if self.how == "earlier":
            return x.sin().sum() + self.linear(x)
        if self.how == "later":
            y = self.linear(x)
            return (x * x).sum() + y
        if self.how == "output":
            x = x.sigmoid()
        y = self.linear(x)
        keep = {
            "python": lambda: x,
            "view": lambda: x[1:],
            "detached": lambda: x.detach(),
            "numpy": lambda: x.detach().numpy(),
            "storage": lambda: x.untyped_storage(),
        }.get(self.how)
        self.kept = keep() if keep is not None else None
        if self.how == "functional":
            return y + nn.functional.linear(x, self.other.weight)
        return y


# Other reader of the input, and how often memory may be reused. Backward runs in reverse order.
HOW = {
    "earlier": 0,
    "output": 0,
    "later": 1,
    "functional": 1,
    **dict.fromkeys(("python", "view", "detached", "numpy", "storage"), 0),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("how", HOW)
def test_memory_with_other_readers_is_not_overwritten(
    how: str, action: MemoryAction | None
) -> None:
    torch.manual_seed(1)
    net = Reader(how)
    torch.manual_seed(3)
    x = torch.randn(5, 6, requires_grad=True)
    plain = gradients(net, x, net(x).square().sum())
    scripted = engine(action)
    owner = Watching(scripted)
    with scripted.hooks(net.parameters()), patch_reuse(net, ["linear"], owner):
        loss = net(x).square().sum()
    before = None if net.kept is None else _bytes_of(net.kept)
    require_same(plain, gradients(net, x, loss))
    assert owner.handed_over == HOW[how]
    if before is not None:
        assert before == _bytes_of(net.kept)


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
    plain, _ = trained(net, (2, 5, 6), None)
    found, handed_over = trained(net, (2, 5, 6), engine(action))
    require_same(plain, found)
    assert handed_over == 2


def deep() -> nn.Module:
    return block(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6)
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_a_retained_graph_keeps_its_storages(action: MemoryAction | None) -> None:
    def step(scripted: ScriptedEngine | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(3)
        net = deep()
        x = torch.randn(5, 6, requires_grad=True)
        if scripted is None:
            loss, count = net(x).square().sum(), 0
            loss.backward(retain_graph=True)
            return gradients(net, x, loss), count
        owner = Watching(scripted)
        with scripted.hooks(net.parameters()), patch_reuse(net, names_of(net), owner):
            loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        assert owner.handed_over == 0
        return gradients(net, x, loss), owner.handed_over

    require_same(step(None)[0], step(engine(action))[0])


def test_a_second_backward_raises_an_error_that_names_the_cause() -> None:
    net, scripted = Reader("later"), engine()
    x = torch.randn(5, 6, requires_grad=True)
    with scripted.hooks(net.parameters()), patch_reuse(net, ["linear"], scripted.owner):
        loss = net(x).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("action", ACTIONS)
def test_double_backward(action: MemoryAction | None) -> None:
    layers = {name: make for name, (make, _) in LAYERS.items()}
    for name, make in layers.items():
        torch.manual_seed(1)
        net, shape = Layers(make()).double(), LAYERS[name][1]

        def step(
            scripted: ScriptedEngine | None, net: nn.Module = net, shape: Any = shape
        ) -> list[Tensor]:
            torch.manual_seed(3)
            own = copy.deepcopy(net)
            x = torch.randn(shape, requires_grad=True, dtype=torch.float64)

            def loss() -> Tensor:
                y = own(x).square().sum()
                (first,) = torch.autograd.grad(y, x, create_graph=True)
                return y + first.square().sum()

            if scripted is None:
                return gradients(own, x, loss())
            stays = [*own.parameters(), *own.buffers()]
            with scripted.hooks(stays), patch_reuse(own, names_of(own), scripted.owner):
                found = loss()
            return gradients(own, x, found)

        for one, other in zip(step(None), step(engine(action)), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["linear", "conv2d", "gelu", "relu", "layer norm"])
def test_autocast(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    net = Layers(make())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, _ = trained(net, shape, None)
        separate, _ = trained(net, shape, engine(), Refusing)
        found, handed_over = trained(net, shape, engine())
    require_same(separate, found)
    if name != "conv2d":
        require_same(plain, found)
    assert handed_over == (name in ("linear", "conv2d", "gelu"))


def test_patches_keep_class_state_dict_and_hooks() -> None:
    net, scripted, calls = deep(), engine(), []
    keys, kinds = list(net.state_dict()), [type(m) for m in net.modules()]
    net[0].register_forward_hook(lambda *_: calls.append("forward"))
    net[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    x = torch.randn(5, 6, requires_grad=True)
    with scripted.hooks(net.parameters()), patch_reuse(net, names_of(net), scripted.owner):
        assert list(net.state_dict()) == keys
        assert [type(m) for m in net.modules()] == kinds
        net(x).sum().backward()
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net[1]))):
            other(torch.randn(5, 8) if other is not net and type(other) is nn.LayerNorm else x)
    assert calls[:2] == ["forward", "backward"]
    assert all("forward" not in vars(module) for module in net.modules())


def test_a_copied_module_does_not_reuse_memory() -> None:
    net, scripted = deep(), engine()
    with scripted.hooks(net.parameters()), patch_reuse(net, names_of(net), scripted.owner):
        other = copy.deepcopy(net)
    own = [m for m in other.modules() if "forward" in vars(m)]
    assert own
    for module in own:
        forward = vars(module)["forward"]
        assert isinstance(forward, ReusingForward)
        assert forward.module is module
        assert forward.owner is None


class Own(nn.Linear):
    """Subclass, which has no formula."""


UNFIT: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
    "subclass": (Own(6, 4), lambda: torch.randn(5, 6)),
    "transposed": (nn.Linear(6, 4), lambda: torch.randn(6, 5).T),
    "part": (nn.Linear(6, 4), lambda: torch.randn(5, 12)[:, :6]),
    "dtypes": (nn.Linear(6, 4), lambda: torch.randn(5, 6).double()),
    "features": (nn.Linear(6, 4), lambda: torch.randn(5, 7)),
    "circular": (
        nn.Conv2d(3, 4, 3, padding_mode="circular", padding=1),
        lambda: torch.randn(4, 3, 9, 9),
    ),
    "uneven": (nn.Conv2d(3, 4, 2, padding="same"), lambda: torch.randn(4, 3, 9, 9)),
    "no batch": (nn.Conv2d(3, 4, 3), lambda: torch.randn(3, 9, 9)),
    "one": (nn.Conv2d(3, 4, 3), lambda: torch.randn(1, 3, 9, 9)),
    "channels": (nn.BatchNorm2d(4), lambda: torch.randn(4, 3, 9, 9)),
    "other": (nn.Dropout(), lambda: torch.randn(5, 6)),
    "in place": (nn.SiLU(inplace=True), lambda: torch.randn(5, 6)),
}


@pytest.mark.parametrize("name", UNFIT)
def test_calls_without_a_formula_run_the_modules_own_forward(name: str) -> None:
    module, make = UNFIT[name]
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


def test_signs_of_many_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dlres.memory.execute.reuse.activations._CHUNK", 64)
    tensor = torch.randn(7, 3, 5, 4).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    mask = _mask(signs_of(tensor), tensor.shape, tensor.stride())
    assert torch.equal(mask, tensor > 0)
    x = torch.randn(7, 3, 5, 4, requires_grad=True)
    net = block(nn.ReLU())
    require_same(trained(net, x.shape, None)[0], trained(net, x.shape, engine())[0])


@pytest.mark.parametrize("how", ["add", "set", "relu"])
def test_outputs_may_be_changed_in_place(how: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            y = self.linear(x)
            if how == "add":
                y += x
            elif how == "set":
                y[:, 0] = 0.0
            else:
                y = y.relu_()
            return y

    net = Net()
    require_same(trained(net, (2, 5, 6), None)[0], trained(net, (2, 5, 6), engine())[0])


class Stops(torch.autograd.Function):
    """Function without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def test_an_undefined_gradient_stays_undefined() -> None:
    net = block(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    x = torch.randn(5, 6, requires_grad=True)
    scripted = engine()
    with scripted.hooks(net.parameters()), patch_reuse(net, names_of(net), scripted.owner):
        loss = Stops.apply(net(x)).sum() + x.sum()
    loss.backward()
    assert all(p.grad is None for p in net.parameters())


def test_a_shallow_copy_computes_with_its_own_weights() -> None:
    net, scripted, tracker = nn.Linear(6, 4), engine(), CallTracker()
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


def test_memory_of_an_array_is_not_written_to() -> None:
    net, scripted = nn.Linear(6, 4), engine()
    array = np.ones((5, 6), np.float32)
    position = nn.Parameter(torch.ones(6))
    owner = Watching(scripted)
    with scripted.hooks(net.parameters()), patch_reuse(nn.Sequential(net), ["0"], owner):
        x = torch.from_numpy(array)
        x += position
        loss = net(x).sum()
        del x
    loss.backward()
    assert owner.handed_over == 0
    assert (array == 2.0).all()


def test_memory_that_another_process_shares_is_not_written_to() -> None:
    net, scripted = nn.Linear(6, 4), engine()
    owner = Watching(scripted)
    with scripted.hooks(net.parameters()), patch_reuse(nn.Sequential(net), ["0"], owner):
        x = torch.randn(5, 6, requires_grad=True) * 1.0
        x.detach().share_memory_()
        loss = net(x).sum()
        del x
    loss.backward()
    assert owner.handed_over == 0


def test_gradients_in_another_layout_equal_plain_ones() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.head = nn.GELU(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(x * 1.0).permute(0, 2, 3, 1))

    net = Net()
    strides = []
    for scripted in (None, engine()):
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


def test_many_gradients_at_once() -> None:
    net = block(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    x = torch.randn(5, 6, requires_grad=True)
    many = torch.randn(3, 5, 4)

    def step() -> Tensor:
        (found,) = torch.autograd.grad(net(x), x, many, is_grads_batched=True)
        return found

    plain, scripted = step(), engine()
    with scripted.hooks(net.parameters()), patch_reuse(net, names_of(net), scripted.owner):
        found = step()
    torch.testing.assert_close(found, plain)
