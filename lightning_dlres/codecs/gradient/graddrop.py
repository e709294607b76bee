"""Gradient dropping: only the largest elements are sent, the rest stays in the residual.

Aji and Heafield, "Sparse communication for distributed gradient descent", 2017. Each gradient has a
threshold of its own; on a CPU, that of a large gradient is estimated from a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.base import register
from lightning_dlres.codecs.gradient import sparse
from lightning_dlres.codecs.gradient.base import RESIDUAL, State


@register
class GradDrop(sparse.SparseCodec):
    """Codec with 8 bytes for each element that is sent.

    Args:
        ratio: Share of the elements that are sent.

    Raises:
        ConfigError: If the ratio is not in (0, 1].
    """

    name = "graddrop"

    def __init__(self, *, ratio: float = 0.01) -> None:
        self.ratio = sparse.check_ratio(ratio)

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        if not values.numel():
            return
        residual = state[RESIDUAL]
        exact = torch.add(residual, values, alpha=scale)
        is_finite = exact.isfinite().all()
        indices = sparse.largest(exact, sparse.entries(values.numel(), self.ratio))
        sparse.write(payload, exact[indices], indices, is_finite)
        exact.index_fill_(0, indices, 0)
        torch.where(is_finite, exact, residual, out=residual)
