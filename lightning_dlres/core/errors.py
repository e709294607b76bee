"""One family of errors, so that a caller can tell a wrong argument from a lost peer.

Every message says what was got, what was expected and what to do about it.
"""

from __future__ import annotations


class DlresError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(DlresError, ValueError):
    """An argument, a plan or a model that cannot work, found before the first step."""


class UnsupportedStepError(DlresError, RuntimeError):
    """User code did something during a step that the method cannot carry out exactly."""


class PeerError(DlresError, RuntimeError):
    """Something is wrong with another process; the message names it."""


class PeerTimeoutError(PeerError, TimeoutError):
    """A wait for a peer ran past its deadline."""


class PeerLostError(PeerError):
    """A peer died, closed its connection, or announced that it gives up."""


class ProtocolError(PeerError):
    """Bytes from a peer are not what the protocol says must come next."""


class StorageError(PeerError):
    """A sample cannot be had; the message names where it should be, and its key."""


class BatchMismatchError(PeerError):
    """Two ranks that must see the same batch saw different ones."""


def text_of(error: object) -> str:
    """Return the text of an error as a message can carry it: the name of a file in it may have
    bytes that are no UTF-8."""
    return str(error).encode(errors="backslashreplace").decode()


def got_expected(what: str, got: object, expected: str, try_: str) -> str:
    """Return the standard sentences for a bad value: the argument, its rule, the value, and one
    value that works."""
    return f"{what} must be {expected}, got {got!r}. Use {try_}."
