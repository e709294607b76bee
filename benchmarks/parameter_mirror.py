"""Training with a mirror against plain training: bytes on the device, and the time of a step.

    python -m benchmarks.parameter_mirror

The bound of a step is the longest of three times: forward and backward of plain training; the
plan's copies at the speed of the link; and the bytes of an update of AdamW at the speed of a triad.

Without a GPU, the CPU is both host and device: the window is memory of its own. One thread
computes, so that another processor is free for copies and updates. On a GPU, two peers train the
same network, see `benchmarks.support.mirror_peers`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.support.command import Figures, flags
from benchmarks.support.function_turns import in_turns
from benchmarks.support.mirror_peers import PEERS, Peer, join_alone
from benchmarks.support.report import at_least, at_most, conclude, table
from lightning_dlres.mirror.config import MirrorConfig
from lightning_dlres.mirror.mirror import Mirror

NAME = "parameter_mirror"
# Bytes that an update of AdamW moves for a parameter in float32: parameter, gradient and two means
# are read, and all but the gradient are written.
_UPDATE_BYTES = 28
# Smallest ratio of the bound to the time of a step. Largest ratio of the bytes on the device to
# those of the planned window and one layer.
_LEAST_SPEED, _MOST_BYTES = 0.85, 1.0


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Attributes:
        width: Width of the square layers.
        layers: Number of layers.
        batch: Samples of a step.
        repeats: Number of timed steps.
    """

    width: int = 1024
    layers: int = 24
    batch: int = 192
    repeats: int = 21


QUICK = Settings(width=64, layers=4, batch=4, repeats=3)
ON_GPU = Settings(width=4096, layers=24, batch=16384, repeats=11)
# Steps before those that are timed: the first ones are measured for a plan.
_WARM_UP = 5


class Training:
    """Training of a multilayer perceptron.

    Args:
        settings: Sizes.
        device: Device that computes.
        window: Window of the mirror; None trains without a mirror.
        peer: Peer that makes the optimizer; None trains plainly, or with a mirror.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        window: int | str | None = None,
        peer: Peer | None = None,
    ) -> None:
        torch.manual_seed(0)
        width = settings.width
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(settings.layers)]
        self.model = nn.Sequential(*layers)
        if window is None and peer is None:
            self.model.to(device)
        self.optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
            if peer is None
            else peer(self.model, device)
        )
        self._batch = torch.randn(settings.batch, width, device=device)
        self.mirror = None
        if window is not None:
            config = MirrorConfig(window=window)
            self.mirror = Mirror(self.model, [self.optimizer], config, device)

    def forward_and_backward(self) -> None:
        self.model(self._batch).square().mean().backward()

    def step(self) -> None:
        """Train one step."""
        if self.mirror is None:
            self.forward_and_backward()
            self.optimizer.step()
        else:
            with self.mirror.step("training", is_free=True):
                self.forward_and_backward()
                self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Measured:
    """What was measured of a way to train.

    Attributes:
        seconds: Median time of a step.
        peak: Peak bytes on the GPU in a step; 0 without one.
        mirror: The mirror, if there is one; it was closed.
    """

    seconds: float
    peak: int = 0
    mirror: Mirror | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    on_gpu = torch.cuda.is_available()
    quick = flags(NAME, __doc__, argv).quick
    settings = QUICK if quick else ON_GPU if on_gpu else Settings()
    if on_gpu:
        conclude(NAME, *measure_on_gpu(settings, torch.device("cuda", 0)))
    else:
        torch.set_num_threads(1)
        conclude(NAME, *measure_on_cpu(settings))
    return 0


def windows_of(settings: Settings) -> dict[str, int | str]:
    """Return the windows to measure, by name."""
    return {"auto": "auto", "min": "min", "5 layers": 5 * layer_bytes(settings)}


def layer_bytes(settings: Settings) -> int:
    """Return the bytes of a layer's parameters."""
    return 4 * settings.width * (settings.width + 1)


def measure_on_cpu(settings: Settings) -> Figures:
    """Train in turns, plainly and with windows of several sizes."""
    cpu = torch.device("cpu")
    windows = windows_of(settings)
    plain = Training(settings, cpu)
    ours = {name: Training(settings, cpu, window) for name, window in windows.items()}
    for training in ours.values():
        # The first turn below is the last step of the warm-up.
        for _ in range(_WARM_UP - 1):
            training.step()
    ways: list[Callable[[], Any]] = [plain.step, *(training.step for training in ours.values())]
    ways.append(plain.forward_and_backward)
    times = in_turns(ways, settings.repeats)
    *steps, compute = [median(seconds) for seconds in times]
    measured = {
        name: Measured(seconds, mirror=training.mirror)
        for (name, training), seconds in zip(ours.items(), steps[1:], strict=True)
    }
    layer = layer_bytes(settings)
    return report(
        settings,
        plain=Measured(steps[0]),
        ours=measured,
        peers={},
        compute=compute,
        triad_speed=_triad_speed(layer),
        fetch_speed=_copy_speed(layer),
    )


