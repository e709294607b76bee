"""The script `dlres`: starts commands, some of them without importing torch and Lightning.

`import lightning_dlres` registers the strategies, and so imports Lightning. That takes seconds.
"""

from __future__ import annotations

import importlib.util
import sys
import types

_PACKAGE = "lightning_dlres"
# First arguments of commands without Lightning. None: no argument, which shows the help.
_LIGHTWEIGHT = ("store", "ps", "--help", "-h", "--version", None)


def main() -> int:
    """Run the command of this process and return its exit status."""
    if _PACKAGE not in sys.modules and next(iter(sys.argv[1:]), None) in _LIGHTWEIGHT:
        _skip_package_imports()
    from lightning_dlres.cli.main import main as run

    return run()


def _skip_package_imports() -> None:
    """Install an empty package of this name, so that its modules can be imported alone."""
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    package = types.ModuleType(_PACKAGE)
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[_PACKAGE] = package


if __name__ == "__main__":
    sys.exit(main())
