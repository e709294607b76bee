"""Check that code between layers treats each sample alone, where that matters."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core.error_places import place_of
from lightning_dlres.core.wire.tree import Tree, flatten, map_tensors, tensors_of, unflatten
from lightning_dlres.pipeline.capture.block_calls import (
    calls_replaced,
    original_call,
    with_values,
    without_graphs,
)
from lightning_dlres.pipeline.capture.captured import CapturedModule
from lightning_dlres.pipeline.capture.crossing import without_objects
from lightning_dlres.pipeline.capture.modes import TRAINING, device_of, seed_layer, trial
from lightning_dlres.pipeline.capture.trace import AFTER_ALL, BLOCK, Value
from lightning_dlres.pipeline.stage.closeness import equal_up_to_rounding
from lightning_dlres.pipeline.stage.microbatch import (
    cut,
    is_unjoined,
    join,
    join_if_alike,
    parted,
    samples_in,
)

# Relative difference that counts as rounding.
_TOLERANCE = 1e-3


class _Coupled(Exception):
    """A call gets other values for a part of the batch than for the whole."""


def coupling(captured: CapturedModule, inputs: Tree) -> str:
    """Return why the code between the layers of a step needs the whole batch; "" if it does not.

    The code runs on the whole batch, and on two parts of it with the same outputs of layers. For a
    module, code before the first layer counts, too.

    Args:
        captured: The step or the module, cut into layers.
        inputs: (args, kwargs) of a call of it, with at least two samples.
    """
    step, trace = captured.step, captured.trace
    between = zip(trace.glue, trace.glue_layers, strict=True)
    first = -1 if step is None else 0
    is_random = any(e.is_random and first <= n < len(captured.blocks) for e, n in between)
    if (samples_in(inputs) or 1) < 2 or is_random:
        return ""
    device = device_of(inputs)
    with trial(captured.module, TRAINING, device):
        calls = _recorded_calls(captured, inputs)
    crossing = inputs
    if step is not None:
        with trial(captured.module, TRAINING, device):
            seed_layer(-1)
            crossing = captured.begin(step, map_tensors(Tensor.clone, inputs), seed_layer)
    samples = samples_in(crossing) or 1
    sizes = _halves(samples)
    parts = [(0, samples, crossing), *zip((0, sizes[0]), sizes, cut(crossing, sizes), strict=True)]
    ends: list[list[Tensor]] = []
    try:
        for start, size, part in parts:
            with trial(captured.module, TRAINING, device):
                copies = {
                    layer: _Replayed(captured, layer, calls, slice(start, start + size), samples)
                    for layer in range(len(captured.blocks))
                }
                end = captured.run(range(len(captured.blocks)), part, copies=copies)
            ends.append(tensors_of(parted(end)))
        for (start, size, _), end_of_part in zip(parts[1:], ends[1:], strict=True):
            for whole, tensor in zip(ends[0], end_of_part, strict=True):
                if not _is_part(tensor, whole, slice(start, start + size), samples):
                    raise _Coupled("a result that is used after the last submodule")
    except _Coupled as error:
        return f"{error} is another one for a part of the batch"
    except Exception as error:
        place = place_of(error)
        at = f" at {place}" if place else ""
        return f"it fails for a part of the batch with {type(error).__name__}: {error}{at}"
    return ""


def may_mix_at_end(captured: CapturedModule) -> bool:
    """Return whether a module has code after its last layer that `mixed_end` can judge."""
    trace = captured.trace
    ends = [e for e, n in zip(trace.glue, trace.glue_layers, strict=True) if n == AFTER_ALL]
    is_random = any(event.is_random for event in ends)
    return bool(ends) and not is_random and captured.has_sample_outputs


def mixed_end(captured: CapturedModule, inputs: Tree) -> str:
    """Return why the code after a module's last layer does not fit that before; "" if it does.

    Under GPipe the code after the last layer runs on the whole batch, and that before on
    micro-batches. A value that both compute, such as an order of the samples, is then another one.

    Args:
        captured: The module, cut into layers.
        inputs: (args, kwargs) of a call of it, with at least two samples.
    """
    # Few samples would seldom show an order.
    inputs = map_tensors(partial(_four_times, samples=samples_in(inputs)), inputs)
    reason = coupling(captured, inputs)
    if not reason:
        return ""
    samples = samples_in(inputs) or 1
    sizes, layers = _halves(samples), range(len(captured.blocks))
    # Code that fails for a part of the batch is no sign of a mixture.
    with suppress(Exception):
        with trial(captured.module, TRAINING, device_of(inputs)):
            parts = cut(map_tensors(Tensor.clone, inputs), sizes)
            outputs = [captured.run(layers, part) for part in parts]
            joined = join_if_alike(outputs, sizes)
            if is_unjoined(joined):
                return ""
            by_part = join([captured.output(output) for output in outputs], sizes)
            whole = captured.output(joined)
        pairs = zip(tensors_of(by_part), tensors_of(whole), strict=True)
        if not all(_is_part(a, b, slice(0, samples), samples) for a, b in pairs):
            return reason
    return ""


def _halves(samples: int) -> list[int]:
    return [samples - samples // 2, samples // 2]


def _four_times(tensor: Tensor, samples: int | None) -> Tensor:
    """Return a tensor with the samples of another one four times: twice for each half.

    Each half has positive and negative numbers, and the halves differ in their mean, their largest
    number and the like. So an order of all samples, or a value of the batch, differs from that of a
    half. Whole numbers stay as they are.
    """
    if not tensor.dim() or tensor.shape[0] != samples:
        return tensor
    tensor = tensor.detach()
    reverse = tensor.flip(0)
    if not tensor.is_floating_point():
        return torch.cat([tensor, reverse, tensor, reverse])
    return torch.cat([tensor, -reverse, 2 * tensor, -0.5 * reverse])


def _recorded_calls(captured: CapturedModule, inputs: Tree) -> dict[int, tuple[Tree, Tree]]:
    """Return the tensors of the arguments and the output of each call, by its number."""
    calls: dict[int, tuple[Tree, Tree]] = {}
    num_calls = [0] * len(captured.blocks)

    def call(layer: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        number = layer + num_calls[layer] * len(captured.blocks)
        num_calls[layer] += 1
        seed_layer(number)
        target = with_values(block, (args, kwargs))
        arguments = [t.detach().clone() for t in tensors_of(without_objects((args, kwargs)))]
        output = original_call(target, args, kwargs)
        calls[number] = arguments, map_tensors(lambda t: t.detach().clone(), output)
        return output if target is block else without_graphs(output, args, kwargs)

    args, kwargs = map_tensors(Tensor.clone, inputs)
    seed_layer(-1)
    with captured.opened() as code, calls_replaced(dict(enumerate(captured.blocks)), call):
        code(*args, **kwargs)
    return calls


class _Replayed(nn.Module):
    """Module in the place of a block, which returns what the block has returned for the batch.

    Args:
        captured: The step.
        layer: Layer of the block.
        calls: Arguments and outputs of calls, for the whole batch.
        part: Samples of this part.
        samples: Samples of the batch.
    """

    def __init__(
        self,
        captured: CapturedModule,
        layer: int,
        calls: dict[int, tuple[Tree, Tree]],
        part: slice,
        samples: int,
    ) -> None:
        super().__init__()
        self._name, self._call, self._count = captured.names[layer], layer, len(captured.blocks)
        self._trace, self._calls, self._part = captured.trace, calls, part
        self._samples = samples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call, self._call = self._call, self._call + self._count
        whole, output = self._calls[call]
        own = tensors_of(without_objects((args, kwargs)))
        pairs = list(zip(whole, own, strict=True))
        # Several rows of a sample may follow each other, or the samples of a view.
        by_view = not all(_is_part(t, w, self._part, self._samples) for w, t in pairs)
        if by_view and not all(
            _is_part(t, w, self._part, self._samples, by_view=True) for w, t in pairs
        ):
            raise _Coupled(f"the input of {self._name!r}")
        structure, tensors = flatten(output)
        aliases = dict(self._trace.calls[call].aliases)
        pieces = []
        for position, tensor in enumerate(tensors):
            value = aliases.get(position, Value(BLOCK, call, position))
            for dim, factor in self._trace.sample_dims.get(value, ()):
                tensor = _narrowed(tensor, dim, factor, self._part, by_view=by_view)
            # No leaf, since user code may change it in place.
            pieces.append(tensor.detach().requires_grad_(tensor.is_floating_point()).clone())
        return unflatten(structure, pieces)


def _narrowed(tensor: Tensor, dim: int, factor: int, part: slice, *, by_view: bool) -> Tensor:
    """Return the samples of a part.

    Args:
        tensor: Tensor for the whole batch.
        dim: Dimension with the samples.
        factor: Rows of each sample in it.
        part: The samples.
        by_view: True if the first rows of all samples come first; False if the rows of a sample
            follow each other.
    """
    size = part.stop - part.start
    if not by_view or factor == 1:
        return tensor.narrow(dim, factor * part.start, factor * size)
    views = tensor.unflatten(dim, (factor, -1))
    narrowed: Tensor = views.narrow(dim + 1, part.start, size).flatten(dim, dim + 1)
    return narrowed


def _is_part(
    tensor: Tensor, whole: Tensor, part: slice, samples: int, *, by_view: bool = False
) -> bool:
    """Return True if a tensor is the part of another one, or the same for all parts."""
    size = part.stop - part.start
    if tensor.dim() != whole.dim() or tensor.dtype != whole.dtype:
        return False
    pairs = enumerate(zip(tensor.shape, whole.shape, strict=True))
    cut_dims = [dim for dim, (count, of_whole) in pairs if count != of_whole]
    if len(cut_dims) > 1:
        # Pairs of samples of the part are not all pairs with its samples.
        return False
    for dim in cut_dims:
        count, of_whole = tensor.shape[dim], whole.shape[dim]
        if of_whole % samples or count * samples != of_whole * size:
            return False
        whole = _narrowed(whole, dim, of_whole // samples, part, by_view=by_view)
    if not whole.is_floating_point():
        return torch.equal(tensor, whole)
    return equal_up_to_rounding(tensor, whole, _TOLERANCE)
