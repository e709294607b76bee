"""The script `dlres`: runs commands that need neither torch nor Lightning without importing them.

`import lightning_dlres` registers the strategies, and so imports Lightning, which takes seconds.
"""

from __future__ import annotations

import importlib.util
import sys
import types

_PACKAGE = "lightning_dlres"
# Without a command the help is shown.
_LIGHT = ("store", "--help", "-h", "--version", None)


def main() -> int:
    """Run the command of this process and return its exit status."""
    if _PACKAGE not in sys.modules and next(iter(sys.argv[1:]), None) in _LIGHT:
        _skip_package_imports()
    from lightning_dlres.cli.main import main as run

    return run()


def _skip_package_imports() -> None:
    """Put an empty package in the place of this one, so that its modules can be imported alone."""
    found = importlib.util.find_spec(_PACKAGE)
    assert found is not None
    package = types.ModuleType(_PACKAGE)
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules[_PACKAGE] = package


if __name__ == "__main__":
    sys.exit(main())
