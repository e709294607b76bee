"""Options of a profile, and the training samples that the layers run on."""

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
        samples: Number of training samples to run, at most one batch if the loader has no
            `batch_size`; "auto": one micro-batch.
        batch: Number of samples in a training batch, for the size of a micro-batch; "auto": the
            loader's `batch_size`, or the size of its first batch.
        microbatch: Number of samples in a micro-batch; "auto": `batch` divided by the number of
            micro-batches.
        repeats: Minimum number of timed runs of every layer. Below 4, links are measured with fewer
            messages, too.
        seconds: Minimum time, in seconds, over which the layers are measured on every rank. Over a
            shorter time, a throttled or shared processor does not show its sustained speed. Below
            the default, links are measured with smaller messages, too.

    Raises:
        ConfigError: If `seconds` is negative or not finite, or another number is below 1.
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
        inputs: Inputs of the first layer, one tree for each micro-batch. They are missing before a
            training step is cut.
        batches: Micro-batches, as the user's code receives them; same order as `inputs`.
        microbatches: Number of micro-batches in a training batch.
        whole_batch: All read samples as one batch, for a trial of the step. It has at least two
            samples, if the data has as many.
    """

    inputs: list[Tree]
    batches: list[Any]
    microbatches: int
    whole_batch: Any
