"""Libraries of models: those that are installed, and their import."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.support.capture_models.libraries import import_library

# Library that a family of models needs.
LIBRARIES = {"transformers": "transformers", "torchvision": "torchvision"}


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
