"""Speed of gradient codecs on one core, relative to a triad, which memory bandwidth bounds.

    python -m benchmarks.gradient_codecs
    python -m benchmarks.gradient_codecs --quick   tiny sizes: the figures mean nothing

A triad `a = b + x * c` reads two arrays and writes one: 12 bytes per element. Encoding reads the
gradient and the residual, and writes the residual and the codes: 12 bytes per element, and the
payload. Decoding and accumulating reads the payload and the sum, and writes the sum: 8 bytes per
element, and the payload. A figure is the ratio of a codec's bytes per second to those of a triad on
the same arrays. Codec and triad take turns; a figure is the median of all pairs.

The arrays have three sizes: that of a small layer, that of a large one, and at least twice that of
the last-level cache. A rank often has only one core, so one thread computes. If there is a GPU, it
is measured, too, with a higher target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.command import flags
from benchmarks.support.function_turns import in_turns
from benchmarks.support.report import Check, at_least, conclude, table, versions
from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.codecs.gradient.base import gradient_codec

NAME = "gradient_codecs"
# Codecs with a target, and those that are measured for comparison.
CHECKED, OTHERS = ("tbq", "onebit"), ("int8", "fp16")
# Least ratio of a codec's bytes per second to those of a triad: on one core, and on a GPU.
TARGET, GPU_TARGET = 0.70, 0.85
ENCODE, DECODE, TRIAD = "encode", "decode", "triad"
# Bytes that a task moves for each element, without the payload.
MOVED = {TRIAD: 12, ENCODE: 12, DECODE: 8}
# Least assumed size of the last-level cache, in bytes; the system may not tell the size.
_CACHE_BYTES = 64 << 20
_COLUMNS = ("device", "codec", "task", "MiB", "bytes/element", "GB/s", "triad GB/s", "of a triad")


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Attributes:
        layers: Bytes of a small and of a large layer's gradient.
        beyond_caches: Bytes of an array that no cache holds; None leaves it out.
        repeats: Pairs of turns.
        turn_bytes: Least bytes of gradients in a turn. A turn has several calls for a small one.
    """

    layers: tuple[int, ...] = (1 << 20, 64 << 20)
    beyond_caches: int | None = None
    repeats: int = 31
    turn_bytes: int = 32 << 20


QUICK = Settings(layers=(1 << 18,), repeats=2, turn_bytes=1 << 18)


# Work of a turn on a GPU, over that of a turn on the CPU.
_GPU_WORK_RATIO = 16
# Fewer calls would show the time of their start instead of the memory's speed.
_LEAST_GPU_CALLS = 8


@dataclass(frozen=True)
class Speed:
    """Speed of a codec's task beside that of a triad.

    Attributes:
        of_triad: Bytes per second, divided by those of the triad; median of all pairs.
        bytes_per_element: Bytes that the task moves for each element, payload included.
        rate: Bytes per second; median.
        triad_rate: Bytes per second of the triad; median.
    """

    of_triad: float
    bytes_per_element: float
    rate: float
    triad_rate: float

    def row(self) -> list[float]:
        """Return the figures in the order of the table's columns."""
        return [self.bytes_per_element, self.rate / 1e9, self.triad_rate / 1e9, self.of_triad]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    chosen = flags(NAME, __doc__, argv, others={"gpu": "measure the GPU only"})
    settings = settings_of(is_quick=chosen.quick)
    torch.set_num_threads(1)
    devices = [] if chosen.gpu else [("CPU", torch.device("cpu"), TARGET)]
    if torch.cuda.is_available():
        devices.append((torch.cuda.get_device_name(), torch.device("cuda"), GPU_TARGET))
    checks: dict[str, Check] = {}
    rows: list[list[object]] = []
    for device_name, device, target in devices:
        for nbytes, names in sizes(settings):
            for name in names:
                codec = gradient_codec(name)
                if device.type == "cuda" and not codec.runs_on_gpus():
                    print(f"{name}: no kernels for this GPU. Install lightning-dlres[cuda].")
                    continue
                for task, speed in measure(codec, nbytes, device, settings).items():
                    rows.append([device_name, name, task, nbytes / 2**20, *speed.row()])
                    if name in CHECKED:
                        key = f"{device_name}, {name}, {task}, {nbytes / 2**20:g} MiB: of a triad"
                        checks[key] = at_least(speed.of_triad, target)
    print(table(_COLUMNS, rows))
    raw = {
        "columns": _COLUMNS,
        "rows": rows,
        "last_cache_bytes": cache_bytes(),
        **versions(),
    }
    conclude(NAME, checks, raw)
    return 0


