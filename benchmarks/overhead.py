"""Overhead of each feature beside plain Lightning, in settings where the feature cannot help.

    python -m benchmarks.overhead             about ten minutes
    python -m benchmarks.overhead --quick     tiny sizes: the figures mean nothing
    python -m benchmarks.overhead --steps     training steps only
    python -m benchmarks.overhead --files     the local folder only

Training steps: a transformer trains on the CPU, in one process, with steps of about 10 ms and
100 ms. Plain training, `ActivationOffload` with a budget that holds everything, and
`dlres_hetero_pipe` on one device take turns of a few steps. In a round each of them has one turn. A
figure is the median over the rounds of several starts. One more training has the
`ActivationOffload` callback in half of its turns only.

Local folder: small files in the page cache are read through `PrefetchCacheDataModule`, and through
a DataLoader with 0, 1 and 2 persistent workers. Each epoch is compared with the DataLoader that is
fastest in this epoch. An epoch lasts from the request for its iterator to its last batch.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.activation_offload import Block
from benchmarks.support.command import flags
from benchmarks.support.report import Check, at_least, at_most, conclude, table, versions
from benchmarks.support.step_turns import CallbackToggle, step_seconds
from lightning_dlres import ActivationOffload, PrefetchCacheDataModule
from lightning_dlres.prefetch.cache.samples import Sample

# Largest step time over that of plain training.
OFFLOAD_TARGET, PIPELINE_TARGET = 1.01, 1.03
# Smallest rate of samples over that of the fastest DataLoader.
FILES_TARGET = 0.95
EPOCHS = 3
# Numbers of DataLoader workers.
WORKERS = (0, 1, 2)
# Size of the transformer.
_WIDTH, _LENGTH = 128, 64
# Warm-up steps, in which allocators, caches and plans settle; they do not count.
_WARMUP_STEPS = 12
_QUIET: Mapping[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class StepSize:
    """Size of the steps, and number of them.

    Attributes:
        seconds: Approximate time of a plain step.
        blocks: Number of transformer blocks.
        steps: Number of steps of a turn.
        turns: Number of turns that count.
    """

    seconds: float
    blocks: int
    steps: int
    turns: int


@dataclass(frozen=True)
class Folder:
    """Folder of files of one size.

    Attributes:
        bytes: Size of each file.
        files: Number of files.
        batch: Number of files of a batch.
    """

    bytes: int
    files: int
    batch: int


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Attributes:
        sizes: Sizes of steps, by their name.
        folders: Folders to read, by the name of their file size.
        starts: Number of times that all trainings are started.
        file_rounds: Number of times that each loader reads a folder.
    """

    sizes: Mapping[str, StepSize]
    folders: Mapping[str, Folder]
    starts: int
    file_rounds: int


FULL = Settings(
    {"10 ms": StepSize(0.01, 4, 5, 80), "100 ms": StepSize(0.1, 12, 2, 40)},
    {"4 KB": Folder(4096, 20_000, 64), "100 KB": Folder(100_000, 2_000, 64)},
    5,
    5,
)
QUICK = Settings({"10 ms": StepSize(0.0, 1, 2, 2)}, {"4 KB": Folder(4096, 16, 8)}, 1, 1)


class Transformer(LightningModule):
    """Transformer with a loss that needs no labels."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block(_WIDTH) for _ in range(blocks)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Files(Dataset[Tensor]):
    """Map-style dataset that reads each file of a folder when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(map(str, folder.iterdir()))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> Tensor:
        return torch.from_numpy(np.fromfile(self._paths[number], np.uint8))


def as_tensor(sample: Sample) -> Tensor:
    """Return a sample's bytes as uint8, as `Files` does."""
    return sample.tensor()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parts = {"steps": "training steps only", "files": "the local folder only"}
    chosen = flags("overhead", __doc__, argv, others=parts)
    settings = QUICK if chosen.quick else FULL
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    checks: dict[str, Check] = {}
    raw: dict[str, Any] = {"settings": asdict(settings), **versions()}
    for part, measure in (("steps", training), ("files", reading)):
        if getattr(chosen, part) or not (chosen.steps or chosen.files):
            part_checks, raw[part] = measure(settings)
            checks |= part_checks
    conclude("overhead", checks, raw)
    return 0


