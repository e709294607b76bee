"""Low-rank gradients by PyTorch's own PowerSGD hook (Vogels et al., 2019).

The hook approximates each gradient, taken as a matrix, by a product P Q^T of two narrow matrices.
The error is this rank's gradient minus the ranks' common product. The hook adds it to the rank's
next gradient. Torch also keeps such an error, the rank's gradient minus the mean, for gradients
that it does not compress. These errors have the mean zero and would only grow, so they are dropped
after each step.

Torch keeps the errors and the matrices Q of a bucket in the order of its parameters. A resumed run
begins with other buckets, so checkpoints have the errors and matrices by the names of the
parameters.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
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
from lightning_dlres.gradsync.execute.saved_states import reordered_names, with_units

POWERSGD = "powersgd"
# Least `start_step` with error feedback or a warm start. DDP changes its buckets after step 0, so
# `PowerSGDState` rejects a smaller number.
_FIRST_START_STEP = 2
# Longest wait for a group's threads to release it, in seconds.
_RELEASE_SECONDS = 5.0
# Groups that another thread still held after that wait. They live as long as the process.
_unreleased: list[dist.ProcessGroup] = []


@dataclass(frozen=True, kw_only=True)
class _Before:
    """State from before a step: fields of `PowerSGD`, and those of torch's state by bucket."""

    scale: float
    layouts: dict[int, dict[str, torch.Size]]
    named_errors: dict[str, Tensor]
    named_qs: dict[str, Tensor]
    errors: dict[int, Tensor]
    p_matrices: dict[int, Tensor]
    q_matrices: dict[int, Tensor]


