"""Errors of this package, one class per cause, such as a wrong argument or a lost peer.

Each message names the rule, the value or event that breaks it, and a fix.
"""

from __future__ import annotations


class DlresError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(DlresError, ValueError):
    """An argument, a plan or a model is invalid; raised before the step that would use it."""


class UnsupportedStepError(DlresError, RuntimeError):
    """User code did something during a step that this package cannot reproduce exactly."""


class PeerError(DlresError, RuntimeError):
    """Another process failed or misbehaved; the message names it."""


class PeerTimeoutError(PeerError, TimeoutError):
    """A wait for a peer ran past its deadline."""


class PeerLostError(PeerError):
    """A peer died, closed its connection, or announced a failure."""


class ProtocolError(PeerError):
    """A peer sent bytes that break the protocol."""


class StorageError(PeerError):
    """A sample cannot be read; the message names its storage and its key."""


class BatchMismatchError(PeerError):
    """Two ranks that must see the same batch saw different ones."""


def text_of(error: object) -> str:
    """Return the text of an error in valid UTF-8; a file name in it may be invalid UTF-8."""
    return str(error).encode(errors="backslashreplace").decode()


def got_expected(argument: str, got: object, expected: str, fix: str) -> str:
    """Return the standard message for a bad value.

    Args:
        argument: Name of the argument.
        got: Its value.
        expected: Rule for the value; follows "must be".
        fix: Value that is valid; follows "Use".
    """
    return f"{argument} must be {expected}, got {got!r}. Use {fix}."
