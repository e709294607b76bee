"""Orders to the ranks of a benchmark and their replies: lines of JSON over stdin and stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

Message = dict[str, Any]


class RankRpc:
    """Rank's end of the connection. It reads orders from stdin and writes replies to stdout.

    Everything else that the process prints to stdout goes to stderr.
    """

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def reply(self, reply: Mapping[str, Any]) -> None:
        """Reply to the last order."""
        print(json.dumps(dict(reply)), file=self._replies, flush=True)

    def next_order(self) -> Message:
        """Wait for the next order and return it; exit the process at the end of stdin."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        return dict(json.loads(line))

    def orders(self) -> Iterator[Message]:
        """Yield orders until stdin ends."""
        while True:
            yield self.next_order()
