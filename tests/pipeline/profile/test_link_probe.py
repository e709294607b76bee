"""One link is measured between each pair of hosts, and one within each host."""

from __future__ import annotations

from lightning_dlres.pipeline.profile.link_probe import pairs_to_measure


def test_one_pair_of_ranks_for_every_pair_of_hosts() -> None:
    assert pairs_to_measure(["a", "a", "a"]) == [(0, 1)]
    assert pairs_to_measure(["a", "b", "a", "c"]) == [(0, 2), (0, 1), (0, 3), (1, 3)]
    assert pairs_to_measure(["a"]) == []
