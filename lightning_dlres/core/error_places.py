"""Place in user code at which an error was raised, for messages of errors that are caught."""

from __future__ import annotations

# Beginnings of the names of modules whose frames are not user code.
_LIBRARIES = ("torch.", "lightning.", "lightning_dlres.", "contextlib")


def place_of(error: BaseException) -> str:
    """Return "file:line in function" of the innermost frame of user code; "" without one.

    An error that only code of libraries has passed is at the place of its cause.
    """
    place, step = "", error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if not str(frame.f_globals.get("__name__", "")).startswith(_LIBRARIES):
            code = frame.f_code
            place = f"{code.co_filename}:{step.tb_lineno} in {code.co_name}"
        step = step.tb_next
    if not place and error.__cause__ is not None:
        return place_of(error.__cause__)
    return place
