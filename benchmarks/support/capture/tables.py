"""Tables of the verdicts: text for the terminal, Markdown for the docs, numbers for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.capture.task import AS_IT_IS
from benchmarks.support.capture.verdicts import EQUAL, KINDS, Verdict

# Text above the tables of the page.
_PAGE = Path(__file__).with_name("page.md")


@dataclass(frozen=True)
class CaseRow:
    """Verdicts on a case.

    Attributes:
        name: Name of the case.
        family: Its family.
        ours: Verdict on our pipeline.
        peer: Verdict on the peer.
    """

    name: str
    family: str
    ours: Verdict
    peer: Verdict

    def layers(self) -> str:
        """Return the layers of each stage of our pipeline, such as "3 + 2"."""
        return " + ".join(map(str, self.ours.notes.get("split", []))) or "-"

    def reference(self) -> str:
        """Return the reference of our pipeline, or of the peer if ours did not run."""
        return str(self.ours.notes.get("reference") or self.peer.notes.get("reference") or "-")

    def peer_text(self) -> str:
        """Return the verdict on the peer, with the special help that it took."""
        help_given = self.peer.notes.get("help", AS_IT_IS)
        return self.peer.text() + ("" if help_given == AS_IT_IS else f" [{help_given}]")

    def cells(self) -> list[str]:
        """Return the row of a table."""
        return [
            self.name,
            self.layers(),
            self.reference(),
            str(self.ours.notes.get("schedule", "-")),
            self.ours.text(),
            self.peer_text(),
        ]


COLUMNS = ("model", "layers of the stages", "reference", "schedule", "ours", "torch's pipeline()")


def counts(rows: Sequence[CaseRow]) -> dict[str, Any]:
    """Return the number of cases by contender and kind of verdict, and the share of equal ones."""
    result: dict[str, Any] = {"cases": len(rows)}
    for contender in ("ours", "peer"):
        kinds = Counter(getattr(row, contender).kind for row in rows)
        result[contender] = {kind: kinds[kind] for kind in KINDS if kinds[kind]}
        result[f"{contender}_equal_share"] = round(kinds[EQUAL] / len(rows), 4) if rows else 0.0
    return result


def by_family(rows: Sequence[CaseRow]) -> dict[str, dict[str, Any]]:
    """Return the counts of each family."""
    families = dict.fromkeys(row.family for row in rows)
    return {family: counts([r for r in rows if r.family == family]) for family in families}


def summary_rows(rows: Sequence[CaseRow]) -> list[list[object]]:
    """Return the rows of the table of counts: family, contender, cases, and each kind's number."""
    table: list[list[object]] = []
    groups = {**by_family(rows), "all": counts(rows)}
    for family, group in groups.items():
        for contender in ("ours", "peer"):
            share = f"{group[f'{contender}_equal_share']:.0%}"
            numbers = [group[contender].get(kind, 0) for kind in KINDS]
            table.append([family, contender, group["cases"], share, *numbers])
    return table


SUMMARY_COLUMNS = ("family", "contender", "cases", "share of equal", *KINDS)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def document(rows: Sequence[CaseRow], settings: str) -> str:
    """Return the page of the docs.

    Args:
        rows: The verdicts.
        settings: Line that says how they were measured.
    """
    parts = [_PAGE.read_text().rstrip(), settings, markdown(SUMMARY_COLUMNS, summary_rows(rows))]
    for family in by_family(rows):
        cells = [row.cells() for row in rows if row.family == family]
        parts += [f"## {family[0].upper()}{family[1:]}", markdown(COLUMNS, cells)]
    return "\n\n".join(parts) + "\n"


def _cell(value: object) -> str:
    # Angle brackets and stars would be read as markup.
    text = str(value).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return text.replace("_", "\\_")
