"""A plan is plain data: it survives JSON, prints, and refuses what cannot run, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.cost_model.simulator import simulate
from lightning_dlres.pipeline.plan.plan import PipelinePlan, consecutive_replicas, even_split
from lightning_dlres.pipeline.profile.cluster import Cluster, Device
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, StepCosts


def layer(name: str, size: int, seconds: float) -> LayerProfile:
    return LayerProfile(
        name=name,
        parameter_bytes=size,
        gradient_bytes=size,
        forward=(seconds, 2 * seconds, 4 * seconds),
        backward=(seconds, 2 * seconds, 4 * seconds),
    )


def devices(*powers: float) -> tuple[Device, ...]:
    return tuple(Device(kind={1.0: 0, 0.5: 1, 0.25: 2}[power], power=power) for power in powers)


PLAN = PipelinePlan(
    replicas=((0, 2), (1, 3)),
    split=(2, 1),
    recompute=(1,),
    microbatches=4,
    layers=(layer("net.0", 4096, 0.25), layer("net.1", 0, 0.5), layer("net.2", 1 << 20, 1.0)),
    cluster=Cluster(kinds=("fast", "half", "quarter"), devices=devices(1.0, 0.5, 1.0, 0.25)),
)


@st.composite
def plans(draw: st.DrawFn) -> PipelinePlan:
    split = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    world = draw(st.integers(1, 3)) * len(split)
    ranks = draw(st.permutations(range(world)))
    replicas = tuple(
        tuple(ranks[first : first + len(split)]) for first in range(0, world, len(split))
    )
    profile = st.builds(
        LayerProfile,
        name=st.from_regex(r"[\w.\[\]]{0,8}", fullmatch=True),
        parameter_bytes=st.integers(0, 2**40),
        shared=st.dictionaries(st.sampled_from("ab"), st.integers(0, 9)),
        forward=st.just((1.0,)),
        backward=st.tuples(st.floats(0, 1e6)),
    )
    layers = draw(
        st.one_of(st.just([]), st.lists(profile, min_size=sum(split), max_size=sum(split)))
    )
    device = st.builds(
        Device,
        kind=st.just(0),
        power=st.floats(0.01, 1.0),
        host=st.sampled_from(["", "a"]),
        memory_limit=st.one_of(st.none(), st.integers(0, 2**40)),
    )
    cluster_devices = draw(st.one_of(st.none(), st.lists(device, min_size=world, max_size=world)))
    return PipelinePlan(
        replicas=replicas,
        split=tuple(split),
        recompute=tuple(draw(st.sets(st.integers(0, sum(split) - 1)))),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        microbatches=draw(st.integers(0, 4)),
        layers=tuple(layers),
        step=StepCosts(loss=(0.5,), state_bytes_per_parameter_byte=2.0),
        cluster=Cluster(kinds=("cpu",), devices=tuple(cluster_devices))
        if cluster_devices is not None
        else None,
    )


@given(plans())
def test_a_plan_round_trips_through_json(plan: PipelinePlan) -> None:
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert PipelinePlan.from_json(plan.to_json().encode()) == plan


@given(plans())
def test_every_plan_prints_and_places_each_layer_and_rank_once(plan: PipelinePlan) -> None:
    assert len(plan.table().splitlines()) == 3 + plan.stages
    positions = [plan.position(rank) for rank in range(plan.world_size)]
    assert sorted(positions) == [
        (r, s) for r in range(len(plan.replicas)) for s in range(plan.stages)
    ]
    for rank, (replica, stage) in enumerate(positions):
        assert plan.replicas[replica][stage] == rank
    layers = [layer for stage in range(plan.stages) for layer in plan.layers_of(stage)]
    assert layers == list(range(sum(plan.split)))
    for layer in layers:
        assert layer in plan.layers_of(plan.stage_of(layer))
    assert len({plan.rank_name(rank) for rank in range(plan.world_size)}) == plan.world_size


def test_the_table_shows_the_plan() -> None:
    title, header, _, first, second = PLAN.table().splitlines()
    assert title == "Pipeline plan"
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "stage",
        "rank",
        "power",
        "layers",
        "names",
        "recomputed",
        "in flight",
        "parameters",
        "peak memory",
        "busy per step",
    ]
    assert [cell.strip() for cell in first.strip("|").split("|")] == [
        "0",
        "0, 1",
        "1.00, 0.50",
        "2",
        "net.0 .. net.1",
        "1",
        "2",
        "4 KiB",
        "8 KiB",
        "8000.0 ms",
    ]
    assert [cell.strip() for cell in second.strip("|").split("|")][4] == "net.2"
    bare = PipelinePlan(replicas=((0,),), split=(3,)).table().splitlines()[-1]
    assert [cell.strip() for cell in bare.strip("|").split("|")] == [
        "0",
        "0",
        "-",
        "3",
        "-",
        "0",
        "-",
        "-",
        "-",
        "-",
    ]


def test_the_slowest_replica_sets_the_busy_time() -> None:
    # Two of the four micro-batches on a device of half the speed; the second layer is recomputed.
    assert PLAN.busy_seconds(0) == 2 * 2 * (0.75 + 0.75 + 0.5)
    assert PLAN.busy_seconds(1) == 2 * 4 * (1.0 + 1.0)
    with pytest.raises(ConfigError, match="must have measured times"):
        PipelinePlan(replicas=((0, 1),), split=(2, 1), layers=PLAN.layers).busy_seconds(0)


def test_a_measured_plan_can_be_simulated() -> None:
    timeline = simulate(PLAN.workload(), PLAN.split, PLAN.recompute)
    assert timeline.step_seconds >= PLAN.busy_seconds(1)
    assert PLAN.prediction() == "The time of a step was not predicted, since nothing was measured."
    prediction = msgspec.structs.replace(PLAN, predicted_seconds=0.5, even_seconds=1.0).prediction()
    assert prediction == "Predicted step: 500.0 ms; an even split takes 1000.0 ms (2.00 times)."


def test_a_rank_name_has_stage_and_replica() -> None:
    assert PLAN.rank_name(3) == "stage 1 of replica 1 (rank 3)"
    assert PipelinePlan(replicas=((1, 0),), split=(1, 1)).rank_name(0) == "stage 1 (rank 0)"
    with pytest.raises(ConfigError, match=r"rank must be in one of the replicas .*, got 4"):
        PLAN.rank_name(4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"replicas": ()}, "replicas must be lists with a rank for each stage of split"),
        (
            {"replicas": ((0, 1), (2,))},
            "replicas must be lists with a rank for each stage of split",
        ),
        ({"split": (1, 1, 1)}, r"a rank for each stage of split \(3\)"),
        ({"replicas": ((0, 1), (1, 2))}, "the ranks 0 to 3, each once"),
        ({"replicas": ((0, 1), (2, 4))}, "the ranks 0 to 3, each once"),
        ({"replicas": ((-1, 0), (1, 2))}, "replicas must be "),
        ({"split": (3, 0)}, "split must be at least one layer for every stage"),
        ({"split": (4, -1)}, "split must be a whole number"),
        ({"split": (2, 2)}, "split must add up to the 3 layers"),
        ({"recompute": (3,)}, "indices of layers from 0 to 2"),
        ({"recompute": (-1,)}, "recompute must be a whole number"),
        ({"schedule": "2bw"}, "schedule must be one of 'gpipe', '1f1b'"),
        ({"microbatches": -1}, "must be a whole number of at least 0, got -1"),
        ({"extra_in_flight": -1}, "must be a whole number of at least 0, got -1"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(change: dict[str, Any], words: str) -> None:
    good = {"replicas": PLAN.replicas, "split": PLAN.split, "layers": PLAN.layers}
    PipelinePlan(**good)
    with pytest.raises(ConfigError, match=words):
        PipelinePlan(**{**good, **change})
    edited = json.loads(PLAN.to_json())
    edited.update(
        {key: list(map(list, v)) if key == "replicas" else v for key, v in change.items()}
    )
    with pytest.raises(ConfigError, match=words):
        PipelinePlan.from_json(json.dumps(edited))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be JSON"),
        ("{}", "missing required field `replicas`"),
        ('{"replicas": [["0"]], "split": [1]}', "Expected `int`, got `str`"),
        (b"\xff\xfe", "must be JSON"),
        ("[" * 50, "must be JSON"),
        # A slip in an edited file must not be read as the default.
        ('{"replicas": [[0]], "split": [1], "recomputed": [0]}', "unknown field `recomputed`"),
    ],
)
def test_text_that_is_no_plan_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PipelinePlan.from_json(text)


def test_a_plan_is_loaded_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    assert PipelinePlan.load(path) == PipelinePlan.load(str(path)) == PLAN
    with pytest.raises(ConfigError, match=r"nowhere\.json' \(No such file"):
        PipelinePlan.load(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        PipelinePlan.load(tmp_path)


def test_replicas_are_made_of_consecutive_ranks() -> None:
    assert consecutive_replicas(6, 3) == ((0, 1, 2), (3, 4, 5))
    assert consecutive_replicas(3, 3) == ((0, 1, 2),)
    assert consecutive_replicas(2, 1) == ((0,), (1,))
    for stages in (0, -1, 4, 12):
        with pytest.raises(ConfigError, match=rf"ranks \(6\), got {stages}\..*\[1, 2, 3, 6\]"):
            consecutive_replicas(6, stages)


@given(st.integers(1, 50), st.integers(1, 50))
def test_an_even_split_differs_by_at_most_one_layer(layers: int, stages: int) -> None:
    split = even_split(layers, stages)
    assert (sum(split), len(split)) == (layers, stages)
    assert max(split) - min(split) <= 1
    assert list(split) == sorted(split, reverse=True)


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": ((),), "split": (), "layers": ()},
        {"cluster": {"kinds": ("cpu",), "devices": devices(1.0)}},
        {"cluster": {"kinds": ("cpu",), "devices": (Device(kind=1),) * 4}},
    ],
    ids=["no stage", "a device is missing", "an unknown kind"],
)
def test_plans_without_a_stage_or_with_a_wrong_cluster_are_refused(change: dict[str, Any]) -> None:
    options = {"replicas": PLAN.replicas, "split": PLAN.split, "layers": PLAN.layers, **change}

    def make_plan() -> PipelinePlan:
        cluster = Cluster(**options.pop("cluster")) if "cluster" in options else None
        return PipelinePlan(**options, cluster=cluster)

    with pytest.raises(ConfigError):
        make_plan()


def test_a_plan_in_another_encoding_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be JSON"):
        PipelinePlan.from_json(PLAN.to_json().replace("net", "größe").encode("latin-1"))
