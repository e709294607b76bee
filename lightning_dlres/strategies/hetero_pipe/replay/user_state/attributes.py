"""State of user code that a training step changes beside parameters and buffers.

This is: attributes of the LightningModule and of modules outside of the layers; containers, objects
and random generators that these refer to; attributes of callbacks; and settings of the Trainer.

Plain training runs the step once. Here some ranks do not run it, and others run it several times.
So every run starts from the same values, and every rank ends with what one run left. Each run works
on copies of the tensors: writing old values back would invalidate a graph that has saved them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_dlres.core._compat import registered_buffers
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors
from lightning_dlres.pipeline.stage.module_attributes import are_identical
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attribute_changes import (
    IN_PLACE,
    KNOWN,
    PACKED,
    SHARED,
    UNSENDABLE,
    ChangeDecoder,
    Unsendable,
    apply_change,
)
from lightning_dlres.strategies.hetero_pipe.replay.user_state.containers import (
    References,
    arrives_unchanged,
    detached_copy,
    pack,
    with_items,
)
from lightning_dlres.strategies.hetero_pipe.replay.user_state.reading import Reading, Roots
from lightning_dlres.strategies.hetero_pipe.replay.user_state.shared_values import shared_values
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import (
    ABSENT,
    COPIED_TYPES,
    NAMED_KINDS,
    SCALARS,
    ObjectState,
    has_own_attributes,
    kind_of,
    read_content,
    same_generator_state,
    value_key,
)
from lightning_dlres.strategies.hetero_pipe.replay.user_state.value_copies import ValueCopies


class UserState:
    """The user's state that `training_step` can reach.

    Args:
        modules: Returns the modules outside of the layers, with names; the LightningModule's is "".
        layers: The layers. They are left out: their attributes belong to the stages.
        callbacks: The Trainer's callbacks.
        settings: Returns objects of the Trainer by name; see `settings_owners`. Only their numbers,
            strings, short sequences and small tensors count.
    """

    def __init__(
        self,
        modules: Callable[[], Iterable[tuple[str, nn.Module]]],
        layers: Sequence[nn.Module] = (),
        callbacks: Sequence[Callback] = (),
        settings: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._modules, self._callbacks, self._settings = modules, callbacks, settings
        self._layer_ids = {id(inner) for layer in layers for inner in layer.modules()}

    def isolate(
        self,
        layer_tensors: LayerTensors | None = None,
        last: IsolatedState | None = None,
        buffers: Sequence[Tensor] = (),
    ) -> IsolatedState:
        """Replace all tensors and arrays by copies, for one run of the step.

        Args:
            layer_tensors: Tensors that layers made. They are not copied: a use of the original is
                noticed, a use of a copy would not be.
            last: The last run of the same step, which is over. What still holds of it is used
                again, since a step may run once per micro-batch.
            buffers: Tensors that the caller replaces. Those that share memory with others get their
                copies here, too: see `IsolatedState.shared_copy`.
        """
        roots = self._roots()
        if last is not None and not last.reading.is_current(roots):
            last = None
        reading = self._read(roots) if last is None else last.reading
        return IsolatedState(reading, layer_tensors or LayerTensors(), last, buffers)

    def observe(self) -> IsolatedState:
        """Begin a run that keeps its changes; only `diff` of the result may be called."""
        return IsolatedState(self.read(), LayerTensors(), keeps_changes=True)

    def apply(self, changes: Tree, unsendable: Unsendable) -> None:
        """Make the changes of one run, on every rank.

        Args:
            changes: The result of `IsolatedState.diff`, on this rank or another.
            unsendable: `IsolatedState.unsendable` of this rank's last run; empty without a run.
        """
        if not changes:
            return
        states = {state.path: state for state in self.read().states}
        decoder = ChangeDecoder(changes, states, unsendable)
        for path, change in changes.items():
            if path in states:
                apply_change(states[path], change, decoder.decode)

    def all_metrics(self) -> dict[str, nn.Module]:
        """Return the metrics, and the collections of metrics, that exist now."""
        return dict(self.read().metrics)

    def read(self) -> Reading:
        """Return the state as it is now."""
        return self._read(self._roots())

    def _roots(self) -> Roots:
        return Roots(list(self._modules()), self._settings())

    def _read(self, roots: Roots) -> Reading:
        """Return the state of every object that the step can reach, and the metrics.

        The search is breadth-first, so that an object gets the shortest of its names. The order
        depends on the user's objects only, and hence is the same on all ranks.
        """
        states: list[ObjectState] = []
        metrics: list[tuple[str, nn.Module]] = []
        seen: set[int] = set()
        queue: list[tuple[str, Any]] = []
        has_inner_modules = False
        for name, module in roots.modules:
            seen.add(id(module))
            # A module may be a metric that user code made during training, as `MetricTracker` does.
            is_metric = isinstance(module, (Metric, MetricCollection))
            (metrics if is_metric else queue).append((name, module))
        for index, callback in enumerate(self._callbacks):
            queue.append((f"trainer.callbacks[{index}]", callback))
        num_roots = len(queue)
        for name, owner in roots.settings.items():
            if id(owner) not in seen and (isinstance(owner, dict) or hasattr(owner, "__dict__")):
                seen.add(id(owner))
                state = ObjectState.read(name, owner, "settings")
                states.append(state)
                queue += state.children()
        for index, (path, value) in enumerate(queue):
            kind, is_root = kind_of(value), index < num_roots
            # Root modules are in `seen` from the start, so that no attribute adds one again.
            if kind is None or (id(value) in seen and not is_root):
                continue
            seen.add(id(value))
            if kind == "module" and not is_root:
                # A list or a callback holds it: submodules of the LightningModule are all roots.
                if id(value) in self._layer_ids:
                    continue
                has_inner_modules = True
                queue += [(f"{path}.{name}", child) for name, child in value.named_children()]
                buffers, not_persistent = registered_buffers(value)
                states.append(ObjectState.read(f"{path}'s buffers", buffers, "dict"))
                owner = f"{path}'s buffers outside of the state dict"
                states.append(ObjectState.read(owner, not_persistent, "set"))
            if kind == "metric":
                metrics.append((path, value))
                continue
            state = ObjectState.read(path, value, kind)
            # A tuple cannot change, but its items may hold state.
            if kind != "tuple":
                states.append(state)
            queue += state.children()
            if has_own_attributes(value):
                queue.append((f"{path}'s attributes", vars(value)))
        return Reading(states, metrics, None if has_inner_modules else roots)


class IsolatedState:
    """The user's state during one run of the step, with copies in place of tensors and arrays.

    The constructor puts the copies there. Then follow the run, `diff`, and `restore`.

    Args:
        reading: The state of all objects before the run.
        layer_tensors: Tensors that layers made, which are not copied.
        last: The run before, whose unchanged copies serve this run, too; None copies all.
        buffers: Further tensors of which `shared_copy` may return copies.
        keeps_changes: True leaves tensors and arrays in their places; the run may change them.

    Attributes:
        reading: As the argument.
        unsendable: New values that cannot be sent to other ranks, by the path of the object that
            holds them and their name in it. Filled by `diff`.
    """

    def __init__(
        self,
        reading: Reading,
        layer_tensors: LayerTensors,
        last: IsolatedState | None = None,
        buffers: Sequence[Tensor] = (),
        *,
        keeps_changes: bool = False,
    ) -> None:
        states = reading.states
        self.reading, self._states, self._layer_tensors = reading, states, layer_tensors
        self._copies: ValueCopies = ValueCopies(
            None if last is None else last._copies, keeps_originals=keeps_changes
        )
        self._paths = {id(state.owner): state.path for state in states}
        # Values of the diff that is being made: pairs to fill in, with arguments of `_encoded`.
        self._pending: list[tuple[list[Any], str, Any, Any]] = []
        self.unsendable: dict[tuple[str, Any], Any] = {}
        # States that `diff` could not rule out; None before.
        self._changed: list[ObjectState] | None = None
        copied = [state for state in states if state.holds_copied]
        values = [value for state in copied for value in self._copied_values(state)]
        self._copies.prepare(values, buffers)
        for state in copied:
            content = self._copied_content(state)
            if not keeps_changes:
                state.write(content)

    def shared_copy(self, buffer: Tensor) -> Tensor | None:
        """Return the copy of a buffer that shares memory with other values; None if it does not."""
        copy: Tensor | None = self._copies.in_shared_memory.get(id(buffer))
        return copy

    def diff(self) -> Tree:
        """Return the changes of the run, by path; see `attribute_changes` for their form."""
        self._pending, self._changed = [], self._possibly_changed()
        changes = {state.path: self._change_of(state) for state in self._changed}
        found = {path: change for path, change in changes.items() if change is not None}
        return found | self._encode_pending()

    def diff_so_far(self) -> Tree:
        """Return the changes until now, like `diff`; user code may run on."""
        changes, self._changed = self.diff(), None
        self._copies.forget_writes()
        return changes

    def restore(self, layer_tensors: LayerTensors | None = None) -> None:
        """Write the content from before the run back into all objects.

        After `diff`, no user code may run before this.

        Args:
            layer_tensors: Tensors that layers made during this run. If a hook stored one as an
                attribute, the attribute keeps it, so that a later use of it is noticed.
        """
        for state in self._possibly_changed() if self._changed is None else self._changed:
            if layer_tensors and state.kind in NAMED_KINDS:
                for name, value in read_content(state.owner, state.kind).items():
                    if isinstance(value, Tensor) and layer_tensors.layer_of(value) is not None:
                        state.content[name] = value
            state.write(state.content)

    def _possibly_changed(self) -> list[ObjectState]:
        return [state for state in self._states if not state.is_surely_unchanged()]

    def _copied_content(self, state: ObjectState) -> Any:
        path, is_setting = state.path, state.kind == "settings"
        if state.kind in NAMED_KINDS:
            return {
                name: self._copy(value, [path, name if type(name) is str else index], is_setting)
                for index, (name, value) in enumerate(state.content.items())
            }
        if state.kind in ("list", "deque"):
            return [self._copy(item, [path, i], is_setting) for i, item in enumerate(state.content)]
        return state.content

    def _copied_values(self, state: ObjectState) -> Iterator[Any]:
        """Yield the tensors and arrays of an object of which the run gets copies."""
        values = state.content.values() if state.kind in NAMED_KINDS else state.content
        pending = list(values) if state.kind in (*NAMED_KINDS, "list", "deque") else []
        for value in pending:
            if isinstance(value, tuple):
                pending.extend(value)
            elif self._is_copied(value):
                yield value

    def _is_copied(self, value: Any) -> bool:
        kind = type(value)
        made_by_layer = kind is Tensor and self._layer_tensors.layer_of(value) is not None
        return kind in COPIED_TYPES and not made_by_layer

    def _copy(self, value: Any, place: list[Any], is_setting: bool) -> Any:
        """Return a copy of a tensor or array, also inside a tuple; any other value itself."""
        if isinstance(value, tuple):
            items = [self._copy(item, [*place, i], is_setting) for i, item in enumerate(value)]
            return value if are_identical(items, value) else with_items(value, items)
        if not self._is_copied(value):
            return value
        return self._copies.copy_of(value, place, is_setting)

    def _change_of(self, state: ObjectState) -> Tree:
        before, now = state.content, read_content(state.owner, state.kind)
        if state.kind in NAMED_KINDS:
            return self._change_of_names(state, before, now)
        if state.kind in ("list", "deque"):
            starts_alike = all(map(self._is_same, before, now))
            if len(now) == len(before) and starts_alike:
                return None
            # A list that has grown sends only its new items. A deque is sent whole: one with a
            # maximal length drops its first items as it grows.
            has_grown = starts_alike and len(now) > len(before)
            start = len(before) if has_grown and state.kind == "list" else 0
            items = enumerate(now[start:], start)
            return ["items", start, [self._encoded(state.path, i, item) for i, item in items]]
        if state.kind == "set":
            return self._change_of_set(state.path, before, now)
        return None if same_generator_state(before, now) else ["state", now]

    def _change_of_names(self, state: ObjectState, before: Any, now: Any) -> Tree:
        path = state.path
        new = [
            [
                self._encoded_key(path, ("key", index), key),
                self._encoded(path, _sendable_name(key, index), value),
            ]
            for index, (key, value) in enumerate(now.items())
            if not self._is_same(before.get(key, ABSENT), value)
        ]
        # A setting that is missing now may still exist: it may have become too large to count.
        removed = [
            self._encoded_key(path, ("old key", index), key)
            for index, key in enumerate(before)
            if key not in now and state.kind != "settings"
        ]
        order = None
        if state.kind == "dict":
            expected = [k for k in before if k in now] + [k for k in now if k not in before]
            # Equal keys are not always the same one, such as 1 and True.
            if not are_identical(expected, now) and (
                list(map(value_key, expected)) != list(map(value_key, now))
            ):
                order = [self._encoded_key(path, ("key", i), key) for i, key in enumerate(now)]
        return ["names", new, removed, order] if new or removed or order else None

    def _change_of_set(self, path: str, before: set[Any], now: set[Any]) -> Tree:
        # Compare ids first, since keys cost more: most members are the same objects. An object that
        # took the place of one with the same key is no change.
        ids_before, ids_now = set(map(id, before)), set(map(id, now))
        only_before = {value_key(member): member for member in before if id(member) not in ids_now}
        only_now = {value_key(member): member for member in now if id(member) not in ids_before}
        new = [
            self._encoded(path, i, only_now[k])
            for i, k in enumerate(only_now)
            if k not in only_before
        ]
        removed = [
            self._encoded(path, ("old member", i), only_before[k])
            for i, k in enumerate(only_before)
            if k not in only_now
        ]
        return ["set", new, removed] if new or removed else None

    def _encoded_key(self, path: str, name: Any, key: Any) -> list[Any]:
        """Return the pair of an encoding and a key; see `_encoded`."""
        return [None, key] if type(key) is str else self._encoded(path, name, key)

    def _encoded(self, path: str, name: Any, value: Any) -> list[Any]:
        """Return a pair for an encoding and the value to send; see `attribute_changes`.

        `_encode_pending` fills it in, once all values are known.

        Args:
            path: Path of the object that the value belongs to.
            name: Name of the value in this object, as in the keys of `unsendable`: a key, an index,
                or a pair such as ("old key", index).
            value: The value.
        """
        pair: list[Any] = []
        self._pending.append((pair, path, name, value))
        return pair

    def _encode_pending(self) -> Tree:
        """Fill in all pairs of `_encoded`, and return the shared values as a change.

        A value that cannot be sent is added to `unsendable`.
        """
        if not self._pending:
            return {}
        references: dict[int, Tree] = {id_: [KNOWN, path] for id_, path in self._paths.items()}
        values = [value for *_, value in self._pending]
        shared: list[Tree] = []
        for value in shared_values(values, self._paths, self._copies.copies):
            # One that cannot be sent is reported below, for each of its names.
            with suppress(ConfigError, RecursionError):
                shared.append(self._encoding_of(value, references))
                references[id(value)] = [SHARED, len(shared) - 1]
        # Name of the first value that may use a shared one. Errors show it, since the shared values
        # have no path of their own.
        first_user = None
        for pair, path, name, value in self._pending:
            try:
                pair += references.get(id(value)) or self._encoding_of(value, references)
            except (ConfigError, RecursionError):
                self.unsendable[path, name] = value
                pair += [UNSENDABLE, [type(value).__name__, path, name]]
            if first_user is None and pair[0] in (SHARED, PACKED):
                first_user = f"{path}.{name}" if path else str(name)
        return {f"{first_user} and other names": ["shared", shared]} if shared else {}

    def _encoding_of(self, value: Any, references: References) -> Tree:
        """Return the encoding of a value, and the value to send.

        Raises:
            ConfigError: If the value cannot be sent.
        """
        known = self._copies.copies.get(id(value))
        if known is not None:
            return [IN_PLACE, [known.place, map_tensors(detached_copy, value)]]
        if arrives_unchanged(value, references):
            return [None, map_tensors(detached_copy, value)]
        return [PACKED, pack(value, references)]

    def _is_same(self, before: Any, now: Any) -> bool:
        """Return whether the run left a value as it was; its unwritten copy counts as the same."""
        if before is now and not isinstance(now, tuple):
            return not self._copies.is_written(now)
        known = self._copies.copies.get(id(now))
        if known is not None:
            return before is known.original and not self._copies.is_written(now)
        if type(before) is not type(now):
            return False
        if isinstance(before, tuple):
            if len(before) != len(now) or not all(map(self._is_same, before, now)):
                return False
            # A tuple of the user's class may have attributes beside its items.
            attributes = [tuple(getattr(t, "__dict__", {}).items()) for t in (before, now)]
            return not any(attributes) or self._is_same(*attributes)
        return value_key(before) == value_key(now)


def _sendable_name(key: Any, index: int) -> Any:
    """Return a name for the value under a key: the key itself if it can be sent."""
    parts = key if type(key) is tuple else (key,)
    return key if all(type(part) in SCALARS for part in parts) else ("value of key", index)
