"""Training with a mirror against plain training: bytes on the device, and the time of a step.

    python -m benchmarks.parameter_mirror

One thread computes, so that another processor is free for copies and updates. The bound of a step
is the longest of three times: forward and backward of plain training; the plan's copies at the
speed of one processor; and the bytes of an update of AdamW at the speed of a triad on one
processor. The CPU is both host and device: the window is memory of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.support.command import Figures, flags
from benchmarks.support.function_turns import in_turns
from benchmarks.support.report import at_least, at_most, conclude, table
from lightning_dlres.mirror.config import MirrorConfig
from lightning_dlres.mirror.mirror import Mirror

NAME = "parameter_mirror"
# Bytes that an update of AdamW moves for a parameter in float32: parameter, gradient and two means
# are read, and all but the gradient are written.
_UPDATE_BYTES = 28
# Smallest part of the bound, and largest bytes on the device over window and one layer.
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


class Training:
    """Training of a multilayer perceptron.

    Args:
        settings: Sizes.
        window: Window of the mirror; None trains plainly.
    """

    def __init__(self, settings: Settings, window: int | str | None) -> None:
        torch.manual_seed(0)
        width = settings.width
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(settings.layers)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batch = torch.randn(settings.batch, width)
        self.mirror = None
        if window is not None:
            config = MirrorConfig(window=window)
            self.mirror = Mirror(self.model, [self.optimizer], config, torch.device("cpu"))

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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    settings = QUICK if flags(NAME, __doc__, argv).quick else Settings()
    torch.set_num_threads(1)
    conclude(NAME, *measure(settings))
    return 0


def measure(settings: Settings) -> Figures:
    """Train in turns, plainly and with windows of several sizes."""
    layer = 4 * settings.width * (settings.width + 1)
    windows: dict[str, int | str] = {"auto": "auto", "min": "min", "5 layers": 5 * layer}
    plain = Training(settings, None)
    ours = {name: Training(settings, window) for name, window in windows.items()}
    for training in ours.values():
        for _ in range(4):
            training.step()
    ways: list[Callable[[], Any]] = [plain.step, *(training.step for training in ours.values())]
    ways.append(plain.forward_and_backward)
    times = in_turns(ways, settings.repeats)
    *steps, compute = [median(seconds) for seconds in times]
    bandwidth, copy_speed = _triad_speed(layer), _copy_speed(layer)
    update = _UPDATE_BYTES * settings.layers * layer / 4 / bandwidth
    rows: list[list[object]] = [["plain", None, None, 1e3 * steps[0], None, None]]
    checks = {}
    raw: dict[str, Any] = {"compute": compute, "update": update, "plain": steps[0]}
    for (name, training), seconds in zip(ours.items(), steps[1:], strict=True):
        mirror = training.mirror
        assert mirror is not None
        assert mirror.plan is not None
        link = mirror.plan.fetched_bytes / copy_speed
        bound = max(compute, link, update)
        unit = max(unit.nbytes for unit in mirror.units)
        limit = mirror.plan.peak_bytes + unit
        rows.append(
            [
                name,
                mirror.window.peak_bytes / 1e6,
                1e3 * mirror.plan.seconds,
                1e3 * seconds,
                1e3 * bound,
                bound / seconds,
            ]
        )
        checks[f"window {name}: bound over step"] = at_least(bound / seconds, _LEAST_SPEED)
        checks[f"window {name}: bytes on the device over window and a layer"] = at_most(
            mirror.window.peak_bytes / limit, _MOST_BYTES
        )
        raw[name] = {"step": seconds, "link": link, "peak_bytes": mirror.window.peak_bytes}
    parameters = 4 * sum(p.numel() for p in plain.model.parameters())
    print(
        f"{parameters / 1e6:.0f} MB of parameters; forward and backward {1e3 * compute:.0f} ms, "
        f"update at least {1e3 * update:.0f} ms, copies at {copy_speed / 1e9:.1f} GB/s"
    )
    columns = ["window", "MB on device", "planned ms", "step ms", "bound ms", "bound / step"]
    print(table(columns, rows))
    return checks, raw


def _triad_speed(nbytes: int) -> float:
    """Return the bytes per second of a sum of two arrays in one thread, all three together."""
    a, b, c = (np.ones(16 * nbytes // 8) for _ in range(3))
    return 3 * a.nbytes / _fastest(lambda: np.add(a, b, out=c))


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
