"""The benchmark of device memory runs to its end on tiny sizes, with equal gradients everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import activation_offload
from tests.support.fake_gpu import FakeGpu


def test_every_way_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert activation_offload.main(["--quick"]) == 0
    assert (tmp_path / activation_offload.PICTURE).read_bytes().startswith(b"\x89PNG")
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in activation_offload.NETWORKS:
        assert f"{name}: peers that are better on both axes" in line["checks"]
        assert {"plain", "save_on_cpu", "ours, min"} <= line["raw"][name].keys()
        assert line["raw"][name]["predicted"].keys() >= {"ours, 50% of saved", "ours, min"}


def test_the_peak_on_a_gpu_is_that_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.peak_bytes = 1234
    monkeypatch.setattr(activation_offload, "gpu_of", lambda device: gpu)
    way = activation_offload.Way("plain", nn.Linear(2, 2))
    way.optimizer = torch.optim.SGD(way.network.parameters())
    assert activation_offload.peak_of(way, torch.ones(2, 2), torch.device("cpu")) == 1234
