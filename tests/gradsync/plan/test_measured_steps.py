"""Drifting steps call for a new plan, and a coordinator must gain something."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.plan.measured_steps import DriftDetector, choose_coordinator


def drifts(detector: DriftDetector, seconds: list[float]) -> list[bool]:
    return [detector.add(value) for value in seconds]


def test_steady_steps_do_not_drift_and_outliers_do_not_count() -> None:
    detector = DriftDetector(window=5, band=1.3, skip=2)
    # The first steps after planning are slow.
    steady = [9.0, 9.0, *[1.0, 1.1, 0.9, 1.0, 8.0] * 10]
    assert not any(drifts(detector, steady))


def test_no_drift_is_reported_in_a_pause() -> None:
    detector = DriftDetector(window=2, band=1.3, skip=1)
    detector.reset(pause=4)
    assert not any(drifts(detector, [1.0] * 3))
    assert drifts(detector, [2.0] * 8) == [*[False] * 5, True, False, True]


@pytest.mark.parametrize(
    ("factor", "is_drift"), [(1.2, False), (1.4, True), (0.9, False), (0.5, True)]
)
def test_a_median_out_of_the_band_is_a_drift(factor: float, is_drift: bool) -> None:
    detector = DriftDetector(window=3, band=1.3, skip=0)
    assert not any(drifts(detector, [2.0, 2.0, 2.0]))
    assert drifts(detector, [2.0 * factor] * 3) == [False, False, is_drift]
    assert detector.is_window_complete
    assert drifts(detector, [2.0] * 3) == [False] * 3


def test_all_ranks_complete_their_windows_in_the_same_steps() -> None:
    one, other = DriftDetector(window=3, skip=1), DriftDetector(window=3, skip=1)
    complete = []
    for step in range(20):
        one.add(1.0)
        other.add(100.0 if step > 8 else 1.0)
        assert one.is_window_complete == other.is_window_complete
        if one.is_window_complete:
            complete.append(step)
    assert complete == [6, 9, 12, 15, 18]


def test_a_new_plan_gets_a_new_reference() -> None:
    detector = DriftDetector(window=2, band=1.5, skip=1)
    drifts(detector, [1.0] * 3)
    assert drifts(detector, [4.0] * 2) == [False, True]
    detector.reset()
    assert not any(drifts(detector, [9.0, *[4.0] * 8]))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"none": [1.0]}, "none"),
        ({"none": [1.0], "replay": [0.985], "always": [0.985]}, "none"),
        ({"none": [1.0], "replay": [0.9], "always": [0.89]}, "replay"),
        ({"none": [1.0], "replay": [0.9], "always": [0.8]}, "always"),
        ({"none": [1.0], "replay": [1.1], "always": [0.9]}, "always"),
        ({"none": [1.0, 1.0, 5.0], "replay": [0.9, 7.0, 0.9]}, "replay"),
        ({"none": [1.0], "always": [0.99]}, "none"),
    ],
)
def test_a_coordinator_must_gain_something(seconds: dict[str, list[float]], expected: str) -> None:
    assert choose_coordinator(seconds) == expected


@pytest.mark.parametrize(
    "seconds", [{}, {"replay": [1.0]}, {"none": []}, {"none": [1.0], "x": [1.0]}]
)
def test_times_without_a_base_are_refused(seconds: dict[str, list[float]]) -> None:
    with pytest.raises(ConfigError, match="seconds must be times of steps with 'none'"):
        choose_coordinator(seconds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a whole number of at least 1"),
        ({"band": 1.0}, "band must be a finite number above 1"),
        ({"skip": -1}, "skip must be a whole number of at least 0"),
    ],
)
def test_bad_options_of_a_detector_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DriftDetector(**options)
