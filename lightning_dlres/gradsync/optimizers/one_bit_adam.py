"""1-bit Adam: AdamW whose momentum is synchronised compressed once its variance is frozen.

Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang and He, "1-bit Adam: communication efficient
large-scale training with Adam's convergence speed", 2021. Adam is not linear in the gradient, so
error feedback cannot make up for the error of a compressed gradient. With a frozen variance, Adam
is momentum SGD with a fixed preconditioner, and linear again.

The published form compresses the momentum, and then divides it by the root of the variance. One-bit
codes have one magnitude per sign and block. The division would blow up their error in elements of
small variance, and training can diverge. Here each rank divides its gradient first. The root is
fixed and equal on all ranks, so the mean is the same, and error feedback works as before. All
elements of the result are of similar size, and their errors, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw
from typing_extensions import override

from lightning_dlres.core.checks import finite, instance, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.gradsync.optimizers.momentum_sync import MomentumSync
from lightning_dlres.gradsync.optimizers.variance_freeze import FreezeRule

# Largest magnitude of a gradient for which float32 holds its square and a sum of momenta.
_LARGEST_GRADIENT = 2.0**63
_HISTORY = "variance_history"
# True in the state of a parameter whose variance is frozen.
_FROZEN = "is_frozen"
# Key of its momentum, divided by the root of the variance.
_MOMENTUM = "scaled_momentum"

# Name of a parameter, the parameter, and its group.
_Entry = tuple[str, Tensor, dict[str, Any]]


class OneBitAdam(torch.optim.Optimizer):
    """AdamW for slow networks: the ranks exchange one bit per parameter after a warm-up.

    In the warm-up, gradients are averaged uncompressed, and each step is exactly that of
    `torch.optim.AdamW`. Then the variance is frozen. From there on, each rank updates the common
    momentum with its own gradient, divided by the root of the variance. The momenta are averaged
    with two-way error feedback, and all ranks hold the same momentum and the same parameters, bit
    for bit.

    Register the hook that averages gradients in the warm-up and keeps them local afterwards:

        model = DistributedDataParallel(module)
        optimizer = OneBitAdam(module.parameters(), lr=1e-3)
        model.register_comm_hook(optimizer.sync, momentum_hook)

    One process, or one rank, is never compressed: it trains as AdamW does, without an end of the
    warm-up.

    - Weight decay is decoupled, as AdamW's. It is not part of a gradient, so it is not compressed.
    - Clipping, as any use of `p.grad`, sees the mean gradient in the warm-up, and this rank's own
      gradient afterwards. The own gradient has more noise, so its norm is larger, and ranks clip by
      different factors. Clip rarely, or raise the threshold after the warm-up.
    - A step is skipped on all ranks if a gradient on any rank is NaN, infinite or above 2^63 in
      magnitude. No parameter, momentum or residual changes, and the optimizer does not count the
      step; a Trainer's `global_step` does. A warning says so once. This includes overflows that a
      `torch.amp.GradScaler` finds, also on one rank only; they cause no warning.
    - A parameter without a gradient (None) on all ranks is skipped. If only some ranks have one,
      it counts as zero on the others.
    - A parameter whose first gradient comes after the warm-up is trained as by AdamW, uncompressed.
    - Elements whose gradient was always zero in the warm-up have no variance, and they stay as they
      are afterwards, except for weight decay. A one-bit momentum is never zero and would move them.
    - The learning rate may follow any schedule. End its own warm-up before the variance is frozen.
    - In the state of a parameter after the warm-up, `exp_avg_sq` is the unbiased variance, and
      `scaled_momentum`, in the place of `exp_avg`, is the momentum divided by its root.

    A checkpoint needs `state_dict`, equal on all ranks, and `sync.state_dict` of each rank, which
    has what it has not sent yet. The state of a `torch.optim.AdamW` can be loaded, too: it goes on
    with the warm-up. AdamW can go on from a state of the warm-up; with a later one its step raises
    KeyError. After a PeerError, the momentum is undefined: continue from a checkpoint. Call
    `sync.close()` after the training.

    Args:
        params: Parameters, named parameters or groups of them, as for any optimizer.
        lr: Learning rate.
        betas: Decay rates of momentum and variance.
        eps: Added to the root of the variance.
        weight_decay: Decoupled weight decay.
        freeze_step: Number of steps of the warm-up. "auto" ends it when the norm of the variance
            changes by less than 4 % in 1 / (1 - beta2) steps.
        sync: Synchronisation of the momentum; None: one bit per parameter.

    Attributes:
        sync: Synchronisation of the momentum, which is also the state of `momentum_hook`.

    Raises:
        ConfigError: If an argument has a bad value.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | Literal["auto"] = "auto",
        sync: MomentumSync | None = None,
    ) -> None:
        finite("lr", lr, "lr=1e-3")
        finite("eps", eps, "eps=1e-8")
        finite("weight_decay", weight_decay, "weight_decay=0.01")
        if freeze_step != "auto":
            whole_number("freeze_step", freeze_step, "freeze_step='auto'")
        if sync is not None:
            instance("sync", sync, (MomentumSync,), "a MomentumSync or None", "MomentumSync()")
        self.sync = MomentumSync() if sync is None else sync
        self._steps, self._has_skipped, self._warns_of_hook = 0, False, True
        defaults = {"lr": lr, "betas": _betas(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.sync.note_options(freeze_step=freeze_step)
        self._rule = FreezeRule(freeze_step, max(g["betas"][1] for g in self.param_groups))

    @property
    def is_frozen(self) -> bool:
        """True after the warm-up."""
        return any(_FROZEN in state for state in self.state.values())

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.dtype.is_floating_point:
                self.param_groups.pop()
                rule = "tensors of a floating-point dtype"
                raise ConfigError(got_expected("params", parameter.dtype, rule, "torch.float32"))

    @torch.no_grad()
    @override
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update the parameters; all ranks call it together.

        Args:
            closure: Computes the loss and the gradients, and returns the loss.

        Raises:
            ConfigError: If a gradient is sparse, or `sync` synchronises another optimizer.
            PeerError: If a rank is lost or late after the warm-up.
        """
        self.sync.require_owner(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        entries = list(self._entries())
        is_usable = self._unscale([p.grad for _, p, _ in entries if p.grad is not None])
        frozen = [entry for entry in entries if _FROZEN in self.state.get(entry[1], {})]
        if frozen:
            has_gradient = [parameter.grad is not None for _, parameter, _ in frozen]
            is_unusable, *has_gradient = self.sync.begin_step([not is_usable, *has_gradient])
            is_usable = not is_unusable
            frozen = [entry for entry, has in zip(frozen, has_gradient, strict=True) if has]
        if not is_usable:
            self._note_skipped_step()
            return loss
        self._step_uncompressed()
        self._step_frozen(frozen)
        self._steps += 1
        if not self.is_frozen and self.sync.world_size > 1 and self._is_last_of_warm_up():
            self._freeze()
        if self._warns_of_hook and self.is_frozen and self.sync.world_size > 1:
            self._warns_of_hook = False
            if not self.sync.has_hook:
                warnings.warn(
                    "OneBitAdam has ended its warm-up, and gradients are still averaged without "
                    "compression, because its hook has not run. Call "
                    "`model.register_comm_hook(optimizer.sync, momentum_hook)`.",
                    stacklevel=2,
                )
        return loss

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, equal on all ranks; see also `sync.state_dict`."""
        history = {"steps": self._steps, "norms": list(self._rule.norms)}
        return {**super().state_dict(), _HISTORY: history}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the state of a OneBitAdam or a `torch.optim.AdamW`.

        What has not been sent is forgotten; see `sync.load_state_dicts`. After the warm-up, all
        ranks call this method together.
        """
        self.sync.release()
        super().load_state_dict(dict(state_dict))
        steps = [int(state["step"]) for state in self.state.values()]
        history = state_dict.get(_HISTORY, {"steps": max(steps, default=0), "norms": []})
        self._steps = history["steps"]
        self._rule.restore(history["norms"])
        self.sync.take_over(self._frozen_parameters(), self)

    def _entries(self) -> Iterator[_Entry]:
        """Yield all parameters with names that are equal on all ranks."""
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                # Names of the user need not be unique.
                yield f"parameter {index}", parameter, group
                index += 1

    def _frozen_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter, _ in self._entries():
            if _FROZEN in self.state.get(parameter, {}):
                yield name, parameter

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if a gradient scaler shall call `step` after an overflow, too.

        It then sets the attributes of `_unscale`. Otherwise a rank whose gradient the user's code
        has made infinite would not call it, while the others wait for this rank. A Trainer clips no
        gradients of an optimizer with this attribute.
        """
        return not self.sync.is_attached

    def _unscale(self, gradients: Sequence[Tensor]) -> bool:
        """Remove a gradient scaler's factor; return False if the gradients are not usable."""
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise ConfigError(
                "gradients must be dense for OneBitAdam, got a sparse one. "
                "Use torch.nn.Embedding(sparse=False)."
            )
        overflows, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if overflows is not None:
            # Later overflows are found on all ranks.
            self.sync.shares_overflows = True
        if overflows is not None and overflows > 0:
            return False
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(1 / scale.to(gradient.device))
        filled = [gradient for gradient in gradients if gradient.numel()]
        # NaN makes the comparison false.
        return float(get_total_norm(filled, math.inf)) <= _LARGEST_GRADIENT

    def _note_skipped_step(self) -> None:
        if self._has_skipped or getattr(self, "found_inf", None) is not None:
            return
        self._has_skipped = True
        warnings.warn(
            "OneBitAdam has skipped a step, because a gradient is NaN, infinite or above 2^63 in "
            "magnitude on some rank. Later ones are skipped without a warning: watch the loss.",
            stacklevel=3,
        )

    def _step_uncompressed(self) -> None:
        """Update the parameters whose variance is not frozen, as AdamW does."""
        for group in self.param_groups:
            parameters = [
                parameter
                for parameter in group["params"]
                if parameter.grad is not None and _FROZEN not in self.state.get(parameter, {})
            ]
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0, dtype=torch.float32)
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key] = torch.zeros_like(
                            parameter, memory_format=torch.preserve_format
                        )
            states = [self.state[parameter] for parameter in parameters]
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _step_frozen(self, entries: Sequence[_Entry]) -> None:
        """Synchronise the momenta of parameters, and update these."""
        momenta = {}
        for name, parameter, group in entries:
            state, beta1 = self.state[parameter], group["betas"][0]
            momentum = state[_MOMENTUM]
            # Bits below those of a 16-bit dtype would be lost outside of any residual.
            values = momentum if momentum.element_size() >= 4 else momentum.to(torch.float32)
            values.mul_(beta1)
            if parameter.grad is not None:
                root = _root(state, group).to(values)
                values.addcdiv_(parameter.grad.to(values), root, value=1 - beta1)
            momenta[name] = values.reshape(-1)
        self.sync.average(momenta)
        for name, parameter, group in entries:
            state, beta1 = self.state[parameter], group["betas"][0]
            momentum = state[_MOMENTUM]
            values = momenta[name].view(momentum.shape)
            # Elements without a variance stay: a one-bit momentum is never zero.
            values.masked_fill_(state["exp_avg_sq"].isinf(), 0.0)
            if values.data_ptr() != momentum.data_ptr():
                momentum.copy_(values)
            state["step"] += 1
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(values, alpha=-group["lr"] / (1 - beta1 ** float(state["step"])))

    def _is_last_of_warm_up(self) -> bool:
        """Return True if the variance is to be frozen now; the same on all ranks."""
        if not self.state:
            return False
        if not self._rule.needs_norm(self._steps):
            return self._rule.is_last(self._steps)
        norms = [state["exp_avg_sq"].sum(dtype=torch.float32) for state in self.state.values()]
        is_stable = self._rule.add(math.fsum(map(float, norms)))
        # Processors of different kinds may round the norm differently.
        return self.sync.agree(is_stable)

    def _freeze(self) -> None:
        """End the warm-up: keep the unbiased variance, and divide the momentum by its root."""
        self.sync.require_same([parameter for _, parameter, _ in self._entries()])
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if not state:
                    continue
                variance = state["exp_avg_sq"]
                variance.div_(1 - group["betas"][1] ** float(state["step"]))
                # Nothing is known about these elements. An infinite variance stops them.
                variance.masked_fill_(variance == 0, math.inf)
                # Under another name: AdamW must not take it for a momentum.
                state[_MOMENTUM] = state.pop("exp_avg").div_(_root(state, group))
                state[_FROZEN] = True
        self.sync.take_over(self._frozen_parameters(), self)


def _root(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """Return the root of the frozen variance, by which momenta are divided."""
    return state["exp_avg_sq"].sqrt().add_(group["eps"])


def _betas(betas: tuple[float, float]) -> tuple[float, float]:
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not is_pair or any(
        isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta < 1
        for beta in betas
    ):
        raise ConfigError(
            got_expected("betas", betas, "two numbers of at least 0 and below 1", "(0.9, 0.999)")
        )
    return betas[0], betas[1]
