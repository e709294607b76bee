"""Speed of zero-value compression beside a plain copy, and its cost on dense data.

    python -m benchmarks.zvc

The codec runs on one core first, since a rank often has only one, then on all cores, and on a GPU
if there is one. Memory bandwidth is the bound. A copy reads and writes every byte. If a part d of
the elements is not zero, compression reads every byte, and writes the mask and a part d of the
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.command import flags
from benchmarks.support.function_turns import in_turns
from benchmarks.support.report import Check, at_least, at_most, conclude, table, versions
from lightning_dlres import codecs
from lightning_dlres.codecs import ZeroValue

# Part of the elements that are not zero.
DENSITY = 0.4
# Bytes of an element -> GB of uncompressed data per second on one core.
TARGETS = {4: 4.0, 2: 2.0, 1: 1.0}
# Largest time of encoding dense data, over the time of a copy.
DENSE_TARGET = 1.01
# Smallest throughput on a GPU, over that of a copy.
GPU_TARGET = 0.5
_DTYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.int8}


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Attributes:
        nbytes: Bytes of a tensor.
        repeats: Number of timed runs.
        large: Bytes of a larger tensor. Dense data is measured at both sizes.
    """

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
        ratio = dense_over_copy(replace(settings, nbytes=nbytes))
        checks[f"dense data, {nbytes >> 20} MiB: encode over a copy"] = at_most(ratio, DENSE_TARGET)
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
    """Return the throughput of a copy, `encode` and `decode`, in GB of the tensor per second."""
    codec = ZeroValue()
    buffer = torch.empty(codec.bound(tensor), dtype=torch.uint8, device=tensor.device)
    target = torch.empty_like(tensor)
    encoded = codec.encode(tensor, buffer, DENSITY)
    if not torch.equal(codecs.decode(encoded), tensor):
        raise RuntimeError("decode must return the encoded tensor, got another one")
    nbytes = tensor.numel() * tensor.element_size()
    ways: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(tensor),
        "encode": lambda: codec.encode(tensor, buffer, DENSITY),
        "decode": lambda: codec.decode(encoded, target),
    }
    seconds = in_turns(list(ways.values()), settings.repeats, tensor.is_cuda)
    return {way: nbytes / median(each) / 1e9 for way, each in zip(ways, seconds, strict=True)}


def dense_over_copy(settings: Settings) -> float:
    """Return the time of `encode` on dense data over that of a copy: the median ratio of pairs."""
    tensor = torch.randn(settings.nbytes // 4)
    codec, buffer = ZeroValue(), torch.empty(settings.nbytes * 2, dtype=torch.uint8)
    # Both write to the same buffer: the speeds of two buffers were seen to differ by 3 %.
    target = buffer[: settings.nbytes].view(torch.float32)
    encodes, copies = in_turns(
        [lambda: codec.encode(tensor, buffer), lambda: target.copy_(tensor)], settings.repeats
    )
    return median(a / b for a, b in zip(encodes, copies, strict=True))


def sparse(width: int, settings: Settings) -> Tensor:
    """Return random elements, of which a part of DENSITY is not zero, at random places."""
    generator = torch.Generator().manual_seed(width)
    count = settings.nbytes // width
    values = torch.randint(1, 100, (count,), generator=generator, dtype=torch.int8)
    values[torch.rand(count, generator=generator) >= DENSITY] = 0
    return values.to(_DTYPES[width])


if __name__ == "__main__":
    raise SystemExit(main())
