"""Error of a training step that the layers cannot train as they were chosen."""

from __future__ import annotations

from lightning_dlres.core.errors import DlresError, UnsupportedStepError, error_named


class NeedsCutStepError(UnsupportedStepError):
    """The training step would have to be cut itself, or the module around a list of layers.

    Args:
        reason: What the step does, as a sentence.
        fix: Sentence with a way out.
        refusal: Error to raise if nothing else can be cut; None for the one of that attempt.

    Attributes:
        reason: As the argument.
        refusal: As the argument.
    """

    def __init__(self, reason: str, fix: str, refusal: DlresError | None = None) -> None:
        super().__init__(f"{reason} {fix}")
        self.reason, self.refusal = reason, refusal

    @classmethod
    def instead_of(cls, refusal: DlresError) -> NeedsCutStepError:
        """Return the error for a refusal that holds only while these layers are the pipeline."""
        sentence, _, _ = str(refusal).partition(". ")
        return cls(f"{sentence.rstrip('.')}.", "", refusal)

    def to_tree(self) -> list[str]:
        """Return the error as plain data, for other ranks."""
        kind = type(self.refusal).__name__ if self.refusal is not None else ""
        return [self.reason, kind, str(self.refusal)]

    @classmethod
    def from_tree(cls, tree: list[str]) -> NeedsCutStepError:
        """Return the error that another rank has made into plain data."""
        reason, kind, text = tree
        return cls(reason, "", error_named(kind, text) if kind else None)
