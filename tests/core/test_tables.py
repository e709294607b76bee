"""Tests of tables: no lost text, aligned numbers, and no effect of the terminal."""

from __future__ import annotations

import pytest

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.tables import render


def test_numbers_are_right_aligned_and_text_is_left_aligned() -> None:
    lines = render("Plan", ["stage", "time"], [["a", 1.5], ["long", None], ["b", 100]]).splitlines()
    assert lines[0] == "Plan"
    assert lines[1] == "| stage | time |"
    assert lines[3:] == ["| a     |  1.5 |", "| long  |    - |", "| b     |  100 |"]


def test_a_column_with_a_word_is_text() -> None:
    assert "| 1   |" in render("t", ["x"], [[1], ["abc"]])


def test_markup_is_shown_unchanged() -> None:
    assert "[bold]x[/bold] [3]" in render("t", ["c"], [["[bold]x[/bold] [3]"]])


def test_without_a_width_nothing_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = render("t", ["c"], [["x" * 500]])
    assert "x" * 500 in text
    assert "\x1b" not in text


def test_a_width_folds_long_cells_without_losing_text() -> None:
    text = render("t", ["name", "value"], [["abcdefghij" * 10, 3]], width=30)
    assert all(len(line) <= 30 for line in text.splitlines())
    # All letters of the cell that the header does not have.
    assert sum(text.count(letter) for letter in "bcdfghij") == 80


def test_a_table_without_rows_has_its_header() -> None:
    assert "| a | b |" in render("empty", ["a", "b"], [])


def test_a_short_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 cells"):
        render("t", ["a", "b"], [[1]])
