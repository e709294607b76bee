"""The ways out that an error on a micro-batch of one sample names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.stage.layer_errors import explaining_single_samples


def test_a_layer_that_need_not_train_belongs_into_eval_mode() -> None:
    words = r"larger batches .*eval mode in the constructor"
    with pytest.raises(UnsupportedStepError, match=words), explaining_single_samples(True):
        nn.BatchNorm1d(2)(torch.zeros(1, 2))


def test_a_state_of_the_last_batch_needs_whole_batches() -> None:
    words = r"hidden state of the last one, use microbatches=1"
    with pytest.raises(UnsupportedStepError, match=words), explaining_single_samples(True):
        nn.GRU(2, 3, batch_first=True)(torch.zeros(1, 4, 2), torch.zeros(1, 8, 3))
