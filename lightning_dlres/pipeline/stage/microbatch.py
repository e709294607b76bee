"""Cutting a batch into micro-batches, and joining the outputs of micro-batches.

The batch is global. Micro-batch sizes differ by at most one sample, so a ragged last batch and a
batch with fewer samples than micro-batches need no special case. Micro-batch m holds the same
samples for any number of stages or replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import itemgetter
from typing import Any

import msgspec
import torch
from torch import Tensor

from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.core.wire.payload import require_dense
from lightning_dlres.core.wire.tree import Tree, flatten, map_tensors, tensors_of, unflatten


def microbatch_sizes(samples: int, microbatches: int) -> list[int]:
    """Return the number of samples of each micro-batch, as even as possible, larger ones first.

    No micro-batch is empty: a batch with fewer samples than micro-batches gives one per sample.

    Raises:
        ConfigError: If `samples` or `microbatches` is less than 1.
    """
    if samples < 1 or microbatches < 1:
        raise ConfigError(
            f"samples and microbatches must be at least 1, got {samples} samples and "
            f"{microbatches} micro-batches."
        )
    count = min(samples, microbatches)
    return [samples // count + (m < samples % count) for m in range(count)]


def share(microbatches: int, replicas: int, replica: int) -> range:
    """Return the micro-batches of one replica.

    The replicas divide the micro-batches of the batch as evenly as possible, each into a contiguous
    range. The range is empty if there are fewer micro-batches than replicas.

    Args:
        microbatches: Number of micro-batches of the batch.
        replicas: Number of replicas.
        replica: Index of the replica.
    """
    whole, rest = divmod(microbatches, replicas)
    first, end = (index * whole + min(index, rest) for index in (replica, replica + 1))
    return range(first, end)


def samples_in(tree: Tree) -> int | None:
    """Return the number of samples: the leading dimension of the first tensor that has one.

    None if no tensor has a dimension.
    """
    return next((t.shape[0] for t in tensors_of(tree) if t.dim() > 0), None)


def cut(tree: Tree, sizes: Sequence[int]) -> list[Tree]:
    """Return the inputs of a module as one tree per micro-batch.

    Tensors whose leading dimension is the number of samples are cut, as views. Everything else is
    the same in every part.

    Args:
        tree: Inputs for the whole batch.
        sizes: Number of samples of every micro-batch.
    """
    return _cut(tree, sizes, with_lists=False)


class InputCutter:
    """Cuts the inputs of a module, and remembers which of them are no samples.

    A table of positions has as many rows as a batch has samples if the batch happens to be as long
    as its sequences. Batches of other lengths show that its rows are none.
    """

    def __init__(self) -> None:
        # Structure of the inputs, position of a tensor and its length, other than the samples'.
        self._fixed: set[tuple[str, int, int]] = set()
        # Places of lists that once had another length than the samples'.
        self._fixed_lists: set[tuple[Any, ...]] = set()

    def cut(self, tree: Tree, sizes: Sequence[int]) -> list[Tree]:
        """Return the inputs of a module as one tree per micro-batch; see `cut`."""
        samples, (structure, tensors) = sum(sizes), flatten(tree)
        self._require_no_lists_of_samples(list(_lists_in(structure, tensors, samples)), sizes)
        form = repr(structure)
        lengths = [(i, t.shape[0]) for i, t in enumerate(tensors) if t.dim()]
        self._fixed.update((form, i, length) for i, length in lengths if length != samples)
        whole = {i for i, length in lengths if (form, i, length) in self._fixed}
        return _cut(tree, sizes, with_lists=False, whole=whole)

    def _require_no_lists_of_samples(
        self, lists: list[tuple[tuple[Any, ...], int]], sizes: Sequence[int]
    ) -> None:
        """Raise if a list looks like one with an element for each sample.

        Raises:
            UnsupportedStepError: If a list has as many elements as there are samples, as had all
                earlier ones at its place.
        """
        samples = sum(sizes)
        self._fixed_lists.update(place for place, length in lists if length != samples)
        is_suspect = any(place not in self._fixed_lists for place, _ in lists)
        if is_suspect and len(sizes) > 1:
            raise UnsupportedStepError(
                "Inputs of the pipelined module must not have a list with as many elements as "
                f"there are samples ({samples}), since only tensors are cut into micro-batches. "
                "Pass a tensor, or a tuple of numbers, which every micro-batch gets whole; or use "
                "microbatches=1."
            )


def own_copy(part: Tree, sizes: Sequence[int]) -> Tree:
    """Return a micro-batch with memory of its own, for layers that change their input in place.

    To autograd, a change of one view is a change of all views of the same tensor.

    Args:
        part: Micro-batch, from `cut`.
        sizes: Number of samples of every micro-batch.
    """
    return part if len(sizes) == 1 else map_tensors(Tensor.clone, part)


def cut_batch(batch: Tree, sizes: Sequence[int]) -> list[Tree]:
    """Return a loader's batch as one batch per micro-batch.

    Tensors are cut as by `cut`. A list or tuple with one element per sample, such as file names, is
    cut too, unless an element contains a tensor.
    """
    return _cut(batch, sizes, with_lists=True)


def _cut(
    tree: Tree, sizes: Sequence[int], with_lists: bool, whole: Collection[int] = ()
) -> list[Tree]:
    samples, starts = sum(sizes), [sum(sizes[:m]) for m in range(len(sizes))]
    structure, tensors = flatten(tree)
    is_cut = [
        bool(t.dim()) and t.shape[0] == samples and i not in whole for i, t in enumerate(tensors)
    ]
    for tensor, cuts in zip(tensors, is_cut, strict=True):
        if cuts:
            require_dense(tensor)
    parts = []
    for start, size in zip(starts, sizes, strict=True):
        pieces = [
            t.narrow(0, start, size) if cuts else t for t, cuts in zip(tensors, is_cut, strict=True)
        ]
        part_structure = structure
        if with_lists:
            part = slice(start, start + size)
            part_structure = _change_lists(structure, samples, itemgetter(part))
        parts.append(unflatten(part_structure, pieces))
    return parts


def doubled(tree: Tree, *, is_batch: bool) -> Tree:
    """Return inputs of a module, or a loader's batch, with all samples twice.

    Args:
        tree: The inputs, or the batch.
        is_batch: True for the rules of `cut_batch`, False for those of `cut`.
    """
    samples, (structure, tensors) = samples_in(tree), flatten(tree)
    twice = [torch.cat([t, t]) if t.dim() and t.shape[0] == samples else t for t in tensors]
    if is_batch:
        structure = _change_lists(structure, samples, lambda content: content * 2)
    return unflatten(structure, twice)


# The functions below walk the nodes of a structure (see `core.wire.tree`). The first element of a
# node is its tag and the last one its content. Tags: "l" list, "u" tuple, "n" named tuple, "d" dict
# and "m" other mapping (pairs of nodes), "c" dataclass (pairs of field name and node), "t" tensor,
# "a" NumPy array, "g" NumPy scalar.


def _change_lists(
    node: list[Any], samples: int | None, change: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Return the structure with a change of the lists and tuples that `cut_batch` cuts."""
    tag, content = node[0], node[-1]
    if tag in ("l", "u") and isinstance(content, list):
        if len(content) == samples and not any(_holds_tensor(child) for child in content):
            return [tag, change(content)]
        return [tag, [_change_lists(child, samples, change) for child in content]]
    if tag == "n":
        return [*node[:-1], [_change_lists(child, samples, change) for child in node[2]]]
    if tag in ("d", "m", "c") and isinstance(content, list):
        pairs = [[key, _change_lists(value, samples, change)] for key, value in content]
        return [*node[:-1], pairs]
    return node


