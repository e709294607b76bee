"""Step profiles that are small enough for brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from hypothesis import strategies as st

from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.plan.choices import KEEP, StorageChoice
from lightning_dlres.memory.profile.step_profile import (
    Region,
    Reuse,
    SavedStorageProfile,
    StepProfile,
    TierLink,
)

MIB = 1 << 20


def stack(sizes: list[int], seconds: float = 0.01, **link: object) -> StepProfile:
    """Return the profile of a network whose layers save one storage each, used in reverse order.

    Args:
        sizes: MiB of each storage.
        seconds: Time between two events.
        link: Changed properties of the link to the host's memory.
    """
    count = len(sizes)
    data = tuple(
        SavedStorageProfile(
            nbytes=size * MIB,
            layer=f"layer{number}",
            saved=number,
            shared_until=number + 1,
            uses=(2 * count - 1 - number,),
            end=2 * count - 1 - number,
        )
        for number, size in enumerate(sizes)
    )
    host_link: dict[str, object] = {
        "tier": "host",
        "out_rate": 1e9,
        "in_rate": 1e9,
        "overlaps": True,
    }
    return StepProfile(
        seconds=(seconds,) * (2 * count + 1),
        base=(0,) * (2 * count + 1),
        storages=data,
        links=(TierLink(**{**host_link, **link}),),  # type: ignore[arg-type]
    )


@st.composite
def profiles(draw: st.DrawFn, max_storages: int = 5) -> StepProfile:
    """Draw a small step profile."""
    return any_profile(random.Random(draw(st.integers(0, 1 << 30))), max_storages)


def any_profile(rng: random.Random, max_storages: int = 5) -> StepProfile:
    """Return a random step of one or two forward passes, each followed by its backward."""
    count = rng.randint(1, max_storages)
    events: list[tuple[int, bool]] = []
    for group in _groups(rng, list(range(count))):
        saves = [(number, True) for number in group]
        uses = [(number, False) for number in reversed(group)]
        extra = [(number, False) for number in group if rng.random() < 0.2]
        if rng.random() < 0.3:
            rng.shuffle(uses)
        events += saves + uses + extra
    positions: dict[tuple[int, bool], list[int]] = {}
    for position, event in enumerate(events):
        positions.setdefault(event, []).append(position)
    data = []
    for number in range(count):
        saved, uses = positions[number, True][0], tuple(positions[number, False])
        is_held_by_user = rng.random() < 0.15
        nbytes = rng.randint(1, 40) * MIB
        packs = rng.random() < 0.5
        data.append(
            SavedStorageProfile(
                nbytes=nbytes,
                layer=f"layer{number}",
                saved=saved,
                shared_until=len(events)
                if is_held_by_user
                else min(saved + rng.choice([1, 1, 1, 2]), len(events)),
                uses=uses,
                end=uses[-1],
                packed=int(nbytes * rng.uniform(0.2, 0.85)) if packs else None,
                encode_seconds=rng.uniform(0, 0.01) if packs else 0.0,
                decode_seconds=rng.uniform(0, 0.01) if packs else 0.0,
            )
        )
    links = [
        TierLink(
            tier=tier,
            out_rate=rng.uniform(1, 20) * 1e9,
            in_rate=rng.uniform(1, 20) * 1e9,
            overlaps=tier == "host" and rng.random() < 0.6,
        )
        for tier in ("host", "disk")
        if rng.random() < 0.7
    ]
    seconds = tuple(rng.uniform(0, 0.01) for _ in range(len(events) + 1))
    base = tuple(rng.randint(0, 10) * MIB for _ in range(len(events) + 1))
    regions = tuple(_regions(rng, data))
    reuses = tuple(_reuses(rng, data))
    # A reuse saves the memory of a gradient, so the base must contain that gradient.
    gradient_bytes = [0] * len(base)
    for reuse in reuses:
        if reuse.overwritten_at is not None:
            for position in range(reuse.overwritten_at + 1, data[reuse.storage].end + 2):
                gradient_bytes[position] += data[reuse.storage].nbytes
    return StepProfile(
        seconds=seconds,
        base=tuple(b + g for b, g in zip(base, gradient_bytes, strict=True)),
        storages=tuple(data),
        links=tuple(links),
        regions=regions,
        reuses=reuses,
    )


def _groups(rng: random.Random, numbers: list[int]) -> list[list[int]]:
    if len(numbers) > 2 and rng.random() < 0.3:
        middle = rng.randint(1, len(numbers) - 1)
        return [numbers[:middle], numbers[middle:]]
    return [numbers]


def _regions(rng: random.Random, data: list[SavedStorageProfile]) -> list[Region]:
    regions = []
    for first, stop in itertools.combinations(range(len(data) + 1), 2):
        inside = data[first:stop]
        if rng.random() < 0.25 and inside[-1].saved < min(d.uses[0] for d in inside):
            regions.append(
                Region(
                    layer=f"block{first}-{stop}",
                    storages=tuple(range(first, stop)),
                    seconds=rng.uniform(0.0, 0.02),
                    entry=inside[0].saved,
                    inputs=rng.choice([0, 3 * MIB]),
                    workspace=rng.choice([0, 2 * MIB]),
                )
            )
    return regions


def _reuses(rng: random.Random, data: list[SavedStorageProfile]) -> list[Reuse]:
    reuses = []
    for number, storage in enumerate(data):
        if rng.random() > 0.3:
            continue
        use = rng.choice(storage.uses)
        signs = rng.choice([0, storage.nbytes // 32])
        if storage.shared_until < storage.uses[0] and signs and rng.random() < 0.5:
            overwritten_at, nbytes = None, 0
        elif storage.shared_until <= use:
            overwritten_at, nbytes = use, rng.randint(1, storage.nbytes)
        else:
            continue
        reuses.append(
            Reuse(
                layers=(f"block{number}-{number + 1}.inner",),
                storage=number,
                overwritten_at=overwritten_at,
                nbytes=nbytes,
                signs=signs,
                seconds=rng.choice([0.0, rng.uniform(0, 0.005)]),
            )
        )
    return reuses


Combination = tuple[tuple[StorageChoice, ...], tuple[int, ...], tuple[int, ...]]


def all_selections(
    profile: StepProfile, actions: tuple[MemoryAction, ...] = tuple(MemoryAction)
) -> Iterator[Combination]:
    """Yield all selections of a planner: choices of all storages, regions and reuses."""
    for regions in _subsets(len(profile.regions)):
        for reuses in _subsets(len(profile.reuses)):
            yield from _selections_with(profile, regions, reuses, actions)


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    for size in range(count + 1):
        yield from itertools.combinations(range(count), size)


def _selections_with(
    profile: StepProfile,
    regions: tuple[int, ...],
    reuses: tuple[int, ...],
    actions: tuple[MemoryAction, ...],
) -> Iterator[Combination]:
    recomputed = [profile.regions[index] for index in regions]
    inside = [n for region in recomputed for n in region.storages]
    used = [profile.reuses[index] for index in reuses]
    names = {region.layer for region in recomputed}
    if len(inside) != len(set(inside)):
        return
    for reuse in used:
        if reuse.storage in inside or any(n.partition(".")[0] in names for n in reuse.layers):
            return
    never_saved = {reuse.storage for reuse in used if reuse.overwritten_at is None}
    options = []
    for number, storage in enumerate(profile.storages):
        own = [KEEP]
        if (
            number not in inside
            and number not in never_saved
            and storage.shared_until < storage.uses[0]
        ):
            for action in actions:
                if action in (MemoryAction.COMPRESS, MemoryAction.BOTH) and storage.packed is None:
                    continue
                if action is MemoryAction.COMPRESS:
                    own.append(StorageChoice(action))
                if action in (MemoryAction.OFFLOAD, MemoryAction.BOTH):
                    own += [StorageChoice(action, link.tier) for link in profile.links]
        options.append(own)
    for choices in itertools.product(*options):
        yield choices, regions, reuses
