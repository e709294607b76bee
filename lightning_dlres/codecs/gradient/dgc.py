"""Deep gradient compression: sparse gradients with momentum correction, clipping, factor masking
and warm-up (Lin, Han, Mao, Wang and Dally, 2018).

Each rank accumulates momentum of its own gradient before it selects the largest elements. So pass
`momentum` to this codec, and none to the optimizer: use SGD with its default momentum of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.base import register
from lightning_dlres.codecs.gradient import sparse
from lightning_dlres.codecs.gradient.base import RESIDUAL, GradientCodec, State
from lightning_dlres.core.checks import finite, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.kernels.gradients import sums

_MOMENTUM = "momentum"
# Share of the elements that are sent in the first part of the warm-up. Each of the later parts
# sends a quarter of the one before.
_FIRST_RATIO, _FALL = 0.25, 4


@register
class DGC(sparse.SparseCodec):
    """Codec with 8 bytes for each element that is sent.

    Args:
        ratio: Share of the elements that are sent after the warm-up.
        momentum: Factor of the momentum that each rank accumulates; 0 for none.
        clip: Norm at which each rank clips a gradient before it accumulates it. The paper takes the
            norm of single-device training, divided by the square root of the number of ranks. None
            does not clip.
        warmup_steps: Steps over which the share falls from a quarter to `ratio`.

    Raises:
        ConfigError: If an argument is out of its range.
    """

    name = "dgc"
    suits_adam = False
    # Clipping needs a sum of squares with the same bits on a GPU as on a CPU.
    uses_kernels = True

    def __init__(
        self,
        *,
        ratio: float = 0.001,
        momentum: float = 0.0,
        clip: float | None = None,
        warmup_steps: int = 0,
    ) -> None:
        self.ratio = sparse.check_ratio(ratio)
        if not 0 <= finite("momentum", momentum, "momentum=0.9") < 1:
            raise ConfigError(got_expected("momentum", momentum, "in [0, 1)", "momentum=0.9"))
        self.momentum = momentum
        self.clip = clip if clip is None else finite("clip", clip, "clip=None", above=True)
        self.warmup_steps = whole_number("warmup_steps", warmup_steps, "warmup_steps=0", least=0)

    @property
    @override
    def transforms_gradient(self) -> bool:
        return bool(self.momentum) or self.clip is not None

    @override
    def at_step(self, step: int) -> GradientCodec:
        ratio = self.ratio
        if step < self.warmup_steps:
            parts = 1
            while _FIRST_RATIO / _FALL**parts > self.ratio:
                parts += 1
            ratio = max(_FIRST_RATIO / _FALL ** (step * parts // self.warmup_steps), self.ratio)
        return DGC(ratio=ratio, momentum=self.momentum, clip=self.clip)

    @override
    def new_state(self, count: int, device: torch.device, *, is_aggregator: bool = False) -> State:
        state = super().new_state(count, device, is_aggregator=is_aggregator)
        # The sum of all ranks has no momentum, and is not clipped: only the state of a rank's own
        # gradient has this entry.
        if not is_aggregator and self.transforms_gradient:
            state[_MOMENTUM] = torch.zeros(count, device=device)
        return state

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        if not values.numel():
            return
        gradient = values * scale
        is_finite = gradient.isfinite().all()
        if not gradient.is_cuda and not is_finite:
            sparse.write_not_finite(payload)
            return
        residual, momentum = state[RESIDUAL], state.get(_MOMENTUM)
        if self.clip is not None and momentum is not None:
            _, _, squares = sums.moments(gradient, gradient.new_zeros(1))
            gradient.mul_((self.clip / squares.sqrt().to(torch.float32)).clamp(max=1.0))
        # A GPU changes copies, which replace the state if the gradient is finite. A branch would
        # wait for the GPU.
        total = residual.clone() if gradient.is_cuda else residual
        velocity = momentum
        if momentum is not None:
            velocity = momentum.clone() if gradient.is_cuda else momentum
            gradient = velocity.mul_(self.momentum).add_(gradient)
        total.add_(gradient)
        indices = sparse.largest(total, sparse.entries(values.numel(), self.ratio))
        sparse.write(payload, total[indices], indices, is_finite)
        total.index_fill_(0, indices, 0)
        if velocity is not None:
            # Factor masking: stale momentum must not act again on what was sent.
            velocity.index_fill_(0, indices, 0)
        if gradient.is_cuda:
            torch.where(is_finite, total, residual, out=residual)
            if momentum is not None and velocity is not None:
                torch.where(is_finite, velocity, momentum, out=momentum)
