"""Options of a profile, and the samples that it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_dlres.core.checks import finite, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.wire.tree import Tree


@dataclass(frozen=True)
class ProfileConfig:
    """Options of the profile that is taken before training.

    Args:
        samples: Number of training samples to run; "auto": one micro-batch.
        batch: Number of samples in a profiled batch; "auto": that of the loader.
        microbatch: Number of samples that are run at once; "auto": as many as in training.
        repeats: Minimum number of runs of every layer.
        seconds: Minimum time, in seconds, over which the layers are measured on every rank. Over a
            shorter time, a throttled or shared processor does not show its sustained speed. Below
            the default, links are measured with fewer and smaller messages, too.

    Raises:
        ConfigError: If a number is not positive.
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
                rule = "a positive integer or 'auto'"
                raise ConfigError(got_expected(f"profile.{name}", value, rule, "'auto'"))
        whole_number("profile.repeats", self.repeats, "repeats=5")
        finite("profile.seconds", self.seconds, "seconds=3.0")


@dataclass(frozen=True)
class ProfileSamples:
    """Training samples for the profile, read on rank 0.

    Attributes:
        inputs: Inputs of the first layer, one for each micro-batch.
        batches: Micro-batches, as the user's code receives them; same order as `inputs`.
        microbatches: Number of micro-batches in a training batch.
        whole_batch: All samples as one batch; at least two samples, if the data has as many.
    """

    inputs: list[Tree]
    batches: list[Any]
    microbatches: int
    whole_batch: Any
