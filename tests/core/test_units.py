"""Tests of sizes, rates and durations: parsing, formatting, and errors that name the argument."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import (
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 1024**3),
        ("512 MB", 512 * 1000**2),
        ("1.5k", 1500),
        (".5 KiB", 512),
        ("2 Gi", 2 * 1024**3),
        ("1e3", 1000),
        (" 7 b ", 7),
        ("0", 0),
        (1024, 1024),
        (2.0e9, 2_000_000_000),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_parsed(text: str | int | float, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30s", 30.0),
        ("5min", 300.0),
        ("250 ms", 0.25),
        ("1.5 h", 5400.0),
        ("20us", 2e-5),
        ("12", 12.0),
        (0.5, 0.5),
        (3, 3.0),
        (timedelta(minutes=2), 120.0),
    ],
)
def test_durations_are_parsed(value: str | int | float | timedelta, seconds: float) -> None:
    assert parse_seconds(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "GiB",
        "8 GiBs",
        "-1",
        -1,
        "1.2.3",
        "nan",
        float("nan"),
        float("inf"),
        True,
        None,
        "1e999",
        "9" * 400,
        10**400,
    ],
)
def test_invalid_values_are_refused_with_the_name_of_the_argument(bad: object) -> None:
    with pytest.raises(ConfigError, match="budget must be"):
        parse_bytes(bad, "budget")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout must be"):
        parse_seconds(bad, "timeout")  # type: ignore[arg-type]


def test_a_negative_timedelta_is_refused() -> None:
    with pytest.raises(ConfigError, match="duration"):
        parse_seconds(timedelta(seconds=-1))


@given(st.integers(0, 10**18))
def test_sizes_survive_a_round_trip(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=1e-3)
    assert parse_bytes(str(count)) == count


@given(st.floats(1e-9, 1e9))
def test_durations_survive_a_round_trip(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=1e-3)
    assert parse_seconds(repr(seconds)) == pytest.approx(seconds)


def test_formatted_values_have_one_unit_and_few_digits() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(8 * 1024**3) == "8 GiB"
    assert format_seconds(0.0) == "0 s"
    assert format_seconds(10.0) == "10 s"
    assert format_seconds(90) == "1.5 min"
    assert format_seconds(0.25) == "250 ms"


@pytest.mark.parametrize(
    ("value", "rate"),
    [("10GB/s", 10e9), ("500Mbit/s", 62.5e6), ("1 Gbit", 125e6), ("2MiB/s", 2 << 20), (1e6, 1e6)],
)
def test_rates_are_parsed(value: str | float, rate: float) -> None:
    assert parse_rate(value) == rate


@pytest.mark.parametrize("bad", ["fast", "", "0", "-1MB/s", "10 parsec/s"])
def test_an_invalid_rate_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="bandwidth must be"):
        parse_rate(bad)
