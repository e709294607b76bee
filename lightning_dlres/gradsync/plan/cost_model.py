"""Cost model: the choice of algorithm, topology, codec and partitions with the shortest step.

The model predicts the step of many plans, and takes the shortest one. A plan compresses the
gradients from some size on, since the fixed time of a codec outweighs its gain for small ones. It
cuts gradients into pieces of nearly equal size, with some number of pieces per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.gradsync.plan.costs import SyncCosts
from lightning_dlres.gradsync.plan.decision import ALL_REDUCE, Contender, SyncDecision
from lightning_dlres.gradsync.plan.graph import TOPOLOGIES
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, make_plan
from lightning_dlres.gradsync.plan.prediction import (
    BUCKET_BYTES,
    Integers,
    StepPrediction,
    StepPredictor,
    UnitTable,
)
from lightning_dlres.gradsync.plan.shares import link_shares
from lightning_dlres.gradsync.plan.transmissions import message_bytes_for
from lightning_dlres.gradsync.plan.units import GradientSpec, assign_owners, cut
from lightning_dlres.kernels.gradients.layout import BLOCK

# Part of the step that an algorithm must gain over a more precise one. Predictions of steps are off
# by about as much, and a smaller gain does not pay for a loss of precision.
MARGIN = 0.05
# Codecs among which "auto" chooses: those that ended within the spread of uncompressed training in
# `benchmarks.convergence` on all tasks. Codecs with one or two bits did not.
AUTO_CODECS = ("fp16", "bf16", "int8")
# Numbers of pieces per rank that are tried; None cuts no gradient. More pieces overlap better, but
# take more fixed time.
_PIECES_PER_RANK = (None, 1, 2, 3, 4, 6, 8, 16)
# Largest number of thresholds that are tried: sizes from which on gradients are compressed.
_MOST_THRESHOLDS = 12


def auto_codecs(
    codecs: Mapping[str, GradientCodec], *, is_adam_like: bool, has_error_feedback: bool = True
) -> dict[str, GradientCodec]:
    """Return the codecs that "auto" may choose for an optimizer.

    Args:
        codecs: Candidates by name.
        is_adam_like: True if the optimizer divides by an estimate of the gradient's variance. One-
            and two-bit codecs may then make training diverge.
        has_error_feedback: False leaves only unbiased codecs.
    """
    return {
        name: codec
        for name, codec in codecs.items()
        if (codec.suits_adam or not is_adam_like) and (has_error_feedback or codec.is_unbiased)
    }


def decide(
    gradients: Sequence[GradientSpec],
    costs: SyncCosts,
    codecs: Mapping[str, GradientCodec],
    *,
    algorithms: Sequence[str] | None = None,
    topologies: Sequence[str] = tuple(TOPOLOGIES),
    element_bytes: int = 4,
    backward_seconds: float = 0.0,
    bucket_bytes: int = BUCKET_BYTES,
    margin: float = MARGIN,
    least_bytes: int = 0,
    is_coordinated: bool = False,
) -> SyncDecision:
    """Return the decision with the shortest predicted step.

    Algorithms are compared in the order of `precision`: torch's all-reduce, then "raw", then codecs
    with ever smaller payloads. Each takes the lead only if its step is shorter, by a margin, than
    that of the leader before it.

    Args:
        gradients: The gradients, in the order of the model.
        costs: Measured costs of all algorithms.
        codecs: Codecs by name.
        algorithms: Algorithms among which to choose: names of codecs, "raw", and "none" for torch's
            all-reduce. None: all of them.
        topologies: Topologies among which to choose.
        element_bytes: Bytes of an element that is sent as it is.
        backward_seconds: Time of backward, with which synchronisation overlaps.
        bucket_bytes: Bytes of a bucket of gradients.
        margin: Part of the leader's step that an algorithm must gain.
        least_bytes: Gradients with fewer bytes are not compressed.
        is_coordinated: True if a coordinator plans the messages; see `StepPredictor`.

    Raises:
        ConfigError: If there is no algorithm or topology, or one without costs.
    """
    chosen = tuple(algorithms) if algorithms is not None else (ALL_REDUCE, RAW, *codecs)
    known = {ALL_REDUCE, RAW, *codecs}
    if not chosen or set(chosen) - known:
        rule = f"some of {sorted(known)}"
        raise ConfigError(got_expected("algorithms", list(chosen), rule, "algorithms=None"))
    if not topologies or set(topologies) - set(TOPOLOGIES):
        rule = f"some of {sorted(TOPOLOGIES)}"
        raise ConfigError(got_expected("topologies", list(topologies), rule, "topologies=['ps']"))
    missing = {RAW, *chosen} - {ALL_REDUCE} - set(costs.codecs)
    if missing:
        rule = "costs of all algorithms"
        raise ConfigError(got_expected("costs", sorted(costs.codecs), rule, str(sorted(missing))))
    predictor = StepPredictor(
        costs,
        codecs,
        element_bytes=element_bytes,
        backward_seconds=backward_seconds,
        bucket_bytes=bucket_bytes,
        is_coordinated=is_coordinated,
    )
    search = _Search(gradients, predictor, codecs, -(-least_bytes // element_bytes))
    best: dict[str, tuple[Contender, _Layout | None]] = {}
    contenders = []
    for algorithm in sorted(set(chosen), key=lambda name: precision(name, codecs)):
        for topology in ("",) if algorithm == ALL_REDUCE else topologies:
            candidate = search.best(algorithm, topology)
            if candidate is None:
                continue
            contenders.append(candidate[0])
            if algorithm not in best or _step_seconds(candidate) < _step_seconds(best[algorithm]):
                best[algorithm] = candidate
    if not best:
        # No gradient is large enough for any of the algorithms.
        raw = [(search.best(RAW, topology), topology) for topology in topologies]
        best[RAW] = min((c for c, _ in raw if c is not None), key=_step_seconds)
        contenders.append(best[RAW][0])
    # The algorithms are in the order of their precision.
    winner = next(iter(best.values()))
    for candidate in best.values():
        if _step_seconds(candidate) < _step_seconds(winner) * (1 - margin):
            winner = candidate
    return _decision(gradients, winner, contenders, costs)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Units of all gradients, before some of them get a codec.

    Attributes:
        partitions: Partitions of each gradient.
        shares: Share of the merging work of each rank.
        counts: Elements of each unit.
        owners: Owner of each unit.
        compressible_counts: Elements of the gradient of each unit; 0 if it must not be
            compressed.
    """

    partitions: tuple[int, ...]
    shares: tuple[float, ...]
    counts: Integers
    owners: Integers
    compressible_counts: Integers


