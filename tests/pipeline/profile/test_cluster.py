"""A link that was not measured is derived from similar ones; invalid data is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.profile.cluster import Cluster, Device, Link
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, StepCosts
from tests.support.pipeline_profiles import ONE_F_ONE_B, plain_cluster, plain_layers

HOSTS = ("a", "a", "a", "b", "b", "c", "c")


def cluster(*links: tuple[int, int, float]) -> Cluster:
    return plain_cluster(
        len(HOSTS),
        hosts=HOSTS,
        links=[Link(ranks=(a, b), latency=x, bytes_per_second=1.0) for a, b, x in links],
    )


def test_a_measured_link_counts_in_both_directions() -> None:
    measured = cluster((0, 1, 7.0), (1, 3, 8.0))
    assert measured.link(0, 1).latency == measured.link(1, 0).latency == 7.0
    assert measured.link(3, 1).latency == 8.0


def test_a_link_that_was_not_measured_equals_the_most_similar_one() -> None:
    measured = cluster((3, 4, 1.0), (0, 1, 2.0), (5, 0, 4.0), (0, 3, 3.0))
    assert measured.link(1, 2).latency == 2.0, "same host"
    assert measured.link(4, 2).latency == 3.0, "same two hosts"
    assert measured.link(5, 6).latency == 1.0, "within a host, as the first such link"
    assert measured.link(3, 6).latency == 4.0, "between hosts, as the first such link"


def test_a_link_without_similar_ones_is_perfect() -> None:
    measured = cluster((0, 1, 2.0))
    assert measured.transfer_seconds(0, 3, 10**12) == 0.0
    assert measured.transfer_seconds(1, 2, 10) == 12.0


def test_shared_parameters_count_once_in_a_stage() -> None:
    layer = LayerProfile(name="x", parameter_bytes=3, shared={"a": 4, "b": 5})
    assert layer.all_parameter_bytes == 12


@pytest.mark.parametrize("device", [{"kind": 1}, {"kind": -1}, {"power": 0.0}])
def test_bad_devices_are_refused(device: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(devices|kind|power) must be "):
        Cluster(kinds=("cpu",), devices=(Device(**device),))


@pytest.mark.parametrize(
    ("ranks", "latency", "bytes_per_second"),
    [((0, 2), 0.0, 1.0), ((-1, 0), 0.0, 1.0), ((0, 1), -1.0, 1.0), ((0, 1), 0.0, 0.0)],
)
def test_bad_links_are_refused(
    ranks: tuple[int, int], latency: float, bytes_per_second: float
) -> None:
    def make() -> None:
        link = Link(ranks=ranks, latency=latency, bytes_per_second=bytes_per_second)
        plain_cluster(2, links=[link])

    with pytest.raises(ConfigError, match=r"(links|ranks|latency|bytes_per_second) must be "):
        make()


def test_a_layer_without_times_for_a_kind_is_refused() -> None:
    layers = (*plain_layers([1.0]), LayerProfile(name="new", forward=(1.0,)))
    with pytest.raises(
        ConfigError, match=r"layer 'new' for each of 1 kinds .* got 1 forward and 0 backward times"
    ):
        Workload(layers, StepCosts(), plain_cluster(1), ((0,),), ONE_F_ONE_B, 1)


def test_a_profile_round_trips_through_json() -> None:
    given = cluster((0, 1, 2.0))
    assert msgspec.json.decode(msgspec.json.encode(given), type=Cluster) == given
    layer = LayerProfile(name="x", shared={"a": 4}, forward=(1.0, 2.0), backward=(2.0, 3.0))
    assert msgspec.json.decode(msgspec.json.encode(layer), type=LayerProfile) == layer
