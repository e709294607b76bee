"""Matching of module calls to formulas that can reuse the input's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_dlres.core._compat import is_transforming, is_view
from lightning_dlres.memory.execute.reuse.activations import GeluFormula, SiluFormula
from lightning_dlres.memory.execute.reuse.dense import ConvolutionFormula, LinearFormula
from lightning_dlres.memory.execute.reuse.formula import Formula, Params
from lightning_dlres.memory.execute.reuse.norms import (
    BatchNormFormula,
    GroupNormFormula,
    LayerNormFormula,
)


@dataclass(frozen=True)
class FormulaMatch:
    """Formula for one call of a module, with its arguments.

    Attributes:
        formula: Formula of the call; None: a ReLU that saves signs.
        x: Input.
        params: Parameters of the module.
        dtype: Dtype to which autocast casts input and parameters; None: they are not cast.
    """

    formula: Formula | None
    x: Tensor
    params: Params = ()
    dtype: torch.dtype | None = None

    def tensors(self) -> tuple[Tensor, Params]:
        """Return the input and the parameters as the formula gets them, cast if needed."""
        if self.dtype is None:
            return self.x, self.params
        params = tuple(None if p is None else p.to(self.dtype) for p in self.params)
        return self.x.to(self.dtype), params

    @property
    def nbytes(self) -> int:
        """Return the bytes of the input as the formula gets it."""
        return self.x.numel() * (self.dtype or self.x.dtype).itemsize

    @property
    def reusable_bytes(self) -> int:
        """Return the bytes of the input's gradient that fit into the input's memory."""
        if self.formula is None:
            return 0
        return self.formula.reusable_bytes(self.x) * self.nbytes // self.x.nbytes


def is_relu(module: nn.Module) -> bool:
    """Return whether a module is a ReLU, whose signs can be saved."""
    return type(module) is nn.ReLU


def match_formula(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> FormulaMatch | None:
    """Return the formula for a call of a module; None if the module's own forward has to run."""
    matcher = _MATCHERS.get(type(module))
    if matcher is None or len(args) != 1 or kwargs or not torch.is_grad_enabled():
        return None
    # Tensors of transforms (vmap, grad) and of forward derivatives are not supported.
    is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if is_tracing or torch.compiler.is_compiling() or is_transforming():
        return None
    x = args[0]
    if type(x) is not Tensor or not _is_reusable(x):
        return None
    match = matcher(module, x)
    if match is None:
        return None
    tensors = [tensor for tensor in (match.x, *match.params) if tensor is not None]
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return None
    dtypes = {tensor.dtype for tensor in tensors}
    if not (dtypes <= _CASTABLE if match.dtype is not None else len(dtypes) == 1):
        return None
    return match


def _is_reusable(x: Tensor) -> bool:
    """Return whether an input's memory can take the input's gradient.

    The input must need a gradient, must not be a leaf, and must fill its storage without gaps.
    """
    if x.layout is not torch.strided or x.is_nested or is_lazy(x) or not x.numel():
        return False
    if not (x.requires_grad and x.is_floating_point()) or x.is_leaf or x.is_neg():
        return False
    in_order = x.is_contiguous() or (
        x.dim() in (4, 5)
        and x.is_contiguous(
            memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        )
    )
    return (
        x.device.type in ("cpu", "cuda") and in_order and x.untyped_storage().nbytes() == x.nbytes
    )


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of matrix products under autocast; None without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _can_cast(x: Tensor) -> bool:
    """Return whether `FormulaMatch.tensors` gives the same gradients as autocast's own casts.

    With autocast's cache, a weight that several layers share is cast once. Autograd then sums its
    gradients before it casts them back, which rounds differently.
    """
    return not (_is_autocast(x) and torch.is_autocast_cache_enabled())


def _is_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


# The functions below leave some calls to the module's own forward, besides unsupported ones:
# - The weight is frozen: autograd then does not save the input, so no memory can be reused.
# - There is a single row or sample: formulas that compute in parts would then reuse no memory.
# - There is one value per channel or group. Torch refuses such calls in part.


