"""Cache processes that a fork server starts, because imports in each would be slow."""

from __future__ import annotations

import os

from benchmarks.support.forkserver import ForkedProcess


class ForkedCacheProcess:
    """Forked cache process with those attributes of `subprocess.Popen` that `cache.launch` uses.

    Args:
        process: The forked process.
        stdin: File descriptor of the pipe to its stdin.
    """

    def __init__(self, process: ForkedProcess, stdin: int) -> None:
        self._process, self.stdin = process, os.fdopen(stdin, "wb")

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()
