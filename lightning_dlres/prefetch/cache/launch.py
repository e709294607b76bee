"""Discovery of the process that keeps a host's cache, and its start if there is none.

The process holds a lock on a file. Another process holds the lock only while it starts that
process. The system drops the lock when its holder ends, even if it is killed. So the next process
to take the lock removes the files that a killed one has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

import msgspec

from lightning_dlres.core.errors import (
    ConfigError,
    DlresError,
    PeerLostError,
    PeerTimeoutError,
    error_named,
)
from lightning_dlres.core.host.lightweight_process import lightweight_command
from lightning_dlres.core.host.locks import LOCK, locked, private_directory, sweep
from lightning_dlres.core.names import path_part
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.prefetch.cache import messages
from lightning_dlres.prefetch.cache.messages import HostConfig

# Longest path of a Unix socket, in bytes: Linux allows 107, some systems 103.
_MAX_SOCKET_BYTES = 100
# Seconds between two checks for the socket.
_POLL_SECONDS = 0.02
# Characters of the log that an error quotes.
_LOG_TAIL = 2000
# File in which a process writes its progress before it listens.
PROGRESS = "progress"
# Entry point of the process.
MAIN = "lightning_dlres.prefetch.cache.host:main"


def runtime_directory() -> Path:
    """Return this user's directory for sockets and locks; no other user may enter it.

    Raises:
        ConfigError: If another user has made it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = (
        Path(base)
        if os.path.isabs(base) and os.access(base, os.W_OK)
        else Path(tempfile.gettempdir())
    )
    return private_directory(parent, f"dlres-{os.getuid()}")


class HostProcess:
    """Handle of the process that keeps a cache, for the other processes of its host.

    Args:
        name: Name of the cache, unique for the data set and the job on this host.
        config: Configuration to start the process with.

    Raises:
        ConfigError: If the name cannot be part of a socket's path.
    """

    def __init__(self, name: str, config: HostConfig) -> None:
        check_name(name)
        base = runtime_directory()
        self._config = config
        self._directory, self._lock = base / name, base / f"{name}{LOCK}"
        self._log = base / f"{name}.log"
        self.socket = self._directory / "cache.sock"
        if len(os.fsencode(self.socket)) > _MAX_SOCKET_BYTES:
            raise ConfigError(
                f"The socket of cache {name!r} must be a path of at most {_MAX_SOCKET_BYTES} "
                f"bytes, got {self.socket}. Set TMPDIR to a shorter path."
            )

    def ensure(self, timeout: float) -> None:
        """Wait until the process listens; start it if there is none.

        Raises:
            DlresError: If the process could not start; it is the process's own error.
            PeerTimeoutError: If it made no progress for `timeout` seconds.
        """
        deadline, progress = time.monotonic() + timeout, ""
        started: subprocess.Popen[bytes] | None = None
        # The socket alone is no proof, because the socket of a killed process stays.
        while not (self.socket.exists() and self.runs()):
            if started is None or started.poll() == 0:
                # There is no process, or the last one has ended without an error. `_start` also
                # removes the failure file of an earlier process.
                try:
                    started = self._start()
                except OSError as error:
                    raise ConfigError(
                        f"The files of a cache, {self._directory}*, must be writable, got: "
                        f"{error}. Remove these files, or set TMPDIR to another directory."
                    ) from error
            # In this order: a process leaves its failure before it ends.
            status = started.poll() if started is not None else None
            failed = self._failure()
            if failed is None and status:
                failed = PeerLostError(
                    f"The process that keeps the cache ended with status {status} "
                    f"before it listened. The end of its log:\n{self.log_tail()}"
                )
            if failed is not None:
                raise failed
            if (now := self._progress()) != progress:
                # Listing millions of files takes long: only a lack of progress is an error.
                deadline, progress = time.monotonic() + timeout, now
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"The process that keeps the cache ({self._directory}) made no progress for "
                    f"{format_seconds(timeout)}{progress and f', after: {progress}'}. The end of "
                    f"its log:\n{self.log_tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def runs(self) -> bool:
        """Return true if the process runs, or is about to be started."""
        # A shared lock: another process that checks at the same time must not take this check for
        # the cache.
        with locked(self._lock, fcntl.LOCK_SH) as lock:
            return lock is None

    def log_tail(self) -> str:
        """Return the end of the process's log, or the start of the report of a crash."""
        try:
            log = self._log.read_text(errors="replace")
        except OSError:
            log = ""
        crash = log.rfind("Fatal Python error")
        # A report of a crash begins with the thread that has crashed.
        return (log[-_LOG_TAIL:] if crash < 0 else log[crash:][:_LOG_TAIL]) or "(empty)"

    def _failure(self) -> DlresError | None:
        """Return the error of a process with this configuration that could not start."""
        try:
            data = failure_path(self._directory, self._config).read_bytes()
        except OSError:
            return None
        failed = from_json(data, messages.Failed)
        return error_named(failed.error, failed.text)

    def _progress(self) -> str:
        try:
            return (self._directory / PROGRESS).read_text()
        except OSError:
            return ""

    def _start(self) -> subprocess.Popen[bytes] | None:
        """Start the process unless another one holds the lock."""
        with locked(self._lock) as lock:
            if lock is None:
                return None
            sweep(self._lock.parent)
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir(mode=0o700)
            self._log.unlink(missing_ok=True)
            # Append mode: after the process has truncated its log, it writes on at the new end.
            with self._log.open("ab") as log:
                process = start_program(MAIN, [str(self._directory), str(lock)], log, lock)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(msgspec.json.encode(self._config))
            return process


def start_program(
    function: str, arguments: list[str], log: IO[bytes], lock: int
) -> subprocess.Popen[bytes]:
    """Start a process that calls a function.

    Args:
        function: "module:name" of the function.
        arguments: Arguments of the command.
        log: File for its output.
        lock: Descriptor that holds the cache's lock; the process inherits it.

    Returns:
        The process, with a pipe to its standard input.
    """
    return subprocess.Popen(
        lightweight_command(function, *arguments),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=[lock],
        # Ctrl-C and the end of a terminal must reach the ranks only.
        start_new_session=True,
    )


def check_name(name: object) -> None:
    """Raise an error if a cache cannot have this name.

    Raises:
        ConfigError: If the name cannot be one part of a path.
    """
    # Lock and log lie beside the cache's directory.
    path_part("cache", name, reserved=(LOCK, ".log"))


def failure_path(directory: Path, config: HostConfig) -> Path:
    """Return the path of the file with the error of a process that could not start."""
    return directory / f"failed-{messages.fingerprint(config)}.json"
