"""Connection between the ranks of a run: process group, mailbox, and a watch that notices when a
rank dies."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_dlres.core.comm.collectives import (
    REASON_SECONDS,
    any_rank,
    broadcast_flags,
    broadcast_tree,
    gather_numbers,
    no_check,
    wait_for_reason,
)
from lightning_dlres.core.comm.liveness import Watch
from lightning_dlres.core.comm.mailbox import Mailbox, message_group, release_group
from lightning_dlres.core.errors import ConfigError, PeerError, PeerLostError, PeerTimeoutError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.strategies.process_group import DEFAULT_GROUP

# Timeout of a rank that has raised, in seconds. Most often it has raised alone, and the other ranks
# will not answer.
_TIMEOUT_AFTER_FAILURE_SECONDS = 10.0
# Longest wait for the watch's connections at the start, in seconds.
_WATCH_DEADLINE_SECONDS = 30.0
# Parts of the messages of errors that torch's collectives raise when a rank is lost or late.
_SIGNS_OF_A_LOST_RANK = ("gloo", "pair closure", "NCCL")


def require_script(environment: ClusterEnvironment, processes: int) -> None:
    """Raise if Lightning must start the user's script for other devices, but it is not in a file.

    Args:
        environment: Lightning's cluster environment.
        processes: Number of processes on this host.

    Raises:
        ConfigError: If the script was read from standard input, or given with -c, or if this is a
            notebook or another interactive session.
    """
    if processes < 2 or environment.creates_processes_externally:
        return
    script = sys.argv[0] if sys.argv else ""
    is_module = getattr(sys.modules.get("__main__"), "__spec__", None) is not None
    # Python sets `ps1` in an interactive session; Lightning knows a notebook by it, too.
    is_interactive = hasattr(sys, "ps1")
    no_script = script in ("", "-", "-c") and not is_module and not Path(script).is_file()
    if is_interactive or no_script:
        got = {"-": "standard input", "-c": "python -c"}.get(script, "no script")
        got = "a notebook or an interactive session" if is_interactive else got
        raise ConfigError(
            f"devices={processes} needs a script in a file, since Lightning starts it once per "
            f"device, got {got}. Save the script as train.py and run `python train.py`."
        )


class Connection:
    """Connection of this rank to all ranks of a run, from the strategy's setup to its teardown.

    Args:
        names: Name of each rank in messages.
        environment: Lightning's cluster environment.
        nodes: Number of hosts.
        timeout: Seconds that a rank waits for another.
        tracer: Gets a span for every transfer.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        timeout: Seconds that a rank waits for another; shorter after this rank has raised.
        mailbox: Mailbox for messages between the ranks.
    """

    def __init__(
        self,
        names: list[str],
        environment: ClusterEnvironment,
        nodes: int,
        timeout: float,
        tracer: Tracer,
    ) -> None:
        self.rank, self.world_size, self.timeout = dist.get_rank(), len(names), timeout
        self._failure: str | None = None
        # Count of each signal, by signal number. Used by a run of one rank, which has no watch.
        self._signals: dict[int, int] = {}
        self._group = message_group()
        self._watch = self._start_watch(names, environment, nodes) if len(names) > 1 else None
        self.mailbox = Mailbox(
            self._group, self.rank, names, timeout=timeout, check=self.check, tracer=tracer
        )

    def rename(self, names: list[str]) -> None:
        """Change the ranks' names in messages; called after planning, which gives each a stage."""
        self.mailbox.names[:] = names
        if self._watch is not None:
            self._watch.rename(names)

    def check(self) -> None:
        """Raise if this rank or another is known to have failed.

        Raises:
            PeerLostError: If a failure is known; the message names the rank and its error.
        """
        if self._failure is not None:
            raise PeerLostError(f"This run has failed: {self._failure}")
        if self._watch is not None:
            self._watch.check()

    @property
    def failed(self) -> bool:
        """True if this rank or another is known to have failed."""
        return self._failure is not None or (
            self._watch is not None and self._watch.failure is not None
        )

    def announce_failure(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed; only the first failure is reported."""
        if self._failure is None:
            self._failure = f"{type(error).__name__}: {error}"
            if self._watch is not None and self._watch.failure is None:
                is_known = isinstance(error, PeerLostError) and error.is_announced
                self._watch.announce(error if is_known else self._failure)

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Context manager that replaces an error of a collective of torch, which names no rank.

        Raises:
            PeerLostError: If a collective failed; the message names the rank, if it is known.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerError) or not _is_of_a_collective(error):
                raise
            raise self.reason_of(error) from error

    def reason_of(self, error: BaseException) -> BaseException:
        """Return the failure of the rank that broke a collective of torch; the error itself if it
        is another one. Waits for some seconds for the watch to notice the failure."""
        if isinstance(error, PeerError) or not _is_of_a_collective(error):
            return error
        try:
            wait_for_reason(self.check, min(self.timeout, REASON_SECONDS))
        except PeerLostError as reason:
            return reason
        return PeerLostError(
            "A rank was lost or late in a collective call, and it is not known which. All ranks "
            "must make the same calls: check that all have as many batches, and that none stops "
            f"training alone. The error of torch: {error}"
        )

    def shorten_timeout(self) -> None:
        """Wait for other ranks only briefly from now on, because this rank has raised."""
        self.timeout = self.mailbox.timeout = min(self.timeout, _TIMEOUT_AFTER_FAILURE_SECONDS)

    def count_signal(self, number: int) -> None:
        """Count a signal that this rank has received; all ranks learn of it within seconds.

        A signal handler may call this.
        """
        if self._watch is not None:
            self._watch.count_signal(number)
        else:
            # A new dict, since a signal may interrupt a reader of the old one.
            self._signals = {**self._signals, number: self._signals.get(number, 0) + 1}

    def signal_counts(self) -> dict[int, int]:
        """Return the highest known count of each signal on any rank, by signal number."""
        return self._watch.signal_counts() if self._watch is not None else self._signals

    def broadcast(self, tree: Tree, source: int) -> Tree:
        """Return the tree of rank `source` on all ranks."""
        with self._naming_late_ranks():
            return broadcast_tree(tree, source, self.timeout, self.check)

    def broadcast_flags(self, flags: list[bool], source: int) -> list[bool]:
        """Return the flags of rank `source` on all ranks; called with equally many on each."""
        with self._naming_late_ranks():
            return broadcast_flags(flags, source, self.timeout, self.check)

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the numbers of every rank, by rank."""
        with self._naming_late_ranks():
            return gather_numbers(values, self.timeout, self.check)

    def any_rank(self, flag: bool, while_waiting: Callable[[], None] | None = None) -> bool:
        """Return True on all ranks if the flag is set on any.

        Args:
            flag: This rank's flag.
            while_waiting: Called repeatedly until all ranks have called this method.
        """
        with self._naming_late_ranks():
            return any_rank(flag, self.timeout, self.check, while_waiting)

    def all_ranks(self, flag: bool) -> bool:
        """Return True on all ranks if the flag is set on all."""
        return not self.any_rank(not flag)

    @contextmanager
    def _naming_late_ranks(self) -> Iterator[None]:
        """Context manager of a collective call; names the ranks that do not take part in time."""
        if self._watch is not None:
            self._watch.calls.begin()
        try:
            yield
        except PeerTimeoutError as error:
            late = self._watch.calls.late_ranks() if self._watch is not None else []
            if not late:
                raise
            own_name, names = self.mailbox.names[self.rank], [self.mailbox.names[r] for r in late]
            raise PeerTimeoutError(
                f"{own_name} waited {self.timeout:g} s in a collective call for "
                f"{' and '.join(names)}, where user code may be stuck. If it is only slow, raise "
                "the strategy's timeout."
            ) from error

    def close(self) -> None:
        """Close the connection; wait for the other ranks only if none has failed."""
        orderly = not self.failed
        try:
            self.mailbox.close(orderly)
            if orderly:
                self.any_rank(False)
        except BaseException:
            DEFAULT_GROUP.note_failure()
            raise
        if self._watch is not None:
            self._watch.close()
        if orderly:
            release_group(self._group)
        else:
            DEFAULT_GROUP.note_failure()

    def _start_watch(self, names: list[str], environment: ClusterEnvironment, nodes: int) -> Watch:
        deadline = min(self.timeout, _WATCH_DEADLINE_SECONDS)
        if self.rank == 0:
            address = "127.0.0.1" if nodes == 1 else socket.gethostbyname(environment.main_address)
            watch = Watch.host(names, bind=address, deadline=deadline)
            broadcast_tree(watch.invitation, 0, self.timeout, no_check)
            return watch
        invitation = broadcast_tree(None, 0, self.timeout, no_check)
        # If rank 0 started this process and is killed, the parent of this process changes. The
        # watch notices that before its deadline.
        return Watch.join(
            self.rank,
            invitation,
            deadline=deadline,
            watch_parent=os.getppid() if is_child_of_rank_0(environment) else None,
        )


@contextmanager
def announcing_failures(connection: Callable[[], Connection | None]) -> Iterator[None]:
    """Context manager that tells the other ranks of a failure at once.

    Lightning's `on_exception` would be too late. Lightning calls the user's hooks before it, and
    such a hook may wait for ranks that do not know of the failure.

    Args:
        connection: Returns the connection to the other ranks; None if there is none any more.
    """
    try:
        yield
    except BaseException as error:
        current = connection()
        if current is not None:
            current.announce_failure(error)
        raise


def is_child_of_rank_0(environment: ClusterEnvironment) -> bool:
    """Return True if rank 0 has started this process.

    Lightning's launcher starts the processes of a host as children of that host's first rank.
    """
    return (
        isinstance(environment, LightningEnvironment)
        and environment.node_rank() == 0
        and environment.local_rank() > 0
    )


def _is_of_a_collective(error: BaseException) -> bool:
    """Return True for an error that a collective of torch raises when a rank is lost or late."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS_OF_A_LOST_RANK)
