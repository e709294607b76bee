"""Gradient codecs of users that break a rule on which the ranks rely are refused at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dlres import GradientSyncState, register_codec
from lightning_dlres.codecs import base as registry
from lightning_dlres.codecs.gradient import QSGD, RESIDUAL, GradientCodec, State, TernGrad
from lightning_dlres.codecs.gradient.contract import require_contract
from lightning_dlres.core.errors import ConfigError
from tests.support.stepped_codec import SteppedCodec


class Rounding(GradientCodec):
    """Codec that rounds to multiples of 1/64, and keeps all rules."""

    name = "rounding"

    def payload_bytes(self, count: int) -> int:
        return 4 * count

    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        total = values * scale + state[RESIDUAL]
        sent = (total * 64).round() / 64
        payload.view(torch.float32).copy_(sent)
        state[RESIDUAL].copy_(total - sent)

    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        values = payload.view(torch.float32) * scale
        out.copy_(out + values if accumulate else values)


class WithoutBytes(Rounding):
    def payload_bytes(self, count: int) -> int:
        return 0


class ChangesValues(Rounding):
    def compress(self, values: Tensor, *args: Any, **kwargs: Any) -> None:
        super().compress(values, *args, **kwargs)
        values.zero_()


class ChangesPayload(Rounding):
    def expand(self, payload: Tensor, *args: Any, **kwargs: Any) -> None:
        super().expand(payload, *args, **kwargs)
        payload.zero_()


class IsRandom(Rounding):
    def expand(self, payload: Tensor, out: Tensor, **kwargs: Any) -> None:
        super().expand(payload, out, **kwargs)
        out.add_(torch.rand_like(out) * 1e-3)


class WritesLess(Rounding):
    def expand(self, payload: Tensor, out: Tensor, **kwargs: Any) -> None:
        super().expand(payload[:400], out[:100], **kwargs)


class NeverAdds(Rounding):
    def expand(self, payload: Tensor, out: Tensor, *, scale: float = 1.0, **_: Any) -> None:
        super().expand(payload, out, scale=scale)


class IgnoresScale(Rounding):
    def expand(self, payload: Tensor, out: Tensor, *, scale: float = 1.0, **how: Any) -> None:
        super().expand(payload, out, **how)


class SendsHalf(Rounding):
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        payload.view(torch.float32).copy_(values * scale / 2)


class IsLost(SendsHalf):
    def compress(self, values: Tensor, *args: Any, **kwargs: Any) -> None:
        super().compress(values * torch.nan, *args, **kwargs)


class ClaimsToBeUnbiased(SendsHalf):
    is_unbiased = True


class SendsTwiceOrNothing(SendsHalf):
    """An unbiased codec."""

    is_unbiased = True

    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        is_sent = torch.rand((), generator=torch.Generator().manual_seed(seed)) < 0.5
        super().compress(values, state, payload, scale=4 * scale * is_sent)


class SendsSomeElementsInTurn(SteppedCodec, Rounding):
    """An unbiased codec without random numbers: step k sends the elements k, k + 100, ..."""

    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        is_sent = torch.arange(len(values)) % 100 == self.step % 100
        payload.view(torch.float32).copy_(values * is_sent * scale * 100)


class KeepsResidualUnderItsOwnName(SendsHalf):
    """A codec that sends half of what it has, and keeps the rest."""

    is_unbiased = True

    def new_state(
        self, count: int, device: torch.device, *, is_aggregator: bool = False
    ) -> dict[str, Tensor]:
        return {"rest": torch.zeros(count, device=device)}

    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        total = values * scale + state["rest"]
        super().compress(total, state, payload)
        state["rest"].copy_(total / 2)


class RoundsAloneWithoutResidual(SendsHalf):
    """A codec whose errors are small, though always the same."""

    is_unbiased = True

    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        payload.view(torch.float32).copy_((values * scale).bfloat16().float())


class Accumulates(SendsHalf):
    transforms_gradient = True


class RoundsAlone(Rounding):
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        payload.view(torch.float32).copy_((values * scale).bfloat16().float())


class HasPositionsOf16Bits(Rounding):
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        values = payload.view(torch.float32) * scale
        values[1 << 16 :] = 0
        out.copy_(out + values if accumulate else values)


class NeedsGpu(Rounding):
    def compress(self, values: Tensor, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("values must be on a GPU")


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (WithoutBytes, "return a positive multiple of 4 from payload_bytes, got 0 for 1000"),
        (ChangesValues, "leave the values as they are in compress"),
        (ChangesPayload, "leave the payload as it is in expand"),
        (IsRandom, "by the same ones for the same payload"),
        (WritesLess, "by the same ones for the same payload"),
        (NeverAdds, "add scale times the values"),
        (IgnoresScale, "add scale times the values"),
        (SendsHalf, "a payload and a residual that lack 50% of an element"),
        (HasPositionsOf16Bits, "lack .*% of an element of 70000"),
        (ClaimsToBeUnbiased, "on average, .*, got an error of 50% of an element in the mean of 64"),
        (IsLost, "by the same ones for the same payload"),
    ],
)
def test_a_codec_that_breaks_a_rule_is_refused(kind: type[Rounding], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        require_contract(kind())


@pytest.mark.parametrize(
    "kind",
    [
        Rounding,
        NeedsGpu,
        SendsTwiceOrNothing,
        SendsSomeElementsInTurn,
        RoundsAloneWithoutResidual,
        KeepsResidualUnderItsOwnName,
        Accumulates,
        RoundsAlone,
    ],
)
def test_other_codecs_are_taken_and_no_random_number_is_used(kind: type[Rounding]) -> None:
    before = torch.get_rng_state()
    require_contract(kind())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [QSGD, TernGrad])
def test_a_subclass_of_an_unbiased_codec_is_taken(kind: type[GradientCodec]) -> None:
    assert kind.is_unbiased
    # A subclass from outside of the package is tried, the package's own codecs are not.
    require_contract(type("Own", (kind,), {"__module__": __name__})())


def test_a_state_of_a_codec_that_breaks_a_rule_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))
    monkeypatch.setattr(IsRandom, "name", "random values", raising=False)
    register_codec(IsRandom)
    with pytest.raises(ConfigError, match="codec 'random values' must replace all values"):
        GradientSyncState(algorithm="random values")


@pytest.mark.parametrize("name", ["auto", "none", "powersgd", ""])
def test_names_with_another_meaning_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must be a text that is none of"):
        register_codec(type("Named", (Rounding,), {"name": name}))