class PowerSGD:
    """Synchronisation by PyTorch's PowerSGD hook.

    Args:
        rank: Rank of the matrices that approximate a gradient.
        start_step: First step that is compressed; those before use all-reduce.
        error_feedback: True sends in later steps what a step left out.
        warm_start: True begins each step with the matrices Q of the step before; False, with random
            ones.
        least_ratio: A gradient is compressed only if that makes it smaller by this factor.
        seed: Seed of the random matrices Q.

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
        has_memory = flag("error_feedback", error_feedback) | flag("warm_start", warm_start)
        least = _FIRST_START_STEP if has_memory else 0
        self._seed = whole_number("seed", seed, "seed=0", least=0)
        self._state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=whole_number("rank", rank, "rank=1"),
            start_powerSGD_iter=whole_number("start_step", start_step, "start_step=1000", least),
            min_compression_rate=finite("least_ratio", least_ratio, "least_ratio=2", above=True),
            use_error_feedback=error_feedback,
            warm_start=warm_start,
            random_seed=self._seed,
        )
        # Names and shapes of the parameters of each bucket that has a state, by index.
        self._layouts: dict[int, dict[str, torch.Size]] = {}
        # Flat errors and matrices Q by name, until `_arrange` puts them into a bucket's state.
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] = {}
        # Loss scale by which all errors are multiplied now.
        self._scale = 1.0
        self._before: _Before | None = None
        # Group of torch's hook, from the first step until `close`.
        self._group: dist.ProcessGroup | None = None

    def close(self) -> None:
        """Destroy the group of torch's hook; called by all ranks together, after their last step.

        A thread of the group must not be the last one to release it: that would end the process.
        """
        group, self._group = self._group, None
        if group is None:
            return
        dist.destroy_process_group(group)
        self._state.process_group = None
        # The last step is over, but the thread that ran its last callback may still hold that.
        # A new object has as many references as the group has here without that thread.
        other = object()
        own_references, deadline = sys.getrefcount(other), time.monotonic() + _RELEASE_SECONDS
        while sys.getrefcount(group) > own_references and time.monotonic() < deadline:
            time.sleep(1e-3)
        if sys.getrefcount(group) > own_references:
            _unreleased.append(group)

    def keep(self) -> None:
        """Keep the present state, so that `undo` can return to it after the next steps."""
        # Torch replaces the tensors of errors, but writes to those of Q. It computes P anew.
        self._before = _Before(
            scale=self._scale,
            layouts=dict(self._layouts),
            named_errors=dict(self._errors),
            named_qs=dict(self._qs),
            errors=dict(self._state.error_dict),
            p_matrices=dict(self._state.p_memory_dict),
            q_matrices={bucket: q.clone() for bucket, q in self._state.q_memory_dict.items()},
        )

    def undo(self) -> None:
        """Return to the state of the last `keep`, once; do nothing without a `keep` since."""
        if self._before is not None:
            before, self._before = self._before, None
            self._scale, self._layouts = before.scale, before.layouts
            self._errors, self._qs = before.named_errors, before.named_qs
            self._state.error_dict = before.errors
            self._state.p_memory_dict = before.p_matrices
            self._state.q_memory_dict = before.q_matrices

    def reduce(self, bucket: GradBucket, names: Sequence[str], loss_scale: float) -> Future[Tensor]:
        """Start to replace the gradients of a bucket by their approximate means.

        Args:
            bucket: The bucket.
            names: Names of its parameters, in the order of the bucket.
            loss_scale: Factor of the gradients, a power of two.

        Returns:
            Future of the bucket's buffer.

        Raises:
            ConfigError: If torch's hook cannot handle the bucket.
        """
        self._refuse(bucket, names)
        if self._group is None:
            # Torch's hook sums from callbacks. In DDP's group that would race with DDP's own sums,
            # such as that of the unused parameters.
            self._group = self._state.process_group = dist.new_group()
        if self._state.iter >= self._state.start_powerSGD_iter:
            shapes = [parameter.shape for parameter in bucket.parameters()]
            # Loaded errors are in float32. Scale them before `_arrange` gives them the gradients'
            # dtype, in which small ones would vanish.
            self._rescale(loss_scale)
            self._arrange(bucket, dict(zip(names, shapes, strict=True)))
        drop_errors = functools.partial(self._drop_exact_errors, bucket.index())
        return powerSGD_hook(self._state, bucket).then(drop_errors)

    def state_dict(self, rank: int) -> dict[str, Any]:
        """Return the step, the random generator, and the errors and matrices Q by parameter.

        The tensors are flat. Errors are float32, without the loss scale.

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
            # In float32: without the loss scale, small errors vanish in float16.
            "errors": {name: error.float() / self._scale for name, error in errors.items()},
            "qs": {name: q.clone() for name, q in qs.items()},
            "random_keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "random_position": [int(position), int(has_gauss), float(gauss)],
        }

    def load_state_dicts(
        self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int
    ) -> None:
        """Continue from the states of all ranks of an earlier run, or of an earlier step of this.

        On another number of ranks, each rank gets the mean of the errors, with a warning. Residuals
        of another algorithm are dropped, with a warning.

        Args:
            states: States of all ranks, by rank; those of PowerSGD have the key `POWERSGD`.
            rank: This rank.
            world_size: Number of ranks of this run.
        """
        if with_units(states):
            warnings.warn(
                "The checkpoint's residuals were dropped, because PowerSGD cannot take those of "
                "another algorithm.",
                stacklevel=3,
            )
        saved = _of_powersgd(states)
        self._forget()
        if not saved:
            return
        self._state.iter = saved[0]["iteration"]
        position, has_gauss, gauss = saved[0]["random_position"]
        keys = saved[0]["random_keys"].numpy().astype(np.uint32)
        self._state.rng.set_state(("MT19937", keys, position, has_gauss, gauss))
        self._qs = dict(saved[0]["qs"])
        if len(saved) == world_size:
            self._errors = dict(saved[rank]["errors"])
            return
        self._errors = mean_errors(states)
        if self._errors:
            warnings.warn(
                f"The checkpoint has PowerSGD's errors of {len(saved)} ranks, and this run has "
                f"{world_size}: each rank got their mean.",
                stacklevel=3,
            )

    def _forget(self) -> None:
        """Return to the state before the first step."""
        self._layouts, self._errors, self._qs = {}, {}, {}
        self._scale, self._before = 1.0, None
        state = self._state
        for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            memory.clear()
        state.iter, state.rng = 0, np.random.RandomState(self._seed)

    def _refuse(self, bucket: GradBucket, names: Sequence[str]) -> None:
        if bucket.buffer().is_sparse:
            got, rule = POWERSGD, "'int8' or another codec with sparse gradients"
            raise ConfigError(got_expected("algorithm", got, rule, "algorithm='int8'"))
        is_gloo = bucket.buffer().device.type == "cpu"
        is_single = bucket.index() == 0 and bucket.is_last()
        # DDP may have other buckets in its first step, in which the hook mostly does not compress.
        is_lasting = self._state.iter > 0 or self._state.start_powerSGD_iter == 0
        if is_gloo and not is_single and is_lasting:
            # The hook's callbacks wait in gloo's threads for each other. Several buckets could take
            # all of these threads, and so deadlock.
            raise ConfigError(
                "algorithm must not be 'powersgd' with several buckets of gradients over gloo, got "
                "several. Give all parameters one dtype and use bucket_cap_mb=1_000_000, or use "
                "algorithm='int8'."
            )
        for name, parameter in zip(names, bucket.parameters(), strict=True):
            if parameter.dim() == 0 or parameter.is_complex():
                rule = "'int8' or another codec for scalar or complex parameters"
                got = f"{POWERSGD!r} with {name!r}"
                raise ConfigError(got_expected("algorithm", got, rule, "algorithm='int8'"))

    def _arrange(self, bucket: GradBucket, layout: dict[str, torch.Size]) -> None:
        """Give torch the state of a bucket's parameters, in the order of the bucket."""
        index = bucket.index()
        # Compare lists: the order counts, and equal dicts may differ in it.
        if list(self._layouts.get(index, ())) == list(layout):
            return
        # Take the state out of all buckets that had some of these parameters.
        for other in [i for i, old in self._layouts.items() if old.keys() & layout.keys()]:
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
            # The hook takes Q only if there is memory for P.
            self._state.p_memory_dict[index] = buffer.new_empty(count)

    def _drop_exact_errors(self, bucket: int, done: Future[Tensor]) -> Tensor:
        """Zero the errors of a bucket's gradients that are not compressed; return its buffer.

        These gradients are the exact means. Torch calls it from another thread, before DDP goes on.
        """
        buffer = done.value()
        if bucket in self._layouts:
            compressed = self._compressed(self._layouts[bucket])
            for name, error in self._errors_of(bucket).items():
                if name not in compressed:
                    error.zero_()
        return buffer

    def _drop_misfits(self, layout: Mapping[str, torch.Size]) -> None:
        """Drop loaded errors and matrices whose sizes are not those of this run, with a warning."""
        sizes_of_q = {
            name: rank * columns for name, (_, columns, rank) in self._compressed(layout).items()
        }
        misfits = [
            (loaded, name)
            for loaded, expected in ((self._errors, _counts(layout)), (self._qs, sizes_of_q))
            for name in layout
            if name in loaded and loaded[name].numel() != expected.get(name)
        ]
        for loaded, name in misfits:
            del loaded[name]
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
        """Return rows, columns and rank, by name, of the gradients that torch compresses.

        They are in torch's order, in which those of one shape follow each other.
        """
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
    """Return the number of elements of each parameter."""
    return {name: shape.numel() for name, shape in layout.items()}