def training(settings: Settings) -> tuple[dict[str, Check], dict[str, Any]]:
    """Compare the step times of all ways to train; each way computes with one thread."""
    # Each training runs in its own Python thread, and so has its own team of OpenMP threads. All
    # teams together have more threads than there are cores, so OpenMP would sleep at every barrier.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _training(settings)
    finally:
        torch.set_num_threads(threads)


def _training(settings: Settings) -> tuple[dict[str, Check], dict[str, Any]]:
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": dict,
        "plain again": dict,
        "ActivationOffload": lambda: {"callbacks": [ActivationOffload(budget="1PiB")]},
        "dlres_hetero_pipe": lambda: {"strategy": "dlres_hetero_pipe"},
    }
    targets = {"ActivationOffload": OFFLOAD_TARGET, "dlres_hetero_pipe": PIPELINE_TARGET}
    checks: dict[str, Check] = {}
    raw: dict[str, Any] = {}
    rows: list[list[object]] = []
    for name, size in settings.sizes.items():
        batch = batch_for(size)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for start in range(settings.starts):
            for way, seconds_of_turns in in_turns(size, batch, ways, start).items():
                seconds[way] += seconds_of_turns
        raw[name] = {"batch": len(batch), "seconds": seconds}
        for way in ways:
            ratio = paired(seconds[way], seconds["plain"])
            rows.append([name, way, 1e3 * median(seconds[way]), ratio])
            if way in targets:
                checks[f"{way} over plain, step of {name}"] = at_most(ratio, targets[way])
        pairs = [with_and_without(size, batch) for _ in range(settings.starts)]
        raw[name]["in one training"] = pairs
        ratio = median(paired(with_it, without) for with_it, without in pairs)
        milliseconds = 1e3 * median(seconds for with_it, _ in pairs for seconds in with_it)
        rows.append([name, "ActivationOffload, in one training", milliseconds, ratio])
        check = f"ActivationOffload over the same training without, step of {name}"
        checks[check] = at_most(ratio, OFFLOAD_TARGET)
    print(table(("step", "way", "ms", "over plain"), rows), flush=True)
    return checks, raw


def with_and_without(size: StepSize, batch: Tensor) -> tuple[list[float], list[float]]:
    """Train once; return the median step seconds of the turns with the callback, and without."""
    offload = ActivationOffload(budget="1PiB")
    toggle = CallbackToggle(offload, size.steps, _WARMUP_STEPS)
    steps = _WARMUP_STEPS + 2 * size.turns * size.steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            **_QUIET, accelerator="cpu", devices=1, max_epochs=1, callbacks=[offload, toggle]
        )
        trainer.fit(Transformer(size.blocks), DataLoader([batch] * steps, batch_size=None))
    return toggle.medians


def batch_for(size: StepSize) -> Tensor:
    """Return a batch with which a plain step takes about `size.seconds`."""
    samples = 1
    while True:
        batch = torch.randn(samples, _LENGTH, _WIDTH)
        seconds = median(in_turns(size, batch, {"plain": dict})["plain"])
        if seconds >= size.seconds / 2:
            samples = max(1, round(samples * size.seconds / seconds))
            return torch.randn(samples, _LENGTH, _WIDTH)
        samples *= 2


