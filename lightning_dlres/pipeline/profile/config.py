"""Options of a profile, and the samples that it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_dlres.core.checks import finite, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.wire.tree import Tree


@dataclass(frozen=True)
class ProfileConfig:
    """How the model is profiled before training (Method E, E5).

    Args:
        samples: Number of training samples to run; "auto": one micro-batch.
        batch: Number of samples in a profiled batch; "auto": that of the loader.
        microbatch: Number of samples that are run at once; "auto": as many as in training.
        repeats: Least number of runs of every layer.
        seconds: Least time over which the layers are measured on every rank. A throttled processor
            shows its sustained speed only over a while, and so does one that others use, too. In a
            shorter profile than the default's, links are measured with smaller and fewer messages.

    Raises:
        ConfigError: a number is not positive.
    """

    samples: int | Literal["auto"] = "auto"
    batch: int | Literal["auto"] = "auto"
    microbatch: int | Literal["auto"] = "auto"
    repeats: int = 5
    seconds: float = 3.0

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "microbatch"):
            value = getattr(self, name)
            if value != "auto" and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                expected = "a positive integer or 'auto'"
                raise ConfigError(got_expected(f"profile.{name}", value, expected, "'auto'"))
        whole_number("profile.repeats", self.repeats, "repeats=5")
        finite("profile.seconds", self.seconds, "seconds=3.0")


@dataclass(frozen=True)
class ProfileSamples:
    """What rank 0 read: micro-batches as the first layer gets them, the batches they were made
    from, how many micro-batches there are in a training batch, and the samples as one batch, two at
    least where there are as many."""

    inputs: list[Tree]
    batches: list[Any]
    microbatches: int
    together: Any