class _Search:
    """Search for the best plan of an algorithm and a topology."""

    def __init__(
        self,
        gradients: Sequence[GradientSpec],
        predictor: StepPredictor,
        codecs: Mapping[str, GradientCodec],
        least_elements: int,
    ) -> None:
        self._predictor, self._codecs = predictor, codecs
        self._gradients = gradients
        self._sizes = [gradient.count for gradient in gradients]
        compressible = [gradient.count for gradient in gradients if gradient.is_compressible]
        self._thresholds = _thresholds(compressible, least_elements)
        ranks = predictor.world_size
        equal = (1 / ranks,) * ranks
        # Equal shares suit slow merging; shares by bandwidth suit slow links.
        by_links = tuple(link_shares(predictor.costs.links.bandwidths)[0])
        self._shares = {"ring": (equal,), "ps": tuple(dict.fromkeys((equal, by_links)))}
        self._layouts: dict[tuple[tuple[int, ...], tuple[float, ...]], _Layout] = {}
        self._tables: dict[tuple[str, tuple[int, ...]], UnitTable] = {}

    def best(self, algorithm: str, topology: str) -> tuple[Contender, _Layout | None] | None:
        """Return the best plan; None if the algorithm compresses no gradient."""
        if algorithm == ALL_REDUCE:
            prediction = self._predictor.predict_all_reduce(sum(self._sizes))
            return self._contender(algorithm, topology, None, 0, prediction), None
        best: tuple[Contender, _Layout] | None = None
        for layout in self._layouts_of(algorithm, topology):
            raw = self._table(RAW, layout)
            for least in (0,) if algorithm == RAW else self._thresholds:
                table = raw
                if algorithm != RAW:
                    is_compressed = layout.compressible_counts >= least
                    table = raw.where(is_compressed, self._table(algorithm, layout))
                prediction = self._predictor.predict_units(
                    topology, layout.counts, layout.owners, table
                )
                if best is None or prediction.step_seconds < _step_seconds(best):
                    contender = self._contender(algorithm, topology, layout, least, prediction)
                    best = contender, layout
        return best

    def _layouts_of(self, algorithm: str, topology: str) -> Iterator[_Layout]:
        is_divisible = algorithm == RAW or self._codecs[algorithm].is_divisible
        for shares in self._shares[topology]:
            seen = set()
            for pieces_per_rank in _PIECES_PER_RANK if is_divisible else _PIECES_PER_RANK[:1]:
                partitions = self._partitions(pieces_per_rank)
                if partitions not in seen:
                    seen.add(partitions)
                    yield self._layout(partitions, shares)

    def _partitions(self, pieces_per_rank: int | None) -> tuple[int, ...]:
        """Return the number of partitions of each gradient; None cuts no gradient."""
        if pieces_per_rank is None:
            return (1,) * len(self._sizes)
        total = sum(self._sizes)
        # Rounded up, so that a single gradient has no more partitions than there are pieces.
        piece = max(-(-total // (pieces_per_rank * self._predictor.world_size)), BLOCK)
        return tuple(len(cut(count, max(-(-count // piece), 1), BLOCK)) for count in self._sizes)

    def _layout(self, partitions: tuple[int, ...], shares: tuple[float, ...]) -> _Layout:
        key = partitions, shares
        if key not in self._layouts:
            pieces = [
                (stop - start, gradient.count if gradient.is_compressible else 0)
                for gradient, number in zip(self._gradients, partitions, strict=True)
                for start, stop in cut(gradient.count, number, BLOCK)
            ]
            counts = [count for count, _ in pieces]
            self._layouts[key] = _Layout(
                partitions=partitions,
                shares=shares,
                counts=np.array(counts, dtype=np.int64),
                owners=np.array(assign_owners(counts, shares), dtype=np.int64),
                compressible_counts=np.array([count for _, count in pieces], dtype=np.int64),
            )
        return self._layouts[key]

    def _table(self, codec: str, layout: _Layout) -> UnitTable:
        key = codec, layout.partitions
        if key not in self._tables:
            self._tables[key] = self._predictor.table(codec, layout.counts)
        return self._tables[key]

    def _contender(
        self,
        algorithm: str,
        topology: str,
        layout: _Layout | None,
        least: int,
        prediction: StepPrediction,
    ) -> Contender:
        is_lossy = algorithm not in (ALL_REDUCE, RAW)
        return Contender(
            algorithm=algorithm,
            topology=topology,
            least_elements=least,
            compressed=sum(g.is_compressed(least) for g in self._gradients) if is_lossy else 0,
            units=0 if layout is None else len(layout.counts),
            prediction=prediction,
        )


def _thresholds(sizes: Sequence[int], least: int) -> list[int]:
    """Return sizes of gradients, spread over all sizes of at least `least`, largest first."""
    distinct = sorted({size for size in sizes if size >= max(least, 1)}, reverse=True)
    if len(distinct) <= _MOST_THRESHOLDS:
        return distinct
    last = len(distinct) - 1
    return [distinct[last * index // (_MOST_THRESHOLDS - 1)] for index in range(_MOST_THRESHOLDS)]


def precision(algorithm: str, codecs: Mapping[str, GradientCodec]) -> tuple[int, float, str]:
    """Return a sort key: the most precise algorithm first."""
    if algorithm in (ALL_REDUCE, RAW):
        return (0 if algorithm == ALL_REDUCE else 1), 0.0, algorithm
    return 2, -codecs[algorithm].payload_bytes(BLOCK), algorithm


def _step_seconds(candidate: tuple[Contender, _Layout | None]) -> float:
    return candidate[0].prediction.step_seconds


def _decision(
    gradients: Sequence[GradientSpec],
    winner: tuple[Contender, _Layout | None],
    contenders: Sequence[Contender],
    costs: SyncCosts,
) -> SyncDecision:
    contender, layout = winner
    choices: tuple[CodecChoice, ...] = ()
    plan = None
    if layout is not None:
        choices = tuple(
            CodecChoice(
                codec=contender.algorithm
                if gradient.is_compressed(contender.least_elements)
                else RAW,
                partitions=partitions,
            )
            for gradient, partitions in zip(gradients, layout.partitions, strict=True)
        )
        plan = make_plan(
            gradients,
            choices,
            world_size=len(layout.shares),
            topology=contender.topology,
            alignment=BLOCK,
            shares=layout.shares,
            message_bytes=message_bytes_for(costs.links.bandwidths),
        )
    return SyncDecision(
        algorithm=contender.algorithm,
        topology=contender.topology,
        choices=choices,
        shares=layout.shares if layout is not None else (),
        plan=plan,
        contenders=tuple(contenders),
        costs=costs,
    )
