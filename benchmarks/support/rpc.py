"""How a rank of a benchmark hears what to do, and answers: lines of JSON over stdin and stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

Answer = dict[str, Any]


class Talk:
    """A rank's side: orders come in, answers go out, and whatever else is printed goes to
    stderr."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def say(self, answer: Mapping[str, Any]) -> None:
        """Answer the last order."""
        print(json.dumps(dict(answer)), file=self._answers, flush=True)

    def order(self) -> Answer:
        """Wait for the next order; ends the process if there will be none."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        return dict(json.loads(line))

    def orders(self) -> Iterator[Answer]:
        """Yield all orders to come."""
        while True:
            yield self.order()
