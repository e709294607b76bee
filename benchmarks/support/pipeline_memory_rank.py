"""Program that forks the ranks of benchmarks/pipeline_memory.py.

Each rank trains a few steps. It writes the planned bytes of its stage, and the bytes that the C
library's allocator gave out. This is a separate program, because the allocator must be configured
before torch allocates.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Size from which glibc gives each block a memory mapping of its own, in bytes. Such a block returns
# to the system when it is freed, so its bytes can be counted.
_MMAP_THRESHOLD = 1 << 16
# Parameters of mallopt(3).
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_libc = ctypes.CDLL(None)
_libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
_libc.mallopt(_M_ARENA_MAX, 1)


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
            *("fordblks", "keepcost"),
        )
    )


_libc.mallinfo2.restype = _Mallinfo

import msgspec  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from lightning_dlres import HeteroPipeStrategy, PipelinePlan, ProfileConfig  # noqa: E402

RANKS, WORDS, WIDTH, BLOCKS = 3, 60_000, 64, 8
MICROBATCHES, SAMPLES, LENGTH = 6, 96, 256
# Number of steps. The optimizer's state exists from step 1 on. Under 1F1B, steps 0, 1, 2 and 4 also
# check the loss.
STEPS = 6


class Block(nn.Module):
    """Block that saves some tensors of its input's size, also in layers without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(nn.functional.gelu(self.linear(self.norm(x))))
        return out


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [Block() for _ in range(BLOCKS)]
        self.net = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, 64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=False)


class StepPeaks:
    """Peak bytes of every step.

    The list is in a slot, because the strategy does not inspect slots. In an ordinary attribute the
    strategy would refuse a list that grows while 1F1B runs a step.
    """

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes: list[int] = []


class PeakMeter(Callback, TorchDispatchMode):
    """Callback that measures the peak of `allocated` in every step, after every torch operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks = StepPeaks()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peaks.nbytes[-1] = max(self.peaks.nbytes[-1], allocated())
        return result

    def on_train_batch_start(self, *_: Any) -> None:
        self.peaks.nbytes.append(0)
        self.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.__exit__(None, None, None)


def allocated() -> int:
    """Return the bytes of all blocks that have a memory mapping of their own."""
    return int(_libc.mallinfo2().hblkhd)


def warm_up() -> None:
    """Run a small model, so that torch and its libraries allocate what they allocate only once."""
    layer = nn.Sequential(nn.Embedding(10, WIDTH), Block(), nn.Linear(WIDTH, 64))
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    target = torch.zeros(64, dtype=torch.long)
    nn.functional.cross_entropy(layer(target), target).backward()
    optimizer.step()


def train(out: Path, case: Mapping[str, Any]) -> None:
    """Train one case on this rank, and write `<rank>.json`; rank 0 also writes `plan.json`.

    Args:
        out: Directory of the files.
        case: Options of the strategy, and `steps`. With a `split`, `plan.json` must exist: the rank
            follows this plan with the given split.
    """
    torch.set_num_threads(1)
    warm_up()
    options = dict(case)
    if split := options.pop("split", None):
        before = PipelinePlan.load(out / "plan.json")
        options["plan"] = msgspec.structs.replace(before, split=tuple(split))
    steps = options.pop("steps", STEPS)
    at_start, meter = allocated(), PeakMeter()
    net = Net()
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH))
    data = DataLoader(TensorDataset(tokens, tokens % 64), batch_size=SAMPLES)
    # The shortest profile, because only bytes matter here.
    profile = ProfileConfig(repeats=1, seconds=0.0)
    strategy = HeteroPipeStrategy(
        stages=RANKS, microbatches=MICROBATCHES, profile=profile, **options
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        max_epochs=steps,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, data)
    plan = strategy.plan
    assert plan is not None
    _, stage = plan.position(trainer.global_rank)
    planned = plan.workload().peak_bytes(stage, plan.layers_of(stage), plan.recompute)
    # Every rank holds the whole dataset, which the plan does not count. It counts the batch.
    unplanned = at_start + sum(t.numel() * t.element_size() for t in data.dataset.tensors)  # type: ignore[attr-defined]
    peaks = [peak - unplanned for peak in meter.peaks.nbytes]
    row = {
        "stage": stage,
        "layers": plan.split[stage],
        "recomputed": sum(index in plan.recompute for index in plan.layers_of(stage)),
        "planned": planned,
        "measured": sorted(peaks)[len(peaks) // 2],
        "peaks": peaks,
    }
    if trainer.is_global_zero:
        (out / "plan.json").write_text(plan.to_json())
    (out / f"{trainer.global_rank}.json").write_text(json.dumps(row))


def fork(out: Path, case: Mapping[str, Any]) -> None:
    """Fork the ranks with the environment variables that torchrun would set, and train one case.

    Raises:
        SystemExit: If a rank fails.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid:
            ranks.append(pid)
            continue
        status = 1
        try:
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GROUP_RANK": 0,
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": RANKS,
                "LOCAL_WORLD_SIZE": RANKS,
                "TORCHELASTIC_RUN_ID": 0,
            }
            os.environ.update({name: str(value) for name, value in variables.items()})
            train(out, case)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
    if any(statuses):
        raise SystemExit(f"case {dict(case)}: a rank has failed")


def main(out: Path, cases: list[dict[str, Any]]) -> None:
    """Train all cases in order; case number n writes to the directory `out`/n."""
    for number, case in enumerate(cases):
        directory = out / str(number)
        directory.mkdir()
        if "split" in case:
            (directory / "plan.json").write_text((out / str(number - 1) / "plan.json").read_text())
        fork(directory, case)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
