"""Contenders of benchmarks/parameter_server.py that take turns on the hosts of one testbed."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks
from benchmarks.support.testbed import Host, Testbed

_PACKAGE = "benchmarks.support.parameter_server"
WORKER, SERVER = f"{_PACKAGE}.worker_rank", f"{_PACKAGE}.server_rank"
# Steps before the counted ones.
_WARM_UP = 2
# Counted seconds of a turn, and least and most counted steps.
_TURN_SECONDS, _LEAST_STEPS, _MOST_STEPS = 3.0, 3, 12


class Turns:
    """Workers and servers on a testbed; each host has a worker, and a process for servers.

    It is a context manager, which builds the testbed and starts the processes.

    Args:
        hosts: Descriptions of the hosts.
        contenders: By name: {"bucket_mb": ...}, or {"servers": number, "key_bytes": ...}.
    """

    def __init__(self, hosts: Sequence[Host], contenders: Mapping[str, dict[str, Any]]) -> None:
        self._bed, self.size = Testbed(hosts), len(hosts)
        self._contenders = {name: dict(options) for name, options in contenders.items()}
        # Replies of all workers in each round, and processor seconds of all servers in a step.
        self.replies: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in contenders}
        self.server_use: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}

    def __enter__(self) -> Turns:
        self._bed.__enter__()
        starter = RankStarter(self._bed, [WORKER, SERVER])
        self._servers = Ranks(starter, SERVER, self.size, timeout=300.0)
        self._workers = Ranks(starter, WORKER, self.size, timeout=300.0)
        for options in self._contenders.values():
            if "servers" in options:
                options["servers"] = [self.open_server(i) for i in range(options["servers"])]
                options["token"] = secrets.token_hex(16)
        return self

    def __exit__(self, *error: Any) -> None:
        self._workers.close()
        self._servers.close()
        self._bed.__exit__(*error)

    def open_server(self, host: int, snapshot: str | None = None) -> str:
        """Open a server on a host, with a directory for snapshots; return its address."""
        order = {"do": "open", "bind": self._bed.hosts[host].address, "snapshot": snapshot}
        return str(self._servers.ask(order, only=host)[0]["address"])

    def warm_up(self) -> None:
        """Make all contenders, and some steps with each whose times do not count."""
        for name in self._contenders:
            self._order(name, _WARM_UP)
        self._servers.ask({"do": "stop counting"})

    def run(self, rounds: int) -> None:
        """Make steps with all contenders in turns, and keep the replies."""
        for number in range(rounds):
            # Every other round in the opposite order, so that no contender always follows another.
            names = list(self._contenders)
            for name in names if number % 2 else reversed(names):
                first = self._order(name, 1)[0]["seconds"]
                steps = max(_LEAST_STEPS, min(_MOST_STEPS, round(_TURN_SECONDS / first)))
                before = self._server_seconds()
                self.replies[name].append(self._order(name, steps))
                after = self._server_seconds()
                self.server_use[name].append({n: (after[n] - before[n]) / steps for n in after})

    def rounds(self, name: str) -> list[float]:
        """Return the seconds of a step in each round: those of the slowest worker."""
        return [max(reply["seconds"] for reply in replies) for replies in self.replies[name]]

    def seconds(self, name: str) -> float:
        """Return the seconds of a contender's step: the median of the rounds."""
        return statistics.median(self.rounds(name))

    def ratio(self, name: str, other: str) -> float:
        """Return the step of a contender over that of another one: the median of the rounds."""
        pairs = zip(self.rounds(name), self.rounds(other), strict=True)
        return statistics.median(seconds / other_seconds for seconds, other_seconds in pairs)

    def cpu(self, name: str) -> float:
        """Return the processor seconds of a step, of all workers and servers."""
        rounds = zip(self.replies[name], self.server_use[name], strict=True)
        return statistics.median(sum(r["cpu"] for r in rs) + use["cpu"] for rs, use in rounds)

    def threads(self, name: str) -> dict[str, float]:
        """Return the processor seconds of a step by kind of thread, over all hosts."""
        parts: dict[str, list[float]] = {}
        for replies, use in zip(self.replies[name], self.server_use[name], strict=True):
            for thread in {t for r in replies for t in r["threads"]}:
                total = sum(r["threads"].get(thread, 0.0) for r in replies)
                parts.setdefault(f"worker {thread}", []).append(total)
            for thread, seconds in use.items():
                if thread != "cpu":
                    parts.setdefault(f"server {thread}", []).append(seconds)
        return {thread: statistics.median(seconds) for thread, seconds in sorted(parts.items())}

    def sent(self, name: str) -> float:
        """Return the most bytes that a host sent in a step."""
        return statistics.median(max(r["sent"] for r in replies) for replies in self.replies[name])

    def pulls(self, host: int, order: dict[str, Any]) -> dict[str, Any]:
        """Let the worker of a host pull keys; see `PullTimer`."""
        return dict(self._workers.ask(order, only=host)[0])

    def staged_bytes(self) -> tuple[int, int]:
        """Return the bytes that all servers have merged in the steps of `warm_up`, and copied
        before the merge."""
        copied = [reply["copied"] for reply in self._servers.ask({"do": "used"})]
        return sum(one["merged"] for one in copied), sum(one["staged"] for one in copied)

    def raw(self, name: str) -> dict[str, Any]:
        """Return the figures of a contender for the line of JSON."""
        return {
            "seconds": self.rounds(name),
            "cpu": self.cpu(name),
            "sent": self.sent(name),
            "threads": self.threads(name),
        }

    def _order(self, name: str, steps: int) -> list[dict[str, Any]]:
        replies = self._workers.ask({"contender": name, "steps": steps, **self._contenders[name]})
        digests = {reply["digest"] for reply in replies}
        if len(digests) > 1:
            raise RuntimeError(f"the workers of {name!r} have different parameters: {digests}")
        return replies

    def _server_seconds(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for reply in self._servers.ask({"do": "used"}):
            for name, seconds in {"cpu": reply["cpu"], **reply["threads"]}.items():
                total[name] = total.get(name, 0.0) + seconds
        return total
