"""Import of the libraries of models, which the package does not depend on."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

import torch

# torch drops the definitions of a `Library` that is garbage-collected.
_operators: list[torch.library.Library] = []


class MissingLibraryError(ImportError):
    """A library of models is not installed."""


def import_library(name: str) -> ModuleType:
    """Return a library: "transformers" or "torchvision".

    Raises:
        MissingLibraryError: If the library is not installed.
    """
    if find_spec(name) is None:
        raise MissingLibraryError(f"{name} is not installed. Run: pip install {name}")
    # transformers imports torchvision where it is installed.
    if find_spec("torchvision") is not None:
        _import_torchvision()
    return importlib.import_module(name)


def _import_torchvision() -> None:
    """Import torchvision, also a CUDA build beside a CPU build of torch.

    The compiled operators of such a torchvision do not load. Its import then fails, because it
    registers shape functions for two of them. Their bare definitions let the import pass. No model
    of the list calls a compiled operator of torchvision.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.append(library)
        importlib.import_module("torchvision")
