"""Starting a process that needs only the lower floors of this package: importing the package itself
brings torch and Lightning, which cost seconds and hundreds of megabytes."""

from __future__ import annotations

import sys
from pathlib import Path

# What no path has in it.
_SEPARATOR = "\x1f"
# Modules come from where this process has them from: `python -c` would look into the current
# directory first. And a package with the same name and path, and without its `__init__`.
_CODE = (
    f"import sys; sys.path[:] = sys.argv.pop(1).split({_SEPARATOR!r}); import importlib, types; "
    "package = types.ModuleType('lightning_dlres'); "
    "package.__path__ = [sys.argv.pop(1)]; sys.modules['lightning_dlres'] = package; "
    "module, function = sys.argv.pop(1).split(':'); "
    "sys.exit(getattr(importlib.import_module(module), function)())"
)


def light_command(function: str, *arguments: str) -> list[str]:
    """Return the command line that calls a function, such as "lightning_dlres.room.module:main",
    with arguments in `sys.argv[1:]`, and exits with what it returns."""
    package = str(Path(__file__).resolve().parents[2])
    path = _SEPARATOR.join(sys.path)
    return [sys.executable, "-c", _CODE, path, package, function, *arguments]
