"""Threshold quantisation to 2 bits: each element is sent as +threshold, -threshold or nothing.

The rest stays in the residual (Strom, "Scalable distributed DNN training using commodity GPU cloud
computing", 2015; MXNet's 2-bit compression). With `threshold="auto"`, the threshold follows the
mean magnitude of gradient plus residual.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.base import register
from lightning_dlres.codecs.gradient.base import RESIDUAL, GradientCodec, State
from lightning_dlres.core.checks import finite
from lightning_dlres.kernels.gradients import threshold

# The threshold of "auto", as a multiple of the mean magnitude.
_AUTO_MULTIPLE = 1.5
_THRESHOLD = "threshold"


@register
class ThresholdQuantisation(GradientCodec):
    """Codec with codes of 2 bits; a payload has the threshold and the codes.

    Args:
        threshold: Magnitude of what is sent, in units of the gradient; "auto" adapts it.

    Raises:
        ConfigError: If the threshold is not positive.
    """

    name = "tbq"
    suits_adam = False
    uses_kernels = True

    def __init__(self, *, threshold: float | Literal["auto"] = "auto") -> None:
        if threshold != "auto":
            finite("threshold", threshold, "threshold='auto'", above=True)
        self.threshold = threshold

    @override
    def payload_bytes(self, count: int) -> int:
        return threshold.payload_bytes(count)

    @override
    def new_state(self, count: int, device: torch.device, *, is_aggregator: bool = False) -> State:
        state = super().new_state(count, device, is_aggregator=is_aggregator)
        if self.threshold == "auto":
            # Zero: the first step has not chosen one yet.
            state[_THRESHOLD] = torch.zeros(1, device=device)
        return state

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        residual = state[RESIDUAL]
        if self.threshold != "auto":
            chosen = torch.full((1,), self.threshold, device=values.device)
            threshold.encode(values, residual, payload, chosen, scale)
            return
        threshold.encode(values, residual, payload, state[_THRESHOLD], scale, _AUTO_MULTIPLE)

    @override
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        threshold.decode(payload, out, scale, accumulate)
