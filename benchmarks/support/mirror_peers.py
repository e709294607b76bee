"""Peers of the mirror on a GPU: torchao's optimizer on the CPU, and FSDP2 with CPU offload."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

# Function that makes a peer's optimizer. It gets a model, which is on the CPU, and the GPU to train
# on. It may move the model, or shard it, in place.
Peer = Callable[[nn.Sequential, torch.device], Any]


def torchao_optimizer(model: nn.Sequential, device: torch.device) -> Any:
    """Return torchao's optimizer, which keeps gradients and optimizer state in host memory."""
    model.to(device)
    # Imported by name, because torchao is not among this project's dependencies.
    offloading = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return offloading(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-4, fused=True
    )


def fsdp_optimizer(model: nn.Sequential, device: torch.device) -> Any:
    """Return an optimizer on the CPU for a model that FSDP2 shards over one rank."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    mesh = init_device_mesh(device.type, (1,))
    options = {"mesh": mesh, "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=True)}
    for layer in model:
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model, **options)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


PEERS: dict[str, Peer] = {
    "torchao CPUOffloadOptimizer": torchao_optimizer,
    "FSDP2 CPUOffloadPolicy": fsdp_optimizer,
}


def join_alone(device: torch.device) -> None:
    """Make a process group of this process alone."""
    store = Path(tempfile.mkdtemp()) / "store"
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store.as_uri(), rank=0, world_size=1)
