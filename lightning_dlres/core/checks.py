"""Checks of arguments, shared by all constructors, so that a wrong value is refused where it is
given, in one form."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import isfinite
from typing import Any

from lightning_dlres.core.errors import ConfigError, got_expected


def whole_number(name: str, value: object, fix: str, least: int = 1) -> int:
    """Return a whole number of at least `least`.

    Raises:
        ConfigError: It is another type (a bool, too) or less; `fix` is a value to use instead.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(got_expected(name, value, f"a whole number of at least {least}", fix))
    return value


def finite(name: str, value: object, fix: str, *, least: float = 0.0, above: bool = False) -> float:
    """Return a finite number of at least `least`, or, with `above`, more than that.

    Raises:
        ConfigError: It is another type (a bool, too), NaN, infinite or less.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not isinstance(value, (int, float)) or not is_number or not isfinite(value):
        fits = False
    else:
        fits = value > least if above else value >= least
    if not isinstance(value, (int, float)) or not fits:
        bound = f"above {least:g}" if above else f"of at least {least:g}"
        raise ConfigError(got_expected(name, value, f"a finite number {bound}", fix))
    return value


def one_of(name: str, value: Any, choices: Collection[str], fix: str) -> str:
    """Return one of some words.

    Raises:
        ConfigError: It is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        words = " or ".join(map(repr, choices))
        raise ConfigError(got_expected(name, value, f"one of {words}", fix))
    return value


def flag(name: str, value: object) -> bool:
    """Return True or False.

    Raises:
        ConfigError: It is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(got_expected(name, value, "True or False", f"{name}=True"))
    return value


def instance(name: str, value: object, kinds: tuple[type, ...], rule: str, fix: str) -> None:
    """Raise unless a value is of one of the types.

    Raises:
        ConfigError: It is of another type; `rule` says which in words.
    """
    if not isinstance(value, kinds):
        raise ConfigError(got_expected(name, value, rule, fix))


def function(name: str, value: Callable[..., Any] | None) -> None:
    """Raise unless a value can be called or is None.

    Raises:
        ConfigError: It is neither.
    """
    if value is not None and not callable(value):
        raise ConfigError(got_expected(name, value, "a function or None", f"{name}=None"))