def measure_on_gpu(settings: Settings, device: torch.device) -> Figures:
    """Train one way after the other, since each is to have the GPU's memory for itself."""
    # As most people train: matrix products in TF32.
    torch.set_float32_matmul_precision("high")
    join_alone(device)
    compute = run_on_gpu(settings, device, only_compute=True).seconds
    plain = run_on_gpu(settings, device)
    ours = {
        name: run_on_gpu(settings, device, window=window)
        for name, window in windows_of(settings).items()
    }
    peers = {}
    for name, peer in PEERS.items():
        try:
            peers[name] = run_on_gpu(settings, device, peer=peer)
        except ImportError as error:
            print(f"{name}: not measured: {error}")
    layer = layer_bytes(settings)
    return report(
        settings,
        plain=plain,
        ours=ours,
        peers=peers,
        compute=compute,
        triad_speed=_triad_speed_of_all_processors(layer),
        fetch_speed=_fetch_speed(layer, device),
    )


def run_on_gpu(
    settings: Settings,
    device: torch.device,
    *,
    window: int | str | None = None,
    peer: Peer | None = None,
    only_compute: bool = False,
) -> Measured:
    """Train, and free everything."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    training = Training(settings, device, window, peer)
    step = training.forward_and_backward if only_compute else training.step
    for _ in range(_WARM_UP):
        step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(settings.repeats):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) - before
    if training.mirror is not None:
        training.mirror.close()
    return Measured(median(seconds), peak, training.mirror)


def report(
    settings: Settings,
    *,
    plain: Measured,
    ours: Mapping[str, Measured],
    peers: Mapping[str, Measured],
    compute: float,
    triad_speed: float,
    fetch_speed: float,
) -> Figures:
    """Print a table; return the checks and the figures."""
    layer = layer_bytes(settings)
    update = _UPDATE_BYTES * settings.layers * layer / 4 / triad_speed
    rows: list[list[object]] = [_row("plain", plain)]
    checks = {}
    raw: dict[str, Any] = {
        "compute": compute,
        "update": update,
        "plain": {"step": plain.seconds, "peak_bytes": plain.peak},
    }
    for name, measured in ours.items():
        mirror, seconds = measured.mirror, measured.seconds
        assert mirror is not None
        assert mirror.plan is not None
        link = mirror.plan.fetched_bytes / fetch_speed
        bound = max(compute, link, update)
        unit = max(unit.nbytes for unit in mirror.units)
        window = mirror.window.peak_bytes
        rows.append(_row(f"mirror, window {name}", measured, bound))
        checks[f"window {name}: bound over step"] = at_least(bound / seconds, _LEAST_SPEED)
        checks[f"window {name}: bytes on the device over window and a layer"] = at_most(
            window / (mirror.plan.peak_bytes + unit), _MOST_BYTES
        )
        raw[name] = {
            "step": seconds,
            "planned": mirror.plan.seconds,
            "link": link,
            "window_bytes": window,
            "peak_bytes": measured.peak,
        }
    for name, measured in peers.items():
        rows.append(_row(name, measured))
        raw[name] = {"step": measured.seconds, "peak_bytes": measured.peak}
        unbeaten = [
            m for m in ours.values() if m.seconds <= measured.seconds or m.peak <= measured.peak
        ]
        checks[f"windows at least as good as {name} in time or in memory"] = at_least(
            len(unbeaten), len(ours)
        )
    print(
        f"{settings.layers * layer / 1e6:.0f} MB of parameters; forward and backward "
        f"{1e3 * compute:.0f} ms, update at least {1e3 * update:.0f} ms, copies at "
        f"{fetch_speed / 1e9:.1f} GB/s"
    )
    columns = [
        "way",
        "window, MB",
        "peak on the GPU, MB",
        "planned ms without update",
        "step ms",
        "bound ms",
        "bound / step",
    ]
    print(table(columns, rows))
    return checks, raw


def _row(name: str, measured: Measured, bound: float | None = None) -> list[object]:
    mirror = measured.mirror
    plan = mirror.plan if mirror is not None else None
    return [
        name,
        mirror.window.peak_bytes / 1e6 if mirror is not None else None,
        measured.peak / 1e6 or None,
        1e3 * plan.seconds if plan is not None else None,
        1e3 * measured.seconds,
        1e3 * bound if bound is not None else None,
        bound / measured.seconds if bound is not None else None,
    ]


def _triad_speed(nbytes: int) -> float:
    """Return the bytes per second of a sum of two arrays in one thread, all three together."""
    a, b, c = (np.ones(16 * nbytes // 8) for _ in range(3))
    return 3 * a.nbytes / _fastest(lambda: np.add(a, b, out=c))


def _triad_speed_of_all_processors(nbytes: int) -> float:
    """Return the bytes per second of a sum of two arrays in all threads, all three together."""
    a, b, c = (torch.ones(16 * nbytes // 4) for _ in range(3))
    return 3 * a.nbytes / _fastest(lambda: torch.add(a, b, out=c))


def _fetch_speed(nbytes: int, device: torch.device) -> float:
    """Return the bytes per second of copies of layers from pinned memory to the GPU."""
    source = torch.ones(4 * nbytes, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return source.nbytes / _fastest(copy)


def _copy_speed(nbytes: int) -> float:
    """Return the bytes per second of copies of layers in one thread."""
    source, target = np.ones((16, nbytes), dtype=np.uint8), np.empty((16, nbytes), dtype=np.uint8)
    return source.nbytes / _fastest(lambda: np.copyto(target, source))


def _fastest(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
