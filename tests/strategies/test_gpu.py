"""Two ranks that share a GPU, or train on a GPU and a CPU, equal one device."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parent / "two_nodes.py"
SECONDS = 150.0
# Largest difference of a weight from that of plain training, by codec.
TOLERANCES = {"none": 1e-5, "fp16": 1e-3, "int8": 1e-3, "qsgd": 0.1, "tbq": 0.1, "onebit": 0.1}


def run(
    start_script: Any, tmp_path: Path, strategy: str, accelerators: tuple[str, ...]
) -> list[dict[str, Tensor]]:
    """Train on one rank for each accelerator; return the weights of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [tmp_path / f"{strategy}{rank}" for rank in range(len(accelerators))]
    handles = []
    for rank, (accelerator, path) in enumerate(zip(accelerators, paths, strict=True)):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank)}
        handles.append(start_script(SCRIPT, strategy, accelerator, path, env=env))
    for handle in handles:
        assert handle.wait(SECONDS) == 0, "\n".join(other.output() for other in handles)
    for handle, accelerator in zip(handles, accelerators, strict=True):
        device = "cuda" if accelerator == "gpu" else "cpu"
        assert f"trained on {device}" in handle.output()
    return [torch.load(path) for path in paths]


@pytest.mark.parametrize("algorithm", TOLERANCES)
def test_compressed_gradients_of_a_gpu_train(
    algorithm: str, start_script: Any, tmp_path: Path
) -> None:
    (plain,) = run(start_script, tmp_path, "plain", ("gpu",))
    first, second = run(start_script, tmp_path, algorithm, ("gpu", "gpu"))
    for name, value in first.items():
        assert torch.equal(value, second[name])
        torch.testing.assert_close(value, plain[name], rtol=0, atol=TOLERANCES[algorithm])


@pytest.mark.parametrize("accelerators", [("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "gpu")])
def test_a_pipeline_over_a_gpu_equals_one_device(
    accelerators: tuple[str, ...], start_script: Any, tmp_path: Path
) -> None:
    (plain,) = run(start_script, tmp_path, "plain", ("gpu",))
    first, _ = run(start_script, tmp_path, "pipe", accelerators)
    for name, value in first.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)
