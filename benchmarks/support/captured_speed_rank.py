"""Rank of benchmarks/captured_speed.py: GPT-2, captured or as a list of blocks."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.support.hetero_pipeline.ours import Turns
from benchmarks.support.rpc import Message, RankRpc
from lightning_dlres import HeteroPipeStrategy, PipelinePlan

VOCABULARY = 64


class CapturedGPT2(LightningModule):
    """GPT-2 of transformers, called as a whole."""

    module = "net"

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        self.net = GPT2LMHeadModel(config)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits, (samples, length, vocabulary)."""
        return torch.as_tensor(self.net(input_ids=tokens).logits)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.logits(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ListGPT2(CapturedGPT2):
    """The same model, whose blocks the step applies in order."""

    module = "net.transformer.h"

    def logits(self, tokens: Tensor) -> Tensor:
        parts = self.net.transformer
        places = torch.arange(tokens.shape[1])
        x = parts.wte(tokens) + parts.wpe(places)
        for block in parts.h:
            x = block(x)
        return torch.as_tensor(self.net.lm_head(parts.ln_f(x)))


KINDS = {"captured": CapturedGPT2, "list": ListGPT2}


def main(rpc: RankRpc) -> None:
    """Follow one order, to train in turns or to start a training."""
    torch.set_num_threads(1)
    for order in rpc.orders():
        model = KINDS[order["kind"]](order["layers"], order["width"], order["heads"])
        if order["turns"]:
            train_in_turns(rpc, order, model)
        else:
            rpc.reply({"seconds": seconds_to_first_step(rpc, order, model)})


def train_in_turns(rpc: RankRpc, order: Message, model: CapturedGPT2) -> None:
    """Train with half of the blocks on each rank, and reply with the seconds of each turn."""
    # A captured GPT-2 has two embeddings before the blocks, and a norm and a head after them.
    half = order["layers"] // 2 + (2 if order["kind"] == "captured" else 0)
    split = half, half
    strategy = make_strategy(rpc, order, model, PipelinePlan(replicas=((0, 1),), split=split))
    turns = Turns(rpc, order["turns"], strategy)
    trainer = make_trainer(rpc, strategy, turns, max_steps=sum(order["turns"]) + 1)
    trainer.fit(model, make_loader(order))
    rpc.reply({})


class FirstStep(Callback):
    """Callback that notes when the first step begins."""

    def __init__(self) -> None:
        self.began = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = self.began or time.perf_counter()


def seconds_to_first_step(rpc: RankRpc, order: Message, model: CapturedGPT2) -> float:
    """Return the seconds from the call of `fit` to the first step: capture, profile and plan."""
    strategy, first = make_strategy(rpc, order, model, None), FirstStep()
    trainer = make_trainer(rpc, strategy, first, max_steps=1)
    start = time.perf_counter()
    trainer.fit(model, make_loader(order))
    return first.began - start


def make_strategy(
    rpc: RankRpc, order: Message, model: CapturedGPT2, plan: PipelinePlan | None
) -> HeteroPipeStrategy:
    return HeteroPipeStrategy(
        stages=rpc.world_size,
        microbatches=order["microbatches"],
        schedule="1f1b",
        module=model.module,
        plan=plan,
        timeout=order["timeout"],
    )


def make_trainer(
    rpc: RankRpc, strategy: HeteroPipeStrategy, callback: Callback, max_steps: int
) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=rpc.world_size,
        strategy=strategy,
        max_steps=max_steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def make_loader(order: Message) -> DataLoader[Tensor]:
    """Return a loader of random tokens, more than any run needs."""
    generator = torch.Generator().manual_seed(0)
    shape = (64 * order["batch"], order["context"] + 1)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    return DataLoader(tokens, batch_size=order["batch"])  # type: ignore[arg-type]
