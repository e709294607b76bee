"""States of torchmetrics objects, sent from the rank that updated them to all others.

In training only the last stage updates a metric, but every rank computes it at the end of the
epoch. If the step ran on the whole batch, other ranks get the changes of the states (`diff`,
`apply`). If it ran per micro-batch, every last stage sends the states of its micro-batches, and all
ranks merge them (`reset`, `partial_states`, `merge`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_dlres import _compat
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import (
    same_tensors,
    value_key,
)

# Relative difference of two states that counts as rounding.
_ROUNDING = 1e-4
# Metrics of runs that are over, by id, with their number of updates at the end of the run. User
# code may still compute them, in hooks such as `on_fit_end` or after the run.
_finished: dict[int, tuple[weakref.ref[Metric], int]] = {}


class MetricSnapshot(NamedTuple):
    """The state of one metric.

    Attributes:
        state: The states that torchmetrics knows, by name.
        numbers: The metric's attributes that are numbers or flags.
        updates: Number of updates since the last reset.
        last_value: Result of the last `forward`.
    """

    state: dict[str, Any]
    numbers: dict[str, Any]
    updates: int
    last_value: Any


Snapshot = dict[str, MetricSnapshot]


@contextmanager
def metric_sync_disabled(reachable: Callable[[], Iterable[Metric]]) -> Iterator[None]:
    """Context manager in which no metric gathers the states of all ranks.

    Every rank has the states of the whole batches, so that a sum over ranks would count each batch
    several times. `Metric.sync` is replaced in the class: user code may keep metrics anywhere, and
    make them at any time.

    Args:
        reachable: Returns the metrics of the run; called at its end. They do not gather states
            after the run either, until they are updated again.
    """
    original = Metric.sync

    def sync(self: Metric, *args: Any, **kwargs: Any) -> None:
        """Leave the state as it is."""

    Metric.sync = sync  # type: ignore[method-assign]
    try:
        yield
    finally:
        _finished.update({id(m): (weakref.ref(m), m.update_count) for m in reachable()})
        is_wrapped = hasattr(original, "skips_finished_metrics")
        Metric.sync = original if is_wrapped else _skipping_finished(original)  # type: ignore[method-assign]


def _skipping_finished(original: Callable[..., None]) -> Callable[..., None]:
    """Return a `Metric.sync` that does nothing for metrics of runs that are over."""

    @wraps(original)
    def sync(self: Metric, *args: Any, **kwargs: Any) -> None:
        metric, updates = _finished.get(id(self), (None, 0))
        if metric is None or metric() is not self or updates != self.update_count:
            original(self, *args, **kwargs)

    sync.skips_finished_metrics = True  # type: ignore[attr-defined]
    return sync


class MetricStates:
    """The states of all metrics of a model.

    Args:
        root: The LightningModule.

    Attributes:
        metrics: The metrics by name.
    """

    def __init__(self, root: nn.Module) -> None:
        self.metrics = {name: m for name, m in root.named_modules() if isinstance(m, Metric)}
        self._collections = [m for m in root.modules() if isinstance(m, MetricCollection)]

    def register(self, present: Mapping[str, nn.Module]) -> None:
        """Add metrics, and collections of metrics, that are not known yet.

        A new metric replaces an old one of the same name.
        """
        known_ids = set(map(id, self.metrics.values()))
        for path, module in present.items():
            if id(module) in known_ids:
                continue
            for name, inner in module.named_modules(prefix=path):
                if isinstance(inner, Metric):
                    if id(inner) not in known_ids:
                        self.metrics[name] = inner
                elif isinstance(inner, MetricCollection) and inner not in self._collections:
                    self._collections.append(inner)

    def name_of(self, metric: Metric) -> str | None:
        """Return the name of a metric; None if it is not known."""
        return next((name for name, m in self.metrics.items() if m is metric), None)

    def first_unmergeable(self) -> str | None:
        """Return the name of the first metric whose state cannot be merged from parts of a batch;
        None without one."""
        for name, metric in self.metrics.items():
            updates_by_parts = metric.full_state_update is False
            mergers = _compat.metric_mergers(metric)
            # Lists cannot be summed. The state's present type counts: it may differ from the
            # default's.
            has_lists_to_reduce = any(
                isinstance(state, list) and mergers.get(key) != "cat"
                for key, state in metric.metric_state.items()
            )
            if not updates_by_parts or None in mergers.values() or has_lists_to_reduce:
                return str(name)
        return None

    def snapshot(self) -> Snapshot:
        """Return copies of all states."""
        self._separate_compute_groups()
        return {name: _snapshot_of(metric) for name, metric in self.metrics.items()}

    def restore(self, snapshot: Snapshot) -> None:
        """Put the states of a snapshot back; the snapshot can be used again."""
        for name, (state, numbers, updates, last_value) in snapshot.items():
            self._set(name, {k: _copied_state(v) for k, v in state.items()}, updates, last_value)
            vars(self.metrics[name]).update(numbers)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Context manager that restores all states at its end."""
        saved = self.snapshot()
        try:
            yield
        finally:
            self.restore(saved)

    def diff(self, before: Snapshot) -> Tree:
        """Return the changes since a snapshot. A list that has grown gives only its new items."""
        self._separate_compute_groups()
        changes = {}
        for name, metric in self.metrics.items():
            old, new = before[name], _snapshot_of(metric)
            deltas = {
                key: delta
                for key, value in new.state.items()
                if (delta := _delta(old.state[key], value)) is not None
            }
            # Compared by key: 0 equals False, and NaN does not equal itself.
            numbers_differ = any(
                value_key(old.numbers.get(key)) != value_key(value)
                for key, value in new.numbers.items()
            )
            counts_differ = new.updates != old.updates or numbers_differ
            if deltas or counts_differ or new.last_value is not old.last_value:
                changes[name] = [deltas, new.numbers, new.updates, _detached_tree(new.last_value)]
        return changes

    def apply(self, changes: Tree) -> None:
        """Make the changes of another rank's `diff`."""
        for name, (deltas, numbers, updates, last_value) in changes.items():
            current = self.metrics[name].metric_state
            new = {key: _patched(current[key], *delta) for key, delta in deltas.items()}
            self._set(name, new, updates, last_value)
            vars(self.metrics[name]).update(numbers)

    def reset(self) -> None:
        """Reset all metrics, so that they collect the state of some micro-batches only."""
        for metric in self.metrics.values():
            # torchmetrics cannot reset a list state that has become a tensor, or a tensor state
            # that has become a list.
            for key, default in _compat.metric_defaults(metric).items():
                if isinstance(default, list) != isinstance(getattr(metric, key), list):
                    value = [] if isinstance(default, list) else default.to(metric.device)
                    setattr(metric, key, value)
            metric.reset()

    def partial_states(self) -> Tree:
        """Return the states that metrics have collected since `reset`."""
        self._separate_compute_groups()
        parts = {}
        for name, metric in self.metrics.items():
            updates, last_value = _compat.metric_progress(metric)
            if updates:
                parts[name] = [_detached_tree(metric.metric_state), last_value is not None]
        return parts

    def merge(self, parts: Sequence[Tree]) -> None:
        """Add the partial states of one batch, in the order of micro-batches, as one update.

        The last value of a metric that was called (not only updated) becomes that of the batch.
        """
        for name in [n for n in self.metrics if any(n in part for part in parts)]:
            metric = self.metrics[name]
            mergers = _compat.metric_mergers(metric)
            states = [part[name][0] for part in parts if name in part]
            batch = {k: _merged([s[k] for s in states], merger) for k, merger in mergers.items()}
            before, (updates, last_value) = metric.metric_state, _compat.metric_progress(metric)
            if any(part[name][1] for part in parts if name in part):
                # `compute` reads the metric's own state, so give it the batch's temporarily.
                self._set(name, batch, 1, None)
                last_value = metric.compute()
            total = (
                {k: _merged([before[k], batch[k]], merger) for k, merger in mergers.items()}
                if updates
                else batch
            )
            self._set(name, total, updates + 1, last_value)

    def first_differing(self, snapshot: Snapshot) -> str | None:
        """Return the name of the first metric whose state differs from the snapshot by more than
        rounding; None without one."""
        for name, current in self.snapshot().items():
            expected = snapshot[name].state
            if not all(_is_close(value, expected[key]) for key, value in current.state.items()):
                return str(name)
        return None

    def _set(self, name: str, state: dict[str, Any], updates: int, last_value: Any) -> None:
        metric = self.metrics[name]
        for key, value in state.items():
            setattr(metric, key, map_tensors(lambda t: t.to(metric.device), value))
        _compat.set_metric_progress(metric, updates, last_value)

    def _separate_compute_groups(self) -> None:
        # Members of a compute group share one state. Only the collection's own accessor brings all
        # members up to date.
        for collection in self._collections:
            collection.items(copy_state=False)


