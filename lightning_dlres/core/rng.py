"""Global random state: saved, restored, sent to another rank, or forked for one layer.

Two processes that draw from their own generators diverge at the first shuffle. The reading rank
therefore sends the state of its generators with every batch (`snapshot`, `restore`). The layers of
the model run under a generator that depends on the step, micro-batch and layer, not on the rank
(`derive_seed`, `forked`). `rewinder` restores a state many times on one rank. It skips
the conversion of 1249 words of state (625 of Python, 624 of NumPy) to a tree and back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_dlres.core._compat import numpy_change_detector

_MASK = (1 << 64) - 1


def snapshot(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of the global Python, NumPy (legacy) and torch generators.

    It is a tree of plain data and tensors. With a CUDA `device` it includes the device's generator.
    """
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached = numpy_state
    state: dict[str, Any] = {
        "torch": torch.random.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the generators to the state of a `snapshot`, from this or another rank."""
    torch.random.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def rewinder(device: torch.device | None = None) -> Callable[[], None]:
    """Return a function that restores the present state of the generators at each call."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    numpy_has_changed = numpy_change_detector(numpy)
    cuda = torch.cuda.get_rng_state(device) if device and device.type == "cuda" else None

    def rewind() -> None:
        random.setstate(python)
        if numpy_has_changed():
            np.random.set_state(numpy)
        torch.random.set_rng_state(cpu)
        if cuda is not None and device is not None:
            torch.cuda.set_rng_state(cuda, device)

    return rewind


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed that depends on all parts and their order.

    The SplitMix64 finaliser is applied after each part.
    """
    value = 0
    for part in parts:
        value = (value ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value >> 1


def seed_all_devices(seed: int) -> None:
    """Seed the CPU's generator and, if CUDA is in use, those of all its devices.

    `torch.manual_seed` takes a hundred times as long: it records the call stack for every kind of
    device that is not in use.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the CPU's generator and, for a CUDA device, the device's; see `seed_all_devices`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Context manager that restores torch's generators at its end.

    These are the CPU's and, for a CUDA device, the device's.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