def in_turns(
    size: StepSize, batch: Tensor, ways: Mapping[str, Callable[[], dict[str, Any]]], start: int = 0
) -> dict[str, list[float]]:
    """Train in all ways; return the median step seconds of each turn that counts, by way.

    Args:
        size: Size of the steps.
        batch: Batch of every step.
        ways: Functions that return the Trainer's arguments of a way, by its name.
        start: Number of this start. It rotates the order of the first turns.
    """
    settling = -(-_WARMUP_STEPS // size.steps)
    steps = (settling + size.turns) * size.steps

    def training(options: Callable[[], dict[str, Any]]) -> Callable[[Callback], None]:
        def train(clock: Callback) -> None:
            chosen = options()
            arguments = {**_QUIET, "accelerator": "cpu", "devices": 1, "max_epochs": 1, **chosen}
            trainer = Trainer(**{**arguments, "callbacks": [*chosen.get("callbacks", ()), clock]})
            trainer.fit(Transformer(size.blocks), DataLoader([batch] * steps, batch_size=None))

        return train

    names = turned(list(ways), 2 * start)
    orders = [turned(names, turn) for turn in range(size.turns)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return step_seconds({n: training(ways[n]) for n in names}, orders, size.steps, settling)


def reading(settings: Settings) -> tuple[dict[str, Check], dict[str, Any]]:
    """Compare the epochs of all loaders, in samples per second."""
    checks: dict[str, Check] = {}
    raw: dict[str, Any] = {}
    rows: list[list[object]] = []
    for name, folder in settings.folders.items():
        rates: dict[str, list[list[float]]] = {}
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            fill(path, folder)
            ways: dict[str, Callable[[], list[float]]] = {"ours": lambda: ours(path, folder)}  # noqa: B023
            for workers in WORKERS:
                ways[f"DataLoader, {workers} workers"] = lambda n=workers: plain(path, folder, n)  # type: ignore[misc] # noqa: B023
            for turn in range(settings.file_rounds):
                for way in turned(list(ways), turn):
                    rates.setdefault(way, []).append(ways[way]())
        raw[name] = rates
        for epoch in range(EPOCHS):
            of_epoch = {
                way: [rates_of_round[epoch] for rates_of_round in rates_of_way]
                for way, rates_of_way in rates.items()
            }
            our_rates = of_epoch.pop("ours")
            best = max(of_epoch, key=lambda way: median(of_epoch[way]))
            ratio = paired(our_rates, of_epoch[best])
            rows.append([name, epoch + 1, median(our_rates), best, median(of_epoch[best]), ratio])
            check = f"files of {name}, epoch {epoch + 1}, over the best DataLoader"
            checks[check] = at_least(ratio, FILES_TARGET)
    columns = ("files of", "epoch", "ours, samples/s", "best", "samples/s", "ours over it")
    print(table(columns, rows), flush=True)
    return checks, raw


def fill(path: Path, folder: Folder) -> None:
    """Write the files, which puts them into the page cache."""
    random = np.random.default_rng(0)
    for number in range(folder.files):
        (path / f"{number:06}").write_bytes(random.bytes(folder.bytes))


def ours(path: Path, folder: Folder) -> list[float]:
    """Return the samples per second of each epoch through the cache."""
    data = PrefetchCacheDataModule(
        train=path, batch_size=folder.batch, decode=as_tensor, shuffle=True
    )
    data.trainer = Trainer(**_QUIET, accelerator="cpu", devices=1, max_epochs=EPOCHS)
    data.setup("fit")
    try:
        return epochs(data.train_dataloader(), folder)
    finally:
        data.teardown("fit")


def plain(path: Path, folder: Folder, workers: int) -> list[float]:
    """Return the samples per second of each epoch through a DataLoader."""
    loader = DataLoader(
        Files(path),
        batch_size=folder.batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return epochs(loader, folder)


def epochs(loader: Iterable[Tensor], folder: Folder) -> list[float]:
    """Return the samples per second of `EPOCHS` epochs.

    Raises:
        RuntimeError: If the number of samples of an epoch is not the number of files.
    """
    rates = []
    for _ in range(EPOCHS):
        start, samples = time.perf_counter(), 0
        for batch in loader:
            samples += len(batch)
        rates.append(samples / (time.perf_counter() - start))
        if samples != folder.files:
            raise RuntimeError(f"an epoch must have {folder.files} samples, got {samples}")
    return rates


def turned(ways: list[str], turn: int) -> list[str]:
    """Return the order of the ways in round number `turn`.

    Odd rounds reverse the order of the round before. Each pair of rounds begins with another way,
    so that a drift of the machine's speed affects all ways alike.
    """
    start = turn // 2 % len(ways)
    order = ways[start:] + ways[:start]
    return order[::-1] if turn % 2 else order


def paired(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of value over other, of pairs from the same round."""
    return median(value / other for value, other in zip(values, others, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
