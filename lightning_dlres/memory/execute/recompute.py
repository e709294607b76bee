"""Recomputation: modules that run again in backward instead of saving their intermediate tensors.

`torch.utils.checkpoint` does the work. This module patches it around a module's forward and removes
it again, so that the module's class, state dict keys and hooks stay the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from lightning_dlres.core._compat import is_transforming, version_of
from lightning_dlres.memory.execute.bitwise_check import BitwiseCheck
from lightning_dlres.memory.execute.call_tracker import CallTracker
from lightning_dlres.memory.execute.shallow_copies import unpatch_copies
from lightning_dlres.memory.execute.side_effects import PLAIN, checksum, tensors_in

# Callback that gets True if a recomputed output has the same bits as the first one.
ReportMatch = Callable[[bool], None]
# Parameters and buffers of a module, each with its version: the number of in-place changes.
Weights = list[tuple[Tensor, int]]

# Types of arguments that cannot be changed.
_IMMUTABLE = (*PLAIN, torch.dtype, torch.device, torch.Size)


def has_repeatable_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a module that runs again can be given the same arguments.

    Checkpoint restores the values of positional tensors, but neither subclasses of `Tensor` nor
    attributes of a tensor. Other mutable objects may have changed by then.
    """
    return all(isinstance(value, _IMMUTABLE) for value in kwargs.values()) and all(
        not vars(value) if type(value) is Tensor else isinstance(value, _IMMUTABLE)
        for value in args
    )