def power_sgd(codec_options: object) -> PowerSGD:
    """Return PowerSGD with the options of a user.

    Args:
        codec_options: Keyword arguments of `PowerSGD` as a dict, or None.

    Raises:
        ConfigError: If an option is unknown or bad.
    """
    options = keyword_arguments("codec_options", codec_options)
    known = inspect.signature(PowerSGD).parameters.keys()
    if not options.keys() <= known:
        rule = f"some of {sorted(known)} for 'powersgd'"
        raise ConfigError(got_expected("codec_options", options, rule, "codec_options=None"))
    return PowerSGD(**options)


def _of_powersgd(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the results of `PowerSGD.state_dict` by rank; an empty list if there are none."""
    return [one[POWERSGD] for one in states if POWERSGD in one]


def without_reordered_errors(
    states: Sequence[Mapping[str, Any]], orders: Mapping[str, Sequence[int]] | None
) -> Sequence[Mapping[str, Any]]:
    """Return the states of all ranks without errors and matrices of reordered parameters.

    Args:
        states: States of all ranks, by rank; those of PowerSGD have the key `POWERSGD`.
        orders: See `without_reordered` of the codecs' states; None if they are not known.
    """
    saved = _of_powersgd(states)
    if orders is None:
        return states
    names = {name for one in saved for key in ("errors", "qs") for name in one[key]}
    reordered = reordered_names(states, names, orders)
    if not reordered:
        return states

    def kept(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in values.items() if name not in reordered}

    return [
        {**one, POWERSGD: {**own, "errors": kept(own["errors"]), "qs": kept(own["qs"])}}
        if (own := one.get(POWERSGD)) is not None
        else one
        for one in states
    ]


def mean_errors(states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the mean of all ranks' flat errors by parameter, empty if there are none.

    The mean is the part of the last mean gradients that was not sent. A rank without an error for a
    parameter counts as zero.

    Args:
        states: States of all ranks, by rank; those of PowerSGD have the key `POWERSGD`.
    """
    saved = _of_powersgd(states)
    names = dict.fromkeys(name for one in saved for name in one["errors"])
    return {
        name: sum(one["errors"][name] for one in saved if name in one["errors"]) / len(saved)
        for name in names
    }
