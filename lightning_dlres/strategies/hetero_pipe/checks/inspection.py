"""Trial step on real samples before training, with the layers run within the step on this rank.

It answers two questions. Does the step take anything from the layers other than the module's
output? And which layers treat micro-batches differently from the batch?

The layers themselves run, not copies, since the user's hooks and attributes are on them. Only one
layer at a time is on the device. Parameters, buffers and attributes are restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres._compat import RECURRENT_CACHES
from lightning_dlres.core import rng
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.capture.crossing import without_objects
from lightning_dlres.pipeline.deferred.values import is_deferred, stand_in_values
from lightning_dlres.pipeline.stage.attribute_state import AttributeState
from lightning_dlres.pipeline.stage.closeness import equal_up_to_rounding, has_same_values
from lightning_dlres.pipeline.stage.microbatch import samples_in
from lightning_dlres.pipeline.stage.module_attributes import MANAGED_ATTRIBUTES
from lightning_dlres.pipeline.stage.shared_inputs import SharedInputs
from lightning_dlres.pipeline.stage.stage import Layer
from lightning_dlres.strategies.hetero_pipe.calls.needs_cut import NeedsCutStepError
from lightning_dlres.strategies.hetero_pipe.step.parameter_guard import LayerTensorGuard
from lightning_dlres.strategies.hetero_pipe.step.step_context import StepContext
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep

# Relative difference of two outputs that counts as rounding.
_TOLERANCE = 1e-3
_COMPARISON_DTYPE = torch.float64
# Largest number of layers that the warning names.
_MAX_NAMES = 8
_SCALARS = (bool, int, float, str, type(None))


@dataclass
class StepInspection:
    """Result of a trial step.

    Attributes:
        refusal: Reason why the step cannot be trained over stages; None if it can.
        failure: Error that ended the trial, so that nothing is known of the step; None without one.
        needs_cut: Error for a step that must be cut in the place of the module, as plain data; None
            if it need not.
        layers: Names of the layers whose result depends on the micro-batches, with the reasons.
        written_parameters: Parameters that a layer's forward writes to.
    """

    refusal: str | None = None
    failure: str | None = None
    needs_cut: list[str] | None = None
    layers: dict[str, list[str]] = field(default_factory=dict)
    written_parameters: set[nn.Parameter] = field(default_factory=set)

    def warning(self) -> str | None:
        """Return one line that names the layers; None without any."""
        if not self.layers:
            return None
        names = [f"{name} ({', '.join(reasons)})" for name, reasons in self.layers.items()]
        more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return (
            "dlres: these layers see one micro-batch at a time, and in plain training the whole "
            f"batch: {', '.join(names[:_MAX_NAMES])}{more}."
        )


def inspect_step(context: StepContext, batch: Any) -> StepInspection:
    """Run one trial step on a batch; parameters, buffers, metrics and random state are restored.

    User hooks may have saved tensors of the layers, which cannot be taken back. These are recorded
    in `context.layer_tensors`, so that a later step that uses one is refused.
    """
    rewind_random_state = rng.rewinder(context.device)
    guard, inspection = LayerTensorGuard(), StepInspection()
    step = LightningStep(context, context.trial_args(batch), keeps_batch=True, is_trial=True)
    layers = _LocalLayers(context, guard, inspection)
    trainable = context.settings.trainable()
    try:
        with torch.enable_grad(), layers.attributes_restored():
            loss, logs = step.run_whole(guard, layers)
            guard.refuse([loss], "as the loss")
            for record in logs:
                guard.refuse([record.value], f"logged as {record.name!r}")
    except Exception as error:
        # User code may have replaced the guard's error by one of its own.
        if guard.refusal is not None:
            inspection.refusal = str(guard.refusal)
        else:
            inspection.failure = f"{type(error).__name__}: {error}"
            if isinstance(error, NeedsCutStepError):
                inspection.needs_cut = error.to_tree()
    finally:
        step.restore_metrics()
        rewind_random_state()
        settings_refusal = context.settings.restore_trainable(trainable)
        inspection.refusal = settings_refusal or inspection.refusal
    guard.layer_tensors.detach_all()
    context.layer_tensors = guard.layer_tensors
    return inspection


class _LocalLayers:
    """The model's layers, run one after the other on this rank.

    Args:
        context: Objects that all steps share.
        guard: Guard that records the tensors that the layers make.
        inspection: Result to fill in.
    """

    def __init__(
        self, context: StepContext, guard: LayerTensorGuard, inspection: StepInspection
    ) -> None:
        self._context, self._guard, self._inspection = context, guard, inspection
        self._saved_attributes: list[AttributeState] = []

    def run(self, inputs: Tree) -> Tree:
        """Return the output of the last layer, as the last stage would have it."""
        with self._guard.paused():
            return self._run(inputs)

    def _run(self, inputs: Tree) -> Tree:
        pipelined = self._context.pipelined
        # The user's code before and after the layers has the batch where it was read.
        homes = {tensor.device for tensor in tensors_of(inputs)} or {self._context.device}
        inputs = map_tensors(self._as_stage_input, inputs)
        for index, (name, module) in enumerate(
            zip(pipelined.layers.names, pipelined.layers.modules, strict=True)
        ):
            with self._guard.running(name):
                output, reasons = self._inspect(module, pipelined.bind(index, module), inputs)
            if reasons:
                self._inspection.layers[name] = reasons
            inputs = map_tensors(self._as_stage_input, output)
        home = homes.pop() if len(homes) == 1 else self._context.device
        output = pipelined.output(inputs)
        return map_tensors(lambda t: t.detach().to(home).requires_grad_(t.requires_grad), output)

    def run_one(self, layer: int, inputs: Tree, call: Layer) -> Tree:
        """Return the output of a layer that the step calls."""
        layers = self._context.pipelined.layers
        # A cache of transformers would keep what the first of two runs has added to it.
        inputs = without_objects(inputs)
        with self._guard.paused():
            homes = {tensor.device for tensor in tensors_of(inputs)} or {self._context.device}
            inputs = map_tensors(self._as_stage_input, inputs)
            with self._guard.running(layers.names[layer]):
                output, reasons = self._inspect(layers.modules[layer], call, inputs)
            if reasons:
                self._inspection.layers[layers.names[layer]] = reasons
            home = homes.pop() if len(homes) == 1 else self._context.device
            return map_tensors(lambda t: self._as_stage_input(t).to(home), output)

    @contextmanager
    def attributes_restored(self) -> Iterator[None]:
        """Context manager that restores the attributes of all layers that have run."""
        try:
            yield
        finally:
            # A module in two layers was saved twice. Reverse order restores its first values last.
            for saved in reversed(self._saved_attributes):
                saved.restore()

    def _inspect(self, module: nn.Module, layer: Any, inputs: Tree) -> tuple[Tree, list[str]]:
        """Run a layer twice: with all samples replaced by the first, and with its real inputs.

        Returns:
            The output for the real inputs, and the reasons why the layer depends on micro-batches.
        """
        self._saved_attributes.append(AttributeState(module.modules()))
        samples, rewind_random_state = samples_in(inputs), rng.rewinder(self._context.device)
        # This run comes first, so that a layer creates attributes that it creates only once, such
        # as a table of positions. The second run then does not show them as changes.
        first_sample_output = None
        with suppress(Exception), _copied_tensors(module, self._context.device):
            first_sample_output = layer(map_tensors(lambda t: _repeat_first(t, samples), inputs))
        rewind_random_state()
        attributes = [(name, m, _comparable_attributes(m)) for name, m in module.named_modules()]
        # A layer may change its input in place, which autograd forbids for a leaf.
        shared = SharedInputs(inputs)
        with _copied_tensors(module, self._context.device) as changed:
            output = layer(shared.copies)
        if self._context.pipelined.captured is None and shared.are_changed():
            self._inspection.refusal = (
                f"{type(module).__name__} must not change one of its inputs in place while "
                "another one shares memory with it, because they may come from another stage, each "
                "by itself. Return a clone() from the layer before, or change a copy."
            )
        reasons = [f"changes its {name}" for name in changed]
        parameters = (t for t in changed.values() if type(t) is nn.Parameter)
        self._inspection.written_parameters.update(parameters)
        for name, m, before in attributes:
            prefix = f"{name}." if name else ""
            now = _comparable_attributes(m)
            new = [key for key, value in now.items() if value != before.get(key)]
            reasons += [f"sets its attribute {prefix + key!r}" for key in new]
        if first_sample_output is not None and not _first_samples_alike(
            first_sample_output, output, samples
        ):
            reasons.append("its output for a sample depends on other samples")
        rewind_random_state()
        # The autocast cache holds casts of the copied parameters.
        torch.clear_autocast_cache()
        return output, reasons

    def _as_stage_input(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._context.device).requires_grad_(tensor.requires_grad)


@contextmanager
def _copied_tensors(module: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Context manager in which a module has copies of its parameters and buffers, on a device.

    An autograd graph that a hook saves then holds copies. If it held the parameters themselves,
    they could not be moved to their stage.

    Yields:
        A dict that is filled at the end, from descriptions such as "buffer 'mean'" to original
        tensors. It has the tensors whose copies have changed, and each parameter that was written
        to, even without a change: another batch may change it (an embedding with `max_norm`).
    """
    changed: dict[str, Tensor] = {}
    originals: list[tuple[nn.Module, str, str, Tensor]] = []
    copies: dict[Tensor, Tensor] = {}
    for prefix, m in module.named_modules():
        prefix = f"{prefix}." if prefix else ""
        for name, p in list(m.named_parameters(recurse=False, remove_duplicate=False)):
            if type(p) is nn.Parameter:
                if p not in copies:
                    copies[p] = nn.Parameter(_copy_on(device, p), p.requires_grad)
                originals.append((m, name, f"parameter {prefix + name!r}", p))
        for name, buffer in list(m.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer not in copies:
                copies[buffer] = _copy_on(device, buffer)
            originals.append((m, name, f"buffer {prefix + name!r}", buffer))
    for m, name, _, tensor in originals:
        setattr(m, name, copies[tensor])
    versions = {
        copies[tensor]: copies[tensor]._version
        for tensor in copies
        if type(tensor) is nn.Parameter or is_deferred(tensor)
    }
    try:
        yield changed
        for m, name, description, tensor in originals:
            copy = getattr(m, name)
            is_written = versions.get(copy, copy._version) != copy._version
            if is_written or not (is_deferred(tensor) or has_same_values(copy, tensor)):
                changed[description] = tensor
    finally:
        for m, name, _, tensor in originals:
            setattr(m, name, tensor)


def _copy_on(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, or numbers for a deferred one."""
    if is_deferred(tensor):
        return stand_in_values([tensor])[0].to(device)
    return tensor.detach().to(device, copy=True)


def _repeat_first(tensor: Tensor, samples: int | None) -> Tensor:
    """Return a tensor with all samples replaced by the first; a copy if it has no samples."""
    if not tensor.dim() or tensor.shape[0] != samples:
        return tensor.clone()
    return tensor[:1].expand_as(tensor).clone()


def _first_samples_alike(a: Tree, b: Tree, samples: int | None) -> bool:
    """Return True if the first samples of two outputs are equal up to rounding."""
    for x, y in zip(tensors_of(a), tensors_of(b), strict=False):
        if x.shape != y.shape or not x.dim() or x.shape[0] != samples:
            continue
        first, other = (
            t[0].detach().to(torch.promote_types(t.dtype, _COMPARISON_DTYPE)) for t in (x, y)
        )
        if not equal_up_to_rounding(first, other, _TOLERANCE):
            return False
    return True


class _ObjectVersion:
    """An object and its version: the version counter of a tensor, or the length of a container.

    Two are equal if they hold the same object at the same version.
    """

    def __init__(self, value: Any, version: int) -> None:
        self._value, self._version = value, version

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _ObjectVersion)
            and other._value is self._value
            and other._version == self._version
        )

    __hash__ = None  # type: ignore[assignment]


def _comparable_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the module's attributes that user code has set and that can be compared, by name.

    A tensor with an autograd graph is left out: it is a result that every forward computes anew.
    """
    attributes: dict[str, Any] = {}
    for name, value in vars(module).items():
        is_cache = name in RECURRENT_CACHES and isinstance(module, nn.RNNBase)
        if name in MANAGED_ATTRIBUTES or is_cache:
            continue
        if isinstance(value, Tensor):
            if value.grad_fn is None:
                attributes[name] = _ObjectVersion(value, value._version)
        elif isinstance(value, _SCALARS):
            attributes[name] = value
        elif isinstance(value, (list, dict, set)):
            attributes[name] = _ObjectVersion(value, len(value))
    return attributes
