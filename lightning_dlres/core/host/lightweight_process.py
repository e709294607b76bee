"""Command lines for processes that import only parts of this package.

Importing the package itself imports torch and Lightning, which takes seconds and hundreds of
megabytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Separator of the paths in one argument: a control character that is not used in paths in practice.
_SEPARATOR = "\x1f"
# Program of the child. It sets `sys.path` to that of this process, because `python -c` would search
# the current directory first. It creates the package as an empty module with a name and a path.
# Submodules can then be imported, but the package's `__init__` does not run.
_CODE = (
    f"import sys; sys.path[:] = sys.argv.pop(1).split({_SEPARATOR!r}); import importlib, types; "
    "package = types.ModuleType('lightning_dlres'); "
    "package.__path__ = [sys.argv.pop(1)]; sys.modules['lightning_dlres'] = package; "
    "module, function = sys.argv.pop(1).split(':'); "
    "sys.exit(getattr(importlib.import_module(module), function)())"
)


def lightweight_command(function: str, *arguments: str) -> list[str]:
    """Return the command line of a process that calls a function and exits with its result.

    Args:
        function: Module and name of a function without parameters, such as
            "lightning_dlres.prefetch.module:main".
        arguments: Arguments of the process, in `sys.argv[1:]`.
    """
    package = str(Path(__file__).resolve().parents[2])
    path = _SEPARATOR.join(sys.path)
    return [sys.executable, "-c", _CODE, path, package, function, *arguments]
