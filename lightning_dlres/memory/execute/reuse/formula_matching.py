"""Which modules can write their input's gradient into their input's memory, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_dlres.core._compat import is_transforming, is_view
from lightning_dlres.memory.execute.reuse.activations import Gelu, Silu
from lightning_dlres.memory.execute.reuse.dense import Convolution, Linear
from lightning_dlres.memory.execute.reuse.formula import Formula, Params
from lightning_dlres.memory.execute.reuse.norms import BatchNorm, GroupNorm, LayerNorm


@dataclass(frozen=True)
class Fit:
    """How a module's call is computed.

    Attributes:
        formula: what is computed; None: a ReLU that saves signs.
        x: the input.
        params: of the module.
        dtype: what autocast makes of both before; None: they stay as they are.
    """

    formula: Formula | None
    x: Tensor
    params: Params = ()
    dtype: torch.dtype | None = None

    def tensors(self) -> tuple[Tensor, Params]:
        """Return the input and the parameters as the formula gets them."""
        if self.dtype is None:
            return self.x, self.params
        params = tuple(None if p is None else p.to(self.dtype) for p in self.params)
        return self.x.to(self.dtype), params

    @property
    def nbytes(self) -> int:
        """Return the size of the input as the formula gets it."""
        return self.x.numel() * (self.dtype or self.x.dtype).itemsize

    @property
    def spare(self) -> int:
        """Return how many bytes of the input's gradient need no memory beside the input's."""
        if self.formula is None:
            return 0
        return self.formula.spare(self.x) * self.nbytes // self.x.nbytes


def is_relu(module: nn.Module) -> bool:
    """Return whether a module is a ReLU, whose signs can be saved."""
    return type(module) is nn.ReLU


def fit_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Fit | None:
    """Return how a call of a module is computed; None where that is not possible, and it has to run
    as it is."""
    maker = _MAKERS.get(type(module))
    if maker is None or len(args) != 1 or kwargs or not torch.is_grad_enabled():
        return None
    # A transform's and a forward derivative's tensors have no formula here.
    is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if is_tracing or torch.compiler.is_compiling() or is_transforming():
        return None
    x = args[0]
    if type(x) is not Tensor or not _is_dense(x):
        return None
    found = maker(module, x)
    if found is None:
        return None
    tensors = [tensor for tensor in (found.x, *found.params) if tensor is not None]
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return None
    dtypes = {tensor.dtype for tensor in tensors}
    if not (dtypes <= _LOWERED if found.dtype is not None else len(dtypes) == 1):
        return None
    return found


def _is_dense(x: Tensor) -> bool:
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


def _dtype(x: Tensor) -> torch.dtype | None:
    """Return what autocast makes of a matrix product's and a convolution's tensors."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _can_lower(x: Tensor) -> bool:
    """Return whether autocast does what `Fit.tensors` does: with its cache, a weight that several
    layers share is cast once, and its gradients are added up before they are cast back."""
    return not (_is_autocast(x) and torch.is_autocast_cache_enabled())


def _is_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def _linear(module: Any, x: Tensor) -> Fit | None:
    if not x.is_contiguous() or x.dim() < 2 or x.shape[-1] != module.in_features:
        return None
    if not _can_lower(x) or not module.weight.requires_grad:
        return None
    return Fit(Linear(), x, (module.weight, module.bias), _dtype(x))


def _convolution(module: Any, x: Tensor) -> Fit | None:
    dims = len(module.kernel_size)
    if module.padding_mode != "zeros" or x.dim() != dims + 2 or len(x) < 2:
        return None
    if x.shape[1] != module.in_channels:
        return None
    if not _can_lower(x) or not module.weight.requires_grad:
        return None
    padding = module.padding
    if padding == "valid":
        padding = (0,) * dims
    elif padding == "same":
        both = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if any(size % 2 for size in both):
            return None
        padding = tuple(size // 2 for size in both)
    formula = Convolution(module.stride, padding, module.dilation, module.groups)
    return Fit(formula, x, (module.weight, module.bias), _dtype(x))


def _layer_norm(module: Any, x: Tensor) -> Fit | None:
    shape = tuple(module.normalized_shape)
    if _is_autocast(x) or not x.is_contiguous() or tuple(x.shape[-len(shape) :]) != shape:
        return None
    if x.dim() == len(shape):
        return None
    return Fit(LayerNorm(shape, module.eps), x, (module.weight, module.bias))


def _group_norm(module: Any, x: Tensor) -> Fit | None:
    if _is_autocast(x) or not x.is_contiguous() or x.dim() < 2 or len(x) < 2:
        return None
    if x.shape[1] != module.num_channels or x.numel() // len(x) == module.num_groups:
        return None
    return Fit(GroupNorm(module.num_groups, module.eps), x, (module.weight, module.bias))


def _batch_norm(module: Any, x: Tensor) -> Fit | None:
    fits = x.dim() in _BATCH_NORMS[type(module)] and x.shape[1] == module.num_features
    if not fits or _is_autocast(x) or not x.is_contiguous() or x.numel() <= x.shape[1]:
        return None
    # cuDNN keeps what only its own backward can read, for all channels at a time.
    if x.device.type == "cuda" and torch.backends.cudnn.enabled:
        return None
    mean, variance = module.running_mean, module.running_var
    if (mean is None) != (variance is None):
        return None
    uses_batch = module.training or mean is None
    keeps = not module.training or module.track_running_stats
    momentum = 0.0 if module.momentum is None else module.momentum
    batches = module.num_batches_tracked if module.training and keeps else None
    if module.momentum is None and batches is not None:
        momentum = 1.0 / float(batches + 1)
    running = (mean, variance) if keeps else (None, None)
    formula = BatchNorm(running, uses_batch, momentum, module.eps)
    return Fit(formula, x, (module.weight, module.bias))


def _gelu(module: Any, x: Tensor) -> Fit | None:
    return Fit(Gelu(module.approximate), x)


def _silu(module: Any, x: Tensor) -> Fit | None:
    return None if module.inplace else Fit(Silu(), x)


def _relu(module: Any, x: Tensor) -> Fit | None:
    # Autograd has rules of its own for views that are changed in place.
    return None if module.inplace and is_view(x) else Fit(None, x)


_LOWERED = {torch.float32, torch.float16, torch.bfloat16}
_BATCH_NORMS: dict[type, tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
}
_MAKERS: dict[type, Callable[[Any, Tensor], Fit | None]] = {
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
