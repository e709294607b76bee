"""Training whose activations and gradients go over links of their own equals plain training. Gloo
takes the place of NCCL, since CPU ranks have no other backend."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_dlres import ConfigError, HeteroPipeStrategy
from lightning_dlres.core.comm.direct_link import DirectLink
from lightning_dlres.strategies.hetero_pipe import runner_setup
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, batches, differences_in, trainer_for


class Wide(Classifier):
    """Network whose activations are too large for the header of a message."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [torch.nn.Linear(16, 600), torch.nn.Tanh(), torch.nn.Linear(600, 600)]
        self.net = torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(600, 5))


CASES = {schedule: Case(Wide, schedule=schedule) for schedule in ("gpipe", "1f1b")}


def train_over_links(context: RankContext) -> tuple[dict[str, list[str]], int]:
    opened: list[DirectLink] = []
    open_links = runner_setup.open_direct_links

    def open_over_gloo(*args: object, **options: object) -> list[DirectLink]:
        links = open_links(*args, **{**options, "backend": "gloo"})  # type: ignore[arg-type]
        opened.extend(links)
        return links

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_setup, "open_direct_links", open_over_gloo)
        patch.setattr(runner_setup, "nccl_identity", lambda _: [float(context.rank), 1.0])
        differences = differences_in(
            context,
            {
                name: Case(case.make, schedule=case.schedule, options={"gpu_transfers": "nccl"})
                for name, case in CASES.items()
            },
        )
    return differences, len(opened)


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_over_links_equals_plain_training(pool: RankPool, ranks: int) -> None:
    expected = ({name: [] for name in CASES}, len(CASES))
    assert pool.run(train_over_links, ranks) == [expected] * ranks


def train_without_gpus(context: RankContext) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_for(context, gpu_transfers="nccl").fit(Wide(), batches())
    return [str(warning.message) for warning in caught if "NCCL" in str(warning.message)]


def test_messages_go_through_host_memory_where_nccl_links_no_gpus(pool: RankPool) -> None:
    (warning,), _ = pool.run(train_without_gpus, 2)
    assert "Messages between the ranks [(0, 1)] go through host memory." in warning


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_transfers must be one of 'host' or 'nccl', got 'x'"):
        HeteroPipeStrategy(gpu_transfers="x")  # type: ignore[arg-type]
