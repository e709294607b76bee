"""Ranks of one host get memory limits only if together they would take more than it has."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from lightning_dlres import PipelinePlan
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.host_limits import plan_within_hosts
from lightning_dlres.pipeline.profile.cluster import Cluster, Device
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, StepCosts

SIZES = (100, 60, 20, 60)
LAYERS = tuple(
    LayerProfile(name=f"layer{i}", parameter_bytes=size, forward=(1.0,), backward=(2.0,))
    for i, size in enumerate(SIZES)
)
CLUSTER = Cluster(kinds=("cpu",), devices=(Device(host="a"), Device(host="a")))


def fastest(cluster: Cluster, splits: Sequence[tuple[int, int]] = ((2, 2), (1, 3))) -> PipelinePlan:
    """Return the first split that fits."""
    limits = [device.memory_limit for device in cluster.devices]
    for split in splits:
        held = (sum(SIZES[: split[0]]), sum(SIZES[split[0] :]))
        if all(limit is None or size <= limit for size, limit in zip(held, limits, strict=True)):
            return PipelinePlan(
                replicas=((0, 1),),
                split=split,
                microbatches=4,
                layers=LAYERS,
                step=StepCosts(),
                cluster=cluster,
            )
    raise ConfigError("no plan fits")


def without_warnings(memory: dict[str, int], cluster: Cluster = CLUSTER) -> PipelinePlan:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return plan_within_hosts(fastest, cluster, memory, warnings.warn)


@pytest.mark.parametrize("memory", [{}, {"b": 1}, {"a": 240}])
def test_ranks_that_fit_together_have_no_limit(memory: dict[str, int]) -> None:
    # One rank takes 160 of the 240 bytes, more than half of them.
    plan = without_warnings(memory)
    assert plan.split == (2, 2)
    assert plan.cluster == CLUSTER


def test_ranks_that_do_not_fit_together_get_equal_parts() -> None:
    def by_recomputing(cluster: Cluster) -> PipelinePlan:
        plan = fastest(CLUSTER)
        limited = cluster.devices[0].memory_limit is not None
        return msgspec.structs.replace(plan, recompute=(0, 1) if limited else (), cluster=cluster)

    plan = plan_within_hosts(by_recomputing, CLUSTER, {"a": 239}, warnings.warn)
    assert plan.recompute == (0, 1)
    assert plan.cluster is not None
    assert [device.memory_limit for device in plan.cluster.devices] == [119, 119]


def test_a_warning_is_shown_if_no_plan_fits() -> None:
    expected = "needs 240 B of memory on host a, which has 100 B for its ranks"
    with pytest.warns(UserWarning, match=re.escape(expected)):
        assert plan_within_hosts(fastest, CLUSTER, {"a": 100}, warnings.warn).split == (2, 2)


def test_ranks_with_their_own_limit_are_left_out() -> None:
    devices = (Device(host="a", memory_limit=160), Device(host="a"))
    cluster = Cluster(kinds=("cpu",), devices=devices)
    assert without_warnings({"a": 80}, cluster).cluster == cluster


@pytest.mark.parametrize("memory", [{"a": 100, "b": 100}, {"b": 100, "c": 1}])
def test_hosts_without_ranks_to_limit_take_no_part(memory: dict[str, int]) -> None:
    # The rank on host a has a limit of its own, and no rank is on host c. Host b is overfull.
    devices = (Device(host="a", memory_limit=200), Device(host="b"))
    cluster = Cluster(kinds=("cpu",), devices=devices)
    plan = plan_within_hosts(
        partial(fastest, splits=((1, 3), (3, 1))), cluster, memory, warnings.warn
    )
    assert plan.split == (3, 1)
    assert plan.cluster is not None
    assert [device.memory_limit for device in plan.cluster.devices] == [200, 100]
