"""The module to pipeline: finding it, intercepting calls of it, and errors for misuse."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlres import HeteroPipeStrategy
from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.stage.microbatch import cut
from lightning_dlres.strategies.hetero_pipe.step.module_search import (
    find_pipelined_module,
    require_layers,
)
from lightning_dlres.strategies.hetero_pipe.step.pipelined_module import PipelinedModule
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import QUICK

SHIFT = torch.ones(2)


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def sequential(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(linear() for _ in range(count)))


class Root(nn.Module):
    """A module with the given children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


class Scaled(nn.Module):
    """A block that takes arguments beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, factor: float = 1.0, shift: Tensor | None = None) -> Tensor:
        y = self.linear(x) * factor
        return y if shift is None else y + shift


# --- Finding the module.


@pytest.mark.parametrize(
    ("root", "path", "layers"),
    [
        (Root(net=sequential(3)), "net", ["net.0", "net.1", "net.2"]),
        (Root(embed=linear(), blocks=nn.ModuleList([linear()])), "blocks", ["blocks.0"]),
        (
            Root(a=linear(), inner=Root(net=sequential())),
            "inner.net",
            ["inner.net.0", "inner.net.1"],
        ),
        (Root(net=nn.Sequential(sequential(), linear())), "net", ["net.0", "net.1"]),
        (Root(net=sequential(), act=nn.Sequential(nn.ReLU())), "net", ["net.0", "net.1"]),
        (Root(model=Scaled(), loss=nn.CrossEntropyLoss()), "model", ["model"]),
        (Root(net=sequential(), net2=linear()), "net", ["net.0", "net.1"]),
    ],
    ids=["sequential", "list", "deep", "nested", "without parameters", "lone child", "prefix"],
)
def test_only_candidate_is_found(root: Root, path: str, layers: list[str]) -> None:
    pipelined = find_pipelined_module(root, None)
    assert pipelined.path == path
    assert pipelined.module is root.get_submodule(path)
    assert list(pipelined.layers.names) == layers
    assert [root.get_submodule(name) for name in layers] == list(pipelined.layers.modules)


def test_layers_keep_the_names_of_the_user() -> None:
    named = nn.Sequential()
    named.add_module("first", linear())
    named.add_module("last", linear())
    assert find_pipelined_module(Root(net=named), None).layers.names == ("net.first", "net.last")


@pytest.mark.parametrize(
    ("root", "names"),
    [
        (Root(left=sequential(), right=sequential()), ("left", "right")),
        (Root(net=sequential(), blocks=nn.ModuleList([linear()])), ("net", "blocks")),
        (Root(encoder=linear(), loss=nn.MSELoss(), decoder=linear()), ("encoder", "decoder")),
    ],
)
def test_several_candidates_select_the_step(root: Root, names: tuple[str, ...]) -> None:
    found = find_pipelined_module(root, None)
    assert found.is_step
    assert found.layers.names == names


def test_a_candidate_with_too_few_layers_leaves_the_choice_to_the_step() -> None:
    root = Root(encoder=sequential(), head=linear())
    count = len(root.encoder)
    assert find_pipelined_module(root, None, count).path == "encoder"
    assert find_pipelined_module(root, None, count + 1).is_step
    # A module that is alone is named, so that the error can name it.
    assert find_pipelined_module(Root(encoder=sequential()), None, count + 1).path == "encoder"


@pytest.mark.parametrize("root", [Root(loss=nn.CrossEntropyLoss()), Root(net=nn.Sequential())])
def test_error_says_that_there_is_no_candidate(root: Root) -> None:
    with pytest.raises(ConfigError, match="Root has no module with parameters"):
        find_pipelined_module(root, None)


def test_given_name_selects_the_module() -> None:
    root = Root(left=sequential(), right=nn.ModuleList([Scaled()]), head=linear())
    assert find_pipelined_module(root, "left").module is root.left
    assert find_pipelined_module(root, "right.0").layers.names == ("right.0",)
    assert find_pipelined_module(root, "head").layers.modules == (root.head,)


@pytest.mark.parametrize("path", ["nothing", "left.7", "left.0.weight", "left."])
def test_error_for_a_bad_name_lists_good_names(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"got '{path}'.*\['left', 'right'\]"):
        find_pipelined_module(Root(left=sequential(), right=sequential()), path)


def test_empty_container_is_an_error() -> None:
    with pytest.raises(ConfigError, match="got 'net', which is empty"):
        find_pipelined_module(Root(net=nn.Sequential()), "net")


def test_layer_that_is_used_twice_counts_as_two_layers() -> None:
    shared = linear()
    pipelined = find_pipelined_module(Root(net=nn.Sequential(shared, nn.ReLU(), shared)), None)
    assert pipelined.layers.names == ("net.0", "net.1", "net.2")
    assert pipelined.layers.modules[0] is pipelined.layers.modules[2]


# --- Intercepting calls.


def run_layers(pipelined: PipelinedModule, tree: Tree) -> Tree:
    """Return the output of the layers, run one after the other as the pipeline does."""
    for index, module in enumerate(pipelined.layers.modules):
        tree = pipelined.bind(index, module)(tree)
    return tree


def call_in_order(blocks: Any, x: Tensor, **options: Any) -> Tensor:
    for block in blocks:
        x = block(x, **options)
    return x


@pytest.mark.parametrize(
    ("module", "call"),
    [
        (sequential(3), lambda net, x: net(x)),
        (nn.ModuleList([linear(), linear()]), call_in_order),
        (
            nn.ModuleList([Scaled(), Scaled()]),
            lambda net, x: call_in_order(net, x, factor=2.0, shift=SHIFT),
        ),
        (
            nn.ModuleList([Scaled(), Scaled()]),
            lambda net, x: net[1](net[0](x, 2.0, SHIFT), 2.0, SHIFT),
        ),
        (nn.ModuleList([Scaled()]), lambda net, x: net[0](x, 3.0)),
        (Scaled(), lambda net, x: net(x, shift=SHIFT, factor=0.5)),
        (Scaled(), lambda net, x: net(x=x)),
    ],
    ids=[
        "sequential",
        "list",
        "list, names",
        "list, positions",
        "list of one",
        "any",
        "any, names",
    ],
)
def test_call_goes_to_the_handler(module: nn.Module, call: Callable[..., Tensor]) -> None:
    pipelined, x = find_pipelined_module(Root(net=module), "net"), torch.randn(3, 2)
    expected, inputs = call(module, x), []

    def handler(tree: Tree) -> Tree:
        inputs.append(tree)
        return run_layers(pipelined, tree)

    with pipelined.intercepted(handler):
        assert torch.equal(call(module, x), expected)
        assert torch.equal(call(module, x), expected), "the next step is intercepted, too"
    assert len(inputs) == 2
    assert torch.equal(call(module, x), expected)
    assert len(inputs) == 2, "calls outside of the step are not intercepted"


def test_forward_is_restored_however_the_step_ends() -> None:
    module = sequential()
    own = module.__dict__["forward"] = lambda x: x * 0
    pipelined = find_pipelined_module(Root(net=module), None)

    class Stop(BaseException):
        pass

    def stop(tree: Tree) -> Tree:
        raise Stop

    with pytest.raises(Stop), pipelined.intercepted(stop):
        module(torch.ones(1, 2))
    assert module.__dict__["forward"] is own
    with pipelined.intercepted(lambda tree: tree):
        assert module.__dict__["forward"] is not own
    assert module.__dict__["forward"] is own


def test_user_hooks_fire() -> None:
    module, calls = sequential(), []
    module.register_forward_pre_hook(lambda m, args: calls.append("before"))
    module.register_forward_hook(lambda m, args, output: calls.append(f"after {output.shape[0]}"))
    module[1].register_forward_hook(lambda m, args, output: calls.append("layer"))
    pipelined = find_pipelined_module(Root(net=module), None)
    with pipelined.intercepted(lambda tree: run_layers(pipelined, tree)):
        module(torch.ones(3, 2))
    assert calls == ["before", "layer", "after 3"]


@pytest.mark.parametrize("arguments", [(), (1, 2)])
def test_sequential_takes_one_argument(arguments: tuple[int, ...]) -> None:
    pipelined = find_pipelined_module(Root(net=sequential()), None)
    with pipelined.intercepted(lambda tree: tree):
        with pytest.raises(UnsupportedStepError, match=rf"{len(arguments)} positional and 0"):
            pipelined.module(*arguments)
        with pytest.raises(UnsupportedStepError, match="1 positional and 1 keyword"):
            pipelined.module(1, input=2)


# --- Misuse of an `nn.ModuleList`.

OTHER_USE = r"output of 'blocks\.0' must only be used as the first argument of 'blocks\.1'"
OUT_OF_TURN = r"got a call of 'blocks\.\d' out of turn"
OTHER_ARGUMENTS = r"'blocks\.1' must be called with the same further arguments as 'blocks\.0'"
X = torch.ones(1, 2)


def run_refused(step: Callable[[Any], Any]) -> None:
    root = Root(blocks=nn.ModuleList([Scaled() for _ in range(3)]))
    pipelined = find_pipelined_module(root, None)
    with pipelined.intercepted(lambda tree: pytest.fail("the handler was called")):
        step(root.blocks)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda b: b[0](X) * X, OTHER_USE),
        (lambda b: X + b[0](X), OTHER_USE),
        (lambda b: F.relu(b[0](X)), OTHER_USE),
        (lambda b: nn.Linear(2, 2)(b[0](X)), OTHER_USE),
        (lambda b: b[0](X).relu(), OTHER_USE),
        (lambda b: b[0](X).shape, OTHER_USE),
        (
            lambda b: torch.cat([b[0](X), X]),
            "must only be passed to the next member, got a use in cat",
        ),
        (lambda b: b[1](X), OUT_OF_TURN),
        (lambda b: b[2](b[0](X)), OUT_OF_TURN),
        (lambda b: b[1](b[1](b[0](X))), OUT_OF_TURN),
        (lambda b: b[0](X) and b[1](X), OTHER_USE),
        (lambda b: b[1](b[0](X), 2.0), OTHER_ARGUMENTS),
        (lambda b: b[1](b[0](X, shift=SHIFT), shift=SHIFT.clone()), OTHER_ARGUMENTS),
        (lambda b: b[1](b[0](X, 2.0), factor=2.0), OTHER_ARGUMENTS),
        (lambda b: b[1](b[0](X, factor=2.0)), OTHER_ARGUMENTS),
    ],
)
def test_error_explains_misuse_of_a_list(step: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(UnsupportedStepError, match=words):
        run_refused(step)


def test_output_of_an_earlier_series_is_refused_as_input() -> None:
    def step(blocks: Any) -> None:
        first = blocks[0](X)
        blocks[0](X)
        blocks[1](first)

    with pytest.raises(UnsupportedStepError, match=OUT_OF_TURN):
        run_refused(step)


def test_series_of_calls_may_start_again() -> None:
    root = Root(blocks=nn.ModuleList([Scaled(), Scaled()]))
    pipelined, calls = find_pipelined_module(root, None), []
    with pipelined.intercepted(lambda tree: calls.append(tree)):
        root.blocks[0](X)
        root.blocks[1](root.blocks[0](SHIFT))
    ((first, args, kwargs),) = calls
    assert first is SHIFT
    assert (args, kwargs) == ((), {})


# --- More uses of an `nn.ModuleList`.


@pytest.mark.parametrize(
    "use",
    [
        lambda token: token + 1,
        lambda token: token * 0.5,
        operator.neg,
        operator.itemgetter(0),
        len,
        list,
        float,
        lambda token: token > 0,
    ],
)
def test_error_explains_operators_between_the_members(use: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedStepError, match=OTHER_USE):
        run_refused(lambda blocks: use(blocks[0](X)))


@pytest.mark.parametrize("use", [bool, lambda token: token == 1, lambda token: token != 1])
def test_error_explains_comparisons_between_the_members(use: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedStepError, match=OTHER_USE):
        run_refused(lambda blocks: use(blocks[0](X)))


def test_first_argument_by_name_works_or_is_refused() -> None:
    root = Root(blocks=nn.ModuleList([Scaled(), Scaled()]))
    pipelined = find_pipelined_module(root, None)
    with pipelined.intercepted(lambda tree: run_layers(pipelined, tree)):
        try:
            root.blocks[1](x=root.blocks[0](x=X))
        except UnsupportedStepError:
            return


def test_hooks_on_list_members_see_tensors() -> None:
    root, seen = Root(blocks=nn.ModuleList([linear(), linear()])), []
    for block in root.blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    pipelined = find_pipelined_module(root, None)
    with pipelined.intercepted(lambda tree: run_layers(pipelined, tree)):
        call_in_order(root.blocks, X)
    assert set(seen) == {Tensor}


def test_empty_name_is_an_error() -> None:
    with pytest.raises(ConfigError):
        find_pipelined_module(Root(net=sequential()), "")


def test_all_micro_batches_get_the_same_further_arguments() -> None:
    root, x = Root(blocks=nn.ModuleList([Scaled(), Scaled()])), torch.randn(2, 2)
    pipelined = find_pipelined_module(root, None)

    def step() -> Tensor:
        return root.blocks[1](root.blocks[0](x, 2.0, None), 2.0, None)

    def in_parts(tree: Tree) -> Tree:
        return torch.cat([run_layers(pipelined, part) for part in cut(tree, [1, 1])])

    expected = step()
    with pipelined.intercepted(in_parts):
        assert torch.allclose(step(), expected)


# --- Use of a layer outside of the module's call.


class UsesLayerWeight(LightningModule):
    """Uses a layer's weight after the pipelined module.

    Args:
        second_name: The layer is also an attribute of this module, outside of the pipelined one.
    """

    def __init__(self, second_name: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = nn.Embedding(7, 6)
        if second_name:
            self.table = table
        self.net = nn.Sequential(table, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = F.linear(self.net(batch[0]), self.net[0].weight)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[0].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_with_layer_weight(context: RankContext, second_name: bool) -> list[float]:
    model, world = UsesLayerWeight(second_name), context.world_size
    strategy = HeteroPipeStrategy(module="net", schedule="gpipe", microbatches=2, profile=QUICK)
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy if world > 1 else "auto",
        plugins=[context.environment] if world > 1 else [],
        max_epochs=1,
        **QUIET,
    )
    tokens = torch.randint(7, (12, 5), generator=torch.Generator().manual_seed(0))
    trainer.fit(model, DataLoader(TensorDataset(tokens), batch_size=4))
    return model.losses


@pytest.mark.parametrize("second_name", [False, True])
def test_use_of_another_stages_weight_is_exact_or_refused(
    pool: RankPool, second_name: bool
) -> None:
    (expected,) = pool.run(train_with_layer_weight, 1, second_name)
    outcomes = pool.run_expecting_errors(train_with_layer_weight, 2, second_name, keep=True)
    refused = {"UnsupportedStepError", "ConfigError"} & {o.error_type for o in outcomes}
    # A second name lets all stages hold the layer.
    assert bool(refused) != second_name
    if refused:
        assert any("the layer's weight 'net.0.weight'" in o.traceback for o in outcomes)
    else:
        for outcome in outcomes:
            assert outcome.error_type is None, outcome.traceback
            assert outcome.value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("layers", "stages", "fitting"), [(3, 4, 2), (2, 4, 2), (5, 8, 4), (2, 3, 1), (4, 6, 3)]
)
def test_too_few_layers_name_stages_that_divide_the_devices(
    layers: int, stages: int, fitting: int
) -> None:
    pipelined = find_pipelined_module(Root(net=sequential(layers)), "net")
    require_layers(pipelined, layers)
    with pytest.raises(ConfigError, match=rf"devices={layers}, .*\(stages={fitting}\)"):
        require_layers(pipelined, stages)
