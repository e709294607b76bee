"""Processes of a training with parameter servers, and the faults that tests inject."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.support.forkserver import ForkedProcess, ForkServer
from tests.support.chaos_proxy import Chaos, ChaosProxy
from tests.support.paramserver_training import WorkerOrder, server_status
from tests.support.waiting import wait_until

_MODULE = "tests.support.paramserver_training"
# Time limits in seconds: of a process's start with its imports, and of progress of the training.
_START_SECONDS, _PROGRESS_SECONDS = 90.0, 60.0
_MEMORY = Path("/dev/shm")
# Bytes of a snapshot that is never completed.
_PARTIAL_BYTES = 30_000


class Cluster:
    """Servers, proxies before them, and workers. All faults leave the training able to go on.

    Args:
        forks: Fork server that starts the processes.
        directory: Directory for reports, logs and snapshots.
        workers, servers, steps: Their numbers.
        chaos: Faults of the messages; None: no proxies.
        seed: Seed of these faults.
        max_norm: Bound of the gradients' norm; 0 for none.
        snapshot_seconds: Seconds between two snapshots; 0 for none.
        deadline: Seconds of silence after which servers shut a worker out.
    """

    def __init__(
        self,
        forks: ForkServer,
        directory: Path,
        *,
        workers: int,
        servers: int,
        steps: int,
        chaos: Chaos | None = None,
        seed: int = 0,
        max_norm: float = 0.0,
        snapshot_seconds: float = 0.0,
        deadline: float = 60.0,
    ) -> None:
        self._forks, self._directory, self._snapshot_seconds = forks, directory, snapshot_seconds
        self._opened = contextlib.ExitStack()
        self.servers: list[ForkedProcess] = []
        self._addresses: list[str] = []
        self.proxies: list[ChaosProxy] = []
        self._all: list[ForkedProcess] = []
        directory.mkdir(parents=True, exist_ok=True)
        for index in range(servers):
            self.servers.append(self._start_server(index, 0))
            self._addresses.append(self._address_of(index))
        if chaos is not None:
            self.proxies = [
                self._opened.enter_context(ChaosProxy(address, chaos, seed + index))
                for index, address in enumerate(self._addresses)
            ]
        logs = Path(tempfile.mkdtemp(dir=_MEMORY if _MEMORY.is_dir() else None, prefix="dlres-"))
        self._opened.callback(shutil.rmtree, logs, ignore_errors=True)
        order = WorkerOrder(
            directory=str(directory),
            worker=0,
            process=0,
            workers=workers,
            addresses=[proxy.address for proxy in self.proxies] or self._addresses,
            steps=steps,
            token=secrets.token_hex(16),
            log_directory=str(logs),
            max_norm=max_norm,
            deadline=deadline,
        )
        self.orders = [replace(order, worker=worker) for worker in range(workers)]
        self.workers = [self._start_worker(order) for order in self.orders]

    def close(self) -> None:
        """Kill all processes."""
        for process in self._all:
            process.kill_group()
        self._opened.close()

    def step_of(self, worker: int) -> int:
        """Return the number of finished steps of a worker's latest process; -1 before it joined."""
        try:
            return int(self.orders[worker].report.with_suffix(".step").read_text())
        except FileNotFoundError:
            return -1

    def wait_step(self, step: int) -> None:
        """Wait until a worker has finished so many steps.

        Raises:
            AssertionError: If the training makes no progress.
        """
        while (most := max(map(self.step_of, range(len(self.orders))))) < step:
            self.wait(
                lambda most=most: max(map(self.step_of, range(len(self.orders)))) > most,
                f"a step after {most}",
            )

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition; fail with the output of all processes if it does not come true."""

        def holds() -> bool:
            if condition():
                return True
            assert not self._has_failed(), f"a process has ended during the wait for {what}"
            return False

        try:
            wait_until(holds, what, _PROGRESS_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from error

    def _has_failed(self) -> bool:
        """Return True if a server or the latest process of a worker has ended with an error."""
        return any(process.poll() not in (None, 0) for process in (*self.servers, *self.workers))

    def output(self) -> str:
        """Return what all processes have printed and reported."""
        parts = []
        for path in sorted(self._directory.iterdir()):
            if path.suffix in (".log", ".lost", ".step"):
                text = path.read_text(errors="replace")
                parts += [f"--- {path.name}", text] if text else []
        for address, process in zip(self._addresses, self.servers, strict=True):
            if process.poll() is None:
                with contextlib.suppress(Exception):
                    parts.append(str(server_status(address, 2.0)))
        return "\n".join(parts)

    def kill_server(self, index: int) -> None:
        """Kill a server with SIGKILL."""
        self.servers[index].kill_group()

    def restart_server(self, index: int) -> None:
        """Start a killed server again, at its old address."""
        port = int(self._addresses[index].rpartition(":")[2])
        self.servers[index] = self._start_server(index, port)
        assert self._address_of(index) == self._addresses[index]

    def kill_server_in_snapshot(self, index: int) -> None:
        """Kill a server while it writes a snapshot; the first part of the snapshot stays."""
        partial = self._snapshots(index, ".snapshot.partial")
        # The server waits at the end of a pipe until it is killed.
        self.wait(lambda: _made(os.mkfifo, partial), "a moment between two snapshots")
        pipe, data = os.open(partial, os.O_RDONLY | os.O_NONBLOCK), bytearray()
        try:
            self.wait(lambda: _read_some(pipe, data) > _PARTIAL_BYTES, "half a snapshot")
            self.kill_server(index)
        finally:
            os.close(pipe)
        partial.unlink()
        partial.write_bytes(data)

    def fill_disk(self, index: int) -> None:
        """Let the next snapshot of a server find a full disk, and the one after it space again."""
        partial = self._snapshots(index, ".snapshot.partial")

        self.wait(
            lambda: _made(lambda path: path.symlink_to("/dev/full"), partial),
            "a moment between two snapshots",
        )
        # The server removes what it could not write.
        self.wait(lambda: not partial.is_symlink(), "a failed snapshot")
        saved = self._snapshots(index, ".snapshot").stat().st_mtime_ns
        self.wait(
            lambda: self._snapshots(index, ".snapshot").stat().st_mtime_ns > saved,
            "a snapshot after the failed one",
        )

    def kill_worker(self, worker: int) -> None:
        """Kill a worker with SIGKILL."""
        self.workers[worker].kill_group()

    def replace_worker(self, worker: int) -> None:
        """Start another process of a worker, and wait until it has joined."""
        self.start_replacement(worker)
        self.wait(lambda: self.step_of(worker) >= 0, f"worker {worker}'s return")

    def start_replacement(self, worker: int) -> None:
        """Start another process of a worker."""
        order = self.orders[worker]
        self.orders[worker] = replace(order, process=order.process + 1)
        self.workers[worker] = self._start_worker(self.orders[worker])

    def pause_worker_past_deadline(self, worker: int) -> str:
        """Pause a worker until it is shut out, replace it, and let it go on.

        Returns:
            The error that ends the paused process.
        """
        paused, report = self.workers[worker], self.orders[worker].report.with_suffix(".lost")
        paused.send_signal(signal.SIGSTOP)
        for address in self._addresses:
            self.wait(
                lambda address=address: server_status(address).workers[worker].state == "shut out",
                "the end of the deadline",
            )
        self.replace_worker(worker)
        paused.send_signal(signal.SIGCONT)
        self.wait(lambda: paused.poll() is not None, "the end of the paused process")
        return report.read_text()

    def finish(self) -> list[bytes]:
        """Wait for the end of the training; return the weights of each worker."""
        self.wait_step(self.orders[0].steps)
        for worker in self.workers:
            self.wait(lambda worker=worker: worker.poll() is not None, "the end of the training")
        assert [worker.poll() for worker in self.workers] == [0] * len(self.workers), self.output()
        return [order.report.with_suffix(".weights").read_bytes() for order in self.orders]

    def _start_server(self, index: int, port: int) -> ForkedProcess:
        address = self._directory / f"server-{index}.address"
        address.unlink(missing_ok=True)
        arguments = [str(address), str(port)]
        if self._snapshot_seconds:
            arguments += [str(self._directory / f"snapshots-{index}"), str(self._snapshot_seconds)]
        return self._start("server_main", arguments, f"server-{index}.log")

    def _address_of(self, index: int) -> str:
        path = self._directory / f"server-{index}.address"
        wait_until(path.exists, f"the address of server {index}", _START_SECONDS)
        return path.read_text()

    def _snapshots(self, index: int, suffix: str) -> Path:
        port = self._addresses[index].rpartition(":")[2]
        return self._directory / f"snapshots-{index}" / f"server-{port}{suffix}"

    def _start_worker(self, order: WorkerOrder) -> ForkedProcess:
        name = f"{order.report.name}.log"
        return self._start("worker_main", [json.dumps(asdict(order))], name)

    def _start(self, function: str, arguments: list[str], log: str) -> ForkedProcess:
        descriptor = os.open(self._directory / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            process = self._forks.start(
                f"{_MODULE}:{function}", arguments, {1: descriptor, 2: descriptor}
            )
        finally:
            os.close(descriptor)
        self._all.append(process)
        return process


def _made(make: Callable[[Path], None], path: Path) -> bool:
    """Make a special file; return False if there is a file."""
    try:
        make(path)
    except FileExistsError:
        return False
    return True


def _read_some(pipe: int, data: bytearray) -> int:
    """Add what a pipe has to the data; return the number of bytes."""
    with contextlib.suppress(BlockingIOError):
        data += os.read(pipe, 4096)
    return len(data)


@contextlib.contextmanager
def closing_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """Context manager that kills all processes at its end."""
    try:
        yield cluster
    finally:
        cluster.close()
