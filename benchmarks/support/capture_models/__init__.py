"""Models on which the capture of modules into pipeline stages is judged.

The models are tiny: a step takes well below a second on one core. Two of the three families need a
library that the package does not depend on: transformers or torchvision. It is imported when the
family's cases are requested. `names` has the names of the cases without any import.
"""

from __future__ import annotations

from importlib import import_module

from benchmarks.support.capture_models.case import CaptureCase
from benchmarks.support.capture_models.names import NAMES

# Files of the cases, by family.
_FILES = {
    "transformers": "transformers",
    "torchvision": "torchvision_models",
    "by hand": "by_hand",
}


def family_cases(family: str) -> dict[str, CaptureCase]:
    """Return the cases of a family by name.

    Raises:
        MissingLibraryError: If the family's library is not installed.
    """
    return import_module(f"{__name__}.{_FILES[family]}").cases()


def all_cases() -> dict[str, CaptureCase]:
    """Return the cases of all families by name.

    Raises:
        MissingLibraryError: If a family's library is not installed.
    """
    return {name: case for family in NAMES for name, case in family_cases(family).items()}
