"""Rank of benchmarks/large_model.py: trains a model as a pipeline, or plainly, and prints figures.

The last line of its output is JSON. Figures of memory are as in `pipeline_memory_rank`, which
configures the allocator and must come before torch.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

from benchmarks.support.pipeline_memory_rank import PeakMeter, allocated  # isort: skip

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlres import HeteroPipeStrategy, ProfileConfig

VOCABULARY = 8192
# Elements of each parameter that are compared with those of plain construction.
COMPARED = 64


class Decoder(nn.Module):
    """Transformer with learnt positions, as users write it: no list that the pipeline is given."""

    def __init__(self, width: int, blocks: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 16, 4 * width, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tokens(tokens) + self.places(torch.arange(length))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Net(LightningModule):
    """The training. The model is made in `configure_model`."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.net: Decoder | None = None
        self.initial: dict[str, list[float]] = {}

    def configure_model(self) -> None:
        if self.net is None:
            seed_everything(0, verbose=False)
            sizes = self.sizes
            self.net = Decoder(sizes["width"], sizes["blocks"], sizes["length"])

    def on_train_start(self) -> None:
        self.initial = {
            name: parameter.detach().flatten()[:COMPARED].tolist()
            for name, parameter in self.named_parameters()
            if not parameter.is_meta
        }

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        logits = self.net(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main(order: dict[str, Any]) -> None:
    """Train on this rank."""
    torch.set_num_threads(1)
    sizes, at_start = order["sizes"], allocated()
    net, meter, start = Net(sizes), PeakMeter(), time.perf_counter()
    strategy = HeteroPipeStrategy(
        stages=order["stages"],
        microbatches=order["microbatches"],
        module="net",
        deferred_init=True,
        memory_limit=order["memory_limit"],
        profile=ProfileConfig(repeats=1, seconds=0.0),
    )
    trainer = Trainer(
        strategy=strategy if order["stages"] > 1 else "auto",
        accelerator="cpu",
        devices=1,
        num_nodes=order["stages"],
        max_epochs=1,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    generator = torch.Generator().manual_seed(0)
    shape = order["steps"] * sizes["samples"], sizes["length"] + 1
    data = torch.randint(VOCABULARY, shape, generator=generator)
    trainer.fit(net, DataLoader(data, batch_size=sizes["samples"]))  # type: ignore[arg-type]
    figures: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "initial": net.initial,
        "parameter_bytes": sum(p.numel() * p.element_size() for p in net.parameters()),
        "peaks": [peak - at_start for peak in meter.peaks.nbytes],
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if plan := strategy.plan if order["stages"] > 1 else None:
        _, stage = plan.position(trainer.global_rank)
        layers = plan.layers_of(stage)
        figures |= {
            "stage": stage,
            "layers": len(layers),
            "planned": plan.workload().peak_bytes(stage, layers, plan.recompute),
        }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
