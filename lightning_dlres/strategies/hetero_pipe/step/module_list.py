"""User code's calls of the members of a pipelined `nn.ModuleList`.

User code calls the members one after the other, as in a loop. The calls are recorded, and the last
one runs the pipeline. Until then user code gets placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_dlres.core._compat import CALL
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.capture.block_calls import call_collectors
from lightning_dlres.pipeline.capture.segment_state import CUT_THE_STEP
from lightning_dlres.strategies.hetero_pipe.calls.changed_arguments import (
    ArgumentChanges,
    with_changes,
)
from lightning_dlres.strategies.hetero_pipe.calls.needs_cut import NeedsCutStepError
from lightning_dlres.strategies.hetero_pipe.step.forward_replacement import original_forward

# Takes (args, kwargs) of a call; returns whether the call runs on this rank, as in plain training.
RunsHere = Callable[[Any], bool]


class _MemberOutput:
    """Placeholder for the output of a member of a pipelined list.

    The members run on their stages, after user code has called the last one. The placeholder can
    only be passed to the next member: every other use raises an error.

    Args:
        path: Name of the list.
        index: Index of the member.
        is_collected: Whether hooks of transformers get it as a hidden state.
    """

    def __init__(self, path: str, index: int, is_collected: bool = False) -> None:
        self.__dict__.update(path=path, index=index, is_collected=is_collected)

    def __getattr__(self, name: str) -> Any:
        raise self._misuse()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        placeholders = [a for a in args if isinstance(a, cls)]
        raise (
            placeholders[0]._misuse()
            if placeholders
            # The placeholder is inside a container, such as the list that `torch.cat` gets.
            else NeedsCutStepError(
                "The output of a member of a pipelined nn.ModuleList must only be passed to the "
                f"next member, got a use in {getattr(function, '__name__', '?')}.",
                f"Move the code between the members into the members, or {CUT_THE_STEP}.",
            )
        )

    __hash__ = object.__hash__

    def _misuse(self) -> NeedsCutStepError:
        path, index = self.__dict__["path"], self.__dict__["index"]
        if self.__dict__["is_collected"]:
            around = path.rpartition(".")[0] or "training_step"
            reason = (
                f"Hidden states of the layers must not be used where the list {path!r} is cut, got "
                f"a use of that of '{path}.{index}'."
            )
            fix = f"Cut the module around the list: HeteroPipeStrategy(module={around!r})."
            return NeedsCutStepError(reason, fix, UnsupportedStepError(f"{reason} {fix}"))
        return NeedsCutStepError(
            f"The output of '{path}.{index}' must only be used as the first argument of "
            f"'{path}.{index + 1}', got another use. The members of a pipelined nn.ModuleList must "
            "be called one after the other, with nothing in between.",
            f"Move the code between them into the members, or {CUT_THE_STEP}.",
        )


def _raise_misuse(placeholder: _MemberOutput, *args: Any) -> Any:
    raise placeholder._misuse()


# Python looks up operators in the class, without calling `__getattr__`.
for _operator in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "matmul", "rmatmul", "truediv", "rtruediv"),
    *("floordiv", "mod", "pow", "rpow", "neg", "pos", "abs", "invert", "and", "or", "xor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "float", "int", "index"),
    *("len", "iter", "getitem", "setitem", "contains", "call", "iadd", "isub", "imul"),
):
    setattr(_MemberOutput, f"__{_operator}__", _raise_misuse)


@dataclass
class _ListCall:
    """State of one series of calls of a list's members, in order from the first to the last.

    Attributes:
        next_index: Index of the member that must be called next; None before the first call.
        previous: First argument that the next member must get: the placeholder for the previous
            member's output.
        inputs: First argument, further positional arguments and keyword arguments of the first
            member.
        changes: Finds arguments that user code changes between the calls.
        records_gradients: Whether autograd recorded operations at the first call.
        is_here: Whether the members run in user code's own calls.
    """

    next_index: int | None = None
    previous: Any = None
    inputs: tuple[Any, tuple[Any, ...], dict[str, Any]] = (None, (), {})
    changes: ArgumentChanges = field(default_factory=lambda: ArgumentChanges((), {}))
    records_gradients: bool = True
    is_here: bool = False

    def require_next(self, path: str, index: int, first: Any, args: Any, kwargs: Any) -> None:
        """Check that a call of a member continues the series.

        Raises:
            NeedsCutStepError: If the member or its arguments are not those that the series needs
                next, or if gradients are recorded only here or only before.
        """
        if self.next_index != index or first is not self.previous:
            raise NeedsCutStepError(
                f"The members of the pipelined nn.ModuleList {path!r} must be called in order, "
                "each once, with the previous one's output as the first argument, got a call of "
                f"'{path}.{index}' out of turn.",
                f"Call all members in one loop over the list, or {CUT_THE_STEP}.",
            )
        if torch.is_grad_enabled() != self.records_gradients:
            here, before = ("without", "with") if self.records_gradients else ("with", "without")
            raise NeedsCutStepError(
                f"The members of the pipelined nn.ModuleList {path!r} must all be called with "
                f"gradients recorded, or all without, got '{path}.{index}' {here} and '{path}.0' "
                f"{before}.",
                "Cut the step instead, where some of them may be called within torch.no_grad(): "
                "HeteroPipeStrategy(module='training_step').",
            )
        _, first_args, first_kwargs = self.inputs
        has_same_args = len(args) == len(first_args) and all(
            a is b for a, b in zip(args, first_args, strict=True)
        )
        if (
            not has_same_args
            or kwargs.keys() != first_kwargs.keys()
            or any(kwargs[k] is not first_kwargs[k] for k in kwargs)
        ):
            raise NeedsCutStepError(
                f"'{path}.{index}' must be called with the same further arguments as '{path}.0', "
                "got other objects. All members share one copy, which is sent along with the "
                "activations.",
                f"Pass the very same objects, or {CUT_THE_STEP}.",
            )
        if index and self.changes.found():
            raise NeedsCutStepError(
                f"The further arguments of '{path}.{index}' must be as they were for '{path}.0', "
                "got an object that has changed in between.",
                f"Let the layers change it, or {CUT_THE_STEP}.",
            )


def list_forwards(
    path: str,
    members: Sequence[nn.Module],
    handler: Callable[[Tree], Tree],
    runs_here: RunsHere | None = None,
) -> list[Callable[..., Tree]]:
    """Return the replacements for the calls of a list's members.

    All but the last return a placeholder; the last calls the handler. A call of the first member
    starts a new series.

    Args:
        path: Name of the list, for errors.
        members: Its members.
        handler: Runs the list.
        runs_here: Function described at `RunsHere`, asked at the first member; None if the handler
            gets every series.
    """
    state, count = _ListCall(), len(members)

    def forward_of(index: int) -> Callable[..., Tree]:
        def forward(*positional: Any, **kwargs: Any) -> Tree:
            if index == 0:
                state.is_here = runs_here is not None and runs_here((positional, kwargs))
            if state.is_here:
                with original_forward([members[index]], CALL):
                    return members[index](*positional, **kwargs)
            if not positional:
                raise NeedsCutStepError(
                    f"'{path}.{index}' must be called with its input as the first positional "
                    "argument, got keyword arguments only.",
                    f"Pass the input without a name, or {CUT_THE_STEP}.",
                )
            first, args = positional[0], positional[1:]
            if index == 0:
                state.next_index, state.previous = 0, first
                state.inputs = first, args, kwargs
                state.changes = ArgumentChanges(args, kwargs)
                state.records_gradients = torch.is_grad_enabled()
            state.require_next(path, index, first, args, kwargs)
            state.next_index, state.previous = index + 1, _MemberOutput(path, index)
            if index < count - 1:
                state_of_layer = _MemberOutput(path, index, is_collected=True)
                call_collectors(members[index], positional, state_of_layer)
                return state.previous
            # Drop the step's tensors, which would otherwise stay in memory until the next step.
            inputs, state.inputs = state.inputs, (None, (), {})
            state.changes = ArgumentChanges((), {})
            output = handler(inputs)
            call_collectors(members[index], positional, output)
            return output

        return forward

    return [forward_of(index) for index in range(count)]


class ListMember:
    """A member of a pipelined list as one layer; its input tree is (first argument, args, kwargs,
    and what earlier members have changed in them).

    Its output is the first argument of the next member, which also gets the same other arguments.

    Attributes:
        role: "last" for the last member, whose output is that of the list; else "".
    """

    def __init__(self, module: nn.Module, is_last: bool) -> None:
        self._module, self._is_last = module, is_last
        self.role = "last" if is_last else ""

    def __call__(self, inputs: Tree) -> Tree:
        first, args, kwargs, *earlier = inputs
        changes = ArgumentChanges(args, kwargs)
        with original_forward([self._module], CALL):
            output = self._module(first, *args, **kwargs)
        changed = [*(earlier[0] if earlier else ()), *changes.found()]
        if self._is_last:
            return with_changes(output, args, kwargs, changed)
        return (output, args, kwargs, changed) if changed else (output, args, kwargs)
