"""Steps of networks whose layers reuse memory, to compare with steps that do not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.reuse.install import patch_reuse
from tests.support.scripted_policy import ScriptedEngine

# Actions for saved storages. None: each action in turn.
ACTIONS = [*MemoryAction, None]


def scripted_engine(
    action: MemoryAction | None = MemoryAction.KEEP, late: bool = False
) -> ScriptedEngine:
    """Return an engine that treats every saved storage by `action`.

    Args:
        action: Action for all storages. None: each action in turn.
        late: True: copies happen at the last allowed time.
    """
    actions = list(MemoryAction)
    return ScriptedEngine(lambda number, _: action or actions[number % len(actions)], late=late)


class Layers(nn.Sequential):
    """Layers behind an operation whose output requires a gradient and has no other reader."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.0)


# Layers by name: constructor, and shape of the input.
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


def backward_results(net: nn.Module, x: Tensor, loss: Tensor) -> list[Tensor]:
    """Run backward; return the loss, all gradients, and the buffers."""
    tensors = [x, *net.parameters()]
    for tensor in tensors:
        tensor.grad = None
    loss.backward()
    grads = [t.grad for t in tensors if t.grad is not None]
    return [loss.detach(), *grads, *(b.clone() for b in net.buffers())]


def assert_equal_tensors(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> None:
    assert len(expected) == len(actual) > 0
    for expected_tensor, actual_tensor in zip(expected, actual, strict=True):
        assert torch.equal(expected_tensor, actual_tensor)


class CountingOwner:
    """Owner that counts the storages that it lets layers overwrite."""

    def __init__(self, scripted: ScriptedEngine) -> None:
        self._owner, self.num_reused = scripted.owner, 0
        self.recording_unpacked = scripted.owner.recording_unpacked

    def take_ownership(self, tensor: Tensor, unpacked: list[Any]) -> bool:
        is_granted = self._owner.take_ownership(tensor, unpacked)
        self.num_reused += is_granted
        return is_granted


def leaf_names(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if name and not list(module.children())]


class RefusingOwner(CountingOwner):
    """Owner that lets layers overwrite no storage, so that gradients get separate memory."""

    def take_ownership(self, tensor: Tensor, unpacked: list[Any]) -> bool:
        return False


def run_step(
    net: nn.Module,
    shape: tuple[int, ...],
    scripted: ScriptedEngine | None,
    owner_of: Callable[[ScriptedEngine], CountingOwner] = CountingOwner,
) -> tuple[list[Tensor], int]:
    """Run a step on a copy of `net`; return its results and the number of reused storages.

    Args:
        net: Module to copy.
        shape: Shape of the input.
        scripted: Engine of the step. None: plain autograd.
        owner_of: Returns the owner that decides on reuse.
    """
    torch.manual_seed(3)
    net = copy.deepcopy(net)
    x = torch.randn(shape, requires_grad=True)
    if scripted is None:
        return backward_results(net, x, net(x).square().sum()), 0
    owner = owner_of(scripted)
    with (
        scripted.hooks([*net.parameters(), *net.buffers()]),
        patch_reuse(net, leaf_names(net), owner),
    ):
        loss = net(x).square().sum()
    return backward_results(net, x, loss), owner.num_reused
