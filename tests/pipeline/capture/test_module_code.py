"""Code that users write in `forward`: cut anywhere, it gives what it gives uncut, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoints

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.capture.captured import CapturedModule
from lightning_dlres.pipeline.capture.tracing.capturing import capture
from tests.support.captured_chains import assert_alike, chain_result, plain_result
from tests.support.examples import checkered

FEATURES = 4
Code = Callable[["Module", Tensor], Tensor]


class Module(nn.Module):
    """Module with four blocks and a parameter, whose forward is a function."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (Block() for _ in range(4))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.other: list[nn.Module] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.linear(x) if scale is None else self.linear(x) * scale
        for other in self.other:
            y = y @ other.linear.weight
        return F.dropout(y, 0.3, self.training)


class Checkpointed(Block):
    """Block that checkpoints itself where it is called."""

    def __call__(self, *args: Any) -> Any:
        return checkpoint(partial(super().__call__), *args)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoints.checkpoint(function, *args, use_reentrant=False)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


CODES: dict[str, Code] = {}


def code(function: Code) -> Code:
    CODES[function.__name__] = function
    return function


@code
def parameter_as_an_argument(m: Module, x: Tensor) -> Tensor:
    return m.d(m.c(m.b(m.a(x), m.scale)), m.scale)


@code
def parameter_of_another_block(m: Module, x: Tensor) -> Tensor:
    m.c.other = [m.a]
    return m.d(m.c(m.b(m.a(x))))


@code
def array_of_the_input(m: Module, x: Tensor) -> Tensor:
    y = m.b(m.a(x))
    factor = torch.from_numpy(x.numpy() + 1)
    return m.d(m.c(y * factor))


@code
def array_of_an_output(m: Module, x: Tensor) -> Tensor:
    y = m.a(x)
    factor = torch.from_numpy(y.detach().numpy() + 1)
    return m.d(m.c(m.b(y) * factor)) * factor


@code
def number_of_an_output(m: Module, x: Tensor) -> Tensor:
    y = m.a(x)
    m.last = y.mean().item()
    return m.d(m.c(m.b(y) * m.last)) + m.last


@code
def decision_by_an_output(m: Module, x: Tensor) -> Tensor:
    y = m.a(x)
    y = m.b(y) if y.detach().sum() > 0 else m.b(-y)
    return m.d(m.c(y))


@code
def decision_after_all_blocks(m: Module, x: Tensor) -> Tensor:
    y = m.a(x)
    z = m.d(m.c(m.b(y)))
    return z * 2 if y.isnan().any() else z + 1


@code
def checkpoint_of_blocks(m: Module, x: Tensor) -> Tensor:
    y = checkpoint(m.a, x)
    y = checkpoint(m.b, y)
    return m.d(checkpoint(m.c, y))


@code
def checkpoint_of_two_blocks(m: Module, x: Tensor) -> Tensor:
    return m.d(checkpoint(lambda y: m.c(m.b(y)), m.a(x)))


@code
def checkpoint_of_a_sequence(m: Module, x: Tensor) -> Tensor:
    return checkpoints.checkpoint_sequential([m.a, m.b, m.c, m.d], 2, x, use_reentrant=False)


@code
def checkpoint_with_glue_after(m: Module, x: Tensor) -> Tensor:
    return m.d(checkpoint(m.c, checkpoint(m.b, m.a(x)) * 2) + x)


