"""Low-rank gradients by PyTorch's own PowerSGD hook (Vogels et al., 2019).

Torch keeps the errors and the matrices Q of a bucket in the order of its parameters. A resumed run
begins with other buckets, so this module knows them by the names of the parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from lightning_dlres.core.checks import finite, flag, keyword_arguments, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected

POWERSGD = "powersgd"
_SINGLE_BUCKET = "a single bucket with gloo"


@dataclass(frozen=True, kw_only=True)
class _Before:
    """What steps change: that of `PowerSGD`, and that of torch, by bucket."""

    scale: float
    layouts: dict[int, dict[str, torch.Size]]
    named_errors: dict[str, Tensor]
    named_qs: dict[str, Tensor]
    errors: dict[int, Tensor]
    ps: dict[int, Tensor]
    qs: dict[int, Tensor]


class PowerSGD:
    """Synchronisation by PyTorch's PowerSGD hook.

    Args:
        rank: Rank of the matrices that approximate a gradient.
        start_step: First step that is compressed; those before use all-reduce.
        error_feedback: True sends in later steps what a step left out.
        warm_start: True begins with the matrices of the step before.
        least_ratio: A gradient is compressed only if that makes it smaller by this factor.
        seed: Seed of the first matrices.

    Raises:
        ConfigError: If an argument has a bad value.
    """

    def __init__(
        self,
        *,
        rank: int = 1,
        start_step: int = 1000,
        error_feedback: bool = True,
        warm_start: bool = True,
        least_ratio: float = 2.0,
        seed: int = 0,
    ) -> None:
        least = 2 if flag("error_feedback", error_feedback) | flag("warm_start", warm_start) else 0
        self._state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=whole_number("rank", rank, "rank=1"),
            start_powerSGD_iter=whole_number("start_step", start_step, "start_step=1000", least),
            min_compression_rate=finite("least_ratio", least_ratio, "least_ratio=2", above=True),
            use_error_feedback=error_feedback,
            warm_start=warm_start,
            random_seed=whole_number("seed", seed, "seed=0", least=0),
        )
        # Names and shapes of the parameters of each bucket that has a state.
        self._layouts: dict[int, dict[str, torch.Size]] = {}
        # Errors and matrices Q of parameters that are in no known bucket, by name.
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] = {}
        # Factor of the gradients that the errors have.
        self._scale = 1.0
        self._before: _Before | None = None

    def keep(self) -> None:
        """Copy what the next steps change, so that `undo` can undo them."""
        # Torch replaces the errors in each step, and writes to the matrices.
        self._before = _Before(
            scale=self._scale,
            layouts=dict(self._layouts),
            named_errors=dict(self._errors),
            named_qs=dict(self._qs),
            errors=dict(self._state.error_dict),
            ps=dict(self._state.p_memory_dict),
            qs={bucket: q.clone() for bucket, q in self._state.q_memory_dict.items()},
        )

    def undo(self) -> None:
        """Return to the state of before the steps since `keep`, which is called once between."""
        if self._before is not None:
            before, self._before = self._before, None
            self._scale, self._layouts = before.scale, before.layouts
            self._errors, self._qs = before.named_errors, before.named_qs
            self._state.error_dict = before.errors
            self._state.p_memory_dict, self._state.q_memory_dict = before.ps, before.qs

    def reduce(self, bucket: GradBucket, names: Sequence[str], loss_scale: float) -> Future[Tensor]:
        """Start to replace the gradients of a bucket by their approximate means.

        Args:
            bucket: The bucket.
            names: Names of its parameters.
            loss_scale: Factor of the gradients, a power of two.

        Raises:
            ConfigError: If torch's hook cannot handle the bucket.
        """
        self._refuse(bucket, names)
        if self._state.process_group is None:
            # Torch's hook sums from callbacks. In DDP's group that would race with DDP's own sums,
            # such as that of the unused parameters.
            self._state.process_group = dist.new_group()
        if self._state.iter >= self._state.start_powerSGD_iter:
            shapes = [parameter.shape for parameter in bucket.parameters()]
            self._arrange(bucket, dict(zip(names, shapes, strict=True)))
            self._rescale(loss_scale)
        return powerSGD_hook(self._state, bucket)

    def state_dict(self, rank: int) -> dict[str, Any]:
        """Return numbers, strings and tensors, by the names of parameters.

        Args:
            rank: This rank. All ranks have the same matrices Q, so only rank 0 saves them.
        """
        errors, qs = dict(self._errors), dict(self._qs)
        for bucket in self._layouts:
            errors |= self._errors_of(bucket)
            qs |= self._qs_of(bucket)
        if rank:
            qs = {}
        _, keys, position, has_gauss, gauss = self._state.rng.get_state()
        return {
            "iteration": self._state.iter,
            "errors": {name: error / self._scale for name, error in errors.items()},
            "qs": {name: q.clone() for name, q in qs.items()},
            "random_keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "random_position": [int(position), int(has_gauss), float(gauss)],
        }

    def load_state_dicts(
        self, saved: Sequence[Mapping[str, Any]], rank: int, world_size: int
    ) -> None:
        """Continue from the states of all ranks of an earlier run, before the first step."""
        self._state.iter = saved[0]["iteration"]
        position, has_gauss, gauss = saved[0]["random_position"]
        keys = saved[0]["random_keys"].numpy().astype(np.uint32)
        self._state.rng.set_state(("MT19937", keys, position, has_gauss, gauss))
        self._qs = dict(saved[0]["qs"])
        if len(saved) == world_size:
            self._errors = dict(saved[rank]["errors"])
            return
        self._errors = mean_errors(saved)
        if self._errors:
            warnings.warn(
                f"The checkpoint has PowerSGD's errors of {len(saved)} ranks, and this run has "
                f"{world_size}: each rank got their mean.",
                stacklevel=2,
            )

    def _refuse(self, bucket: GradBucket, names: Sequence[str]) -> None:
        if bucket.buffer().is_sparse:
            got, rule = f"{POWERSGD!r}", "'int8' or another codec with sparse gradients"
            raise ConfigError(got_expected("algorithm", got, rule, "algorithm='int8'"))
        is_gloo = bucket.buffer().device.type == "cpu"
        is_single = bucket.index() == 0 and bucket.is_last()
        if is_gloo and not is_single and self._state.iter > 0:
            # Its chain of callbacks waits on gloo's own threads, which several buckets exhaust.
            raise ConfigError(
                got_expected(
                    "bucket_cap_mb",
                    "several buckets",
                    f"{_SINGLE_BUCKET} for algorithm 'powersgd', and parameters of one dtype",
                    "bucket_cap_mb=1_000_000",
                )
            )
        for name, parameter in zip(names, bucket.parameters(), strict=True):
            if parameter.dim() == 0 or parameter.is_complex():
                rule = "'int8' or another codec for scalar or complex parameters"
                got = f"{POWERSGD!r} with {name!r}"
                raise ConfigError(got_expected("algorithm", got, rule, "algorithm='int8'"))

    def _arrange(self, bucket: GradBucket, layout: dict[str, torch.Size]) -> None:
        """Put the state of a bucket's parameters into their order."""
        index = bucket.index()
        # The order counts, which dicts do not compare.
        if list(self._layouts.get(index, ())) == list(layout):
            return
        for other in [i for i, known in self._layouts.items() if known.keys() & layout.keys()]:
            self._errors |= self._errors_of(other)
            self._qs |= self._qs_of(other)
            del self._layouts[other]
            for memory in (self._state.error_dict, self._state.p_memory_dict):
                memory.pop(other, None)
            self._state.q_memory_dict.pop(other, None)
        self._layouts[index] = layout
        self._drop_misfits(layout)
        buffer = bucket.buffer()
        if any(name in self._errors for name in layout):
            self._state.error_dict[index] = torch.cat(
                [
                    self._errors.pop(name, torch.zeros(shape.numel())).to(buffer)
                    for name, shape in layout.items()
                ]
            )
        order = self._compressed(layout)
        if order and all(name in self._qs for name in order):
            self._state.q_memory_dict[index] = torch.cat(
                [self._qs.pop(name).to(buffer) for name in order]
            )
            count = sum(rank * rows for rows, _, rank in order.values())
            self._state.p_memory_dict[index] = torch.empty_like(buffer[:1]).expand(count).clone()

    def _drop_misfits(self, layout: Mapping[str, torch.Size]) -> None:
        """Drop loaded errors and matrices whose sizes are not those of this run, with a warning."""
        sizes = {
            name: rank * columns for name, (_, columns, rank) in self._compressed(layout).items()
        }
        misfits = [
            (kept, name)
            for kept, known in ((self._errors, _counts(layout)), (self._qs, sizes))
            for name in layout
            if name in kept and kept[name].numel() != known.get(name)
        ]
        for kept, name in misfits:
            del kept[name]
        if misfits:
            names = sorted({name for _, name in misfits})
            warnings.warn(
                f"The checkpoint's state of PowerSGD was dropped for {names[:5]}, because the rank "
                "or the parameter has another size now.",
                stacklevel=2,
            )

    def _rescale(self, loss_scale: float) -> None:
        """Give the errors the factor that the gradients have now."""
        if loss_scale != self._scale:
            factor = loss_scale / self._scale
            errors = self._state.error_dict
            for bucket, error in errors.items():
                errors[bucket] = error * factor
            self._errors = {name: error * factor for name, error in self._errors.items()}
            self._scale = loss_scale

    def _compressed(self, layout: Mapping[str, torch.Size]) -> dict[str, tuple[int, int, int]]:
        """Return rows, columns and rank of the gradients that torch compresses, in its order: those
        of one shape follow each other."""
        by_shape: dict[tuple[int, int, int], list[str]] = {}
        for name, shape in layout.items():
            rows, columns = shape[0], shape.numel() // max(shape[0], 1)
            rank = min(rows, columns, self._state.matrix_approximation_rank)
            least = self._state.min_compression_rate
            if (rows + columns) * rank * least < rows * columns:
                by_shape.setdefault((rows, columns, rank), []).append(name)
        return {name: shape for shape, names in by_shape.items() for name in names}

    def _errors_of(self, bucket: int) -> dict[str, Tensor]:
        error, layout = self._state.error_dict.get(bucket), self._layouts[bucket]
        if error is None:
            return {}
        pieces = error.split([shape.numel() for shape in layout.values()])
        return dict(zip(layout, pieces, strict=True))

    def _qs_of(self, bucket: int) -> dict[str, Tensor]:
        q, order = self._state.q_memory_dict.get(bucket), self._compressed(self._layouts[bucket])
        if q is None:
            return {}
        pieces = q.split([rank * columns for _, columns, rank in order.values()])
        return dict(zip(order, pieces, strict=True))


def _counts(layout: Mapping[str, torch.Size]) -> dict[str, int]:
    return {name: shape.numel() for name, shape in layout.items()}


def power_sgd(codec_options: object) -> PowerSGD:
    """Return PowerSGD with the options of a user.

    Raises:
        ConfigError: If an option is unknown or bad.
    """
    options = keyword_arguments("codec_options", codec_options)
    known = {"rank", "start_step", "error_feedback", "warm_start", "least_ratio", "seed"}
    if not options.keys() <= known:
        rule = f"some of {sorted(known)} for 'powersgd'"
        raise ConfigError(got_expected("codec_options", options, rule, "codec_options=None"))
    return PowerSGD(**options)


def mean_errors(saved: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the mean of all ranks' errors by parameter: what the last means lacked."""
    names = dict.fromkeys(name for one in saved for name in one["errors"])
    return {
        name: sum(one["errors"][name] for one in saved if name in one["errors"]) / len(saved)
        for name in names
    }
