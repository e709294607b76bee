"""The pipelined module of a LightningModule: finding it, and intercepting user code's calls of it.

Three kinds of module can be pipelined:

- an `nn.Sequential`, whose children are the layers,
- an `nn.ModuleList` whose members user code calls one after the other, and
- any other module, whose own code is cut into layers where it calls its submodules (see
  `pipeline.capture`). An `nn.Sequential` with a `forward` of its own is one, too. Where that is
  not possible, the module is one layer.

The `forward` of an `nn.Sequential` or a single module is replaced, so that the user's hooks on it
still fire. In an `nn.ModuleList` the calls of the members are replaced, hooks included: the hooks
fire only on the stage that runs the member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_dlres.core import _compat
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, tensors_of
from lightning_dlres.pipeline.capture.captured import CapturedModule
from lightning_dlres.pipeline.capture.crossing import Returned
from lightning_dlres.pipeline.capture.segment_state import CUT_THE_STEP, OpenStep
from lightning_dlres.pipeline.capture.tracing.capturing import capture
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.pipeline.stage.microbatch import output_of
from lightning_dlres.pipeline.stage.module_attributes import are_identical
from lightning_dlres.pipeline.stage.stage import Chain, Layer
from lightning_dlres.strategies.hetero_pipe.calls.changed_arguments import (
    SequentialMember,
    given_back,
    given_back_container,
    with_own_containers,
)
from lightning_dlres.strategies.hetero_pipe.calls.modes import CallModes
from lightning_dlres.strategies.hetero_pipe.calls.needs_cut import NeedsCutStepError
from lightning_dlres.strategies.hetero_pipe.step.forward_replacement import (
    forwards_replaced,
    original_forward,
    user_forward_in,
)
from lightning_dlres.strategies.hetero_pipe.step.module_list import (
    ListMember,
    RunsHere,
    list_forwards,
)

# Takes the tensors of a call's inputs, and those of its output.
RecordCall = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class Handler(Protocol):
    """Handler of a call of the pipelined module, or of a layer that a step calls."""

    def __call__(self, inputs: Tree, layer: int | None = None) -> Tree:
        """Return the output of the call.

        Args:
            inputs: Inputs of the call, as one tree.
            layer: Index of the layer that is called; None for the pipelined module.
        """


class LocalLayers(Protocol):
    """Layers that run on this rank, in a trial."""

    def run(self, inputs: Tree) -> Tree:
        """Return the output of the last layer for the inputs of the module."""

    def run_one(self, layer: int, inputs: Tree, call: Layer) -> Tree:
        """Return the output of a layer, given its inputs and its call."""


class _StopAtCall(BaseException):
    """Signal that ends a run of the step at the call of the pipelined module.

    It is not an Exception, so that `except Exception` in user code does not catch it.
    """

    def __init__(self, inputs: Tree) -> None:
        self.inputs = inputs


@dataclass(frozen=True)
class PipelinedModule:
    """The module that is cut into stages.

    Attributes:
        path: Name of the module in the LightningModule.
        module: The module.
        layers: Its layers, with their names in the LightningModule.
        captured: The module's own code, cut into layers; None before `captured_on`, and for modules
            that have layers of their own.
    """

    path: str
    module: nn.Module
    layers: ModelLayers
    captured: CapturedModule | None = None

    def bind(self, index: int, module: nn.Module) -> Layer:
        """Return a layer as a function from its input tree to its output tree.

        Args:
            index: Index of the layer.
            module: The layer, or a copy of it.
        """
        if self.captured is not None:
            return _CapturedLayer(self.captured, index, module)
        if is_plain_sequential(self.module):
            return SequentialMember(module, is_first=index == 0)
        if isinstance(self.module, nn.ModuleList):
            return ListMember(module, is_last=index == len(self.layers.modules) - 1)
        return _SingleLayer(module)

    @property
    def chain(self) -> Chain | None:
        """Function that runs several layers at once; None without one."""
        return None if self.captured is None else partial(_run_captured, self.captured)

    def output(self, crossing: Tree) -> Tree:
        """Return the output of the module's call, given that of the last layer.

        A captured module runs its own code after its last layer, such as a loss of its own, on what
        the layer has returned. Any module returns the output of its last layer.
        """
        if self.captured is None:
            return output_of(crossing, lambda output: output, lambda: True)
        with original_forward([self.module], "forward"):
            captured = self.captured
            return output_of(crossing, captured.output, lambda: captured.has_sample_outputs)

    @property
    def is_step(self) -> bool:
        """True for a training step that is cut as a whole."""
        return False

    @property
    def called_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules whose code or attributes a call of the module uses, by name."""
        modules = list(self.module.named_modules(prefix=self.path))
        # The forward of a sequence or list of layers does nothing but to call them.
        return modules[1:] if has_several_layers(self.module) else modules

    def captured_on(
        self, root: nn.Module, inputs: Tree, step: OpenStep, *, is_whole: bool = False
    ) -> PipelinedModule:
        """Return this module cut into layers, if it has none yet; it runs a few times.

        Args:
            root: The LightningModule.
            inputs: (args, kwargs) of a call of the module, or of the step that is cut.
            step: Opens the training step, whose run leaves nothing behind.
            is_whole: True if a batch is its only micro-batch.

        Raises:
            UnsupportedStepError: If the module cannot be cut.
        """
        if self.captured is not None or has_several_layers(self.module):
            return self
        with original_forward([self.module], "forward"):
            captured = capture(self.module, inputs)
        names = tuple(f"{self.path}.{name}" for name in captured.names)
        layers = ModelLayers(
            root, names, captured.blocks, container=self.path, shared=captured.shared_parameters
        )
        return replace(self, layers=layers, captured=captured)

    def cut_like(self, other: Any) -> PipelinedModule:
        """Return this module with the layers of another one, if that is the same module.

        A step, or a module around this one, that an earlier run had to cut in the place of this
        module is returned.
        """
        root = self.layers.root
        if getattr(other, "is_step", False) and other.module is root:
            return other if other.layers.are_present() else self
        is_same_or_around = (
            isinstance(other, PipelinedModule)
            and f"{self.path}.".startswith(f"{other.path}.")
            and other.layers.root is root
            and other.module is root.get_submodule(other.path)
        )
        return other if is_same_or_around and other.has_present_layers else self

    @property
    def has_present_layers(self) -> bool:
        """True if the module has the same layers as when this object was made."""
        if has_several_layers(self.module):
            return are_identical(list(self.module.children()), self.layers.modules)
        is_up_to_date = self.captured is None or self.captured.is_up_to_date
        return is_up_to_date and self.layers.are_present()

    @contextmanager
    def intercepted(self, handler: Handler, runs_here: RunsHere | None = None) -> Iterator[None]:
        """Context manager that passes user code's calls of the module to `handler`.

        Inside the handler the module has its own forward again, so that its layers can run. Uses
        may be nested: the innermost handler gets the calls.

        Args:
            handler: Function described at `Handler`.
            runs_here: Function described at `RunsHere`, for the members of a list.
        """
        self._require_members()
        targets = list(self.module) if isinstance(self.module, nn.ModuleList) else [self.module]
        attribute = _forward_attribute(self.module)

        def handle(inputs: Tree) -> Tree:
            with original_forward(targets, attribute):
                return handler(inputs)

        def handle_list(inputs: Tree) -> Tree:
            _, args, kwargs = inputs
            return given_back(handle(inputs), args, kwargs)

        def handle_sequence(own: Tree) -> Tree:
            return given_back_container(handle(own), own)

        if isinstance(self.module, nn.ModuleList):
            forwards = list_forwards(self.path, targets, handle_list, runs_here)
        elif is_plain_sequential(self.module):
            forwards = [_sequential_forward(self.path, handle_sequence)]
        else:
            forwards = [lambda *args, **kwargs: handle((args, kwargs))]
        with forwards_replaced(self.path, targets, attribute, forwards):
            yield

    def call(self, layer: int, inputs: Tree) -> Tree:
        """Call the module of a layer; for a training step only, see `PipelinedStep`."""
        raise NotImplementedError

    def run_here(self, inputs: Tree, layer: int | None = None) -> Any:
        """Run a call that was passed to a handler on this rank, as without one."""
        module = self.module
        if isinstance(module, nn.ModuleList):
            first, args, kwargs = inputs
            for member in module:
                first = member(first, *args, **kwargs)
            return first
        if is_plain_sequential(module):
            return module.forward(inputs)
        args, kwargs = inputs
        return module.forward(*args, **kwargs)

    def inputs_of(
        self, step: Callable[..., Any], args: tuple[Any, ...], check: Callable[[], None]
    ) -> Tree | Returned:
        """Run a step up to the module's call; return the call's inputs.

        Args:
            step: The training step.
            args: Its arguments.
            check: Called at the module's call; it may raise.

        Returns:
            The inputs, as one tree; `Returned` if the step returns None without a call.

        Raises:
            UnsupportedStepError: If the step returns something else without a call.
        """

        modes = CallModes.now()

        def stop(inputs: Tree, layer: int | None = None) -> Tree:
            self._require_modes(modes)
            check()
            raise _StopAtCall(with_own_containers(inputs))

        def check_at_first_member(inputs: Any) -> bool:
            check()  # The other members would not see what is set between their calls.
            return False

        try:
            with self.intercepted(stop, check_at_first_member):
                result = step(*args)
        except _StopAtCall as signal:
            return signal.inputs
        if result is not None:
            raise self._wrong_number_of_calls(0)
        return Returned(None)

    def finish(
        self, step: Callable[..., Any], args: tuple[Any, ...], output: Tree, record_call: RecordCall
    ) -> Any:
        """Return the result of a step in which the module's call returns the pipeline's output.

        Args:
            step: The training step.
            args: Its arguments.
            output: What the last layer has returned.
            record_call: Called with the tensors of the call's inputs, and of its output.

        Raises:
            UnsupportedStepError: If the step makes several calls, or returns a loss without one.
        """
        return self._answered(step, args, lambda _: self.output(output), record_call)

    def run_locally(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        layers: LocalLayers,
        record_call: RecordCall,
    ) -> Any:
        """Return the result of a step whose layers run on this rank; see `finish`.

        Args:
            step: The training step.
            args: Its arguments.
            layers: Runs the layers.
            record_call: Called with the tensors of the call's inputs, and of its output.
        """
        return self._answered(step, args, layers.run, record_call)

    def _answered(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        answer: Callable[[Tree], Tree],
        record_call: RecordCall,
    ) -> Any:
        num_calls, modes = 0, CallModes.now()

        def handle(inputs: Tree, layer: int | None = None) -> Tree:
            nonlocal num_calls
            num_calls += 1
            self._require_modes(modes)
            if num_calls > 1:
                raise self._wrong_number_of_calls(num_calls)
            output = answer(inputs)
            record_call(tensors_of(inputs), tensors_of(output))
            return output

        with self.intercepted(handle):
            result = step(*args)
        if not num_calls and result is not None:
            raise self._wrong_number_of_calls(0)
        return result

    def _require_members(self) -> None:
        """Raise if members of a list have come, gone or been replaced since the run began."""
        if not isinstance(self.module, nn.Sequential | nn.ModuleList):
            return
        if has_several_layers(self.module) and not are_identical(
            list(self.module), self.layers.modules
        ):
            raise UnsupportedStepError(
                f"The layers of {self.path!r} must stay those of the start of the run, since each "
                f"rank holds its part of them, got other layers, {len(self.module)} in all. Add "
                "or replace layers before the run, and switch them off by an attribute."
            )

    def _require_modes(self, expected: CallModes) -> None:
        """Raise if the module is called in another mode than that of the step's start."""
        step = f"{type(self.layers.root).__name__}.training_step"
        expected.require_unchanged(step, self.path, PipelinedModule._answered.__code__)

    def _wrong_number_of_calls(self, num_calls: int) -> UnsupportedStepError:
        rule = (
            f"{type(self.layers.root).__name__}.training_step must call {self.path!r}, the "
            "pipelined module, exactly once in every step, got"
        )
        if num_calls:
            fix = f"Concatenate the inputs and call it once, or {CUT_THE_STEP}."
            return NeedsCutStepError(f"{rule} a second call.", fix)
        rule += " a step that returned without a call."
        fix = "Name the module that it calls: HeteroPipeStrategy(module='...')."
        return NeedsCutStepError(rule, fix, UnsupportedStepError(f"{rule} {fix}"))


