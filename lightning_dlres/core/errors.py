"""Errors of this package, one class per cause, such as a wrong argument or a lost peer.

The message of a `ConfigError` names the rule, the value that breaks it, and a fix. The messages of
the other errors name what happened and where. They name a fix if there is a likely one.
"""

from __future__ import annotations


class DlresError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(DlresError, ValueError):
    """User input is invalid: an argument, a file, a plan, a model, a data set or a batch."""


class EpochTakenError(ConfigError):
    """Other processes, which may be about to end, use an epoch of a cache in another way."""


class UnsupportedStepError(DlresError, RuntimeError):
    """User code did something during a step that this package cannot reproduce exactly."""


class PeerError(DlresError, RuntimeError):
    """Another process or a storage failed or sent bad data; the message names it if known."""


class PeerTimeoutError(PeerError, TimeoutError):
    """A wait for a peer ran past its deadline."""


class PeerLostError(PeerError):
    """A peer died, closed its connection, or announced a failure.

    Attributes:
        is_announced: True if the message is an announcement; see `announcement`.
    """

    is_announced = False


class ProtocolError(PeerError):
    """Bytes do not have the form that the protocol or a codec prescribes.

    A peer sent them, or they were read or compressed on this rank.
    """


class StorageError(PeerError):
    """A sample cannot be read from a local file, a URL or a storage node.

    The message names the sample. If several samples are read at once, it may name only the first.
    """


class BatchMismatchError(PeerError):
    """Two ranks that must see the same batch saw different ones."""


def text_of(error: object) -> str:
    """Return the text of an error in valid UTF-8; a file name in it may be invalid UTF-8."""
    return str(error).encode(errors="backslashreplace").decode()


def announcement(name: str, error: BaseException | str) -> str:
    """Return the text by which a rank tells the others that it has failed.

    An announcement of another rank is passed on as it is, so that it names the rank at fault.

    Args:
        name: Name of the rank.
        error: Its error, or the text of one.
    """
    is_announced = isinstance(error, PeerLostError) and error.is_announced
    return text_of(error) if is_announced else text_of(f"{name} gave up: {error}")


def announced(text: str) -> PeerLostError:
    """Return the error of a rank that has got an announcement of another one."""
    error = PeerLostError(text)
    error.is_announced = True
    return error


def error_named(name: str, text: str) -> DlresError:
    """Return the error of another process, made again from its class's name and its text.

    Args:
        name: Name of the class. A class that is not of this module becomes a `PeerError`, and the
            text then begins with the name.
        text: Text of the error.
    """
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, DlresError):
        return kind(text)
    return PeerError(f"{name}: {text}")


def got_expected(argument: str, got: object, expected: str, fix: str) -> str:
    """Return the standard message for a bad value.

    Args:
        argument: Name of the argument.
        got: Its value.
        expected: Rule for the value, as the words after "must be".
        fix: Valid value, as the words after "Use".
    """
    return f"{argument} must be {expected}, got {got!r}. Use {fix}."


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, which its traceback shows; Python 3.10 has none."""
    if hasattr(error, "add_note"):
        error.add_note(text)
