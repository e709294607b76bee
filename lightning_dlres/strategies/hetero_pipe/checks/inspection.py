"""One training step on real samples before training, with the layers run within it on this rank:
does the step take anything from the layers past the module's output, and which layers do not treat
micro-batches as they would treat the batch?

The layers themselves run, not copies, since hooks and attributes are on them. One at a time is on
the device; parameters, buffers and attributes are put back.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core import rng
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.stage.microbatch import samples_in
from lightning_dlres.strategies.hetero_pipe.step.parameter_guard import LayerTensorGuard
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep, StepContext

_TOLERANCE = 1e-3
_EXACT = torch.float64
_NAMED = 8
_SCALARS = (bool, int, float, str, type(None))
# What torch and Lightning keep in a module's attributes.
_OF_TORCH = frozenset(vars(nn.Module()))


@dataclass
class Findings:
    """What one step on real samples showed.

    Attributes:
        refusal: why the step cannot be trained over stages; None if it can.
        unchecked: why the step could not be run; None if it was.
        layers: for every layer that sees the difference between a batch and its micro-batches, how.
        parameters: parameters that a layer's forward writes to.
    """

    refusal: str | None = None
    unchecked: str | None = None
    layers: dict[str, list[str]] = field(default_factory=dict)
    parameters: set[nn.Parameter] = field(default_factory=set)

    def line(self) -> str | None:
        """Return one line that names the layers; None if there are none."""
        if not self.layers:
            return None
        named = [f"{name} ({', '.join(how)})" for name, how in self.layers.items()]
        more = f", and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        return (
            "dlres: these layers see one micro-batch at a time, which plain training does not do: "
            f"{', '.join(named[:_NAMED])}{more}."
        )


def inspect_step(context: StepContext, batch: Any) -> Findings:
    """Run one step on a batch; parameters, buffers, metrics, and random state stay as they were.

    What hooks of the user's took stays with them: `context.leftovers` knows it afterwards.
    """
    takes_index = len(inspect.signature(context.module.training_step).parameters) > 1
    args = (batch, 0) if takes_index else (batch,)
    rewind_random_state = rng.held(context.device)
    guard, findings = LayerTensorGuard(), Findings()
    step, run = (
        LightningStep(context, args, untouched=True, trial=True),
        _Layers(context, guard, findings),
    )
    trainable = context.settings.trainable()
    try:
        with torch.enable_grad(), run.put_back():
            loss, records = step.try_out(guard, run.through)
            guard.refuse([loss], "as the loss")
            for record in records:
                guard.refuse([record.value], f"logged as {record.name!r}")
    except Exception as error:
        if guard.refusal is not None:
            findings.refusal = str(guard.refusal)
        else:
            findings.unchecked = f"{type(error).__name__}: {error}"
    finally:
        step.undo_metrics()
        rewind_random_state()
        findings.refusal = context.settings.restore_trainable(trainable) or findings.refusal
    guard.made.detach_all()
    context.leftovers = guard.made
    return findings


class _Layers:
    """The model's layers, run one after the other on this rank."""

    def __init__(self, context: StepContext, guard: LayerTensorGuard, findings: Findings) -> None:
        self._context, self._guard, self._findings = context, guard, findings
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []

    def through(self, inputs: Tree) -> Tree:
        """Return the output of the last layer, as a stage would."""
        with self._guard.paused():
            return self._through(inputs)

    def _through(self, inputs: Tree) -> Tree:
        pipelined = self._context.pipelined
        inputs = map_tensors(self._entered, inputs)
        for index, (name, module) in enumerate(
            zip(pipelined.layers.names, pipelined.layers.modules, strict=True)
        ):
            with self._guard.running(name):
                output, how = self._try_out(module, pipelined.bind(index, module), inputs)
            if how:
                self._findings.layers[name] = how
            inputs = map_tensors(self._entered, output)
        return inputs

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Context manager after which the layers have the attributes of before."""
        try:
            yield
        finally:
            for module, before in reversed(self._attributes):
                vars(module).clear()
                vars(module).update(before)

    def _try_out(self, module: nn.Module, layer: Any, inputs: Tree) -> tuple[Tree, list[str]]:
        """Run a layer twice: with its first sample in the place of all others, and as it is."""
        self._attributes += [(m, dict(vars(m))) for m in module.modules()]
        samples, rewind_random_state = samples_in(inputs), rng.held(self._context.device)
        # First, since it also makes what a layer makes once, such as a table of positions.
        other = None
        with suppress(Exception), _lent(module, self._context.device):
            other = layer(map_tensors(lambda t: _of_one_sample(t, samples), inputs))
        rewind_random_state()
        attributes = [(name, m, _attributes_of(m)) for name, m in module.named_modules()]
        with _lent(module, self._context.device) as changed:
            # A layer may work in place, which a leaf does not allow.
            output = layer(map_tensors(Tensor.clone, inputs))
        how = [f"changes its {name}" for name in changed]
        self._findings.parameters.update(t for t in changed.values() if type(t) is nn.Parameter)
        for name, m, known in attributes:
            prefix = f"{name}." if name else ""
            new = [key for key, value in _attributes_of(m).items() if value != known.get(key)]
            how += [f"sets its attribute {prefix + key!r}" for key in new]
        if other is not None and not _first_alike(other, output, samples):
            how.append("its output for a sample depends on other samples")
        rewind_random_state()
        torch.clear_autocast_cache()
        return output, how

    def _entered(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._context.device).requires_grad_(tensor.requires_grad)


@contextmanager
def _lent(module: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Context manager in which a module has copies of its parameters and buffers, on a device.

    A graph that a hook keeps would hold the parameters themselves, which could not be moved then.

    Yields:
        Gets those that have other values afterwards, and parameters that were written to, which
        may change them another time (an embedding with `max_norm`).
    """
    changed: dict[str, Tensor] = {}
    lent: list[tuple[nn.Module, str, str, Tensor]] = []
    copies: dict[Tensor, Tensor] = {}
    for prefix, m in module.named_modules():
        prefix = f"{prefix}." if prefix else ""
        for name, p in list(m.named_parameters(recurse=False, remove_duplicate=False)):
            if type(p) is nn.Parameter:
                if p not in copies:
                    copy = p.detach().to(device, copy=True)
                    copies[p] = nn.Parameter(copy, p.requires_grad)
                lent.append((m, name, f"parameter {prefix + name!r}", p))
        for name, buffer in list(m.named_buffers(recurse=False, remove_duplicate=False)):
            copies.setdefault(buffer, buffer.detach().to(device, copy=True))
            lent.append((m, name, f"buffer {prefix + name!r}", buffer))
    for m, name, _, tensor in lent:
        setattr(m, name, copies[tensor])
    versions = {copy: copy._version for copy in copies.values() if type(copy) is nn.Parameter}
    try:
        yield changed
        for m, name, full, tensor in lent:
            copy = getattr(m, name)
            if versions.get(copy, copy._version) != copy._version or not _same(copy, tensor):
                changed[full] = tensor
    finally:
        for m, name, _, tensor in lent:
            setattr(m, name, tensor)


