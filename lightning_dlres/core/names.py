"""The rule for names that become parts of paths: no name may leave its directory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_dlres.core.errors import ConfigError

# Bytes. With an ending such as ".key_secret" a name must stay below a file name's 255 bytes.
_LONGEST = 100
# No separators, control characters, leading dots or leading dashes. A leading dash would look like
# an option.
_NAME = re.compile(r"\w[\w.~+@=-]*")


def path_part(what: str, name: object, *, reserved: Sequence[str] = ()) -> str:
    """Return the name if it may be one part of a path.

    Args:
        what: Argument, for the error.
        name: Name from the user.
        reserved: Endings of files that lie beside the named one.

    Raises:
        ConfigError: If the name is empty, too long, or has a reserved ending or other characters.
    """
    if isinstance(name, str) and _NAME.fullmatch(name) and not name.endswith(tuple(reserved)):
        if len(name.encode()) <= _LONGEST:
            return name
        got = f"{len(name.encode())} bytes"
    else:
        got = ascii(name)[: 2 * _LONGEST]
    endings = f", not ending in {' or '.join(reserved)}" if reserved else ""
    raise ConfigError(
        f"{what} must be a name of 1 to {_LONGEST} bytes of letters, digits and any of ._~+@=-, "
        f"beginning with a letter, a digit or _{endings}, got {got}. Use a name such as 'train-1'."
    )
