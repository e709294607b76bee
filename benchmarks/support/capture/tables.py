"""Tables of the verdicts: text for the terminal, Markdown for the docs, numbers for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.support.capture.verdicts import EQUAL, KINDS, Verdict


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

    def cells(self) -> list[str]:
        """Return the row of a table."""
        return [
            self.name,
            self.layers(),
            self.reference(),
            str(self.ours.notes.get("schedule", "-")),
            self.ours.text(),
            self.peer.text(),
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
    parts = [_INTRODUCTION, settings, markdown(SUMMARY_COLUMNS, summary_rows(rows))]
    for family in by_family(rows):
        cells = [row.cells() for row in rows if row.family == family]
        parts += [f"## {family[0].upper()}{family[1:]}", markdown(COLUMNS, cells)]
    return "\n\n".join(parts) + "\n"


def _cell(value: object) -> str:
    # Angle brackets and stars would be read as markup.
    text = str(value).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return text.replace("_", "\\_")


_INTRODUCTION = """# Models that the pipeline cuts

`make bench NAME=capture ARGS="--table docs/capture_table.md"` writes this page. Each model of a fixed list is trained for 20 steps of SGD with
momentum, without dropout: plainly by a Trainer on one device, by `dlres_hetero_pipe`, and by `torch.distributed.pipelining.pipeline()`.
[hetero_pipe.md](hetero_pipe.md#modules-with-a-forward-of-their-own) says how modules are cut.

**Verdicts.** "equal": the loss of each step differs from that of plain training by at most 1e-4 of it, and each weight by at most 1e-3 of the largest
weight of its tensor. The two numbers are the largest such differences. "refused at start": an error before the first step, with its first sentence.
"failed": an error that the contender did not intend, or one after the first step.

**Reference.** "batch" is plain training on whole batches of four samples, against two micro-batches. Models with BatchNorm see one micro-batch at a time in any
pipeline; their reference, "micro-batches", is plain training on the mean of the losses of these micro-batches. Where samples affect each other in
another way, such as in a contrastive loss, the whole batch is the only micro-batch: "batch, microbatches=1".

**Help for the peer.** It gets the models in training mode, without their caches of keys and values, and with an output that is only the loss or the tensors that the
loss needs. It is split at the middle one of our layers. Where its export fails, it gets attention in plain operations. Its schedule is GPipe."""
