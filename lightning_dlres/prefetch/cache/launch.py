"""Finding the process that keeps a host's cache, and starting it if there is none.

Who holds a lock on a file is that process, or is about to start it; a lock ends with its holder,
however that ends, so what a killed one has left behind is found and removed by the next.
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

from lightning_dlres.core.errors import ConfigError, DlresError, PeerLostError, PeerTimeoutError
from lightning_dlres.core.host.lightweight_process import light_command
from lightning_dlres.core.host.locks import LOCK, locked, private_directory, sweep
from lightning_dlres.core.names import path_part
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.prefetch.cache import messages
from lightning_dlres.prefetch.cache.messages import HostConfig

# A path of a Unix socket may have 107 bytes, on some systems 103.
_LONGEST_SOCKET = 100
_POLL = 0.02
_LAST_WORDS = 2000
# The file in which a process says what it does before it listens.
PROGRESS = "progress"
MAIN = "lightning_dlres.prefetch.cache.host:main"


def runtime_directory() -> Path:
    """Return this user's directory for sockets and locks, which nobody else may enter.

    Raises:
        ConfigError: somebody else has made it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = (
        Path(base)
        if os.path.isabs(base) and os.access(base, os.W_OK)
        else Path(tempfile.gettempdir())
    )
    return private_directory(parent, f"dlres-{os.getuid()}")


class HostProcess:
    """The process that keeps the cache called `name`, as others see it.

    Args:
        name: unique for the data set and the job on this host.
        config: what it is started with, if it has to be.

    Raises:
        ConfigError: the name makes no path of a socket.
    """

    def __init__(self, name: str, config: HostConfig) -> None:
        check_name(name)
        base = runtime_directory()
        self._config = config
        self._directory, self._lock = base / name, base / f"{name}{LOCK}"
        self._log = base / f"{name}.log"
        self.socket = self._directory / "cache.sock"
        if len(os.fsencode(self.socket)) > _LONGEST_SOCKET:
            raise ConfigError(
                f"The socket of cache {name!r} must be a path of at most {_LONGEST_SOCKET} bytes, "
                f"got {self.socket}. Take a shorter name, or a shorter TMPDIR."
            )

    def ensure(self, timeout: float) -> None:
        """Return when the process listens; start it if there is none.

        Raises:
            DlresError: why it could not start.
            PeerTimeoutError: it did not come up within `timeout` seconds.
        """
        deadline, progress = time.monotonic() + timeout, ""
        started: subprocess.Popen[bytes] | None = None
        # The socket of a killed process is still there.
        while not (self.socket.exists() and self.runs()):
            if started is None or started.poll() == 0:
                # A failure of an earlier process is swept away by this.
                try:
                    started = self._start()
                except OSError as error:
                    raise ConfigError(
                        f"The files of a cache, {self._directory}*, must be ones that can be made, "
                        f"got: {error}. Remove what is there, or set TMPDIR to another place."
                    ) from error
            failed = self._failure()
            if failed is None and started is not None and started.poll():
                failed = PeerLostError(
                    f"the process that keeps the cache ended with status {started.returncode} "
                    f"before it listened. Its last words:\n{self.last_words()}"
                )
            if failed is not None:
                raise failed
            if (now := self._progress()) != progress:
                # To list millions of files takes as long as it takes.
                deadline, progress = time.monotonic() + timeout, now
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"waited {format_seconds(timeout)} for the process that keeps the cache "
                    f"({self._directory}){progress and f', which last said: {progress}'}. Its last "
                    f"words:\n{self.last_words()}"
                )
            time.sleep(_POLL)

    def runs(self) -> bool:
        """Return whether there is such a process."""
        # Shared: whoever else looks at the same time must not take this for the process.
        with locked(self._lock, fcntl.LOCK_SH) as lock:
            return lock is None

    def last_words(self) -> str:
        """Return the end of what the process has printed."""
        try:
            words = self._log.read_text(errors="replace")
        except OSError:
            words = ""
        crash = words.rfind("Fatal Python error")
        # Of a crash the thread that it happened in comes first.
        return (words[-_LAST_WORDS:] if crash < 0 else words[crash:][:_LAST_WORDS]) or "(nothing)"

    def _failure(self) -> DlresError | None:
        """Return why a process with this configuration could not start."""
        try:
            data = failure_path(self._directory, self._config).read_bytes()
        except OSError:
            return None
        return error_of(from_json(data, messages.Failed))

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
            # To append: the process cuts its log off when it grows long.
            with self._log.open("ab") as log:
                process = start_program(MAIN, [str(self._directory), str(lock)], log, lock)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(msgspec.json.encode(self._config))
            return process


def start_program(
    function: str, arguments: list[str], log: IO[bytes], lock: int
) -> subprocess.Popen[bytes]:
    """Start a process that calls a function, with a pipe as its stdin, and a lock's descriptor."""
    return subprocess.Popen(
        light_command(function, *arguments),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=[lock],
        # ^C and a terminal's end are for those that use the cache.
        start_new_session=True,
    )


def check_name(name: object) -> None:
    """Raise where a cache cannot have this name.

    Raises:
        ConfigError: it is no part of a path.
    """
    # Beside its directory lie its lock and its log.
    path_part("cache", name, reserved=(LOCK, ".log"))


def failure_path(directory: Path, config: HostConfig) -> Path:
    """Return the file that says why a process could not start."""
    return directory / f"failed-{messages.fingerprint(config)}.json"


def error_of(failed: messages.Failed) -> DlresError:
    """Return the error that a message tells of."""
    from lightning_dlres.core import errors

    found = getattr(errors, failed.error, None)
    if isinstance(found, type) and issubclass(found, DlresError):
        return found(failed.text)
    return errors.PeerError(f"{failed.error}: {failed.text}")
