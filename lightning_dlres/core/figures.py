"""Pictures drawn with matplotlib, independent of the user's matplotlib settings."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_png(draw: Callable[[Figure], None], **arguments: object) -> bytes:
    """Return a picture as the bytes of a PNG file.

    Args:
        draw: Function that draws on a new, white figure.
        **arguments: Arguments of the figure, such as `figsize` in inches and `dpi`.
    """
    # Imported here: the import takes most of a second, and most runs draw nothing.
    import matplotlib
    from matplotlib.figure import Figure

    # The user's own style, such as LaTeX or a dark theme, could make the picture unreadable.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        figure = Figure(facecolor="white", **arguments)  # type: ignore[arg-type]
        draw(figure)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    return picture.getvalue()
