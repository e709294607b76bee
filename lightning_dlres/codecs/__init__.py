"""Codecs: one algorithm per file, registered by name.

A codec from outside of this package subclasses `Codec` and is decorated with `register`.
"""

from lightning_dlres.codecs.base import Codec, Encoded, codec, decode, names, register
from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.codecs.raw import Raw
from lightning_dlres.codecs.zvc import ZeroValue

__all__ = [
    "Codec",
    "Encoded",
    "GradientCodec",
    "Raw",
    "ZeroValue",
    "codec",
    "decode",
    "names",
    "register",
]
