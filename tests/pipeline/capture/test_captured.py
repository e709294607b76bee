"""Layers of a captured module give what the module gives, wherever it is cut."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.support.capture_models import family_cases
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.capture.tracing.capturing import capture
from tests.support.captured_chains import assert_alike, chain_result, plain_result

FEATURES = 4
HAND_MADE = family_cases("by hand")
# A module that is called twice, and one that changes a buffer between calls of its submodules.
REFUSED = ("running_statistics",)


class Program(nn.Module):
    """Module whose forward is a list of instructions over a list of tensors."""

    def __init__(self, instructions: list[tuple[str, int, int]]) -> None:
        super().__init__()
        blocks = sum(kind in ("block", "pair") for kind, _, _ in instructions)
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks + 2))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES))
        self.instructions = instructions

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        blocks, called = iter(self.blocks), 1
        known = [next(blocks)(x, x)[0]]
        masks = [mask]
        for kind, first, second in self.instructions:
            a, b = known[first % len(known)], known[second % len(known)]
            if kind in ("block", "pair"):
                results, called = next(blocks)(a, b), called + 1
                known += results if kind == "pair" else results[:1]
            elif kind == "again":
                # Often with the module's input, as for a second view of a batch.
                block = self.blocks[first % called]
                known.append(block(x * (1 + second) if second % 2 else a, b)[0])
            elif kind == "mask":
                masks.append(masks[first % len(masks)].flip(1) * 2)
            elif kind == "in place":
                masks[first % len(masks)].mul_(0.5)
            elif kind == "decide":
                known.append(a + 1 if masks[first % len(masks)].sum() > FEATURES else a * 2)
            else:
                known.append(GLUE[kind](self, a, b, masks[second % len(masks)]))
        last = next(blocks)(known[-1], known[0])
        return {"last": last[0] * masks[-1], "sum": torch.stack(known).sum()}


class Block(nn.Module):
    """Block with two inputs, one of which it may return."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(self.linear(a).tanh(), 0.2, self.training), b


