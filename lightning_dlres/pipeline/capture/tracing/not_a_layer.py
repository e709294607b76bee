"""Refusal of a block as a layer."""

from __future__ import annotations


class NotALayer(Exception):
    """A block cannot be a layer.

    Attributes:
        name: Name of the block.
        reason: Why, as the rest of a sentence that begins with the name.
        is_glue: True if it can only be glue; False if a module around it may be a layer.
        is_repeated: True if it is called several times, which is not allowed.
        rows: Rows for each sample in a tensor that it returns.
    """

    def __init__(
        self,
        name: str,
        reason: str,
        *,
        is_glue: bool = False,
        is_repeated: bool = False,
        rows: int = 1,
    ) -> None:
        super().__init__(f"{name} {reason}")
        self.name, self.reason = name, reason
        self.is_glue, self.is_repeated, self.rows = is_glue, is_repeated, rows
