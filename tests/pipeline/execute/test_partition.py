"""A partition follows the plan, and parameters keep their identity."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.execute.partition import (
    ModelLayers,
    has_meta_tensors,
    held_tensors,
    materialise,
    partition,
    resident_parameter_bytes,
)
from lightning_dlres.pipeline.plan.plan import PipelinePlan

CPU = torch.device("cpu")


class Scale(nn.Module):
    """A layer with a parameter and a buffer of its own, and a `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("count", torch.empty(2))
        self.register_buffer("cache", torch.empty(2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_()
            self.count.zero_()
            self.cache.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Model(nn.Module):
    """A model of four layers, a head and a buffer outside of them. One layer is frozen; two layers
    share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), Scale(), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.net[3].weight = self.net[0].weight
        self.net[2].requires_grad_(False)
        self.head = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(()))

    def reset_parameters(self) -> None:
        self.steps.zero_()


def layers_of(root: nn.Module, prefix: str = "net") -> ModelLayers:
    children = dict(root.get_submodule(prefix).named_children())
    names = tuple(f"{prefix}.{name}" for name in children)
    return ModelLayers(root, names, tuple(children.values()))


def plan_of(*split: int) -> PipelinePlan:
    return PipelinePlan(replicas=(tuple(range(len(split))),), split=split)


def deploy(model: nn.Module, split: tuple[int, ...], stage: int) -> ModelLayers:
    layers, plan = layers_of(model), plan_of(*split)
    partition(layers, layers.owners(plan), plan, stage, CPU)
    return layers


def test_the_plan_determines_the_owners_of_each_parameter() -> None:
    model = Model()
    layers = layers_of(model)
    owners = layers.owners(plan_of(2, 1, 1))
    assert {name: owners[p] for name, p in model.named_parameters()} == {
        "net.0.weight": (0, 2),
        "net.0.bias": (0,),
        "net.1.weight": (0,),
        "net.2.weight": (1,),
        "net.2.bias": (1,),
        "net.3.bias": (2,),
        "head.weight": (0, 1, 2),
        "head.bias": (0, 1, 2),
    }
    assert list(owners) == list(model.parameters()), (
        "in the model's order, which is the same on all ranks"
    )
    assert layers.trainable(range(2)) == [list(model.net[0].parameters()), [model.net[1].weight]]
    assert layers.trainable([2]) == [[]]
    assert layers.non_pipelined_parameters() == list(model.head.parameters())
    assert layers.parameter_bytes() == [80, 16, 32, 16], "the tied weight counts once"


def test_layer_of_a_name() -> None:
    layers = layers_of(Model())
    names = ["net.1.weight", "net.1", "net.10.weight", "head.weight", "steps", "net", "network.1"]
    assert [layers.layer_of(name) for name in names] == [1, 1, None, None, None, None, None]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_holds_its_own_parameters_and_all_keep_their_identity(stage: int) -> None:
    model = Model()
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    layers = deploy(model, (2, 1, 1), stage)
    held = held_tensors(layers, layers.owners(plan_of(2, 1, 1)), plan_of(2, 1, 1), stage)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, parameter in after.items():
        assert parameter is before[name]
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_meta == (name not in held)
        assert parameter.shape == values[name].shape
        assert parameter.requires_grad == ("net.2" not in name)
        assert parameter.is_meta or torch.equal(parameter, values[name])
    assert model.net[3].weight is model.net[0].weight, "the weight stays tied"
    assert has_meta_tensors(model)
    assert resident_parameter_bytes(model) == sum(
        t.numel() * 4 for t in held.values() if isinstance(t, nn.Parameter)
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_buffers_are_on_the_stage_of_their_layer_and_others_on_all_stages(stage: int) -> None:
    model = Model()
    layers = deploy(model, (2, 2), stage)
    meta = {name for name, buffer in model.named_buffers() if buffer.is_meta}
    of_stage_0 = {"net.1.count", "net.1.cache"}
    of_stage_1 = {"net.2.running_mean", "net.2.running_var", "net.2.num_batches_tracked"}
    assert meta == (of_stage_1 if stage == 0 else of_stage_0)
    plan = plan_of(2, 2)
    held = held_tensors(layers, layers.owners(plan), plan, stage)
    assert {n for n, t in held.items() if not isinstance(t, nn.Parameter)} == {
        "steps",
        *(of_stage_0 if stage == 0 else of_stage_1),
    }
    assert list(model.net[1].state_dict()) == ["weight", "count"], "the cache stays non-persistent"


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_steps_the_held_parameters(when: str) -> None:
    model = Model()
    if when == "before":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    deploy(model, (2, 2), 1)
    if when == "after":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    (group,) = optimizer.param_groups
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))
    bias = model.net[3].bias
    before = bias.detach().clone()
    bias.grad = torch.ones_like(bias)
    optimizer.step()
    assert torch.allclose(bias, before - 0.1, atol=0.01)
    assert list(optimizer.state) == [bias], "remote parameters have no state"
    assert list(optimizer.state_dict()["state"]) == [5], "remote parameters keep their indices"


# --- Models that were made on the meta device.


TIED = ("net.0.weight", "net.3.weight")


def made_on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def deploy_meta(split: tuple[int, ...], stage: int, seed: int = 5) -> Model:
    model, plan = made_on_meta(), plan_of(*split)
    layers = layers_of(model)
    owners = layers.owners(plan)
    partition(layers, owners, plan, stage, CPU)
    materialise(layers, plan, stage, device=CPU, seed=seed)
    return model


@pytest.mark.parametrize("split", [(4,), (2, 2), (1, 2, 1)])
def test_initial_values_do_not_depend_on_the_split(split: tuple[int, ...]) -> None:
    whole = deploy_meta((4,), 0)
    assert not has_meta_tensors(whole)
    values = dict(whole.state_dict())
    boundaries = [sum(split[:stage]) for stage in range(len(split) + 1)]
    for stage, (start, stop) in enumerate(pairwise(boundaries)):
        torch.manual_seed(stage)
        model = deploy_meta(split, stage)
        prefixes = [f"net.{index}." for index in range(start, stop)] + ["head."]
        for name, value in model.state_dict().items():
            # A tied weight gets the values of its first holder; see below.
            if name not in TIED and any(name.startswith(prefix) for prefix in prefixes):
                assert torch.equal(value, values[name]), name
        assert model.net[1].cache.is_meta == (not start <= 1 < stop)
    assert whole.net[1].cache.tolist() == [2.0, 2.0]
    assert whole.net[2].running_var.tolist() == [1.0] * 4
    assert whole.net[3].weight is whole.net[0].weight


def test_a_tied_weight_gets_the_initial_values_of_its_first_layer() -> None:
    whole, first = deploy_meta((4,), 0), deploy_meta((3, 1), 0)
    assert torch.equal(whole.net[0].weight, first.net[0].weight)


def test_initial_values_depend_on_the_seed_only() -> None:
    before = torch.get_rng_state()
    one, two, three = deploy_meta((4,), 0, 5), deploy_meta((4,), 0, 6), deploy_meta((4,), 0, 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one.head.weight, two.head.weight)
    assert torch.equal(one.head.weight, three.head.weight)
    assert not torch.equal(one.net[0].bias, one.net[3].bias), "each layer has its own seed"


def test_materialised_parameters_keep_their_identity() -> None:
    model = made_on_meta()
    before = list(model.parameters())
    layers, plan = layers_of(model), plan_of(4)
    materialise(layers, plan, 0, device=CPU, seed=1)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert [p.requires_grad for p in model.net[2].parameters()] == [False, False]


def test_the_error_names_a_module_without_reset_parameters() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(2))

    with torch.device("meta"):
        model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 2), Bare())})
    layers, plan = layers_of(model), plan_of(1, 1)
    materialise(layers, plan, 0, device=CPU, seed=1)
    with pytest.raises(ConfigError, match=r"'net\.1' \(Bare\) .* reset_parameters"):
        materialise(layers, plan, 1, device=CPU, seed=1)


# --- Unusual models.


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(4))


class Block(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary, self.linear = rotary, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.rotary.angles


@pytest.mark.parametrize("stage", [0, 1])
def test_layers_can_share_a_module_with_buffers(stage: int) -> None:
    rotary = Rotary()
    model = nn.ModuleDict({"net": nn.Sequential(Block(rotary), Block(rotary))})
    deploy(model, (1, 1), stage)
    assert not has_meta_tensors(model["net"][stage])


def test_the_list_of_layers_can_have_a_second_name() -> None:
    class Aliased(Model):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net

    model = Aliased()
    deploy(model, (2, 2), 1)
    assert model.net[1].weight.is_meta


def test_all_stages_hold_a_layer_with_a_second_name() -> None:
    """The layer is an embedding; by its second name the loss uses it too."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 4)
            self.net = nn.Sequential(self.embed, nn.Linear(4, 4), nn.Linear(4, 4))

    model = Tied()
    layers = deploy(model, (1, 2), 1)
    assert not model.embed.weight.is_meta
    assert layers.non_pipelined_parameters() == [model.embed.weight]
