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
from typing import Any

from torch import nn

from lightning_dlres.core import _compat
from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.capture.captured import CapturedModule, capture
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.pipeline.stage.microbatch import output_of
from lightning_dlres.pipeline.stage.stage import Chain, Layer
from lightning_dlres.strategies.hetero_pipe.step.module_list import list_forwards

# Takes the inputs of the module's call as one tree, and returns the module's output.
Handler = Callable[[Tree], Tree]


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
            return module
        if isinstance(self.module, nn.ModuleList):
            return _ListMember(module, is_last=index == len(self.layers.modules) - 1)
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
        with _original_forward([self.module], "forward"):
            captured = self.captured
            return output_of(crossing, captured.output, lambda: captured.has_sample_outputs)

    def captured_on(self, root: nn.Module, inputs: Tree) -> PipelinedModule:
        """Return this module cut into layers, if it has none yet; it runs a few times.

        Args:
            root: The LightningModule.
            inputs: (args, kwargs) of a call of the module.

        Raises:
            UnsupportedStepError: If the module cannot be cut.
        """
        if self.captured is not None or _has_several_layers(self.module):
            return self
        with _original_forward([self.module], "forward"):
            captured = capture(self.module, inputs)
        names = tuple(f"{self.path}.{name}" for name in captured.names)
        layers = ModelLayers(
            root, names, captured.blocks, container=self.path, shared=captured.shared_parameters
        )
        return replace(self, layers=layers, captured=captured)

    def cut_like(self, other: PipelinedModule) -> PipelinedModule:
        """Return this module with the layers of another one, if that is the same module."""
        return other if other.module is self.module and other.path == self.path else self

    @contextmanager
    def intercepted(self, handler: Handler) -> Iterator[None]:
        """Context manager that passes user code's calls of the module to `handler`.

        Inside the handler the module has its own forward again, so that its layers can run. Uses
        may be nested: the innermost handler gets the calls.

        Args:
            handler: Function described at `Handler`.
        """
        targets = list(self.module) if isinstance(self.module, nn.ModuleList) else [self.module]
        attribute = _forward_attribute(self.module)

        def handle(inputs: Tree) -> Tree:
            with _original_forward(targets, attribute):
                return handler(inputs)

        if isinstance(self.module, nn.ModuleList):
            forwards = list_forwards(self.path, len(targets), handle)
        elif is_plain_sequential(self.module):
            forwards = [_sequential_forward(self.path, handle)]
        else:
            forwards = [lambda *args, **kwargs: handle((args, kwargs))]
        saved = [module.__dict__.get(attribute) for module in targets]
        for module, forward, current in zip(targets, forwards, saved, strict=True):
            module.__dict__[attribute] = _ForwardReplacement(
                self.path, forward, _user_forward_in(current)
            )
        try:
            yield
        finally:
            _set_forward(targets, attribute, saved)


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
    user_forward = _user_forward_in(vars(module).get("forward"))
    return user_forward is None and type(module).forward is nn.Sequential.forward


def _has_several_layers(module: nn.Module) -> bool:
    return is_plain_sequential(module) or isinstance(module, nn.ModuleList)


def find_pipelined_module(root: nn.Module, path: str | None) -> PipelinedModule:
    """Return the module to pipeline.

    Args:
        root: The LightningModule.
        path: Name of the module, such as "net" or "model.blocks". None selects the only
            `nn.Sequential` or `nn.ModuleList` with parameters that is not inside another one. If
            there is none, it selects the only child with parameters.

    Raises:
        ConfigError: If there is no such module, if it has no layers, or if None fits several.
    """
    if path is None:
        path = _only_candidate(root)
    try:
        if not path:
            raise AttributeError("an empty name")
        module = root.get_submodule(path)
    except AttributeError as error:
        names = [name for name, m in root.named_modules() if _has_several_layers(m) and name]
        raise ConfigError(
            f"module must be the name of a module in {type(root).__name__}, got {path!r}. Use one "
            f"of {names}."
        ) from error
    if _has_several_layers(module):
        pairs = [
            (n, m) for n, m in module.named_modules(remove_duplicate=False) if n and "." not in n
        ]
        if not pairs:
            raise ConfigError(
                f"module must be the name of a module with at least one layer, got {path!r}, which "
                "is empty. Name another module, or put layers into this one."
            )
        layers = {f"{path}.{name}": layer for name, layer in pairs}
    else:
        layers = {path: module}
    return PipelinedModule(path, module, ModelLayers(root, tuple(layers), tuple(layers.values())))


def require_layers(pipelined: PipelinedModule, stages: int, uncut_reason: str = "") -> None:
    """Check that every stage can get a layer.

    Args:
        pipelined: The module.
        stages: Number of stages.
        uncut_reason: Why the module's own code could not be cut; empty if that was not tried.

    Raises:
        ConfigError: If there are fewer layers than stages.
    """
    count = len(pipelined.layers.modules)
    if count < stages:
        kind = type(pipelined.module).__name__
        if isinstance(pipelined.module, nn.Sequential) and not is_plain_sequential(
            pipelined.module
        ):
            kind += ", an nn.Sequential with a forward of its own"
        if uncut_reason:
            raise ConfigError(
                f"The pipelined module {pipelined.path!r} ({kind}) must be one that can be cut "
                f"into {stages} stages, got one that cannot be cut: {uncut_reason} Or train it "
                "whole on each device, with HeteroPipeStrategy(stages=1)."
            )
        raise ConfigError(
            f"The pipelined module {pipelined.path!r} ({kind}) must have at least one layer for "
            f"each of the {stages} stages, got {count} layer{'s' if count != 1 else ''}. "
            f"Use devices={count}, HeteroPipeStrategy(stages={count}), or put more layers into one "
            "nn.Sequential."
        )


