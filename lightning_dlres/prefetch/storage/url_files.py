"""Files behind a URL, through fsspec."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lightning_dlres.prefetch.storage.readers import Files, Piece
from lightning_dlres.prefetch.storage.source_options import hide_secrets

_Result = TypeVar("_Result")

# Held during every call of a file system that is not known to be safe for threads. It is one for
# the process: instances of their own are not enough, because two of them may share a file object
# below (an archive in memory, an archive inside a cached archive) and with it the file position.
_SERIAL = threading.RLock()
# Requests of one read that a web server gets at once. A small one drops connections that come
# faster than it takes them in, and these are silent for seconds.
_WEB_AT_ONCE = 4


def is_concurrent(system: Any) -> bool:
    """Return whether several threads may call a file system at once.

    An asynchronous one runs all of its calls in fsspec's own thread; a file system that wraps
    others is as safe as they are. Nothing is known of any other.
    """
    from fsspec.asyn import AsyncFileSystem

    return isinstance(system, AsyncFileSystem) and all(map(is_concurrent, _wrapped(system)))


def is_web(system: Any) -> bool:
    """Return whether a file system lists a web server's pages, or wraps one that does."""
    names = system.protocol
    known = {names} if isinstance(names, str) else set(names)
    return bool(known & {"http", "https"}) or any(map(is_web, _wrapped(system)))


class UrlFiles(Files):
    """Files of a file system of fsspec.

    Args:
        system: the file system.
        options: what it was made with; errors do not show it.
    """

    def __init__(self, system: Any, options: Mapping[str, Any] | None = None) -> None:
        self._system, self._options = system, options or {}
        self.is_concurrent = is_concurrent(system)
        self.name = f"{type(system).__name__} of fsspec"
        limited = self.is_concurrent and is_web(system) and system.batch_size is None
        self._limits = {"batch_size": _WEB_AT_ONCE} if limited else {}

    def read(self, pieces: Sequence[Piece]) -> list[bytes | OSError]:
        """See `Files`."""
        try:
            return self.call(lambda: self._read(pieces))
        except Exception as error:
            if not self._options:
                raise
            raise OSError(hide_secrets(repr(error), self._options)) from None

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Return what a function returns that uses the file system."""
        if self.is_concurrent:
            return function()
        with _SERIAL:
            return function()

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """Return the sizes of files, None where they are not known; within `call`."""
        sizes: list[int | None] = self._system.sizes(list(paths), **self._limits)
        return sizes

    def _read(self, pieces: Sequence[Piece]) -> list[bytes | OSError]:
        # An empty range is refused by some servers, and so is one behind an empty file's end.
        empty = {at for at, piece in enumerate(pieces) if not piece.length}
        asked = [piece for at, piece in enumerate(pieces) if at not in empty]
        found = iter(self._ranges(asked))
        return [
            self._whole(piece) if at in empty else self._bytes_or_error(next(found))
            for at, piece in enumerate(pieces)
        ]

    def _ranges(self, pieces: Sequence[Piece]) -> Sequence[Any]:
        if not self.is_concurrent and self._system.async_impl:
            # It would read several ranges at once from what it wraps.
            return [self._range(piece) for piece in pieces]
        found: Sequence[Any] = self._system.cat_ranges(
            [piece.path for piece in pieces],
            [piece.start for piece in pieces],
            [_end(piece) for piece in pieces],
            on_error="return",
            **self._limits,
        )
        return found

    def _range(self, piece: Piece) -> Any:
        try:
            return self._system.cat_file(piece.path, piece.start, _end(piece))
        except Exception as error:  # as cat_ranges returns them
            return error

    def _whole(self, piece: Piece) -> bytes | OSError:
        if not piece.is_whole:
            return b""
        try:
            return self._bytes_or_error(self._system.cat_file(piece.path))
        except Exception as error:  # whatever a file system of fsspec may raise
            return self._bytes_or_error(error)

    def _bytes_or_error(self, found: Any) -> bytes | OSError:
        if isinstance(found, OSError) and not self._options:
            return found
        if isinstance(found, (FileNotFoundError, PermissionError, IsADirectoryError)):
            # Of these the kind says enough.
            return type(found)(hide_secrets(str(found), self._options))
        if isinstance(found, Exception):
            # Errors of a connection are not of one kind; another try may help.
            return OSError(hide_secrets(f"{type(found).__name__}: {found}", self._options))
        return bytes(found)


def _end(piece: Piece) -> int:
    # One byte more shows that a file has grown.
    return piece.start + piece.length + int(piece.is_whole)


def _wrapped(system: Any) -> list[Any]:
    from fsspec.spec import AbstractFileSystem

    values: list[Any] = []
    for value in vars(system).values():
        values += value.values() if isinstance(value, dict) else [value]
    return [value for value in values if isinstance(value, AbstractFileSystem)]
