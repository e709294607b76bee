"""Check of user-given names that become parts of paths, so that no path leaves its directory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_dlres.core.errors import ConfigError

# Largest length of a name in bytes. File systems allow 255, which must also hold an ending such as
# ".key_secret".
_MAX_BYTES = 100
# The pattern excludes separators, control characters, leading dots and leading dashes. A leading
# dash would look like an option of a command.
_NAME = re.compile(r"\w[\w.~+@=-]*")


def path_part(argument: str, name: object, *, reserved: Sequence[str] = ()) -> str:
    """Return the name unchanged if it can be one part of a path.

    Args:
        argument: Name of the checked argument, for the error.
        name: Value of the argument, of any type.
        reserved: Endings that the name must not have. Files with these endings lie beside the one
            that is named, and another name must not mean one of them.

    Raises:
        ConfigError: If the name is not a string, is empty or too long, ends with a reserved ending,
            or has a character that is not allowed.
    """
    if isinstance(name, str) and _NAME.fullmatch(name) and not name.endswith(tuple(reserved)):
        if len(name.encode()) <= _MAX_BYTES:
            return name
        got = f"{len(name.encode())} bytes"
    else:
        got = ascii(name)[: 2 * _MAX_BYTES]
    endings = f", not ending in {' or '.join(reserved)}" if reserved else ""
    raise ConfigError(
        f"{argument} must be a name of 1 to {_MAX_BYTES} bytes of letters, digits and any of "
        f"._~+@=-, beginning with a letter, a digit or _{endings}, got {got}. Use a name such as "
        "'train-1'."
    )
