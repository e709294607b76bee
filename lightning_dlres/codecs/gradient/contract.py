"""Trial of a gradient codec from outside of this package: what the ranks rely on."""

from __future__ import annotations

import torch

from lightning_dlres.codecs.gradient.base import RESIDUAL, GradientCodec
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.rng import forked

# Elements of the gradients. The larger one has positions beyond 16 bits.
_COUNTS = (1000, 70_000)
# Values of `out` before a payload is decoded into it.
_FILLS = (float("nan"), 0.0, 1.0)
# Relative difference of sums that counts as rounding.
_TOLERANCE = 1e-5
# Part of the largest element that may be lost by rounding, as to 8 bits.
_MOST_LOST = 0.05
# Compressions of one gradient whose errors must cancel out in an unbiased codec.
_DRAWS = 64
# Largest square of the mean error, over the mean square of the errors. An unbiased codec has about
# 1 / _DRAWS, one that makes the same error each time has 1.
_MOST_BIAS = 0.5


def require_contract(codec: GradientCodec) -> None:
    """Compress and expand small gradients on the CPU.

    Each rank decodes payloads itself. If a codec decoded one payload into several values, the
    parameters of the ranks would drift apart without an error. A codec that raises here, such as
    one for GPUs only, is not judged.

    Raises:
        ConfigError: If the codec breaks a rule of `GradientCodec`.
    """
    if type(codec).__module__.startswith("lightning_dlres."):
        return
    with forked(torch.device("cpu")):
        try:
            broken = next(filter(None, (_broken_rule(codec.at_step(0), n) for n in _COUNTS)), "")
            broken = broken or _bias(codec)
        except Exception:
            # It raises again in its first step, where the error says what it is about.
            return
    if broken:
        raise ConfigError(
            f"codec {codec.name!r} must {broken}. See the docstring of GradientCodec."
        )


def _broken_rule(codec: GradientCodec, count: int) -> str:
    """Return the rule that the codec breaks, and what it does; "" if there is none."""
    nbytes = codec.payload_bytes(count)
    if not isinstance(nbytes, int) or nbytes < 4 or nbytes % 4:
        rule = "return a positive multiple of 4 from payload_bytes"
        return f"{rule}, got {nbytes!r} for {count} elements"
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    given, payload = values.clone(), torch.zeros(nbytes, dtype=torch.uint8)
    state = codec.new_state(count, values.device)
    codec.compress(given, state, payload, scale=1.0, seed=1)
    if not torch.equal(given, values):
        return "leave the values as they are in compress, got others afterwards"
    sent, decoded = payload.clone(), []
    for fill in _FILLS:
        out = torch.full((count,), fill)
        codec.expand(payload, out, scale=1.0, accumulate=False)
        decoded.append(out)
    if not torch.equal(payload, sent):
        return "leave the payload as it is in expand, got another one afterwards"
    if not all(torch.equal(out, decoded[0]) for out in decoded):
        rule = "replace all values of `out` in expand by the same ones for the same payload"
        return f"{rule}, got other ones in another call"
    residual = state.get(RESIDUAL, torch.zeros(count))
    lost = float((values - decoded[0] - residual).abs().max() / values.abs().max())
    if not (codec.is_unbiased or codec.transforms_gradient) and not lost <= _MOST_LOST:
        rule = "keep in state['residual'] what compress does not send, or have is_unbiased = True"
        return f"{rule}, got a payload and a residual that lack {lost:.0%} of an element of {count}"
    total = torch.ones(count)
    codec.expand(payload, total, scale=2.0, accumulate=True)
    expected = 1 + 2 * decoded[0]
    if not torch.allclose(total, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        return "add scale times the values to `out` in expand with accumulate=True, got other sums"
    return ""


def _bias(codec: GradientCodec) -> str:
    """Return the rule that a biased codec with `is_unbiased` breaks; "" if there is none.

    Such a codec keeps no residual, so what it does not send would be lost in each step.
    """
    if not codec.is_unbiased or codec.transforms_gradient:
        return ""
    count = _COUNTS[0]
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    # One state, as in training: a codec may keep what it has not sent under a name of its own.
    state = codec.new_state(count, values.device)
    errors = torch.empty(_DRAWS, count, dtype=torch.float64)
    for step in range(_DRAWS):
        draw = codec.at_step(step)
        payload = torch.zeros(draw.payload_bytes(count), dtype=torch.uint8)
        draw.compress(values.clone(), state, payload, scale=1.0, seed=step)
        decoded = torch.empty(count)
        draw.expand(payload, decoded, scale=1.0, accumulate=False)
        errors[step] = decoded - values
    mean = errors.mean(0)
    lost = float(mean.abs().max() / values.abs().max())
    mean_square = float(errors.square().sum(1).mean())
    if lost <= _MOST_LOST or float(mean.square().sum()) <= _MOST_BIAS * mean_square:
        return ""
    rule = "decode to the gradient on average, as it has is_unbiased = True"
    return f"{rule}, got an error of {lost:.0%} of an element in the mean of {_DRAWS} compressions"
