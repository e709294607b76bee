"""Tables as plain text that look the same in a log, a file and a terminal.

`rich` does the layout. This module fixes its settings: ASCII, no colour, no lost text.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_dlres.core.errors import ConfigError, got_expected

# Width in characters at which no table is folded.
_UNBOUNDED = 100_000


def render(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    width: int | None = None,
) -> str:
    """Return a title line and a table with ASCII rules, without a final newline.

    Columns with only numbers (and None, shown as "-") are aligned to the right. Floats show four
    significant digits.

    Args:
        title: Line above the table; "" omits it.
        columns: Names of the columns.
        rows: Cells of each row.
        width: Width in characters, at which long cells are folded. None: as wide as the content.

    Raises:
        ConfigError: If a row does not have one cell for each column.
    """
    for row in rows:
        if len(row) != len(columns):
            expected = f"{len(columns)} cells, one for each of {list(columns)}"
            raise ConfigError(
                got_expected(f"row of table {title!r}", row, expected, "one cell per column")
            )
    table = Table(box=box.MARKDOWN, show_edge=True)
    for index, name in enumerate(columns):
        is_numeric = all(_is_number(row[index]) for row in rows)
        table.add_column(Text(name), justify="right" if is_numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    lines = [title, *_lines(table, width)]
    return "\n".join(line for line in lines if line)


def _lines(table: Table, width: int | None) -> list[str]:
    # All properties of the terminal are fixed: a log must not depend on where the program runs.
    console = Console(
        file=io.StringIO(),
        width=_UNBOUNDED if width is None else width,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
