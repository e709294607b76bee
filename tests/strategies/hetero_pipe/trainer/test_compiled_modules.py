"""Layers that torch.compile has compiled train in a pipeline as on one device."""

from __future__ import annotations

import torch

from tests.strategies.hetero_pipe.trainer.test_arguments import compare
from tests.support.rank_pool import RankPool
from tests.support.training_cases import Case, Classifier, no_differences_in


class CompiledLayers(Classifier):
    """Network of which one layer is compiled in place, and another one is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].compile(backend="eager")
        self.net[2] = torch.compile(self.net[2], backend="aot_eager")


def test_compiled_layers_train_as_on_one_device(pool: RankPool) -> None:
    cases = {"layers": Case(CompiledLayers)}
    assert pool.run(compare, 2, cases, 1e-5) == no_differences_in(cases)