def settings_of(*, is_quick: bool) -> Settings:
    """Return the sizes for this machine's caches."""
    if is_quick:
        return QUICK
    return Settings(beyond_caches=2 * max(cache_bytes(), _CACHE_BYTES))


def sizes(settings: Settings) -> list[tuple[int, tuple[str, ...]]]:
    """Return the bytes of the gradients, each with the codecs to measure.

    The codecs in `OTHERS` have temporaries as large as the gradient, so they skip the largest
    gradient.
    """
    layers = [(nbytes, CHECKED + OTHERS) for nbytes in settings.layers]
    if settings.beyond_caches is None:
        return layers
    return [*layers, (settings.beyond_caches, CHECKED)]


def measure(
    codec: GradientCodec, nbytes: int, device: torch.device, settings: Settings
) -> dict[str, Speed]:
    """Return the speeds of encoding a gradient, and of decoding it into a sum, by task.

    Args:
        codec: Codec with default options.
        nbytes: Bytes of the gradient in float32.
        device: Device of the gradient.
        settings: Number and size of the turns.
    """
    count = nbytes // 4
    gradient = torch.randn(count, device=device)
    # The sum, which the triad overwrites, and a further array that the triad reads.
    total, other = torch.zeros_like(gradient), torch.zeros_like(gradient)
    state = codec.new_state(count, gradient.device)
    payload = torch.empty(codec.payload_bytes(count), dtype=torch.uint8, device=device)
    tasks: dict[str, Callable[[], Any]] = {
        ENCODE: lambda: codec.compress(gradient, state, payload),
        DECODE: lambda: codec.expand(payload, total, accumulate=True),
    }
    # A GPU is fast, and a turn on it begins and ends with a wait of the host.
    turn_bytes = settings.turn_bytes * (_GPU_WORK_RATIO if gradient.is_cuda else 1)
    calls = max(_LEAST_GPU_CALLS if gradient.is_cuda else 1, turn_bytes // nbytes)
    speeds = {}
    for task, function in tasks.items():
        triads, seconds = in_turns(
            [
                lambda: triad(total, gradient, other, calls),
                lambda function=function: repeated(function, calls),  # type: ignore[misc]
            ],
            settings.repeats,
            gradient.is_cuda,
        )
        moved = calls * (MOVED[task] * count + payload.numel())
        moved_by_triad = calls * MOVED[TRIAD] * count
        speeds[task] = Speed(
            of_triad=median(
                (moved / own) / (moved_by_triad / triad_seconds)
                for own, triad_seconds in zip(seconds, triads, strict=True)
            ),
            bytes_per_element=MOVED[task] + payload.numel() / count,
            rate=moved / median(seconds),
            triad_rate=moved_by_triad / median(triads),
        )
    return speeds


def triad(out: Tensor, first: Tensor, second: Tensor, calls: int) -> None:
    """Write `first + 0.5 * second` to `out`, several times."""
    for _ in range(calls):
        torch.add(first, second, alpha=0.5, out=out)


def repeated(function: Callable[[], Any], calls: int) -> None:
    """Call a function several times."""
    for _ in range(calls):
        function()


def cache_bytes() -> int:
    """Return the bytes of the largest cache of this machine's first processor; 0 if unknown."""
    cache_sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        cache_sizes.append(int(text.rstrip("KMG")) * factor)
    return max(cache_sizes)


if __name__ == "__main__":
    raise SystemExit(main())