class RecomputingForward:
    """Forward of a module that runs again in backward.

    A copy of the module, or an unpickled one, gets a forward of its own, without `report`.

    Args:
        module: Module whose forward it replaces.
        tracker: Tracker of the modules that each thread is calling; it finds copies of a module.
        report: Gets True if a second run gives the same bits. Such a check uses the first output
            and saves no memory. None: recompute without a check.
    """

    def __init__(
        self, module: nn.Module, tracker: CallTracker, report: ReportMatch | None = None
    ) -> None:
        self.module, self.tracker, self.report = module, tracker, report
        # Forward that other code patched in earlier; None: the forward of the class.
        self.previous_forward = module.__dict__.get("forward")
        # Identities of the module's own weights. During `functional_call`, forward uses other
        # weights, but a second run in backward would use the module's own.
        self._weights = [id(tensor) for tensor, _ in _weights_of(module)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.tracker.copy_of(self.module, self) or self.module
        forward = self.previous_forward or partial(type(module).forward, module)
        # A transform (vmap, grad) has ended by the time of backward, and its tensors are invalid.
        if (
            torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or is_transforming()
            or not has_repeatable_arguments(args, kwargs)
        ):
            return forward(*args, **kwargs)
        weights = _weights_of(module)
        if module is self.module and [id(tensor) for tensor, _ in weights] != self._weights:
            return forward(*args, **kwargs)
        distinct, indices = _distinct(args)

        def run(*tensors: Any) -> Any:
            _require_unchanged(module, weights)
            return forward(*(tensors[index] for index in indices), **kwargs)

        if self.report is not None:
            return _run_checked(run, distinct, self.report)
        return checkpoint(run, *distinct, use_reentrant=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "report": None}


def _weights_of(module: nn.Module) -> Weights:
    tensors = (*module.parameters(), *module.buffers())
    return [(tensor, -1 if tensor.is_inference() else version_of(tensor)) for tensor in tensors]


def _require_unchanged(module: nn.Module, weights: Weights) -> None:
    """Check that a module runs again with the weights of its forward.

    Raises:
        RuntimeError: If a parameter or buffer was replaced, or changed in place.
    """
    current = _weights_of(module)
    if len(current) == len(weights) and all(
        one is other and before == after
        for (one, before), (other, after) in zip(weights, current, strict=True)
    ):
        return
    raise RuntimeError(
        f"the parameters and buffers of {type(module).__name__} must not change between forward "
        "and backward, as it is recomputed in backward. Run backward before the optimizer step, or "
        "remove 'recompute' from actions."
    )


def _distinct(args: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the arguments without repetition, and the index of each argument among them.

    Checkpoint restores each saved tensor as a tensor of its own. A module may depend on two inputs
    being one tensor: `nn.MultiheadAttention` computes self-attention in another way.
    """
    index_of: dict[int, int] = {}
    distinct: list[Any] = []
    for argument in args:
        if id(argument) not in index_of:
            index_of[id(argument)] = len(distinct)
            distinct.append(argument)
    return distinct, [index_of[id(argument)] for argument in args]


def _run_checked(run: Callable[..., Any], args: Sequence[Any], report: ReportMatch) -> Any:
    """Return a function's output, and report in backward whether a second run gives the same."""
    global_state = _GlobalState(args)
    # Checkpoint gives the second run new tensor objects, so the checked run must get them, too.
    inputs = _SavedArguments(args)
    output = run(*args)
    expected, is_reported = _checksums(output), False

    def compare(gradient: Tensor) -> None:
        nonlocal is_reported
        if not is_reported:
            is_reported = True
            for handle in handles:
                handle.remove()
            with global_state.restored():
                try:
                    recomputed = _checksums(run(*inputs.take()))
                except Exception:
                    # The inputs no longer exist: the module cannot be recomputed.
                    recomputed = None
            report(recomputed == expected)

    # A leaf gets no hook: it outlives the step, and so would the hook.
    inner = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    handles = [tensor.register_hook(compare) for tensor in inner]
    return output


class _SavedArguments:
    """Arguments of a forward, whose tensors autograd saves until they are taken."""

    def __init__(self, args: Sequence[Any]) -> None:
        self._args = [None if isinstance(value, Tensor) else value for value in args]
        self._indices = [index for index, value in enumerate(args) if isinstance(value, Tensor)]
        tensors = [args[index] for index in self._indices]
        leaf = torch.empty(0, requires_grad=True)
        # These hooks hide the tensors from the engine: this step is compared, not measured.
        with saved_tensors_hooks(Tensor.detach, _identity):
            saved = _Save.apply(leaf, *tensors)  # type: ignore[no-untyped-call]
        self._node: Any = saved.grad_fn

    def take(self) -> list[Any]:
        """Return the arguments, and release them. Can be called once."""
        args, node, self._node = list(self._args), self._node, None
        for index, tensor in zip(self._indices, node.saved_tensors, strict=True):
            args[index] = tensor
        return args


class _Save(torch.autograd.Function):
    """Autograd function that saves tensors and computes nothing."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return leaf.new_empty(0)


def _checksums(output: Any) -> list[Any]:
    return [checksum(tensor) for tensor in tensors_in(output)]


class _GlobalState:
    """Global state that checkpoint restores for a second run: random generators and autocast."""

    def __init__(self, args: Sequence[Any]) -> None:
        self._random = torch.get_rng_state()
        self._devices, self._states = get_device_states(*args)
        device_types = {"cpu", *(tensor.device.type for tensor in tensors_in(args))}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(device_types)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices))
            torch.set_rng_state(self._random)
            set_device_states(self._devices, self._states)
            for kind, dtype, is_enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, is_enabled))
            stack.enter_context(torch.enable_grad())
            # These hooks hide this run from the engine. They save aliases: an operation that saves
            # its output itself would form a cycle of output and node, which is never freed.
            stack.enter_context(saved_tensors_hooks(Tensor.detach, _identity))
            yield


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def patch_recompute(
    root: nn.Module,
    names: Iterable[str],
    tracker: CallTracker | None = None,
    bitwise_check: BitwiseCheck | None = None,
) -> Iterator[None]:
    """Context manager that makes modules run again in backward.

    Args:
        root: Model.
        names: Paths of the modules below the root.
        tracker: Tracker of the modules that each thread is calling; it finds copies of a module.
        bitwise_check: Receives the comparison of both runs; None: no comparison.
    """
    patched = []
    for name in names:
        module = root.get_submodule(name)
        report = None if bitwise_check is None else partial(bitwise_check.record, name)
        forward = RecomputingForward(module, tracker or CallTracker(), report)
        module.forward = forward
        patched.append((module, forward))
    try:
        yield
    finally:
        references = [weakref.ref(forward) for _, forward in patched]
        while patched:
            module, forward = patched.pop()
            # Leave a forward alone that other code has put in the place of this one.
            if module.__dict__.get("forward") is forward:
                if forward.previous_forward is None:
                    del module.forward
                else:
                    module.forward = forward.previous_forward
            del forward
        unpatch_copies(references, lambda forward: forward.previous_forward)
