"""Hosts and commands of a testbed, and the errors of both."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RATE = re.compile(r"(?=.*[1-9])(\d+(?:\.\d+)?)([kmg])bit")
DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")


class UnavailableError(RuntimeError):
    """The machine cannot run a testbed; the message has the reason and a fix."""


class HostError(RuntimeError):
    """A command on a host failed; the message names the host and ends with its stderr."""


class HostTimeoutError(HostError, TimeoutError):
    """Commands did not end in time; the message names their hosts."""


@dataclass(frozen=True)
class Host:
    """Description of a host to build; None leaves a resource unlimited, except `burst`.

    Args:
        share: CPU time in cores: 0.8 is 80% of one core. Hosts whose shares add up to more than the
            machine has slow each other down.
        rate: Rate of the host's link in each direction, such as "200mbit".
        delay: Delay of the host's link in each direction, such as "5ms". A packet from host to host
            crosses two links.
        cpus: Cores that the host's processes may run on.
        burst: Bytes that the link passes at once; None sets what it carries in 2 ms, or 8 KiB if
            that is more. The kernel sends pieces of 64 KiB. With a smaller burst it cuts every
            piece into frames, which takes one core per 500 Mbit/s.

    Raises:
        ValueError: If an argument breaks its rule.
    """

    share: float | None = None
    rate: str | None = None
    delay: str | None = None
    cpus: Sequence[int] | None = None
    burst: int | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not 0.001 <= self.share <= 1024:
            raise invalid_argument(
                "share", self.share, "0.001 to 1024 cores", "0.8 for 80% of one core"
            )
        if self.rate is not None and not RATE.fullmatch(self.rate):
            raise invalid_argument(
                "rate", self.rate, "a number above 0 with kbit, mbit or gbit", "'200mbit'"
            )
        if self.delay is not None and not DELAY.fullmatch(self.delay):
            raise invalid_argument("delay", self.delay, "a number with us, ms or s", "'5ms'")
        if self.cpus is not None and not set() < set(self.cpus) <= os.sched_getaffinity(0):
            cores = sorted(os.sched_getaffinity(0))
            rule = f"one or more of the cores {cores}, and no others"
            raise invalid_argument("cpus", self.cpus, rule, "None for all of them")


@dataclass(frozen=True)
class Machine:
    """Host that was built: its address for other hosts, its network namespace and its cgroup."""

    spec: Host
    address: str
    namespace: str
    cgroup: Path


@dataclass(frozen=True)
class Command:
    """Process to run: index of its host, arguments, and additions to this process's environment."""

    host: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


def invalid_argument(argument: str, value: object, rule: str, fix: str) -> ValueError:
    return ValueError(f"{argument} must be {rule}, got {value!r}. Use {fix}.")
