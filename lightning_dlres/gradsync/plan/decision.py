"""Decision about gradient synchronisation: the plan, or torch's all-reduce, and all contenders."""

from __future__ import annotations

from collections import Counter

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.gradsync.plan.costs import SyncCosts
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, SyncPlan
from lightning_dlres.gradsync.plan.prediction import StepPrediction

# Name of torch's all-reduce among the algorithms.
ALL_REDUCE = "none"
# A prediction may be wrong by this factor on a busy machine. Plans that are predicted to gain more
# need no trial.
_PREDICTION_BAND = 2.0
# Part of the step by which a topology must be faster in a trial than one that is predicted to be
# faster. Repeated measurements differ by about as much.
_TOPOLOGY_GAIN = 0.02
# Between fewer ranks, a parameter server and a ring send the same bytes over the same links.
_LEAST_RANKS_FOR_RIVALS = 3


class Contender(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best plan of an algorithm and a topology, as predicted.

    Attributes:
        algorithm: Name of a codec; "raw" for uncompressed gradients that this package synchronises;
            "none" for torch's all-reduce.
        topology: "ps" or "ring"; "" for torch's all-reduce.
        least_elements: Elements of the smallest gradient that is compressed.
        compressed: Number of gradients that are compressed.
        units: Number of units.
        prediction: Predicted times.
    """

    algorithm: str
    topology: str
    least_elements: int
    compressed: int
    units: int
    prediction: StepPrediction


class StepTrial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured steps of random gradients that are ready at once, on the slowest rank.

    Attributes:
        plan_seconds: Median step with a plan.
        all_reduce_seconds: Median step with torch's all-reduce.
    """

    plan_seconds: float
    all_reduce_seconds: float


class SyncDecision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decision about gradient synchronisation, the same on all ranks.

    Attributes:
        algorithm: Name of a codec; "raw" for uncompressed gradients that this package synchronises;
            "none" for torch's all-reduce.
        topology: "ps" or "ring"; "" for torch's all-reduce.
        choices: Codec and partitions of each gradient; empty for torch's all-reduce.
        shares: Share of the merging work of each rank; empty for torch's all-reduce.
        plan: Plan of the choices and shares; None for torch's all-reduce.
        contenders: Best plan of each algorithm and topology.
        costs: Measured costs.
        topology_seconds: Median step of a trial of each topology; empty without a trial.
        trial: Trial of the plan against torch's all-reduce; None without a trial.
    """

    algorithm: str
    topology: str
    choices: tuple[CodecChoice, ...]
    shares: tuple[float, ...]
    plan: SyncPlan | None
    contenders: tuple[Contender, ...]
    costs: SyncCosts
    topology_seconds: dict[str, float] = {}
    trial: StepTrial | None = None

    @property
    def needs_trial(self) -> bool:
        """True if torch's all-reduce could be faster than the plan, within the errors of a
        prediction."""
        all_reduce = [c for c in self.contenders if c.algorithm == ALL_REDUCE]
        longest = _PREDICTION_BAND * self.prediction.step_seconds
        return self.plan is not None and any(
            contender.prediction.step_seconds < longest for contender in all_reduce
        )

    @property
    def rival_topology(self) -> str | None:
        """The other topology, if it could be faster than that of the plan, within the errors of a
        prediction; else None."""
        if self.plan is None or self.plan.world_size < _LEAST_RANKS_FOR_RIVALS:
            return None
        longest = _PREDICTION_BAND * self.prediction.step_seconds
        rivals = [
            contender.topology
            for contender in self.contenders
            if contender.algorithm == self.algorithm
            and contender.topology != self.topology
            and contender.prediction.step_seconds < longest
        ]
        return rivals[0] if rivals else None

    def after_topology_trial(self, rival: SyncDecision, seconds: dict[str, float]) -> SyncDecision:
        """Return this decision with the topology that was faster in a trial.

        Args:
            rival: Decision for the same algorithm with the other topology.
            seconds: Median step of the trial of each topology.
        """
        is_faster = seconds[rival.topology] < (1 - _TOPOLOGY_GAIN) * seconds[self.topology]
        chosen = rival if is_faster else self
        return msgspec.structs.replace(
            self,
            topology=chosen.topology,
            choices=chosen.choices,
            shares=chosen.shares,
            plan=chosen.plan,
            topology_seconds=seconds,
        )

    def after_trial(self, trial: StepTrial, margin: float) -> SyncDecision:
        """Return this decision with a trial, or one for torch's all-reduce if the trial's steps
        with the plan are not shorter by a margin.

        Args:
            trial: Trial of the plan.
            margin: Part of the step that the plan must gain.
        """
        if trial.plan_seconds < (1 - margin) * trial.all_reduce_seconds:
            return msgspec.structs.replace(self, trial=trial)
        return msgspec.structs.replace(
            self, algorithm=ALL_REDUCE, topology="", choices=(), shares=(), plan=None, trial=trial
        )

    @property
    def is_off(self) -> bool:
        """True if torch's all-reduce is used."""
        return self.plan is None

    @property
    def is_compressed(self) -> bool:
        """True if a gradient is compressed."""
        return any(choice.codec != RAW for choice in self.choices)

    @property
    def prediction(self) -> StepPrediction:
        """Predicted times of the chosen contender."""
        return next(
            contender.prediction
            for contender in self.contenders
            if (contender.algorithm, contender.topology) == (self.algorithm, self.topology)
        )

    def table(self) -> str:
        """Return the decision as tables for printing: contenders, choices, and measured costs."""
        rows: list[list[object]] = []
        for contender in sorted(self.contenders, key=lambda c: c.prediction.step_seconds):
            times = contender.prediction
            is_own = contender.algorithm != ALL_REDUCE
            rows.append(
                [
                    contender.algorithm,
                    contender.topology or None,
                    contender.compressed if is_own else None,
                    contender.units if is_own else None,
                    format_bytes(round(times.link_bytes)),
                    1e3 * times.compute_seconds if is_own else None,
                    1e3 * times.transfer_seconds,
                    1e3 * times.step_seconds,
                    "chosen" if times is self.prediction else "",
                ]
            )
        columns = [
            "algorithm",
            "topology",
            "compressed",
            "units",
            "bytes on a link",
            "compute ms",
            "transfer ms",
            "step ms",
            "",
        ]
        parts = [render("Gradient synchronisation: contenders", columns, rows)]
        if self.topology_seconds:
            times_by_topology = ", ".join(
                f"{format_seconds(seconds)} with topology {topology!r}"
                for topology, seconds in self.topology_seconds.items()
            )
            parts.append(f"In a trial of both topologies, a step took {times_by_topology}.")
        if self.trial is not None:
            own, reduce = self.trial.plan_seconds, self.trial.all_reduce_seconds
            parts.append(
                f"In a trial, a step took {format_seconds(own)} with the best plan, and "
                f"{format_seconds(reduce)} with torch's all-reduce."
            )
        if self.choices:
            counts = Counter((choice.codec, choice.partitions) for choice in self.choices)
            choices = [
                [codec, partitions, gradients]
                for (codec, partitions), gradients in sorted(counts.items())
            ]
            parts.append(render("Choices", ["codec", "partitions", "gradients"], choices))
        return "\n\n".join([*parts, *self._cost_tables()])

    def _cost_tables(self) -> list[str]:
        million = 1_000_000
        rows = [
            [
                name,
                *(
                    f"{format_seconds(cost.fixed_seconds)} + "
                    f"{format_seconds(million * cost.seconds_per_item)}"
                    for cost in (costs.encode, costs.merge, costs.decode)
                ),
            ]
            for name, costs in self.costs.codecs.items()
        ]
        title = "Measured: fixed time, and time of a million elements"
        codecs = render(title, ["codec", "encode", "merge", "decode"], rows)
        links, reduce = self.costs.links, self.costs.all_reduce
        speeds = ", ".join(f"{format_bytes(round(speed))}/s" for speed in links.bandwidths)
        return [
            codecs,
            f"Links of the ranks: {speeds}; {format_seconds(links.message_seconds)} for a message, "
            f"latency {format_seconds(links.latency_seconds)}; {links.incast_share:.0%} of the "
            "speed where several ranks send to one.\n"
            f"All-reduce of torch: {format_seconds(reduce.fixed_seconds)}, and "
            f"{format_seconds((1 << 20) * reduce.seconds_per_item)} for a MiB.",
        ]

    def to_json(self) -> str:
        """Return the decision as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @staticmethod
    def from_json(text: str | bytes) -> SyncDecision:
        """Return the decision in JSON text that `to_json` wrote.

        Raises:
            ConfigError: If the text is not the JSON of a decision.
        """
        try:
            return from_json(text, SyncDecision)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"decision must be JSON that SyncDecision.to_json wrote, got invalid text: {error}."
                " Write the decision again."
            ) from None
