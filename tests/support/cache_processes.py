"""Cache processes that are forked instead of started."""

from __future__ import annotations

import os

from benchmarks.support.forkserver import ForkedProcess


class ForkedHost:
    """A forked process, as `subprocess.Popen` shows one to whoever has started it."""

    def __init__(self, process: ForkedProcess, stdin: int) -> None:
        self._process, self.stdin = process, os.fdopen(stdin, "wb")

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()