def _only_candidate(root: nn.Module) -> str:
    """Return the name of the only module that can be pipelined; see `find_pipelined_module`."""
    containers: list[tuple[str, nn.Module]] = [
        (name, m)
        for name, m in root.named_modules()
        if name and _has_several_layers(m) and any(True for _ in m.parameters())
    ]
    outermost = [
        (n, m)
        for n, m in containers
        if not any(n.startswith(f"{other}.") for other, _ in containers)
    ]
    children = [(name, m) for name, m in root.named_children() if any(True for _ in m.parameters())]
    if len(outermost) == 1:
        return outermost[0][0]
    if len(children) == 1:
        # Its own code is cut into layers.
        return children[0][0]
    names = [name for name, _ in (outermost or children)]
    rule = "module must be the name of the module to cut into stages, got None"
    if not names:
        raise ConfigError(
            f"{rule}, and {type(root).__name__} has no module with parameters. Make its layers in "
            "the LightningModule's constructor or configure_model, as one nn.Sequential."
        )
    raise ConfigError(
        f"{rule}, and {type(root).__name__} has {len(names)} modules that could be the pipeline "
        f"({', '.join(names)}). Name the one with most of the computation, such as "
        f"HeteroPipeStrategy(module={names[0]!r}). All others are not cut: every rank holds them "
        "whole. In training_step, code before the named module runs on the first stage, and code "
        "after it runs on the last."
    )


def _sequential_forward(path: str, handler: Handler) -> Callable[..., Tree]:
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


class _ForwardReplacement:
    """Replacement for a module's forward, in the module's `__dict__`.

    A deep copy of the module does not get a copy of the replacement, which would run the original
    module. It gets a function that refuses the call.

    Attributes:
        user_forward: The function that user code had put in this place; None without one.
    """

    def __init__(self, path: str, forward: Callable[..., Tree], user_forward: Any) -> None:
        self._path, self._forward, self.user_forward = path, forward, user_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., Tree]:
        path = self._path

        def refuse(*args: Any, **kwargs: Any) -> Tree:
            raise UnsupportedStepError(
                f"A copy of {path!r}, the pipelined module, must be made before the run, got a "
                "call of a copy that was made during the run: it has the weights of one stage "
                "only. Make copies in the LightningModule's constructor."
            )

        return refuse


def _user_forward_in(value: Any) -> Any:
    """Return the user's own function in a module's `__dict__`, below any replacement."""
    return value.user_forward if isinstance(value, _ForwardReplacement) else value


@contextmanager
def _original_forward(modules: Sequence[nn.Module], attribute: str) -> Iterator[None]:
    """Context manager in which modules have their original forward, so that their layers can
    run."""
    current = [module.__dict__.get(attribute) for module in modules]
    _set_forward(modules, attribute, list(map(_user_forward_in, current)))
    try:
        yield
    finally:
        _set_forward(modules, attribute, current)


def _set_forward(modules: Sequence[nn.Module], attribute: str, values: Sequence[Any]) -> None:
    """Set an attribute in the `__dict__` of each module; None removes it."""
    for module, value in zip(modules, values, strict=True):
        module.__dict__.pop(attribute, None)
        if value is not None:
            module.__dict__[attribute] = value


class _SingleLayer:
    """A module of any class as one layer; its input tree is (args, kwargs)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, inputs: Tree) -> Tree:
        args, kwargs = inputs
        with _original_forward([self._module], _forward_attribute(self._module)):
            return self._module(*args, **kwargs)


def _run_captured(
    captured: CapturedModule,
    layers: range,
    inputs: Tree,
    before_layer: Callable[[int], None] = lambda layer: None,
    copies: Mapping[int, nn.Module] | None = None,
) -> Tree:
    with _original_forward([captured.module], "forward"):
        return captured.run(layers, inputs, before_layer=before_layer, copies=copies)


class _CapturedLayer:
    """A layer of a captured module, or a copy of it."""

    def __init__(self, captured: CapturedModule, index: int, module: nn.Module) -> None:
        self._captured, self._index, self._module = captured, index, module

    def __call__(self, inputs: Tree) -> Tree:
        index = self._index
        copies = {} if self._module is self._captured.blocks[index] else {index: self._module}
        return _run_captured(self._captured, range(index, index + 1), inputs, copies=copies)


class _ListMember:
    """A member of a pipelined list as one layer; its input tree is (first argument, args, kwargs).

    Its output is the first argument of the next member, which also gets the same other arguments.

    Attributes:
        role: "last" for the last member, whose output is that of the list; else "".
    """

    def __init__(self, module: nn.Module, is_last: bool) -> None:
        self._module, self._is_last = module, is_last
        self.role = "last" if is_last else ""

    def __call__(self, inputs: Tree) -> Tree:
        first, args, kwargs = inputs
        with _original_forward([self._module], _compat.CALL):
            output = self._module(first, *args, **kwargs)
        return output if self._is_last else (output, args, kwargs)
