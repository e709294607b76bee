"""Operations of torch: what their results depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

# Operations whose result is no tensor and depends on the metadata of tensors only.
METADATA = frozenset(
    {
        *("shape", "size", "dim", "ndim", "ndimension", "dtype", "device", "layout", "is_cuda"),
        *("numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size"),
        *("itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn", "is_floating_point"),
        *("is_complex", "is_sparse", "is_quantized", "is_meta", "is_mps", "is_xpu", "is_cpu"),
        *("__len__", "names", "get_device", "type", "is_nested", "is_inference", "is_mkldnn"),
        *("finfo", "iinfo", "result_type", "can_cast", "is_tensor", "is_conj", "is_neg"),
        *("broadcast_shapes", "__hash__", "__dir__", "is_signed", "_version", "retains_grad"),
        *("untyped_storage", "storage", "data_ptr", "is_shared", "is_pinned"),
    }
)

# Methods that are named like in-place operations and change no values.
_SETTINGS = ("requires_grad_", "detach_", "share_memory_")
# Operators of augmented assignment.
_AUGMENTED = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
)
# Hooks act where a tensor's gradient is summed, and a tensor that crosses is on two stages.
TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def is_metadata(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if an operation reads the metadata of tensors only, and is no part of a trace.

    Code of libraries may read it in one run and not in another.
    """
    makes_tensor = name == "type" and len(args) + len(kwargs) > 1
    return name in METADATA and not makes_tensor


def operation_name(function: Any) -> str:
    """Return the name of a function of torch; that of the property for a getter."""
    name = getattr(function, "__name__", "?")
    if name in ("__get__", "__set__"):
        return getattr(getattr(function, "__self__", None), "__name__", name)
    return name


def written_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that an operation changes in place, as its name tells.

    Args:
        name: Name of the operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    is_method = name.endswith("_") and not name.endswith("__") and name not in _SETTINGS
    if is_method or name == "__setitem__" or name in _AUGMENTED:
        # Functions of torch.nn.init pass all on by name.
        return args[:1] or tuple(kwargs.values())
    return (kwargs["out"],) if kwargs.get("out") is not None else ()


def is_decision(function: Any, name: str, arguments: Any, outputs: Any) -> bool:
    """Return True if an operation returns no tensor, but reads values of tensors."""
    # `tensor.data += 1` ends with an assignment to `data`.
    is_write = function is Tensor.__setitem__ or getattr(function, "__name__", "") == "__set__"
    is_write = is_write or name == "_assert"
    return bool(arguments) and not outputs and not is_write


def plain(result: Any) -> Any:
    """Return a result if it is plain data that can be compared and sent, else None."""
    return result if isinstance(result, (bool, int, float, str)) else None


def fingerprint_of(names: Iterable[str]) -> str:
    """Return a fingerprint of operations in their order, given their names."""
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
