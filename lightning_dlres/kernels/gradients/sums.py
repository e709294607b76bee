"""Statistics of a whole gradient, with the same bits from a CPU and a GPU.

A sum in floating point depends on its order. Here each block has 256 partial sums: lane i adds the
elements i, i + 256, ... in order. Then the second half of the lanes is added to the first one until
one number is left. The sums of the blocks are added in the same way, in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dlres.kernels.gradients.layout import blocks, double_array, float_array, run


def moments(values: Tensor, pivot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest magnitude and two sums of a gradient, without waiting for a GPU.

    Args:
        values: float32[n], contiguous.
        pivot: float32[1] on the same device: a number near the values. The variance of values that
            differ little then loses no digits.

    Returns:
        Largest magnitude (float32; NaN if a value is not finite), sum of the differences from
        `pivot`, and sum of their squares (float64), each a tensor without dimensions. The sums
        leave out values that are not finite.
    """
    count, device = values.numel(), values.device
    largest = torch.zeros(blocks(count), device=device)
    sums = torch.zeros(blocks(count), 2, dtype=torch.float64, device=device)
    result = torch.zeros(2, dtype=torch.float64, device=device)
    if not count:
        return torch.zeros((), device=device), result[0], result[1]
    if values.is_cuda:
        from lightning_dlres.kernels.gradients import sums_cuda

        sums_cuda.moments(values, largest, sums, pivot)
        sums_cuda.totals(sums, result)
    else:
        from lightning_dlres.kernels.gradients import sums_cpu

        run(
            sums_cpu.moments,
            count,
            bits=1,  # Unused: the kernel has no codes.
            elements=[float_array(values)],
            per_block=[float_array(largest), double_array(sums)],
            options=[float(pivot)],
        )
        sums_cpu.totals(double_array(sums), double_array(result))
    return largest.amax(), result[0], result[1]
