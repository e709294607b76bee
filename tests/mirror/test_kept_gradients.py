"""Gradients that code keeps have their values for good, as those of plain training."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dlres.mirror.config import MirrorConfig
from lightning_dlres.mirror.execute.gradients import is_at
from lightning_dlres.mirror.mirror import Mirror
from tests.support.fake_gpu import ORDERS, FakeGpu, in_place_of_cuda

CPU = torch.device("cpu")
ACTIONS = ("backward", "zero to none", "zero", "keep", "keep a view", "let go", "replace", "step")
OFTEN = ["backward", *ACTIONS, "backward"]


def observe(actions: Sequence[str], *, is_mirrored: bool, gpu: FakeGpu | None) -> list[Tensor]:
    """Return all gradients, all kept ones and the parameters after each action."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    config = MirrorConfig(window="min")
    mirror = Mirror(model, [optimizer], config, CPU, gpu) if is_mirrored else None
    kept: list[Tensor] = []
    seen = []
    # A later backward moves the sum of a gradient that the user has made to another tensor.
    is_replaced = False
    for number, action in enumerate(actions):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if action == "backward":
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            if mirror is None:
                model(x).square().mean().backward()
            else:
                with mirror.step("training"):
                    model(x).square().mean().backward()
        elif action.startswith("zero"):
            optimizer.zero_grad(set_to_none=action == "zero to none")
            is_replaced = is_replaced and action == "zero"
        elif action.startswith("keep") and not is_replaced:
            kept += [g.view(-1) if action == "keep a view" else g for g in gradients]
        elif action == "let go":
            kept.clear()
        elif action == "replace":
            is_replaced = True
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad * 0.5
        elif action == "step":
            optimizer.step()
        del gradients
        values = [p.grad for p in model.parameters() if p.grad is not None]
        seen += [t.detach().clone() for t in (*values, *kept, *model.parameters())]
    if mirror is not None:
        mirror.close()
    return seen


def assert_alike(actions: Sequence[str], gpu: FakeGpu | None) -> None:
    plain = observe(actions, is_mirrored=False, gpu=None)
    ours = observe(actions, is_mirrored=True, gpu=gpu)
    assert len(plain) == len(ours)
    assert all(map(torch.equal, plain, ours))


@given(st.lists(st.sampled_from(OFTEN), min_size=2, max_size=14))
def test_kept_gradients_stay_as_they_are(actions: list[str]) -> None:
    assert_alike(actions, None)


@pytest.mark.parametrize("order", ORDERS)
def test_kept_gradients_stay_as_they_are_on_a_gpu(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    with in_place_of_cuda(order, monkeypatch) as gpu:
        for _ in range(20):
            drawn = torch.randint(len(OFTEN), (12,), generator=generator)
            assert_alike([OFTEN[index] for index in drawn], gpu)


def placements(features: int) -> list[bool]:
    """Return whether each gradient of four steps is in its place; the first one is kept once."""
    model = nn.Linear(6, features)
    mirror = Mirror(model, [], MirrorConfig(window="min"), CPU)
    place = mirror._gradients._places[model.weight]  # type: ignore[attr-defined]
    kept, is_placed = None, []
    for number in range(4):
        model.zero_grad()
        with mirror.step("training"):
            model(torch.ones(2, 6)).sum().backward()
        assert model.weight.grad is not None
        is_placed.append(is_at(model.weight.grad, place))
        kept = model.weight.grad if number == 0 else None
    assert kept is None
    mirror.close()
    return is_placed


def test_a_gradient_returns_to_its_place_when_nothing_is_kept() -> None:
    # At some of these sizes the allocator gives a gradient the address of the one before.
    sizes = range(1, 120)
    expected = {features: [True, False, True, True] for features in sizes}
    assert {features: placements(features) for features in sizes} == expected