@code
def frozen_first_blocks(m: Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.b(m.a(x))
    return m.d(m.c(y))


@code
def lower_precision(m: Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.b(m.a(x))
        y = y @ y.T @ y
        return m.d(m.c(y))


@code
def own_function(m: Module, x: Tensor) -> Tensor:
    y = Cube.apply(m.a(x))
    return m.d(m.c(m.b(y)) + y)


@code
def own_function_that_returns_its_input(m: Module, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.d(m.c(Identity.apply(y) + y) + m.b(y))


@code
def own_function_of_the_input(m: Module, x: Tensor) -> Tensor:
    factor = Cube.apply(x)
    return m.d(m.c(m.b(m.a(x)) * factor))


@code
def data_of_an_output(m: Module, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.d(m.c(m.b(y)) + y.data)


@code
def rows_by_an_output(m: Module, x: Tensor) -> Tensor:
    y = m.a(x)
    best = y.argmax(1)
    return m.d(m.c(m.b(y)) * y.gather(1, best[:, None]))


@code
def loop_over_parts(m: Module, x: Tensor) -> Tensor:
    y = m.a(x)
    parts = [m_(part) for m_, part in zip((m.b, m.c), y.chunk(2), strict=True)]
    return m.d(torch.cat(parts))


@pytest.mark.parametrize(("name", "is_training"), checkered(CODES, [True, False]))
def test_code_of_users_may_be_cut_anywhere(name: str, is_training: bool) -> None:
    module = Module(CODES[name])
    captured = capture(module, ((sample(0),), {}))
    module.train(is_training)
    assert len(captured.blocks) > 1
    for cuts in cuts_of(captured):
        # Another batch, by which code may decide otherwise.
        for seed in (0, 1):
            inputs = (sample(seed),), {}
            ours = chain_result(captured, inputs, cuts)
            with without_checkpoints():
                assert_alike(ours, plain_result(captured, inputs))


@pytest.mark.parametrize("is_training", [True, False])
def test_blocks_that_checkpoint_themselves_may_be_cut(is_training: bool) -> None:
    module = Module(lambda m, x: m.d(m.c(m.b(m.a(x)))))
    module.b, module.c = Checkpointed(), Checkpointed()
    inputs = (sample(0),), {}
    captured = capture(module, inputs)
    module.train(is_training)
    for cuts in cuts_of(captured):
        ours = chain_result(captured, inputs, cuts)
        with without_checkpoints():
            assert_alike(ours, plain_result(captured, inputs))


def _vectorised(m: Module, x: Tensor) -> Tensor:
    return m.b(torch.vmap(lambda row: row * row.sum())(m.a(x)))


OUTSIDE = torch.ones(FEATURES, requires_grad=True) * 2


def _keeping_in_an_attribute(m: Module, x: Tensor) -> Tensor:
    m.kept = [m.a(x)]
    return m.b(m.kept[0])


def _keeping_in_an_argument(m: Module, x: Any) -> Tensor:
    x.append(m.a(x[0]))
    return m.b(x[-1])


def _hooking(m: Module, x: Tensor) -> Tensor:
    y = m.a(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return m.b(y)


REFUSED: dict[str, tuple[Code, str]] = {
    "reentrant checkpoint": (
        lambda m, x: m.d(checkpoints.checkpoint(m.b, m.a(x), use_reentrant=True)),
        "Set use_reentrant=False",
    ),
    "checkpoint of glue": (
        lambda m, x: m.d(checkpoint(lambda y: m.b(y) * y, m.a(x))),
        "must call torch.utils.checkpoint for its submodules only",
    ),
    "vmap": (_vectorised, "must not use torch.func or torch.vmap between its submodules"),
    "tensor in an attribute": (_keeping_in_an_attribute, "got the attribute 'kept', which keeps"),
    "hook of a tensor": (_hooking, "must not register hooks of tensors between its submodules"),
    "tensor of another graph": (
        lambda m, x: m.b(m.a(x) * OUTSIDE),
        "got mul of one with MulBackward0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_cannot_be_cut_is_refused_with_a_way_out(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(UnsupportedStepError, match=message):
        capture(Module(function), ((sample(0),), {}))


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Context manager for the reference, which seeds random numbers inside of checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "checkpoint", lambda function, *args, **_: function(*args))
        yield


def cuts_of(captured: CapturedModule) -> list[list[int]]:
    """Return each cut by itself, and all cuts together."""
    starts = range(1, len(captured.blocks))
    return [*([start] for start in starts), list(starts)]


def test_a_tensor_that_forward_puts_into_an_argument_is_refused() -> None:
    with pytest.raises(UnsupportedStepError, match="got an argument, which keeps one"):
        capture(Module(_keeping_in_an_argument), (([sample(0)],), {}))


def test_members_of_a_dict_are_layers() -> None:
    module = Module(lambda m, x: m.d(m.parts["two"](m.parts["one"](x))))
    module.parts = nn.ModuleDict({"one": Block(), "two": Block()})
    assert capture(module, ((sample(0),), {})).names == ("parts.one", "parts.two", "d")


def sample(seed: int) -> Tensor:
    return torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(seed))


def uses_more_later(m: Module, x: Tensor) -> Tensor:
    y = m.a(x)
    output = m.d(m.c(m.b(y)))
    return output * y if hasattr(m, "is_later") else output


def test_a_use_of_what_was_not_sent_is_an_error() -> None:
    module, inputs = Module(uses_more_later), ((sample(0),), {})
    captured = capture(module, inputs)
    module.is_later = True
    message = "must use after a submodule only what it has used"
    with pytest.raises(UnsupportedStepError, match=message):
        chain_result(captured, inputs, [2])


def two_views(m: Module, x: Tensor) -> Tensor:
    first, second = (m.b(torch.relu(m.a(view))) for view in (x, x.flip(1) + torch.rand_like(x)))
    ends = [m.d(m.c(view)) for view in (first, second)]
    return (ends[0] * second.detach()).sum(1) + (ends[1] * first.detach()).sum(1)


def two_views_of_one_block_between(m: Module, x: Tensor) -> Tensor:
    first = m.b(m.a(x))
    second = m.a(2 * x).relu_()
    both = m.c(first + second * (x > 0) * m.scale)
    return m.d(both) + m.d(F.normalize(second, dim=1))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("code", [two_views, two_views_of_one_block_between])
def test_blocks_that_are_called_for_several_views_are_layers(code: Code, is_training: bool) -> None:
    module = Module(code)
    captured = capture(module, ((sample(0),), {}))
    assert captured.names == ("a", "b", "c", "d")
    module.train(is_training)
    for cuts in cuts_of(captured):
        for inputs in (((sample(0),), {}), ((sample(1)[:2],), {})):
            ours = chain_result(captured, inputs, cuts)
            assert_alike(ours, plain_result(captured, inputs))


def changes_its_sizes(m: Module, x: Tensor) -> Tensor:
    views = [m.b(m.a(view)) for view in (x, -x)]
    return m.d(m.c(views[0] + views[1]))


def test_views_need_outputs_of_the_same_sizes() -> None:
    module = Module(changes_its_sizes)
    captured = capture(module, ((torch.randn(4, 3, FEATURES),), {}))
    with pytest.raises(UnsupportedStepError, match="must have the same sizes in all batches"):
        chain_result(captured, ((torch.randn(4, 2, FEATURES),), {}), [1])
