"""Parsers and formatters of sizes, rates and durations, such as "8GiB" and "30s".

All budgets, windows and timeouts use them, so a text means the same in each constructor,
config file and command.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import timedelta

from lightning_dlres.core.errors import ConfigError, got_expected

# Decimal and binary prefixes. One-letter forms follow SI ("1.5k" is 1500), as for disks and links.
_BYTES: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{p + s: 1000**n for n, p in enumerate("kmgtp", 1) for s in ("", "b")},
    **{p + s: 1024**n for n, p in enumerate("kmgtp", 1) for s in ("i", "ib")},
}
_SECONDS: Mapping[str, float] = {
    "": 1.0,
    **dict.fromkeys(("ns",), 1e-9),
    **dict.fromkeys(("us", "µs", "μs"), 1e-6),
    **dict.fromkeys(("ms",), 1e-3),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_BYTE_UNITS = (("PiB", 1024**5), ("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2))
_SECOND_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
# Most digits of a text that is read as an integer: as many as 2**64 has.
_MAX_DIGITS = 20
_QUANTITY = re.compile(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)\s*([a-zµμ]*)\s*", re.I)


def parse_bytes(value: str | int | float, argument: str = "size") -> int:
    """Return a number of bytes from "8GiB", "512 MB", "1.5k" or a plain number.

    "k" and "kB" are 1000; "Ki" and "KiB" are 1024. Letter case is ignored, and fractions of a byte
    are rounded. `argument` names the argument in the error.

    Raises:
        ConfigError: If the value is not a size, or is negative, infinite or NaN.
    """
    number = _quantity(value, _BYTES)
    if number is None:
        raise ConfigError(
            got_expected(argument, value, "a number of bytes", 'a value such as "8GiB"')
        )
    return round(number)


def parse_rate(value: str | int | float, argument: str = "bandwidth") -> float:
    """Return bytes a second from "10GB/s", "500Mbit/s", "1.2 GiB" or a plain number of bytes.

    `argument` names the argument in the error.

    Raises:
        ConfigError: If the value is not a rate, or not positive.
    """
    text = str(value).strip()
    text = text[:-2] if text.lower().endswith("/s") else text
    is_in_bits = text.lower().endswith("bit")
    number = _quantity(text[:-3] if is_in_bits else text, _BYTES)
    if not number:
        raise ConfigError(got_expected(argument, value, "a rate", 'a value such as "10GB/s"'))
    return number / 8 if is_in_bits else number


def format_bytes(count: int) -> str:
    """Return bytes as text, in binary units and four digits: 1536 -> "1.5 KiB"."""
    for unit, size in _BYTE_UNITS:
        if abs(count) >= size:
            return f"{_digits(count / size)} {unit}"
    return f"{_digits(count / 1024)} KiB" if abs(count) >= 1024 else f"{count} B"


def parse_seconds(value: str | int | float | timedelta, argument: str = "duration") -> float:
    """Return seconds from "30s", "5min", "250 ms", "2h", a plain number or a timedelta.

    A text without a unit is in seconds. `argument` names the argument in the error.

    Raises:
        ConfigError: If the value is not a duration, or is negative, infinite or NaN.
    """
    amount = value.total_seconds() if isinstance(value, timedelta) else value
    number = _quantity(amount, _SECONDS)
    if number is None:
        raise ConfigError(
            got_expected(argument, value, "a time in seconds", 'a value such as "30s"')
        )
    return float(number)


def format_seconds(seconds: float) -> str:
    """Return a duration as text, in one unit and four digits: 90.0 -> "1.5 min"."""
    for unit, size in _SECOND_UNITS:
        if abs(seconds) >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} us" if seconds else "0 s"


def _quantity(value: object, units: Mapping[str, int] | Mapping[str, float]) -> float | None:
    """Return the value in base units, or None if it is not a finite amount of at least zero."""
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        factor = units.get(match[2].lower()) if match else None
        if match is None or factor is None:
            return None
        # Whole numbers stay integers: a float would round sizes above 2**53 bytes. Longer ones may
        # be beyond the range of floats, and become infinite.
        is_whole = match[1].isdecimal() and len(match[1]) <= _MAX_DIGITS
        number = (int(match[1]) if is_whole else float(match[1])) * factor
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = value
    else:
        return None
    # `math.isfinite` would raise for an integer beyond the range of floats.
    return number if 0 <= number <= sys.float_info.max else None


def _digits(number: float) -> str:
    """Return a number with four significant digits, without an exponent if it is large."""
    return f"{number:.4g}" if abs(number) < 9999 else f"{number:.0f}"
