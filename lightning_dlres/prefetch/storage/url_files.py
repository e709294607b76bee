"""Access to files behind a URL, through fsspec."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lightning_dlres.prefetch.storage.readers import Files, Piece
from lightning_dlres.prefetch.storage.source_options import hide_secrets

_Result = TypeVar("_Result")

# Held during every call of a file system that is not known to be thread-safe. One lock serves the
# whole process: two file systems may share a file object below them (an archive in memory, an
# archive inside a cached archive), and with it the file position.
_SERIAL_LOCK = threading.RLock()
# Maximum number of requests that one read sends to a web server at once. A small server drops
# connections that come faster than it accepts them, and the client notices only after seconds.
_WEB_REQUESTS = 4


def is_concurrent(system: Any) -> bool:
    """Return True if several threads may call a file system at once.

    An asynchronous file system runs all calls in fsspec's own thread. One that wraps others is as
    safe as they are. All other file systems count as unsafe.
    """
    from fsspec.asyn import AsyncFileSystem

    return isinstance(system, AsyncFileSystem) and all(map(is_concurrent, _wrapped_systems(system)))


def is_web(system: Any) -> bool:
    """Return True if a file system lists a web server's pages, or wraps one that does."""
    protocol = system.protocol
    names = {protocol} if isinstance(protocol, str) else set(protocol)
    return bool(names & {"http", "https"}) or any(map(is_web, _wrapped_systems(system)))


class UrlFiles(Files):
    """Files of a file system of fsspec.

    Args:
        system: The file system.
        options: Arguments that it was made with. They may hold secrets: errors do not show them.
    """

    def __init__(self, system: Any, options: Mapping[str, Any] | None = None) -> None:
        self._system, self._options = system, options or {}
        self.is_concurrent = is_concurrent(system)
        self.name = f"{type(system).__name__} of fsspec"
        # A `batch_size` among the options replaces this limit.
        needs_limit = self.is_concurrent and is_web(system) and system.batch_size is None
        self._request_limits = {"batch_size": _WEB_REQUESTS} if needs_limit else {}

    def read(self, pieces: Sequence[Piece]) -> list[bytes | OSError]:
        """See `Files`."""
        try:
            return self.call(lambda: self._read(pieces))
        except Exception as error:
            if not self._options:
                raise
            raise OSError(hide_secrets(repr(error), self._options)) from None

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Return the result of a function that uses the file system.

        The lock is held during the call if the file system is not thread-safe.
        """
        if self.is_concurrent:
            return function()
        with _SERIAL_LOCK:
            return function()

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """Return the sizes of files in bytes, None where unknown.

        Pass it to `call`, because this method takes no lock.
        """
        sizes: list[int | None] = self._system.sizes(list(paths), **self._request_limits)
        return sizes

    def _read(self, pieces: Sequence[Piece]) -> list[bytes | OSError]:
        # Some servers refuse an empty range, and the range behind the end of an empty file.
        empty = {index for index, piece in enumerate(pieces) if not piece.length}
        results = iter(
            self._read_ranges([piece for index, piece in enumerate(pieces) if index not in empty])
        )
        return [
            self._read_empty(piece) if index in empty else self._bytes_or_error(next(results))
            for index, piece in enumerate(pieces)
        ]

    def _read_ranges(self, pieces: Sequence[Piece]) -> Sequence[Any]:
        """Return for each piece its bytes, or the error that fsspec raised."""
        if not self.is_concurrent and self._system.async_impl:
            # `cat_ranges` would read several ranges at once from the wrapped, unsafe file system.
            return [self._read_range(piece) for piece in pieces]
        results: Sequence[Any] = self._system.cat_ranges(
            [piece.path for piece in pieces],
            [piece.start for piece in pieces],
            [_end(piece) for piece in pieces],
            on_error="return",
            **self._request_limits,
        )
        return results

    def _read_range(self, piece: Piece) -> Any:
        try:
            return self._system.cat_file(piece.path, piece.start, _end(piece))
        except Exception as error:  # returned, as cat_ranges does
            return error

    def _read_empty(self, piece: Piece) -> bytes | OSError:
        # Read a whole file even if it was listed as empty: it may have grown.
        if not piece.is_whole:
            return b""
        try:
            return self._bytes_or_error(self._system.cat_file(piece.path))
        except Exception as error:  # a file system of fsspec may raise anything
            return self._bytes_or_error(error)

    def _bytes_or_error(self, result: Any) -> bytes | OSError:
        if isinstance(result, OSError) and not self._options:
            return result
        if isinstance(result, (FileNotFoundError, PermissionError, IsADirectoryError)):
            # Keep the class: the reader does not repeat reads with these errors.
            return type(result)(hide_secrets(str(result), self._options))
        if isinstance(result, Exception):
            # Errors of a connection have many classes. An OSError makes the reader repeat the read.
            return OSError(hide_secrets(f"{type(result).__name__}: {result}", self._options))
        return bytes(result)


def _end(piece: Piece) -> int:
    # Ask for one byte more: if it comes, the file has grown since it was listed.
    return piece.start + piece.length + int(piece.is_whole)


def _wrapped_systems(system: Any) -> list[Any]:
    """Return the file systems that a file system wraps: those in its attributes."""
    from fsspec.spec import AbstractFileSystem

    values: list[Any] = []
    for value in vars(system).values():
        values += value.values() if isinstance(value, dict) else [value]
    return [value for value in values if isinstance(value, AbstractFileSystem)]
