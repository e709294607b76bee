"""Mode in which torch passes all operations of glue, but none inside of blocks."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode


class GlueMode(TorchFunctionMode):
    """Base of modes that are switched off while a block runs."""

    def __init__(self) -> None:
        super().__init__()
        self._is_active = False

    def set_active(self, is_active: bool) -> None:
        """Switch the mode on or off; it must be the innermost one."""
        if is_active == self._is_active:
            return
        self._is_active = is_active
        if is_active:
            self.__enter__()  # type: ignore[no-untyped-call]
        else:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
