"""Codecs of pushed gradients: the same choice on workers and servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dlres.codecs import base as registry
from lightning_dlres.codecs.gradient import GradientCodec, gradient_codec_names
from lightning_dlres.core.checks import keyword_arguments, one_of
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.paramserver.plan.keys import Key

# Smaller gradients are not compressed, in bytes.
_LEAST_BYTES = 16 << 10


def job_codec(name: str, options: Mapping[str, Any] | None) -> GradientCodec | None:
    """Return the codec of a name and options; None for "", which leaves gradients as they are.

    Raises:
        ConfigError: If there is no such codec, or an option is wrong.
    """
    arguments = keyword_arguments("codec_options", options)
    if not name:
        if arguments:
            fix = "codec_options=None"
            raise ConfigError(got_expected("codec_options", arguments, "None without codec", fix))
        return None
    one_of("codec", name, gradient_codec_names(), "codec='fp16'")
    kind = type(registry.codec(name))
    try:
        codec = kind(**arguments)
    except (TypeError, ValueError) as error:
        rule = f"arguments of codec {name!r} ({error})"
        raise ConfigError(
            got_expected("codec_options", arguments, rule, "codec_options=None")
        ) from error
    assert isinstance(codec, GradientCodec)
    return codec


def codec_of(key: Key, codec: GradientCodec | None) -> GradientCodec | None:
    """Return the codec of a key's gradients; None if they travel as they are."""
    is_large = key.dtype == "float32" and key.nbytes >= _LEAST_BYTES
    return codec if is_large else None
