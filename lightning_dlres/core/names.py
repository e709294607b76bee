"""Rule for names that become parts of paths: no path may lead out of its directory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_dlres.core.errors import ConfigError

# Largest length in bytes. File systems allow 255, which must also hold an ending such as
# ".key_secret".
_MAX_BYTES = 100
# No separators, control characters, leading dots or leading dashes. A leading dash would look like
# an option.
_NAME = re.compile(r"\w[\w.~+@=-]*")


def path_part(argument: str, name: object, *, reserved: Sequence[str] = ()) -> str:
    """Return the name, which must be usable as one part of a path.

    Args:
        argument: Argument, for the error.
        name: Name from the user.
        reserved: Endings of files that lie beside the named one.

    Raises:
        ConfigError: If the name is empty, too long, or has a reserved ending or other characters.
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
