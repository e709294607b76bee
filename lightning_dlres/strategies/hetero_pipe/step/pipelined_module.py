"""Finding the pipelined module in a LightningModule, and stepping in where user code calls it.

Three kinds of module can be pipelined: an `nn.Sequential` (its children are the layers), an
`nn.ModuleList` whose members the user's code calls one after the other, and any other single module
(one layer), such as an `nn.Sequential` with a `forward` of its own. Only the module's own `forward`
is replaced, so the user's hooks still fire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dlres import _compat
from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.pipeline.stage.stage import Layer

Handler = Callable[[Tree], Tree]


@dataclass(frozen=True)
class PipelinedModule:
    """The module that is cut into stages.

    Attributes:
        path: its name in the LightningModule.
        module: the module.
        layers: its layers, named as in the whole model.
    """

    path: str
    module: nn.Module
    layers: ModelLayers

    def bind(self, index: int, module: nn.Module) -> Layer:
        """Return a callable from the layer's input tree to its output tree, for the layer `index`
        or a copy of it."""
        if is_chain(self.module):
            return module
        if isinstance(self.module, nn.ModuleList):
            return _Link(module, last=index == len(self.layers.modules) - 1)
        return _Whole(module)

    @contextmanager
    def intercepted(self, handler: Handler) -> Iterator[None]:
        """While active, a call of the module by user code is a call of `handler` with its inputs as
        one tree.

        Inside the handler the module is itself again, so that its layers can run.
        """
        targets = list(self.module) if isinstance(self.module, nn.ModuleList) else [self.module]
        attribute = _attribute(self.module)

        def handle(inputs: Tree) -> Tree:
            with _itself(targets, attribute):
                return handler(inputs)

        if isinstance(self.module, nn.ModuleList):
            forwards = _chain(self.path, len(targets), handle)
        elif is_chain(self.module):
            forwards = [_one_argument(self.path, handle)]
        else:
            forwards = [lambda *args, **kwargs: handle((args, kwargs))]
        saved = [module.__dict__.get(attribute) for module in targets]
        for module, forward, own in zip(targets, forwards, saved, strict=True):
            own = own.own if isinstance(own, _StandIn) else own
            module.__dict__[attribute] = _StandIn(self.path, forward, own)
        try:
            yield
        finally:
            _put(targets, attribute, saved)


class _StandIn:
    """Takes the place of a module's forward. A copy of the module has none of it: it would be a
    call of the original.

    Attributes:
        own: what the user had put there; None if nothing.
    """

    def __init__(self, path: str, forward: Callable[..., Tree], own: Any) -> None:
        self._path, self._forward, self.own = path, forward, own

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., Tree]:
        path = self._path

        def refuse(*args: Any, **kwargs: Any) -> Tree:
            raise UnsupportedStepError(
                f"A copy of {path!r}, the pipelined module, was made during the run and called: it "
                "has the weights of one stage only. Make copies before the run, in the "
                "LightningModule's constructor."
            )

        return refuse


@contextmanager
def _itself(modules: Sequence[nn.Module], attribute: str) -> Iterator[None]:
    """Let modules be themselves meanwhile, whoever has stepped in, so that their layers can run."""
    stand_ins = [module.__dict__.get(attribute) for module in modules]
    _put(
        modules,
        attribute,
        [found.own if isinstance(found, _StandIn) else found for found in stand_ins],
    )
    try:
        yield
    finally:
        _put(modules, attribute, stand_ins)


def _put(modules: Sequence[nn.Module], attribute: str, values: Sequence[Any]) -> None:
    for module, value in zip(modules, values, strict=True):
        module.__dict__.pop(attribute, None)
        if value is not None:
            module.__dict__[attribute] = value


def _attribute(module: nn.Module) -> str:
    # The user's hooks on a list's members fire where the members run, not for stand-ins.
    return _compat.CALL if isinstance(module, nn.ModuleList) else "forward"


def is_chain(module: nn.Module) -> bool:
    """Whether calling the module is calling its children, one after the other. An `nn.Sequential`
    with a forward of its own may do something between them."""
    if not isinstance(module, nn.Sequential):
        return False
    own = vars(module).get("forward")
    own = own.own if isinstance(own, _StandIn) else own
    return own is None and type(module).forward is nn.Sequential.forward


def _is_cut(module: nn.Module) -> bool:
    return is_chain(module) or isinstance(module, nn.ModuleList)


def find_pipelined_module(root: nn.Module, path: str | None) -> PipelinedModule:
    """Return the module to pipeline.

    Args:
        root: the LightningModule.
        path: its name, such as "net" or "model.blocks"; None finds it: the largest `nn.Sequential`
            or `nn.ModuleList` if there is one that no other contains, else the only child with
            parameters.

    Raises:
        ConfigError: there is no such module, or there are several.
    """
    if path is None:
        path = _find(root)
    try:
        if not path:
            raise AttributeError("an empty name")
        module = root.get_submodule(path)
    except AttributeError as error:
        names = [name for name, m in root.named_modules() if _is_cut(m) and name]
        raise ConfigError(
            f"module must be the name of a module in {type(root).__name__}, got {path!r}. Use one "
            f"of {names}."
        ) from error
    if _is_cut(module):
        pairs = [
            (n, m) for n, m in module.named_modules(remove_duplicate=False) if n and "." not in n
        ]
        if not pairs:
            raise ConfigError(
                f"module must be the name of a module with at least one layer, got {path!r}, which "
                "is empty. Name another one, or put layers into it."
            )
        layers = {f"{path}.{name}": layer for name, layer in pairs}
    else:
        layers = {path: module}
    return PipelinedModule(path, module, ModelLayers(root, tuple(layers), tuple(layers.values())))


def require_layers(pipelined: PipelinedModule, stages: int) -> None:
    """Raise unless every stage can get a layer.

    Raises:
        ConfigError: fewer layers than stages.
    """
    count = len(pipelined.layers.modules)
    if count < stages:
        kind = type(pipelined.module).__name__
        if isinstance(pipelined.module, nn.Sequential) and not is_chain(pipelined.module):
            kind += ", an nn.Sequential with a forward of its own"
        raise ConfigError(
            f"The pipelined module {pipelined.path!r} ({kind}) has {count} "
            f"layer{'s' if count != 1 else ''}, expected at least one for each of the {stages} "
            f"stages. Use devices={count}, HeteroPipeStrategy(stages={count}), or put more layers "
            "into one nn.Sequential."
        )


def _find(root: nn.Module) -> str:
    containers: list[tuple[str, nn.Module]] = [
        (name, m)
        for name, m in root.named_modules()
        if name and _is_cut(m) and any(True for _ in m.parameters())
    ]
    outermost = [
        (n, m)
        for n, m in containers
        if not any(n.startswith(f"{other}.") for other, _ in containers)
    ]
    children = [(name, m) for name, m in root.named_children() if any(True for _ in m.parameters())]
    if len(outermost) == 1:
        return outermost[0][0]
    if not outermost and len(children) == 1:
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
        "whole. What training_step calls before the named module "
        "runs on the first stage, and what it calls after it runs on the last."
    )


def _one_argument(path: str, handler: Handler) -> Callable[..., Tree]:
    def forward(*args: Any, **kwargs: Any) -> Tree:
        if len(args) != 1 or kwargs:
            raise UnsupportedStepError(
                f"{path!r} is an nn.Sequential and was called with {len(args)} positional and "
                f"{len(kwargs)} keyword arguments, expected one. Pass a tuple or a dict."
            )
        return handler(args[0])

    return forward


class _Whole:
    """A module of any class as a single layer; its input tree is (args, kwargs)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, inputs: Tree) -> Tree:
        args, kwargs = inputs
        with _itself([self._module], _attribute(self._module)):
            return self._module(*args, **kwargs)


