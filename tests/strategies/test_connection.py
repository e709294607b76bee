"""Ranks that rank 0 has started, for which the end of the parent process is the loss of rank 0."""

from __future__ import annotations

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_dlres.strategies.connection import is_child_of_rank_0


@pytest.mark.parametrize(
    ("node_rank", "local_rank", "expected"),
    [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, False)],
)
def test_rank_0_is_the_parent_on_its_own_host_only(
    monkeypatch: pytest.MonkeyPatch, node_rank: int, local_rank: int, expected: bool
) -> None:
    monkeypatch.setenv("NODE_RANK", str(node_rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert is_child_of_rank_0(LightningEnvironment()) == expected
    assert not is_child_of_rank_0(TorchElasticEnvironment())
