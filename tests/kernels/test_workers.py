"""Tests of the threads for kernels."""

from __future__ import annotations

import threading

import pytest

from lightning_dlres.kernels import workers


def test_results_are_in_order_and_the_last_task_runs_in_this_thread() -> None:
    both = threading.Barrier(2, timeout=60)

    def task(number: int) -> tuple[int, str]:
        both.wait()
        return number, threading.current_thread().name

    results = workers.run([lambda: task(0), lambda: task(1)])
    assert [number for number, _ in results] == [0, 1]
    assert results[1][1] == threading.current_thread().name != results[0][1]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_raised_after_all_tasks_have_ended(failing: int) -> None:
    ended = []

    def task(number: int) -> None:
        if number == failing:
            raise ValueError(f"task {number}")
        ended.append(number)

    with pytest.raises(ValueError, match=f"task {failing}"):
        workers.run([lambda: task(0), lambda: task(1)])
    assert ended == [1 - failing]
