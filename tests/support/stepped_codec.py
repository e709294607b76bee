"""Base of test codecs whose payloads depend on the step."""

from __future__ import annotations

from lightning_dlres.codecs.gradient import GradientCodec


class SteppedCodec(GradientCodec):
    """Codec of float32 payloads that knows its step."""

    is_unbiased = True
    step = 0

    def at_step(self, step: int) -> GradientCodec:
        codec = type(self)()
        codec.step = step
        return codec

    def payload_bytes(self, count: int) -> int:
        return 4 * count
