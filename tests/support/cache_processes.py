"""Processes of a cache that are forked from a warm process, to save their imports."""

from __future__ import annotations

import os

from benchmarks.support.forkserver import ForkedProcess


class ForkedHost:
    """Forked process with the attributes of `subprocess.Popen` that `cache.launch` uses."""

    def __init__(self, process: ForkedProcess, stdin: int) -> None:
        self._process, self.stdin = process, os.fdopen(stdin, "wb")

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()
