"""Modules that run again in backward, in the place of what they would save.

torch's checkpoint does it; here it is put around a module's forward and taken off again, so that
its class, its state dict's keys and its hooks stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from lightning_dlres.core._compat import is_transforming, version_of
from lightning_dlres.memory.execute.bitwise_check import Audit
from lightning_dlres.memory.execute.calling import Calls
from lightning_dlres.memory.execute.side_effects import PLAIN, checksum, tensors_in

Report = Callable[[bool], None]
# The tensors that a forward computes with, and how often each was changed in place.
Weights = list[tuple[Tensor, int]]

# Arguments that nothing can change.
_PLAIN = (*PLAIN, torch.dtype, torch.device, torch.Size)


def comes_back(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a module that runs again gets the same arguments again.

    Tensors do by position only. Their values come back, but neither a subclass of `Tensor` nor
    attributes of one. Other objects may have changed by then.
    """
    return all(isinstance(value, _PLAIN) for value in kwargs.values()) and all(
        not vars(value) if type(value) is Tensor else isinstance(value, _PLAIN) for value in args
    )


class Again:
    """The forward of a module that may run again. A copy of the module, or an unpickled one, has
    one of its own.

    Args:
        module: whose forward it is.
        calls: knows which module is called.
        report: is told whether a run again yields what the first one did; None: nobody looks.
    """

    def __init__(self, module: nn.Module, calls: Calls, report: Report | None = None) -> None:
        self.module, self.calls, self.report = module, calls, report
        # A forward that somebody else has put there before.
        self.before = module.__dict__.get("forward")
        # Inside of functional_call the module has others, and in backward these again.
        self._weights = [id(tensor) for tensor, _ in _weights_of(module)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.calls.copy_of(self.module, self) or self.module
        forward = self.before or partial(type(module).forward, module)
        # By the time of backward a transform is over, and its tensors are of no use.
        if not torch.is_grad_enabled() or is_transforming() or not comes_back(args, kwargs):
            return forward(*args, **kwargs)
        weights = _weights_of(module)
        if module is self.module and [id(tensor) for tensor, _ in weights] != self._weights:
            return forward(*args, **kwargs)
        distinct, places = _distinct(args)

        def run(*tensors: Any) -> Any:
            _require_unchanged(module, weights)
            return forward(*(tensors[place] for place in places), **kwargs)

        if self.report is not None:
            return _watched(run, distinct, self.report)
        return checkpoint(run, *distinct, use_reentrant=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "report": None}


def _weights_of(module: nn.Module) -> Weights:
    tensors = (*module.parameters(), *module.buffers())
    return [(tensor, -1 if tensor.is_inference() else version_of(tensor)) for tensor in tensors]


def _require_unchanged(module: nn.Module, weights: Weights) -> None:
    """Raise where a module would run again with other weights than in forward.

    Raises:
        RuntimeError: A parameter or buffer was replaced, or changed in place.
    """
    now = _weights_of(module)
    if len(now) == len(weights) and all(
        one is other and before == after
        for (one, before), (other, after) in zip(weights, now, strict=True)
    ):
        return
    raise RuntimeError(
        f"{type(module).__name__} runs again in backward, but its parameters or buffers were "
        "changed after forward. Run backward before the optimizer's step, or leave 'recompute' out "
        "of the actions."
    )


def _distinct(args: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return arguments without repetition, and the place of each argument among them.

    Each saved tensor comes back as a tensor of its own, but a module may ask whether two inputs are
    one tensor: `nn.MultiheadAttention` computes self-attention otherwise.
    """
    found: dict[int, int] = {}
    distinct: list[Any] = []
    for argument in args:
        if id(argument) not in found:
            found[id(argument)] = len(distinct)
            distinct.append(argument)
    return distinct, [found[id(argument)] for argument in args]


def _watched(run: Callable[..., Any], args: Sequence[Any], report: Report) -> Any:
    """Return what a function returns, and report, when backward comes to it, whether it would
    return the same once more."""
    surroundings = _Surroundings(args)
    # As checkpoint keeps them: another tensor comes back.
    inputs = _KeptInputs(args)
    output = run(*args)
    first, reported = _checksums(output), False

    def look(gradient: Tensor) -> None:
        nonlocal reported
        if not reported:
            reported = True
            for handle in handles:
                handle.remove()
            with surroundings.restored():
                try:
                    again = _checksums(run(*inputs.take()))
                except Exception:
                    # Its inputs are gone by now: the module must not run again.
                    again = None
            report(again == first)

    # Not on leaves: they live longer than the step.
    inner = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    handles = [tensor.register_hook(look) for tensor in inner]
    return output


class _KeptInputs:
    """Arguments, of which autograd saves the tensors until they are taken."""

    def __init__(self, args: Sequence[Any]) -> None:
        self._args = [None if isinstance(value, Tensor) else value for value in args]
        self._places = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
        tensors = [args[place] for place in self._places]
        leaf = torch.empty(0, requires_grad=True)
        # Here, not where the plan says: nothing is measured in this step.
        with saved_tensors_hooks(Tensor.detach, _itself):
            saved = _Save.apply(leaf, *tensors)  # type: ignore[no-untyped-call]
        self._node: Any = saved.grad_fn

    def take(self) -> list[Any]:
        """Return the arguments, once."""
        args, node, self._node = list(self._args), self._node, None
        for place, tensor in zip(self._places, node.saved_tensors, strict=True):
            args[place] = tensor
        return args


class _Save(torch.autograd.Function):
    """Saves tensors, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return one.new_empty(0)


def _checksums(output: Any) -> list[Any]:
    return [checksum(tensor) for tensor in tensors_in(output)]


class _Surroundings:
    """What checkpoint restores for a second run: random states, and autocast."""

    def __init__(self, args: Sequence[Any]) -> None:
        self._random = torch.get_rng_state()
        self._devices, self._states = get_device_states(*args)
        kinds = {"cpu", *(tensor.device.type for tensor in tensors_in(args))}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(kinds)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices))
            torch.set_rng_state(self._random)
            set_device_states(self._devices, self._states)
            for kind, dtype, is_on in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, is_on))
            stack.enter_context(torch.enable_grad())
            # The engine must not see what this run saves. An alias is saved, as an operation that
            # saves its own output would hold itself, and never be freed.
            stack.enter_context(saved_tensors_hooks(Tensor.detach, _itself))
            yield


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def patch_recompute(
    root: nn.Module,
    names: Iterable[str],
    calls: Calls | None = None,
    audit: Audit | None = None,
) -> Iterator[None]:
    """Inside of it, the named modules below a root run again in backward.

    Args:
        root: the model.
        names: which modules.
        calls: knows which module is called.
        audit: is told whether they yield the same; None: nobody looks.
    """
    installed = []
    for name in names:
        module = root.get_submodule(name)
        again = Again(
            module, calls or Calls(), None if audit is None else partial(audit.note, name)
        )
        module.forward = again
        installed.append((module, again))
    try:
        yield
    finally:
        for module, again in reversed(installed):
            if module.__dict__.get("forward") is again:
                if again.before is None:
                    del module.forward
                else:
                    module.forward = again.before
