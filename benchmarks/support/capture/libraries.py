"""Libraries of models, from this environment or from that of the benchmarks' peers."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.support.capture_models.libraries import import_library

# Library that a family of models needs.
LIBRARIES = {"transformers": "transformers", "torchvision": "torchvision"}


def find_peers_environment() -> None:
    """Let imports find the packages of `make bench NAME=capture` that this environment lacks.

    They come last in `sys.path`: torch and Lightning stay those of this environment.
    """
    for path in Path(sys.prefix).glob("peers/lib/python*/site-packages"):
        if str(path) not in sys.path:
            sys.path.append(str(path))


def is_installed(family: str) -> bool:
    """Return True if the models of a family can be made."""
    return family not in LIBRARIES or find_spec(LIBRARIES[family]) is not None


def import_installed() -> None:
    """Import the libraries that are installed, with those parts that most models need."""
    if is_installed("torchvision"):
        import_library("torchvision")
    if is_installed("transformers"):
        library = import_library("transformers")
        for name in ("PreTrainedModel", "GenerationMixin"):
            getattr(library, name)
