"""States of torchmetrics objects, carried from the rank that updated them to all others.

Only the last stage sees outputs in training, but every rank computes the metric at the end of the
epoch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_dlres import _compat
from lightning_dlres.core.wire.tree import Tree, map_tensors

_ROUNDING = 1e-4
# Metrics of runs that are over, by id, with their number of updates: hooks such as `on_fit_end`,
# and the script, still compute them.
_left: dict[int, tuple[weakref.ref[Metric], int]] = {}
Snapshot = dict[str, tuple[dict[str, Any], dict[str, Any], int, Any]]


@contextmanager
def never_synchronised(reachable: Callable[[], Iterable[Metric]]) -> Iterator[None]:
    """Context manager that keeps metrics from gathering the states of all ranks, wherever they are
    kept and whenever they are made: every rank has seen the whole batches.

    Args:
        reachable: returns the run's metrics, at its end. They stay so until they are updated again.
    """
    own = Metric.sync

    def sync(self: Metric, *args: Any, **kwargs: Any) -> None:
        """Leave the state as it is."""

    Metric.sync = sync  # type: ignore[method-assign]
    try:
        yield
    finally:
        _left.update({id(m): (weakref.ref(m), m.update_count) for m in reachable()})
        Metric.sync = own if hasattr(own, "spares_runs_that_are_over") else _sparing(own)  # type: ignore[method-assign]


def _sparing(own: Callable[..., None]) -> Callable[..., None]:
    @wraps(own)
    def sync(self: Metric, *args: Any, **kwargs: Any) -> None:
        metric, updates = _left.get(id(self), (None, 0))
        if metric is None or metric() is not self or updates != self.update_count:
            own(self, *args, **kwargs)

    sync.spares_runs_that_are_over = True  # type: ignore[attr-defined]
    return sync


class MetricStates:
    """The metrics of a module."""

    def __init__(self, root: nn.Module) -> None:
        self.metrics = {name: m for name, m in root.named_modules() if isinstance(m, Metric)}
        self._collections = [m for m in root.modules() if isinstance(m, MetricCollection)]

    def add(self, present: Mapping[str, nn.Module]) -> None:
        """Take in metrics, and collections of them, that are not known yet; one that has taken
        another's name takes its place."""
        known = set(map(id, self.metrics.values()))
        for path, module in present.items():
            if id(module) in known:
                continue
            for name, inner in module.named_modules(prefix=path):
                if isinstance(inner, Metric):
                    if id(inner) not in known:
                        self.metrics[name] = inner
                elif isinstance(inner, MetricCollection) and inner not in self._collections:
                    self._collections.append(inner)

    def name_of(self, metric: Metric) -> str | None:
        """Return a metric's name in the module."""
        return next((name for name, m in self.metrics.items() if m is metric), None)

    def unmergeable(self) -> str | None:
        """Return the name of a metric whose state cannot be put together from parts of a batch, if
        there is one."""
        for name, metric in self.metrics.items():
            by_parts = metric.full_state_update is False
            if not by_parts or None in _compat.metric_mergers(metric).values():
                return str(name)
        return None

    def snapshot(self) -> Snapshot:
        """Return all states."""
        self._unlink()
        return {name: self._state_of(metric) for name, metric in self.metrics.items()}

    def restore(self, snapshot: Snapshot) -> None:
        """Put back what `snapshot` returned."""
        for name, (state, numbers, updates, last_value) in snapshot.items():
            self._set(name, {k: _kept(v) for k, v in state.items()}, updates, last_value)
            vars(self.metrics[name]).update(numbers)

    def unlike(self, snapshot: Snapshot) -> str | None:
        """Return the name of a metric whose state is not that of the snapshot, up to rounding."""
        for name, (state, *_) in self.snapshot().items():
            expected = snapshot[name][0]
            if not all(_close(value, expected[key]) for key, value in state.items()):
                return str(name)
        return None

    def reset(self) -> None:
        """Start all metrics anew."""
        for metric in self.metrics.values():
            metric.reset()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Undo whatever happens to the metrics meanwhile."""
        saved = self.snapshot()
        try:
            yield
        finally:
            self.restore(saved)

    def changes_since(self, base: Snapshot) -> Tree:
        """Return what other ranks need to follow; of a growing list only what is new."""
        self._unlink()
        changes = {}
        for name, metric in self.metrics.items():
            before, numbers_before, updates_before, value_before = base[name]
            state, numbers, updates, last_value = self._state_of(metric)
            deltas = {k: d for k, v in state.items() if (d := _delta(v, before[k])) is not None}
            counted = updates != updates_before or numbers != numbers_before
            if deltas or counted or last_value is not value_before:
                changes[name] = [deltas, numbers, updates, _copy(last_value)]
        return changes

    def apply(self, changes: Tree) -> None:
        """Follow the changes of another rank."""
        for name, (deltas, numbers, updates, last_value) in changes.items():
            current = self.metrics[name].metric_state
            new = {k: _grown(current[k], start, value) for k, (start, value) in deltas.items()}
            self._set(name, new, updates, last_value)
            vars(self.metrics[name]).update(numbers)

    def _state_of(self, metric: Metric) -> tuple[dict[str, Any], dict[str, Any], int, Any]:
        state = {key: _kept(value) for key, value in metric.metric_state.items()}
        numbers = {k: v for k, v in vars(metric).items() if type(v) in (int, float)}
        return (state, numbers, *_compat.metric_progress(metric))

    def part(self) -> Tree:
        """Return the state that metrics have gathered since `reset`, over some micro-batches."""
        self._unlink()
        parts = {}
        for name, metric in self.metrics.items():
            updates, last_value = _compat.metric_progress(metric)
            if updates:
                parts[name] = [_copy(metric.metric_state), last_value is not None]
        return parts

    def merge(self, parts: Sequence[Tree]) -> None:
        """Add parts of one batch, in order, as one update; the metric's last value becomes that of
        the batch."""
        for name in [n for n in self.metrics if any(n in part for part in parts)]:
            metric = self.metrics[name]
            mergers = _compat.metric_mergers(metric)
            states = [part[name][0] for part in parts if name in part]
            batch = {k: _merged([s[k] for s in states], how) for k, how in mergers.items()}
            before, (updates, last_value) = metric.metric_state, _compat.metric_progress(metric)
            if any(part[name][1] for part in parts if name in part):
                self._set(name, batch, 1, None)
                last_value = metric.compute()
            total = (
                {k: _merged([before[k], batch[k]], how) for k, how in mergers.items()}
                if updates
                else batch
            )
            self._set(name, total, updates + 1, last_value)

    def _set(self, name: str, state: dict[str, Any], updates: int, last_value: Any) -> None:
        metric = self.metrics[name]
        for key, value in state.items():
            setattr(metric, key, map_tensors(lambda t: t.to(metric.device), value))
        _compat.set_metric_progress(metric, updates, last_value)

    def _unlink(self) -> None:
        # Members of a compute group share one state, which only the collection's own accessor
        # brings up to date.
        for collection in self._collections:
            collection.items(copy_state=False)


def _copy(state: Any) -> Any:
    return map_tensors(lambda t: t.detach().clone(), state)


def _kept(value: Any) -> Any:
    # Tensors are updated in place; the elements of a list are not.
    return list(value) if isinstance(value, list) else value.detach().clone()


def _delta(value: Any, before: Any) -> list[Any] | None:
    """Return [number of list elements that stay, what is new], or None if nothing is."""
    if not isinstance(value, list) or not isinstance(before, list):
        same = isinstance(before, Tensor) and value.shape == before.shape
        return None if same and torch.equal(value, before) else [0, _copy(value)]
    stays = len(before) if all(a is b for a, b in zip(before, value, strict=False)) else 0
    stays = stays if len(value) >= len(before) else 0
    return None if stays == len(value) == len(before) else [stays, _copy(value[stays:])]


def _grown(current: Any, start: int, value: Any) -> Any:
    return [*current[:start], *value] if isinstance(value, list) else value


def _merged(states: list[Any], how: str | None) -> Any:
    if how == "cat":
        if isinstance(states[0], list):
            return [item for state in states for item in state]
        return torch.cat([torch.atleast_1d(state) for state in states])
    stacked: Tensor = torch.stack(states)
    return stacked.sum(0) if how == "sum" else stacked.amax(0) if how == "max" else stacked.amin(0)


def _close(value: Any, expected: Any) -> bool:
    # How a list was cut into elements does not matter.
    a, b = (
        torch.cat([torch.atleast_1d(t) for t in v] or [torch.empty(0)]).double()
        if isinstance(v, list)
        else v.double()
        for v in (value, expected)
    )
    if a.shape != b.shape:
        return False
    scale = float(b.abs().amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING * scale, equal_nan=True)