def _snapshot_of(metric: Metric) -> MetricSnapshot:
    state = {key: _copied_state(value) for key, value in metric.metric_state.items()}
    numbers = {k: v for k, v in vars(metric).items() if type(v) in (bool, int, float)}
    return MetricSnapshot(state, numbers, *_compat.metric_progress(metric))


def _detached_tree(state: Any) -> Any:
    return map_tensors(lambda t: t.detach().clone(), state)


def _copied_state(value: Any) -> Any:
    # A tensor state is updated in place; a list state grows, and its items stay as they are.
    return list(value) if isinstance(value, list) else value.detach().clone()


def _delta(old: Any, new: Any) -> list[Any] | None:
    """Return [number of list items that stay, new value or new items]; None without a change."""
    if not isinstance(new, list) or not isinstance(old, list):
        # A list state may become a tensor, or a tensor state a list.
        is_same = isinstance(old, Tensor) and isinstance(new, Tensor) and same_tensors(old, new)
        return None if is_same else [0, _detached_tree(new)]
    starts_alike = all(a is b for a, b in zip(old, new, strict=False)) and len(new) >= len(old)
    stays = len(old) if starts_alike else 0
    return None if stays == len(new) == len(old) else [stays, _detached_tree(new[stays:])]


def _patched(current: Any, start: int, value: Any) -> Any:
    """Return a state after a delta: the new value, or the first items and the new ones."""
    if not isinstance(value, list):
        return value
    # Nothing stays of a tensor that becomes a list. A tensor without dimensions has no first items.
    return [*current[:start], *value] if start else list(value)


def _merged(states: list[Any], merger: str | None) -> Any:
    """Return one state made of several.

    Args:
        states: States of the same name, in the order of micro-batches.
        merger: "cat", "sum", "max" or "min". A metric with None is not run per micro-batch; see
            `first_unmergeable`.
    """
    if merger == "cat":
        if any(isinstance(state, list) for state in states):
            # Some parts may have a tensor, which is the concatenation of a list.
            lists = [state if isinstance(state, list) else [state] for state in states]
            return [item for items in lists for item in items]
        return torch.cat([torch.atleast_1d(state) for state in states])
    stacked: Tensor = torch.stack(states)
    if merger == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if merger == "max" else stacked.amin(0)


def _is_close(value: Any, expected: Any) -> bool:
    # A list state may be divided into items differently: only its concatenation counts.
    a, b = (
        torch.cat([torch.atleast_1d(t) for t in v] or [torch.empty(0)]).double()
        if isinstance(v, list)
        else v.double()
        for v in (value, expected)
    )
    if a.shape != b.shape:
        return False
    scale = float(b.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING * scale, equal_nan=True)
