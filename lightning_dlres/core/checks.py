"""Checks of arguments, shared by all constructors, with messages of one form.

A constructor refuses a wrong value at once. Otherwise the error would appear far from its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.units import parse_seconds

# Longest timeout. torch counts timeouts in nanoseconds in 64 bits, and much longer ones overflow.
_MAX_TIMEOUT_SECONDS = 100 * 86400.0


def whole_number(name: str, value: object, fix: str, least: int = 1) -> int:
    """Return the value, which must be a whole number of at least `least`.

    Args:
        name: Name of the argument, for the error.
        value: Value of the argument.
        fix: Value to use instead, for the error.
        least: Smallest allowed value.

    Raises:
        ConfigError: If the value is of another type (including bool), or less.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(got_expected(name, value, f"a whole number of at least {least}", fix))
    return value


def finite(name: str, value: object, fix: str, *, least: float = 0.0, above: bool = False) -> float:
    """Return the value, which must be a finite number of at least `least`.

    Args:
        name: Name of the argument, for the error.
        value: Value of the argument.
        fix: Value to use instead, for the error.
        least: Smallest allowed value.
        above: Refuse `least` itself, too.

    Raises:
        ConfigError: If the value is of another type (including bool), NaN, infinite, or too small.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not isinstance(value, (int, float)) or not is_number or not isfinite(value):
        is_in_range = False
    else:
        is_in_range = value > least if above else value >= least
    if not isinstance(value, (int, float)) or not is_in_range:
        bound = f"above {least:g}" if above else f"of at least {least:g}"
        raise ConfigError(got_expected(name, value, f"a finite number {bound}", fix))
    return value


def timeout_seconds(value: float | str | timedelta) -> float:
    """Return the seconds of the argument `timeout`: a number, text such as "10min", or a timedelta.

    Raises:
        ConfigError: If the value is no time, or not above 0 and up to 100 days.
    """
    seconds = parse_seconds(value, "timeout")
    if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        rule = "a time above 0 and up to 100 days"
        raise ConfigError(got_expected("timeout", value, rule, "timeout='10min'"))
    return seconds


def keyword_arguments(name: str, value: object) -> dict[str, Any]:
    """Return keyword arguments for a class; an empty dict for None.

    Raises:
        ConfigError: If the value is neither None nor a mapping with texts as keys.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(got_expected(name, value, "a dict of arguments by name", f"{name}=None"))
    return dict(value)


def one_of(name: str, value: Any, choices: Collection[str], fix: str) -> str:
    """Return the value, which must be one of the allowed words.

    Raises:
        ConfigError: If it is not.
    """
    if not isinstance(value, str) or value not in choices:
        words = " or ".join(map(repr, choices))
        raise ConfigError(got_expected(name, value, f"one of {words}", fix))
    return value


def flag(name: str, value: object) -> bool:
    """Return the value, which must be True or False.

    Raises:
        ConfigError: If it is not.
    """
    if not isinstance(value, bool):
        raise ConfigError(got_expected(name, value, "True or False", f"{name}=True"))
    return value


def instance(name: str, value: object, kinds: tuple[type, ...], rule: str, fix: str) -> None:
    """Raise unless a value is of one of the types.

    Args:
        name: Name of the argument, for the error.
        value: Value of the argument.
        kinds: Allowed types.
        rule: Description of the allowed types, for the error.
        fix: Value to use instead, for the error.

    Raises:
        ConfigError: If the value is of another type.
    """
    if not isinstance(value, kinds):
        raise ConfigError(got_expected(name, value, rule, fix))


def local_path(name: str, value: object, rule: str, fix: str) -> None:
    """Raise unless a value is a path in this machine's file system, or None.

    Args:
        name: Name of the argument, for the error.
        value: Value of the argument.
        rule: Description of the file or directory, for the error.
        fix: Value to use instead, for the error.

    Raises:
        ConfigError: If it is no path, is empty, or names another kind of storage.
    """
    if value is None:
        return
    if not isinstance(value, (str, Path)) or not str(value) or "://" in str(value):
        raise ConfigError(got_expected(name, value, rule, fix))


def require_both(first: str, has_first: bool, second: str, has_second: bool) -> None:
    """Raise unless both of two options are given, or none.

    Raises:
        ConfigError: If only one is given.
    """
    if has_first != has_second:
        given, missing = (first, second) if has_first else (second, first)
        raise ConfigError(
            f"{given} must be given together with {missing}, got only {given}. Pass both."
        )


def function(name: str, value: Callable[..., Any] | None) -> None:
    """Raise unless a value is callable or None.

    Raises:
        ConfigError: If it is neither.
    """
    if value is not None and not callable(value):
        raise ConfigError(got_expected(name, value, "a function or None", "a function"))
