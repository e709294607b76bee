"""Error of a training step that calls the pipelined module as only a step that is cut may do."""

from __future__ import annotations

from lightning_dlres.core.errors import UnsupportedStepError


class NeedsCutStepError(UnsupportedStepError):
    """The training step would have to be cut itself.

    Args:
        reason: What the step does, as a sentence.
        fix: Sentence with a way out.
        refusal: Error to raise if nothing else can be cut; None for the one of that attempt.

    Attributes:
        reason: As the argument.
        refusal: As the argument.
    """

    def __init__(self, reason: str, fix: str, refusal: UnsupportedStepError | None = None) -> None:
        super().__init__(f"{reason} {fix}")
        self.reason, self.refusal = reason, refusal
