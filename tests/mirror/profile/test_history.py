"""Layout of the optimizer's history before its first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.mirror.profile import history
from lightning_dlres.mirror.profile.history import (
    PER_PARAMETER,
    history_of,
    planned_history,
    refuse_wrong_kernels,
    use_fused_kernels,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
}


@pytest.mark.parametrize("kind", PER_PARAMETER, ids=lambda kind: kind.__name__)
def test_the_planned_history_is_that_of_a_real_step(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 1).requires_grad_(False))
    optimizer = kind(model.parameters(), **OPTIONS.get(kind.__name__, {}))
    states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    planned = planned_history(optimizer)
    assert optimizer.state == states
    model(torch.randn(2, 20)).sum().backward()
    optimizer.step()
    real = {p: history_of(state) for p, state in optimizer.state.items() if state}
    for parameter, tensors in real.items():
        assert {k: (t.shape, t.dtype) for k, t in tensors.items()} == {
            k: (t.shape, t.dtype) for k, t in planned[parameter].items()
        }
    assert planned_history(optimizer).keys() == planned.keys()


def test_groups_may_have_histories_of_their_own() -> None:
    first, second = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))
    optimizer = torch.optim.Adam([{"params": [first], "amsgrad": True}, {"params": [second]}])
    planned = planned_history(optimizer)
    assert set(planned[first]) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert set(planned[second]) == {"exp_avg", "exp_avg_sq"}


def test_an_optimizer_that_sees_all_parameters_at_once_has_none() -> None:
    assert planned_history(torch.optim.LBFGS([nn.Parameter(torch.ones(300))])) == {}


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("optimizer", "is_fused"),
    [
        (torch.optim.AdamW([nn.Parameter(torch.ones(3))]), True),
        (torch.optim.AdamW([nn.Parameter(torch.ones(3))], foreach=True), None),
        (torch.optim.AdamW([nn.Parameter(torch.ones(3))], fused=False), False),
        (torch.optim.Adam([nn.Parameter(torch.ones(3))], differentiable=True), None),
        (torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=torch.tensor(0.1)), None),
        (torch.optim.RMSprop([nn.Parameter(torch.ones(3))]), None),
    ],
)
def test_the_users_choice_of_a_kernel_is_kept(optimizer: Any, is_fused: Any) -> None:
    use_fused_kernels(optimizer)
    assert optimizer.param_groups[0].get("fused") is is_fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_chosen_kernel_makes_the_steps_of_the_plain_one(kind: Any, dtype: torch.dtype) -> None:
    options = {"lr": 0.125, **({"momentum": 0.5} if kind is torch.optim.SGD else {})}
    chosen, plain = (nn.Parameter(torch.linspace(1, 2, 300).to(dtype)) for _ in range(2))
    optimizers = [kind([chosen], **options), kind([plain], **options, foreach=False)]
    use_fused_kernels(optimizers[0])
    for gradient in (1.0, -0.5, 0.25):
        for parameter, optimizer in zip((chosen, plain), optimizers, strict=True):
            parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    assert torch.allclose(chosen.float(), plain.float(), rtol=0, atol=tolerance)


def test_a_wrong_kernel_of_the_users_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_is_right", lambda kind, dtype: dtype is not torch.bfloat16)
    full, half = (nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in DTYPES)
    refuse_wrong_kernels(torch.optim.SGD([full, half], lr=0.1))
    refuse_wrong_kernels(torch.optim.SGD([full], lr=0.1, fused=True))
    with pytest.raises(ConfigError, match=r"SGD with parameters of torch.bfloat16.*fused=False"):
        refuse_wrong_kernels(torch.optim.SGD([full, half], lr=0.1, fused=True))
