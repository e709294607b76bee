"""Names that become parts of paths: one rule, so that no name leads out of its directory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_dlres.core.errors import ConfigError

# With an ending such as ".key_secret" it must stay below the 255 bytes of a file's name.
_LONGEST = 100
# No separators, control characters or leading dots. A leading dash would look like an option.
_NAME = re.compile(r"\w[\w.~+@=-]*")


def path_part(what: str, name: object, *, reserved: Sequence[str] = ()) -> str:
    """Return a name that may be one part of a path.

    Args:
        what: the argument, for the error.
        name: what the user has given.
        reserved: endings that files beside the named one have.

    Raises:
        ConfigError: the name is empty, too long, or has other characters than a name may have.
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
        f"beginning with a letter, a digit or _{endings}, got {got}. Take a name such as 'train-1'."
    )
