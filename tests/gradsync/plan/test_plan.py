"""Plans are plain data: they print, and survive JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec


def example() -> SyncPlan:
    gradients = [GradientSpec(name="weight", count=300), GradientSpec(name="bias", count=10)]
    choices = [CodecChoice(codec="tbq", partitions=3), CodecChoice(codec=RAW, partitions=1)]
    return make_plan(gradients, choices, world_size=3, topology="ring", alignment=100)


def test_a_plan_survives_json() -> None:
    plan = example()
    assert SyncPlan.from_json(plan.to_json()) == plan
    empty = SyncPlan(world_size=1, topology="ps", units=())
    assert SyncPlan.from_json(empty.to_json()) == empty
    small = msgspec.structs.replace(plan, message_bytes=1000)
    assert SyncPlan.from_json(small.to_json()) == small
    # Plans in checkpoints of earlier versions have no such size.
    content = json.loads(plan.to_json())
    del content["message_bytes"]
    assert SyncPlan.from_json(json.dumps(content)) == plan


def test_a_plan_prints_what_each_rank_owns() -> None:
    title, header, _, *rows = example().table().splitlines()
    assert title == "Gradient synchronisation plan: ring, 3 ranks"
    assert "owner" in header
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert sorted(row[1] for row in cells) == ["raw", "tbq", "tbq", "tbq"]
    assert sum(int(row[4]) for row in cells) == 310
    assert sum(float(row[5]) for row in cells) == pytest.approx(100, abs=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topology": "star"}, "topology must be one of 'ps' or 'ring', got 'star'"),
        ({"world_size": 0}, "world_size must be a whole number of at least 1"),
        ({"world_size": 2}, r"owner must be in \[0, 2\), got 2"),
        ({"units": "none"}, "got invalid text"),
        ({"bogus": 1}, "got invalid text"),
        ({"message_bytes": 0}, "message_bytes must be a whole number of at least 1"),
    ],
)
def test_a_wrong_plan_is_refused(change: dict[str, Any], message: str) -> None:
    text = json.dumps({**json.loads(example().to_json()), **change})
    with pytest.raises(ConfigError, match=message):
        SyncPlan.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": 5}, "units must be numbered from 0 in their order, got"),
        ({"stop": -1}, "units must be ranges of elements, got 0 to -1 of 'weight'"),
    ],
)
def test_wrong_units_are_refused(change: dict[str, Any], message: str) -> None:
    fields = json.loads(example().to_json())
    fields["units"][0].update(change)
    with pytest.raises(ConfigError, match=message):
        SyncPlan.from_json(json.dumps(fields))
