"""Zero-value compression beside a plain copy: how fast, and what it costs where it does not pay.

    python -m benchmarks.zvc

One core first, as a rank often has no more; then all. The bound is that of the memory: a copy reads
and writes every byte, compression at density d reads them all and writes d and the mask. On a
machine with a GPU the same there.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.command import flags
from benchmarks.support.report import Check, at_least, at_most, conclude, table
from lightning_dlres import codecs
from lightning_dlres.codecs import ZeroValue

DENSITY = 0.4
# Of input, in GB/s on one core, by bytes of an element.
TARGETS = {4: 4.0, 2: 2.0, 1: 1.0}
DENSE_TARGET, GPU_TARGET = 1.01, 0.5
_DTYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.int8}


@dataclass(frozen=True)
class Settings:
    """How much is measured: bytes of a tensor, and how often; and of a large one."""

    nbytes: int = 64 << 20
    repeats: int = 31
    large: int = 256 << 20


QUICK = Settings(1 << 20, 3, 2 << 20)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    settings = QUICK if flags("zvc", __doc__, argv).quick else Settings()
    cores = torch.get_num_threads()
    checks: dict[str, Check] = {}
    rows: list[list[object]] = []
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        for width, target in TARGETS.items():
            rates = measure(sparse(width, settings), settings)
            rows.append(["CPU", threads, width, *rates.values()])
            if threads == 1:
                checks[f"encode, {width} bytes, GB/s on a core"] = at_least(rates["encode"], target)
                checks[f"decode, {width} bytes, GB/s on a core"] = at_least(rates["decode"], target)
    torch.set_num_threads(1)
    for nbytes in (settings.nbytes, settings.large):
        more = dense_over_copy(replace(settings, nbytes=nbytes))
        checks[f"dense data, {nbytes >> 20} MiB: encode over a copy"] = at_most(more, DENSE_TARGET)
    if torch.cuda.is_available():
        for width in TARGETS:
            rates = measure(sparse(width, settings).cuda(), settings)
            rows.append([torch.cuda.get_device_name(), "", width, *rates.values()])
            for way in ("encode", "decode"):
                checks[f"GPU, {way}, {width} bytes, of a copy's bandwidth"] = at_least(
                    rates[way] / rates["copy"], GPU_TARGET
                )
    columns = ("device", "threads", "bytes", "copy GB/s", "encode GB/s", "decode GB/s")
    print(table(columns, rows))
    conclude("zvc", checks, {"rows": rows, "density": DENSITY, **versions()})
    return 0


def measure(tensor: Tensor, settings: Settings) -> dict[str, float]:
    """Return the GB of input for every second that a copy, `encode` and `decode` take."""
    codec = ZeroValue()
    room = torch.empty(codec.bound(tensor), dtype=torch.uint8, device=tensor.device)
    target = torch.empty_like(tensor)
    encoded = codec.encode(tensor, room, DENSITY)
    if not torch.equal(codecs.decode(encoded), tensor):
        raise RuntimeError("what was decoded is not what was encoded")
    nbytes = tensor.numel() * tensor.element_size()
    ways: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(tensor),
        "encode": lambda: codec.encode(tensor, room, DENSITY),
        "decode": lambda: codec.decode(encoded, target),
    }
    spent = in_turns(list(ways.values()), settings.repeats, tensor.is_cuda)
    return {way: nbytes / median(each) / 1e9 for way, each in zip(ways, spent, strict=True)}


def dense_over_copy(settings: Settings) -> float:
    """Return how much longer than a copy `encode` takes for dense data: the median of pairs."""
    tensor = torch.randn(settings.nbytes // 4)
    codec, room = ZeroValue(), torch.empty(settings.nbytes * 2, dtype=torch.uint8)
    # To the same place: two buffers were seen to differ by 3 %.
    target = room[: settings.nbytes].view(torch.float32)
    ours, copies = in_turns(
        [lambda: codec.encode(tensor, room), lambda: target.copy_(tensor)], settings.repeats
    )
    return median(a / b for a, b in zip(ours, copies, strict=True))


def in_turns(
    ways: Sequence[Callable[[], Any]], repeats: int, on_gpu: bool = False
) -> list[list[float]]:
    """Return the seconds of every run of each way; they take turns, the order changes."""
    spent: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats + 1):
        places = range(len(ways)) if turn % 2 else reversed(range(len(ways)))
        for place in places:
            start = time.perf_counter()
            ways[place]()
            if on_gpu:
                torch.cuda.synchronize()
            if turn:
                spent[place].append(time.perf_counter() - start)
    return spent


def sparse(width: int, settings: Settings) -> Tensor:
    """Return random elements of which a part is not zero, at random places."""
    generator = torch.Generator().manual_seed(width)
    count = settings.nbytes // width
    values = torch.randint(1, 100, (count,), generator=generator, dtype=torch.int8)
    values[torch.rand(count, generator=generator) >= DENSITY] = 0
    return values.to(_DTYPES[width])


def versions() -> dict[str, str]:
    """Return what the figures depend on."""
    names = ("torch", "numba", "llvmlite")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


if __name__ == "__main__":
    raise SystemExit(main())