def _forward_attribute(module: nn.Module) -> str:
    """Return the name of the method that is replaced in the module, or in the list's members."""
    # The user's hooks on a list's members must fire only on the stage that runs the member. If
    # `forward` were replaced, they would also fire in user code's call, with placeholders.
    return _compat.CALL if isinstance(module, nn.ModuleList) else "forward"


def is_plain_sequential(module: nn.Module) -> bool:
    """Return whether calling the module calls its children one after the other, and nothing else.

    An `nn.Sequential` with a forward of its own may do something between the children.
    """
    if not isinstance(module, nn.Sequential):
        return False
    user_forward = user_forward_in(vars(module).get("forward"))
    return user_forward is None and type(module).forward is nn.Sequential.forward


def has_several_layers(module: nn.Module) -> bool:
    return is_plain_sequential(module) or isinstance(module, nn.ModuleList)


def _sequential_forward(path: str, handler: Callable[[Tree], Tree]) -> Callable[..., Tree]:
    """Return the replacement for the forward of an `nn.Sequential`."""

    def forward(*args: Any, **kwargs: Any) -> Tree:
        if len(args) != 1 or kwargs:
            raise UnsupportedStepError(
                f"{path!r} is an nn.Sequential and must be called with one positional argument, "
                f"got {len(args)} positional and {len(kwargs)} keyword arguments. Pass a tuple or "
                "a dict."
            )
        return handler(args[0])

    return forward


class _SingleLayer:
    """A module of any class as one layer; its input tree is (args, kwargs)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, inputs: Tree) -> Tree:
        args, kwargs = inputs
        with original_forward([self._module], _forward_attribute(self._module)):
            return self._module(*args, **kwargs)


def _run_captured(
    captured: CapturedModule,
    layers: range,
    inputs: Tree,
    before_layer: Callable[[int], None] = lambda layer: None,
    copies: Mapping[int, nn.Module] | None = None,
) -> Tree:
    with original_forward([captured.module], "forward"):
        return captured.run(layers, inputs, before_layer=before_layer, copies=copies)


class _CapturedLayer:
    """A layer of a captured module, or a copy of it."""

    def __init__(self, captured: CapturedModule, index: int, module: nn.Module) -> None:
        self._captured, self._index, self._module = captured, index, module

    def __call__(self, inputs: Tree) -> Tree:
        index = self._index
        copies = {} if self._module is self._captured.blocks[index] else {index: self._module}
        return _run_captured(self._captured, range(index, index + 1), inputs, copies=copies)