def _of_one_sample(tensor: Tensor, samples: int | None) -> Tensor:
    if not tensor.dim() or tensor.shape[0] != samples:
        return tensor.clone()
    return tensor[:1].expand_as(tensor).clone()


def _first_alike(a: Tree, b: Tree, samples: int | None) -> bool:
    pairs = zip(tensors_of(a), tensors_of(b), strict=False)
    for x, y in pairs:
        if x.shape != y.shape or not x.dim() or x.shape[0] != samples:
            continue
        first, other = (t[0].detach().to(torch.promote_types(t.dtype, _EXACT)) for t in (x, y))
        scale = float(other.abs().amax()) if other.numel() else 0.0
        if not torch.allclose(first, other, _TOLERANCE, _TOLERANCE * scale, equal_nan=True):
            return False
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach(), b.detach().to(a.device)
    # A NaN is like itself here.
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


class _Kept:
    """A tensor or container as it was: equal to itself, unless it has changed since."""

    def __init__(self, value: Any, state: int) -> None:
        self._value, self._state = value, state

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _Kept) and other._value is self._value
        return same and isinstance(other, _Kept) and other._state == self._state

    __hash__ = None  # type: ignore[assignment]


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return what can be compared of the user's attributes.

    A tensor with a graph is no state: every forward computes it anew.
    """
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in _OF_TORCH:
            continue
        if isinstance(value, Tensor):
            if value.grad_fn is None:
                found[name] = _Kept(value, value._version)
        elif isinstance(value, _SCALARS):
            found[name] = value
        elif isinstance(value, (list, dict, set)):
            found[name] = _Kept(value, len(value))
    return found
