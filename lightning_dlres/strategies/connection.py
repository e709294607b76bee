"""What ties the ranks of a run together: process group, mailbox, and the watch that notices a
rank's death."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_dlres.core.errors import ConfigError, PeerLostError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.comm.collectives import (
    all_ranks,
    any_rank,
    broadcast_tree,
    gather_numbers,
)
from lightning_dlres.pipeline.comm.liveness import Watch
from lightning_dlres.pipeline.comm.mailbox import Mailbox

_LONGER_THAN_ANY_RUN = timedelta(days=365)
# Seconds that a rank which raised waits for the others: most often it has raised alone.
_INTERRUPTED_SECONDS = 10.0


def join_process_group(
    environment: ClusterEnvironment, backend: str | None, device: torch.device, timeout: float
) -> None:
    """Initialise torch's default process group unless somebody has."""
    if dist.is_initialized():
        return
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    chosen = backend or ("gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl")
    dist.init_process_group(
        chosen,
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timedelta(seconds=timeout),
    )


def require_script(environment: ClusterEnvironment, processes: int) -> None:
    """Raise where Lightning is to start the user's script again for the other devices and has no
    file to start.

    Raises:
        ConfigError: The script was read from standard input, or given with -c.
    """
    if processes < 2 or environment.creates_processes_externally:
        return
    script = sys.argv[0] if sys.argv else ""
    is_module = getattr(sys.modules.get("__main__"), "__spec__", None) is not None
    if script in ("", "-", "-c") and not is_module and not Path(script).is_file():
        got = {"-": "standard input", "-c": "python -c"}.get(script, "no script")
        raise ConfigError(
            f"devices={processes} needs a script in a file, which is started once for each device; "
            f"got {got}. Save the script as train.py and run `python train.py`."
        )


class Connection:
    """The ranks of one run, from the strategy's setup to its teardown.

    Args:
        names: what each rank is called in messages.
        environment: Lightning's cluster environment.
        nodes: number of hosts.
        timeout: seconds that a rank waits for another.
        tracer: gets a span for every transfer.
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
        self._signals: dict[int, int] = {}  # of a run without a watch
        self._group = dist.new_group(backend="gloo", timeout=_LONGER_THAN_ANY_RUN)
        self._watch = self._start_watch(names, environment, nodes) if len(names) > 1 else None
        assert isinstance(self._group, dist.ProcessGroup)
        self.mailbox = Mailbox(
            self._group, self.rank, names, timeout=timeout, check=self.check, tracer=tracer
        )

    def rename(self, names: list[str]) -> None:
        """Call the ranks otherwise in messages: which stage each is, is known after planning."""
        self.mailbox.names[:] = names
        if self._watch is not None:
            self._watch.rename(names)

    def check(self) -> None:
        """Raise if this rank or another is known to have failed."""
        if self._failure is not None:
            raise PeerLostError(f"This run has failed: {self._failure}")
        if self._watch is not None:
            self._watch.check()

    @property
    def failed(self) -> bool:
        """Whether this rank or another is known to have failed."""
        return self._failure is not None or (
            self._watch is not None and self._watch.failure is not None
        )

    def announce_failure(self, error: BaseException) -> None:
        """Tell all ranks that this one gives up; only the first reason counts."""
        if self._failure is None:
            self._failure = f"{type(error).__name__}: {error}"
            if self._watch is not None and self._watch.failure is None:
                self._watch.announce(self._failure)

    def hurry(self) -> None:
        """Wait for other ranks a few seconds only from now on: this rank has raised."""
        self.timeout = self.mailbox.timeout = min(self.timeout, _INTERRUPTED_SECONDS)

    def note_signal(self, number: int) -> None:
        """Count a signal that this rank has got; rank 0 learns it within about a second. May be
        called from a signal handler."""
        if self._watch is not None:
            self._watch.count_signal(number)
        else:
            self._signals = {**self._signals, number: self._signals.get(number, 0) + 1}

    def noted_signals(self) -> dict[int, int]:
        """Return how often each signal came to the rank that got it most often, as far as this
        rank knows: rank 0 hears of all."""
        return self._watch.signal_counts() if self._watch is not None else self._signals

    def broadcast(self, tree: Tree, source: int) -> Tree:
        """Return the source's tree on all ranks."""
        return broadcast_tree(tree, source, self.timeout, self.check)

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return every rank's numbers."""
        return gather_numbers(values, self.timeout, self.check)

    def any_rank(self, flag: bool, while_waiting: Callable[[], None] | None = None) -> bool:
        """Return True if the flag is set on any rank. `while_waiting` is called repeatedly until
        all ranks take part."""
        return any_rank(flag, self.timeout, self.check, while_waiting)

    def all_ranks(self, flag: bool) -> bool:
        """Return whether the flag is set on all ranks."""
        return all_ranks(flag, self.timeout, self.check)

    def close(self) -> None:
        """End the run: in order, if no rank has failed."""
        orderly = not self.failed
        self.mailbox.close(orderly)
        if orderly:
            self.any_rank(False)
        if self._watch is not None:
            self._watch.close()
        if orderly:
            dist.destroy_process_group(self._group)

    def _start_watch(self, names: list[str], environment: ClusterEnvironment, nodes: int) -> Watch:
        patience = min(self.timeout, 30.0)
        if self.rank == 0:
            address = "127.0.0.1" if nodes == 1 else socket.gethostbyname(environment.main_address)
            watch = Watch.host(names, bind=address, deadline=patience)
            broadcast_tree(watch.invitation, 0, self.timeout, _nothing)
            return watch
        invitation = broadcast_tree(None, 0, self.timeout, _nothing)
        launched = isinstance(environment, LightningEnvironment) and environment.local_rank() > 0
        return Watch.join(
            self.rank,
            invitation,
            deadline=patience,
            watch_parent=os.getppid() if launched else None,
        )


def _nothing() -> None:
    """No failure can be known yet."""