def _lists_in(
    node: list[Any], tensors: Sequence[Tensor], samples: int, place: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the place and the length of each list that has neither containers, nor tensors of all
    samples."""
    tag, content = node[0], node[-1]
    if tag in ("d", "m", "c") and isinstance(content, list):
        for number, (_, value) in enumerate(content):
            yield from _lists_in(value, tensors, samples, (*place, number))
    elif tag in ("l", "u", "n") and isinstance(content, list):
        if tag == "l" and all(_is_alone(child, tensors, samples) for child in content):
            yield place, len(content)
        for number, child in enumerate(content):
            yield from _lists_in(child, tensors, samples, (*place, number))


def _is_alone(node: Any, tensors: Sequence[Tensor], samples: int) -> bool:
    if isinstance(node, list) and node and node[0] == "t":
        return tensors[node[1]].shape[:1] != (samples,)
    return _is_plain(node)


def _is_plain(node: Any) -> bool:
    """Return whether a node is neither a container nor a tensor."""
    return not (isinstance(node, list) and node and node[0] in ("l", "u", "n", "d", "m", "c", "t"))


def _holds_tensor(node: list[Any]) -> bool:
    tag, content = node[0], node[-1]
    if tag in ("d", "m"):
        return any(_holds_tensor(child) for pair in content for child in pair)
    if tag == "c":
        return any(_holds_tensor(value) for _, value in content)
    if tag in ("l", "u", "n"):
        return any(_holds_tensor(child) for child in content)
    return tag in ("t", "a", "g")


# Key of the micro-batches' outputs in what `join_if_alike` returns for outputs that are not alike.
_PARTS = "parts that are not alike"
# Key of an output in what `apart` returns.
_APART = "output that is not joined"


def apart(output: Tree) -> Tree:
    """Return an output of a layer that `join_if_alike` must not join with others."""
    return {_APART: output}


def parted(output: Tree) -> Tree:
    """Return the output that was given to `apart`, and any other one as it is."""
    return output[_APART] if _is_apart(output) else output


def _is_apart(output: Tree) -> bool:
    return isinstance(output, dict) and _APART in output


def join_if_alike(parts: Sequence[Tree], sizes: Sequence[int]) -> Tree:
    """Return what `join` returns; if it cannot, a tree for `output_of` that holds all parts.

    For a module without code after its last layer, `output_of` then raises the error of `join`.
    """
    unjoined = {_PARTS: list(parts), "sizes": list(sizes)}
    if len(parts) > 1 and any(map(_is_apart, parts)):
        return unjoined
    try:
        return join(parts, sizes)
    except UnsupportedStepError:
        return unjoined


def is_unjoined(output: Tree) -> bool:
    """Return True for what `join_if_alike` could not join."""
    return isinstance(output, dict) and _PARTS in output


def output_of(
    joined: Tree, finish: Callable[[Tree], Tree], has_samples: Callable[[], bool]
) -> Tree:
    """Return the output of a module whose code goes on after its last layer.

    If the outputs of the layer are not alike, such as packed sequences, the code runs for each
    micro-batch, and its results are joined.

    Args:
        joined: Outputs of the last layer, from `join_if_alike`.
        finish: The code.
        has_samples: Returns True if the first dimension of all results is the samples.

    Raises:
        UnsupportedStepError: If neither can be joined.
    """
    if not is_unjoined(joined):
        return finish(joined)
    outputs = [output_of(part, finish, has_samples) for part in joined[_PARTS]]
    if len(outputs) > 1 and not has_samples():
        raise UnsupportedStepError(
            "The first dimension of each output of the pipelined module must be the samples, got "
            "one that is another dimension or none. Move reductions over the batch from the module "
            "to training_step, or use microbatches=1."
        )
    return join(outputs, joined["sizes"])


def join(parts: Sequence[Tree], sizes: Sequence[int]) -> Tree:
    """Return the output for the whole batch: tensors concatenated along their leading dimension.

    Args:
        parts: Output of every micro-batch, in order.
        sizes: Number of samples of every micro-batch.

    Raises:
        UnsupportedStepError: If the leading dimension of a tensor is not the micro-batch's size, or
            the parts differ in structure. The parts then do not determine the whole.
    """
    if len(parts) == 1:
        return parts[0]
    structures, tensors = zip(*(flatten(part) for part in parts), strict=True)
    # Compare structures as bytes: a NaN in them does not equal itself as a Python object.
    if len({msgspec.msgpack.encode(structure) for structure in structures}) > 1:
        raise UnsupportedStepError(
            "The pipelined module returns different structures for different micro-batches. "
            "Return the same containers and plain values for every batch, or use microbatches=1."
        )
    return unflatten(
        structures[0], [_concatenate(pieces, sizes) for pieces in zip(*tensors, strict=True)]
    )


def _concatenate(pieces: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    for piece, size in zip(pieces, sizes, strict=True):
        if not piece.dim() or piece.shape[0] != size:
            raise UnsupportedStepError(
                "The first dimension of each output of the pipelined module must be the samples, "
                f"got a tensor of shape {tuple(piece.shape)} for a micro-batch of {size} samples. "
                "Move reductions over the batch from the module to training_step, or use "
                "microbatches=1."
            )
    return torch.cat(list(pieces))