class _Link:
    """A member of a list: the result takes the place of the first argument, the others are handed
    on."""

    def __init__(self, module: nn.Module, last: bool) -> None:
        self._module, self._last = module, last

    def __call__(self, inputs: Tree) -> Tree:
        first, args, kwargs = inputs
        with _itself([self._module], _compat.CALL):
            output = self._module(first, *args, **kwargs)
        return output if self._last else (output, args, kwargs)


class _Token:
    """Stands for the output of a member of a pipelined list; it can only be given to the next
    member."""

    def __init__(self, path: str, index: int) -> None:
        self.__dict__.update(path=path, index=index)

    def __getattr__(self, name: str) -> Any:
        raise self._misuse()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tokens = [a for a in args if isinstance(a, cls)]
        raise (
            tokens[0]._misuse()
            if tokens
            else UnsupportedStepError("A pipelined list's output was used in between.")
        )

    __hash__ = object.__hash__

    def _misuse(self) -> UnsupportedStepError:
        path, index = self.__dict__["path"], self.__dict__["index"]
        return UnsupportedStepError(
            f"The output of '{path}.{index}' is used other than as the first argument of "
            f"'{path}.{index + 1}'. The members of a pipelined nn.ModuleList must be called one "
            "after the other, with nothing in between: move what lies between them into the "
            "members."
        )


def _explain(token: _Token, *args: Any) -> Any:
    raise token._misuse()


# Operators look for these in the class, past __getattr__.
for _operator in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "matmul", "rmatmul", "truediv", "rtruediv"),
    *("floordiv", "mod", "pow", "rpow", "neg", "pos", "abs", "invert", "and", "or", "xor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "float", "int", "index"),
    *("len", "iter", "getitem", "setitem", "contains", "call", "iadd", "isub", "imul"),
):
    setattr(_Token, f"__{_operator}__", _explain)


def _chain(path: str, count: int, handler: Handler) -> list[Callable[..., Tree]]:
    state: dict[str, Any] = {}

    def link(index: int) -> Callable[..., Tree]:
        def forward(*positional: Any, **kwargs: Any) -> Tree:
            if not positional:
                raise UnsupportedStepError(
                    f"'{path}.{index}' was called with keyword arguments only, expected its "
                    "input as the first positional argument."
                )
            first, args = positional[0], positional[1:]
            if index == 0:
                state.update(next=0, inputs=(first, args, kwargs), token=first)
            _check_link(path, index, first, args, kwargs, state)
            state.update(next=index + 1, token=_Token(path, index))
            if index == count - 1:
                return handler(state.pop("inputs"))
            return state["token"]

        return forward

    return [link(index) for index in range(count)]


def _check_link(
    path: str, index: int, first: Any, args: Any, kwargs: Any, state: dict[str, Any]
) -> None:
    if state.get("next") != index or first is not state["token"]:
        raise UnsupportedStepError(
            f"'{path}.{index}' was called out of turn: expected the members of a pipelined "
            "nn.ModuleList to be called in order, each once, with the previous one's output as "
            "its first argument."
        )
    _, first_args, first_kwargs = state["inputs"]
    same = len(args) == len(first_args) and all(
        a is b for a, b in zip(args, first_args, strict=True)
    )
    if (
        not same
        or kwargs.keys() != first_kwargs.keys()
        or any(kwargs[k] is not first_kwargs[k] for k in kwargs)
    ):
        raise UnsupportedStepError(
            f"'{path}.{index}' was called with other further arguments than '{path}.0': expected "
            "the very same objects, since they are sent along with the activations."
        )
