"""Script of test_freed_memory.py, for a process whose heap has no holes of earlier work.

It prints how many bytes the process shrinks by when tensors of 64 MiB are freed: within a context,
while a second context is open after the first, after both, and after a context with an error.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from lightning_dlres.core.host.freed_memory import returning_freed_memory
from tests.support.process_memory import anonymous_bytes

MIB = 1 << 20


def freed_bytes() -> int:
    """Return the bytes by which the process shrinks when every second of many tensors is freed.

    The others keep a heap from shrinking at its end.
    """
    tensors = [torch.ones(2 * MIB, dtype=torch.uint8) for _ in range(64)]
    before = anonymous_bytes()
    del tensors[::2]
    return before - anonymous_bytes()


def main() -> None:
    first, second = returning_freed_memory(), returning_freed_memory()
    with first:
        print(freed_bytes())
        second.__enter__()
    print(freed_bytes())
    second.__exit__(None, None, None)
    print(freed_bytes())
    with suppress(ZeroDivisionError), returning_freed_memory():
        _ = 1 / 0
    print(freed_bytes())
