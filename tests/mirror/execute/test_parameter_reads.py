"""Reads of parameters are noted for each step, also where steps of two threads overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lightning_dlres.mirror.execute.parameter_reads import data_reads, parameter_reads


@pytest.mark.parametrize(
    ("reads", "read"),
    [(data_reads, lambda layer: layer.weight.data), (parameter_reads, lambda layer: layer.weight)],
    ids=["data", "module"],
)
def test_steps_that_overlap_each_note_reads(reads: Any, read: Callable[[nn.Linear], Any]) -> None:
    layer, before = nn.Linear(2, 2), (nn.Parameter.__dict__.get("data"), nn.Module.__getattr__)
    notes: list[list[nn.Parameter]] = [[], []]
    first, second = (reads(one.append) for one in notes)
    first.__enter__()
    second.__enter__()
    read(layer)
    first.__exit__(None, None, None)
    read(layer)
    second.__exit__(None, None, None)
    read(layer)
    assert [len(one) for one in notes] == [1, 2]
    assert (nn.Parameter.__dict__.get("data"), nn.Module.__getattr__) == before
