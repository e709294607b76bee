"""Models that are made in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_dlres.mirror.execute.construction import constructing


def make() -> nn.Module:
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = nn.ModuleList([nn.Embedding(300, 64), layer, nn.Linear(64, 300)])
    model[2].weight = model[0].weight
    model[2].register_parameter("none", None)
    return model


def test_initial_values_are_those_of_plain_construction(tmp_path: Path) -> None:
    plain = make()
    with constructing(tmp_path):
        ours = make()
    for (name, parameter), value in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, value), name
    assert ours[2].weight is ours[0].weight
    # Large parameters lie in files without names, small ones in memory.
    assert not ours[0].weight.untyped_storage().resizable()
    assert ours[2].bias.untyped_storage().resizable()
    assert not list(tmp_path.iterdir())
    after = make()
    assert after[0].weight.untyped_storage().resizable()


class Filled(nn.Module):
    """Layers that fill the tensor from which they have made their parameter."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        for name in ("first", "second"):
            values = torch.zeros(200, 200)
            self.register_parameter(name, nn.Parameter(values))
            nn.init.normal_(values)
        self.values = [values] if keep else []


@pytest.mark.parametrize("keep", [True, False])
def test_values_may_be_written_through_the_tensor_of_a_parameter(
    keep: bool, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    plain = Filled(keep)
    torch.manual_seed(5)
    with constructing(tmp_path):
        ours = Filled(keep)
    for expected, own in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(own, expected)
    in_files = [not parameter.untyped_storage().resizable() for parameter in ours.parameters()]
    assert in_files == [True, not keep]
