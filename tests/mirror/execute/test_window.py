"""Window of the device: what is copied, kept, dropped and counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.core.device.clock import HostClock
from lightning_dlres.mirror.execute.fetching import ThreadFetcher
from lightning_dlres.mirror.execute.window import Window
from lightning_dlres.mirror.profile.units import ParameterUnit, find_units

CPU = torch.device("cpu")
# Bytes of a unit: a weight of 64 x 64 elements, and a bias.
UNIT = 4 * 64 * 64 + 512


def units_of(count: int) -> tuple[list[ParameterUnit], list[Tensor]]:
    """Return units, and memory with their values."""
    units = find_units(nn.Sequential(*(nn.Linear(64, 64) for _ in range(count))))
    sources = [torch.zeros(unit.nbytes, dtype=torch.uint8) for unit in units]
    for unit, source in zip(units, sources, strict=True):
        for view, parameter in zip(unit.views(source), unit.parameters, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
    return units, sources


@pytest.fixture
def window() -> Iterator[Window]:
    units, sources = units_of(4)
    made = Window(units, sources, ThreadFetcher(), CPU, limit=2 * UNIT, clock=HostClock())
    yield made
    made.close()


def test_a_copy_has_the_values(window: Window) -> None:
    copy = window.require(1)
    assert window.bytes_now == UNIT
    for view, parameter in zip(copy.views, window.units[1].parameters, strict=True):
        assert torch.equal(view, parameter)
        assert view.data_ptr() != parameter.data_ptr()
        assert window.unit_at(view) == 1
    assert window.unit_at(window.units[1].parameters[0]) is None


def test_the_limit_is_kept_but_for_units_in_use(window: Window) -> None:
    window.require(0)
    window.hold(0)
    window.require(1)
    window.require(2)
    assert (0 in window, 1 in window, 2 in window) == (True, False, True)
    assert window.bytes_now == 2 * UNIT
    window.hold(2)
    window.require(3)
    assert window.bytes_now == 3 * UNIT
    window.let_go(0)
    window.drop_all()
    assert (0 in window, 2 in window) == (False, True)
    assert window.peak_bytes == 3 * UNIT


def test_a_changed_parameter_is_copied_again(window: Window) -> None:
    window.require(0)
    with torch.no_grad():
        window.units[0].parameters[1].add_(1)
    assert torch.equal(window.require(0).views[1], window.units[0].parameters[1])
    assert window.fetched_bytes == 2 * UNIT


def test_memory_that_others_hold_is_never_written_again(window: Window) -> None:
    held = window.require(0).views[0]
    expected = held.clone()
    window.drop(0)
    window.require(1)
    window.require(2)
    assert torch.equal(held, expected)


def test_memory_is_used_again(window: Window) -> None:
    address = window.require(0).memory.data_ptr()
    window.drop(0)
    assert window.require(1).memory.data_ptr() == address


def test_memory_is_used_again_for_units_of_its_size_only() -> None:
    units = find_units(nn.Sequential(*(nn.Linear(64, n) for n in (64, 56, 56))))
    sources = [torch.zeros(unit.nbytes, dtype=torch.uint8) for unit in units]
    window = Window(units, sources, ThreadFetcher(), CPU, limit=UNIT, clock=HostClock())
    window.require(0)
    window.drop(0)
    # More than the limit would be on the device if the larger memory served the smaller unit.
    smaller = window.require(1).memory.data_ptr()
    assert window.unit_at(window.require(1).memory) == 1
    assert window.require(1).memory.numel() == units[1].nbytes
    window.drop(1)
    assert window.require(2).memory.data_ptr() == smaller
    assert [nbytes for nbytes, _ in window.fetches] == [unit.nbytes for unit in units]
    window.close()
