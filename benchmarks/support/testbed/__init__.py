"""Testbed of several hosts on one machine, with slow links and CPUs of different speed.

A host is a network namespace (its own interface, loopback and ports) and a cgroup (its CPU share).
A bridge in one more namespace connects the hosts, so the machine's own network does not change, and
testbeds that are open at the same time cannot reach each other. All names contain the pid of the
process that made them: the next testbed finds and removes the namespaces of killed processes.

Needs Linux, root and iproute2; `reason_unavailable` names a missing one. The package imports
nothing of lightning_dlres, so that a benchmark can report this before it has loaded torch.
"""

from benchmarks.support.testbed.hosts import (
    Command,
    Host,
    HostError,
    HostTimeoutError,
    Machine,
    UnavailableError,
)
from benchmarks.support.testbed.system import MIN_QUOTA_US, PERIOD_US, set_cpu_share
from benchmarks.support.testbed.testbed import Testbed, reason_unavailable

__all__ = [
    "MIN_QUOTA_US",
    "PERIOD_US",
    "Command",
    "Host",
    "HostError",
    "HostTimeoutError",
    "Machine",
    "Testbed",
    "UnavailableError",
    "reason_unavailable",
    "set_cpu_share",
]