GLUE: dict[str, Callable[[Program, Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda module, a, b, mask: a + b,
    "scale": lambda module, a, b, mask: a * module.scale,
    "masked": lambda module, a, b, mask: a * mask,
    "relu": lambda module, a, b, mask: (a + b).relu_(),
    "parts": lambda module, a, b, mask: torch.cat([part * 2 for part in a.chunk(2, 1)], 1),
    "noise": lambda module, a, b, mask: F.dropout(a, 0.5),
    "write": lambda module, a, b, mask: _with_first(a.clone(), b),
    "shape": lambda module, a, b, mask: a.view(b.shape[0], -1) / a.shape[1],
}


def _with_first(a: Tensor, b: Tensor) -> Tensor:
    a[:, 0] = b[:, 1]
    a[:, 1:].add_(1)
    return a


KINDS = ("block", "block", "pair", "again", "mask", "in place", "decide", *GLUE)
kinds = st.sampled_from(KINDS)
programs = st.lists(st.tuples(kinds, st.integers(0, 9), st.integers(0, 9)), max_size=12)


def inputs_of(seed: int, samples: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    mask = torch.randint(0, 2, (samples, FEATURES), generator=generator).float()
    return (x,), {"mask": mask}


@given(
    program=programs,
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    samples=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 12), max_size=4),
    is_training=st.booleans(),
)
def test_any_forward_may_be_cut_anywhere(
    program: list[tuple[str, int, int]],
    seeds: tuple[int, int],
    samples: int,
    cuts: list[int],
    is_training: bool,
) -> None:
    module = Program(program)
    try:
        captured = capture(module, inputs_of(seeds[0], 3))
    except UnsupportedStepError:
        # A block is called again with what a later one returns, or there is a decision between.
        assert any(kind == "again" for kind, _, _ in program)
        reject()
    module.train(is_training)
    # Other values, by which the forward may decide otherwise, and another number of samples.
    inputs = inputs_of(seeds[1], samples)
    cuts = [cut for cut in cuts if cut < len(captured.blocks)]
    try:
        expected = plain_result(captured, inputs)
    except RuntimeError:
        # The module changes a mask in place that backward needs: it cannot be trained.
        reject()
    assert_alike(chain_result(captured, inputs, cuts), expected)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", sorted(HAND_MADE.keys() - set(REFUSED)))
def test_hand_made_models_run_layer_by_layer(name: str, is_training: bool) -> None:
    case = HAND_MADE[name]
    torch.manual_seed(0)
    module = case.make()

    def inputs(seed: int) -> Any:
        batch = case.batch(4, seed)
        return ((), batch) if isinstance(batch, dict) else (batch, {})

    captured = capture(module, inputs(0))
    module.train(is_training)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    ours = chain_result(captured, inputs(1), list(range(len(captured.blocks))))
    module.load_state_dict(state)
    assert_alike(ours, plain_result(captured, inputs(1)))


@pytest.mark.parametrize(
    ("name", "message"),
    [("running_statistics", "got a change of 'mean'")],
)
def test_what_cannot_be_cut_is_refused(name: str, message: str) -> None:
    case = HAND_MADE[name]
    with pytest.raises(UnsupportedStepError, match=message):
        capture(case.make(), (case.batch(4, 0), {}))


class Leak(nn.Module):
    """Module whose first submodule passes a tensor to it by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.first.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.kept


def test_a_tensor_that_a_submodule_does_not_return_is_refused() -> None:
    with pytest.raises(UnsupportedStepError, match="a tensor that a submodule keeps elsewhere"):
        capture(Leak(), ((torch.ones(2, FEATURES),), {}))


class Stateful(nn.Module):
    """Module whose submodules share a list."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: list[float] = []
        self.layers = nn.ModuleList(Remembering(self.shared) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.shared.clear()
        for layer in self.layers:
            x = layer(x)
        return x


class Remembering(nn.Module):
    def __init__(self, shared: list[float]) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(FEATURES, FEATURES), shared

    def forward(self, x: Tensor) -> Tensor:
        self.shared.append(1.0)
        return self.linear(x) * len(self.shared)


class Branching(nn.Module):
    """Module that uses results of its first submodule in more places if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.third = nn.Bilinear(FEATURES, FEATURES, FEATURES)
        self.uses = ""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        early = self.first(x).tanh()
        late = self.second(early).tanh()
        if self.uses == "glue":
            late = late.mul_(early)
        late = self.third(late, early if self.uses == "argument" else late)
        if self.uses == "later glue":
            late = late * early
        return (late, early) if self.uses == "return" else late


@pytest.mark.parametrize("uses", ["argument", "glue", "later glue", "return"])
@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2]])
def test_a_use_that_the_first_samples_did_not_show_is_right_or_refused(
    uses: str, cuts: list[int]
) -> None:
    module, inputs = Branching(), ((torch.randn(3, FEATURES),), {})
    captured = capture(module, inputs)
    module.uses = uses
    ours, refusal = None, ""
    try:
        ours = chain_result(captured, inputs, cuts)
    except UnsupportedStepError as error:
        refusal = str(error)
    if uses == "argument" and 2 not in cuts:
        # The submodule with the new argument runs where the other one is.
        assert ours is not None
    if ours is None:
        assert "module='training_step'" in refusal
    else:
        assert_alike(ours, plain_result(captured, inputs))


def test_submodules_that_share_state_are_refused() -> None:
    with pytest.raises(UnsupportedStepError, match="must give the same output"):
        capture(Stateful(), ((torch.ones(2, FEATURES),), {}))


def test_capture_leaves_the_module_and_random_numbers_as_they_were() -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    module.forward = lambda x: nn.Sequential.forward(module, x) * 2  # type: ignore[method-assign]
    module[1].eval()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    random_state = torch.get_rng_state()
    capture(module, ((torch.ones(3, FEATURES),), {}))
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    assert [m.training for m in module] == [True, False, True, True]


class ReturnsItsParameter(nn.Module):
    """Block with an operation whose result is the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.float()


def test_capture_keeps_no_weak_reference_to_a_parameter() -> None:
    """`torch.utils.swap_tensors`, which moves parameters, refuses it."""

    class Chain(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = block(x) + 1
            return x

    module = Chain(ReturnsItsParameter(), ReturnsItsParameter())
    captured = capture(module, ((torch.ones(2, FEATURES),), {}))
    assert len(captured.blocks) == 2
    assert not any(weakref.getweakrefs(parameter) for parameter in module.parameters())


def test_hooks_of_blocks_fire_once_in_a_run_of_all_layers() -> None:
    case = HAND_MADE["unet"]
    module, calls = case.make(), []
    captured = capture(module, (case.batch(2, 0), {}))
    for name, block in zip(captured.names, captured.blocks, strict=True):
        block.register_forward_hook(lambda *args, name=name: calls.append(name))
    chain_result(captured, (case.batch(2, 0), {}), [2, 5])
    assert calls == list(captured.names)
