"""Models of torchvision: the smallest member of each family, with small images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.support.capture_models.case import Batch, CaptureCase, seeded
from benchmarks.support.capture_models.libraries import import_library
from benchmarks.support.capture_models.names import TORCHVISION

FAMILY = "torchvision"
CLASSES = 5
# Width and height of the images, in pixels, of models that need more or less than the default.
DEFAULT_SIZE = 64
SIZES = {"inception_v3": 80, "vgg11": 32, "vit_b_16": 32, "fcn_resnet50": 32, "r3d_18": 32}
# Frames of a clip, for the model of videos.
FRAMES = 4
# Arguments of the functions that make the models, beside the number of classes.
OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": True, "init_weights": False},
    # The auxiliary classifier needs images of 299 pixels, which take seconds on one core.
    "inception_v3": {"aux_logits": False, "init_weights": False},
    "vit_b_16": {"image_size": SIZES["vit_b_16"]},
    "fcn_resnet50": {"weights_backbone": None, "aux_loss": True},
    "deeplabv3_mobilenet_v3_large": {"weights_backbone": None},
    "lraspp_mobilenet_v3_large": {"weights_backbone": None},
}
# Models without BatchNorm. That of the others mixes the samples of a micro-batch.
PER_SAMPLE = {
    *("alexnet", "convnext_tiny", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vit_b_16"),
}


def cases() -> dict[str, CaptureCase]:
    """Return the cases by name.

    Raises:
        MissingLibraryError: If torchvision is not installed.
    """
    import_library("torchvision")
    return {name: _case(name) for name in TORCHVISION}


def _case(name: str) -> CaptureCase:
    make: Callable[[], nn.Module] = MAKERS.get(name, partial(_make, name))
    is_video = name == "r3d_18"
    return CaptureCase(
        name=name,
        family=FAMILY,
        make=make,
        batch=partial(_pictures, SIZES.get(name, DEFAULT_SIZE), is_video),
        is_per_sample=name in PER_SAMPLE,
    )


def _make(name: str) -> nn.Module:
    from torchvision.models import get_model

    return get_model(name, weights=None, num_classes=CLASSES, **OPTIONS.get(name, {}))


def _maxvit() -> nn.Module:
    """Return the layers of `maxvit_t`; its partition of 7 needs images of 224 pixels."""
    from torchvision.models import MaxVit

    return MaxVit(
        input_size=(DEFAULT_SIZE, DEFAULT_SIZE),
        stem_channels=64,
        partition_size=2,
        block_channels=[64, 128, 256, 512],
        block_layers=[2, 2, 5, 2],
        head_dim=32,
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )


def _vit() -> nn.Module:
    """Return `vit_b_16` with a random head; zeros would give the other layers no gradient."""
    model = _make("vit_b_16")
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


# Models that no function of torchvision makes as the list needs them.
MAKERS: dict[str, Callable[[], nn.Module]] = {"maxvit_t": _maxvit, "vit_b_16": _vit}


def _pictures(size: int, is_video: bool, samples: int, seed: int) -> Batch:
    frames = (FRAMES,) if is_video else ()
    return (torch.randn(samples, 3, *frames, size, size, generator=seeded(seed)),)