def _linear(module: Any, x: Tensor) -> FormulaMatch | None:
    if not x.is_contiguous() or x.dim() < 2 or x.shape[-1] != module.in_features:
        return None
    if not _can_cast(x) or not module.weight.requires_grad:
        return None
    return FormulaMatch(LinearFormula(), x, (module.weight, module.bias), _autocast_dtype(x))


def _convolution(module: Any, x: Tensor) -> FormulaMatch | None:
    dims = len(module.kernel_size)
    if module.padding_mode != "zeros" or x.dim() != dims + 2 or len(x) < 2:
        return None
    if x.shape[1] != module.in_channels:
        return None
    if not _can_cast(x) or not module.weight.requires_grad:
        return None
    padding = module.padding
    if padding == "valid":
        padding = (0,) * dims
    elif padding == "same":
        total_padding = [
            d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)
        ]
        if any(size % 2 for size in total_padding):
            return None
        padding = tuple(size // 2 for size in total_padding)
    formula = ConvolutionFormula(module.stride, padding, module.dilation, module.groups)
    return FormulaMatch(formula, x, (module.weight, module.bias), _autocast_dtype(x))


def _layer_norm(module: Any, x: Tensor) -> FormulaMatch | None:
    shape = tuple(module.normalized_shape)
    if _is_autocast(x) or not x.is_contiguous() or tuple(x.shape[-len(shape) :]) != shape:
        return None
    if x.dim() == len(shape):
        return None
    return FormulaMatch(LayerNormFormula(shape, module.eps), x, (module.weight, module.bias))


def _group_norm(module: Any, x: Tensor) -> FormulaMatch | None:
    if _is_autocast(x) or not x.is_contiguous() or x.dim() < 2 or len(x) < 2:
        return None
    if x.shape[1] != module.num_channels or x.numel() // len(x) == module.num_groups:
        return None
    return FormulaMatch(
        GroupNormFormula(module.num_groups, module.eps), x, (module.weight, module.bias)
    )


def _batch_norm(module: Any, x: Tensor) -> FormulaMatch | None:
    has_valid_shape = x.dim() in _BATCH_NORMS[type(module)] and x.shape[1] == module.num_features
    if not has_valid_shape or _is_autocast(x) or not x.is_contiguous() or x.numel() <= x.shape[1]:
        return None
    # cuDNN saves statistics that only its own backward can read, for all channels together.
    if x.device.type == "cuda" and torch.backends.cudnn.enabled:
        return None
    mean, variance = module.running_mean, module.running_var
    if (mean is None) != (variance is None):
        return None
    uses_batch = module.training or mean is None
    uses_running_stats = not module.training or module.track_running_stats
    momentum = 0.0 if module.momentum is None else module.momentum
    batch_count = module.num_batches_tracked if module.training and uses_running_stats else None
    if module.momentum is None and batch_count is not None:
        momentum = 1.0 / float(batch_count + 1)
    running = (mean, variance) if uses_running_stats else (None, None)
    formula = BatchNormFormula(running, uses_batch, momentum, module.eps)
    return FormulaMatch(formula, x, (module.weight, module.bias))


def _gelu(module: Any, x: Tensor) -> FormulaMatch | None:
    return FormulaMatch(GeluFormula(module.approximate), x)


def _silu(module: Any, x: Tensor) -> FormulaMatch | None:
    return None if module.inplace else FormulaMatch(SiluFormula(), x)


def _relu(module: Any, x: Tensor) -> FormulaMatch | None:
    # Autograd tracks in-place changes of views. A custom function cannot take part in that.
    return None if module.inplace and is_view(x) else FormulaMatch(None, x)


# Dtypes that autocast casts to its own dtype.
_CASTABLE = {torch.float32, torch.float16, torch.bfloat16}
# Numbers of dimensions that the input of each batch normalisation may have.
_BATCH_NORMS: dict[type, tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
}
_MATCHERS: dict[type, Callable[[Any, Tensor], FormulaMatch | None]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.GELU: _gelu,
    nn.SiLU: _silu,
    nn.ReLU: _relu,
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
}
