"""Gradient codecs: one algorithm per file, registered by name."""

from lightning_dlres.codecs.gradient.base import (
    RESIDUAL,
    GradientCodec,
    State,
    gradient_codec,
    gradient_codec_names,
)
from lightning_dlres.codecs.gradient.dgc import DGC
from lightning_dlres.codecs.gradient.fp8 import Float8
from lightning_dlres.codecs.gradient.graddrop import GradDrop
from lightning_dlres.codecs.gradient.half import BFloat16, Float16
from lightning_dlres.codecs.gradient.int8 import BlockwiseInt8
from lightning_dlres.codecs.gradient.onebit import OneBit
from lightning_dlres.codecs.gradient.qsgd import QSGD
from lightning_dlres.codecs.gradient.tbq import ThresholdQuantisation
from lightning_dlres.codecs.gradient.terngrad import TernGrad

__all__ = [
    "DGC",
    "QSGD",
    "RESIDUAL",
    "BFloat16",
    "BlockwiseInt8",
    "Float8",
    "Float16",
    "GradDrop",
    "GradientCodec",
    "OneBit",
    "State",
    "TernGrad",
    "ThresholdQuantisation",
    "gradient_codec",
    "gradient_codec_names",
]
