"""Outputs of a call share memory on other ranks as they do where the call was made."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.stage.layer_call import call_with_changes, with_changes_made


def received(tree: Tree) -> Tree:
    """Return the tree as another rank gets it."""
    header, large = payload.encode(tree, ("call",))
    copies = [tensor.clone() for tensor in large]
    return payload.decode(payload.decode_header(header, "rank 0"), copies)


def on_other_rank(layer: object, inputs: list[Tensor]) -> tuple[list[Tensor], Tree]:
    """Return the inputs and the output of a rank that gets the result of the call."""
    own = [tensor.clone(memory_format=torch.preserve_format) for tensor in inputs]
    result = received(call_with_changes("layer", inputs, lambda: layer(*inputs)))  # type: ignore[operator]
    return own, with_changes_made(own, result)


def test_an_input_that_is_returned_is_the_input() -> None:
    (x,), output = on_other_rank(lambda x: x.mul_(2), [torch.ones(3)])
    assert output is x
    assert x.tolist() == [2, 2, 2]


def test_a_part_of_an_input_is_a_part_of_it() -> None:
    (x,), (head, rest) = on_other_rank(lambda x: [x[:, :2], x[:, 2:].T], [torch.zeros(2, 4)])
    head += 1
    rest += 2
    assert x.tolist() == [[1, 1, 2, 2]] * 2


def test_parts_of_an_output_are_parts_of_it() -> None:
    def chunks(x: Tensor) -> list[Tensor]:
        y = x + 1
        return [*y.chunk(2), y, y]

    (x,), (first, second, whole, same) = on_other_rank(chunks, [torch.zeros(4)])
    first += 1
    second += 2
    assert whole.tolist() == same.tolist() == [2, 2, 3, 3]
    assert x.tolist() == [0, 0, 0, 0]


def test_a_repeated_part_of_an_output_is_a_part_of_it() -> None:
    # The repeated tensor has more elements than the one that it repeats.
    _, (repeated, row) = on_other_rank(
        lambda x: [(y := x + 1).expand(3, -1), y], [torch.zeros(1, 2)]
    )
    row += 1
    assert repeated.tolist() == [[2, 2]] * 3


def test_outputs_with_memory_of_their_own_stay_so() -> None:
    def parts(x: Tensor) -> list[Tensor]:
        # The two share a storage, but no element.
        return list((x + 1).chunk(2))

    _, (first, second) = on_other_rank(parts, [torch.zeros(4)])
    first += 1
    assert second.tolist() == [1, 1]


def test_another_layout_of_the_input_gives_a_copy() -> None:
    x = torch.arange(6.0).view(2, 3)
    result = received(call_with_changes("layer", [x], lambda: [x[0]]))
    own = torch.empty(3, 2).T.copy_(x)
    (output,) = with_changes_made([own], result)
    assert output.tolist() == [0, 1, 2]


VIEWS = {
    "whole": lambda x: x,
    "alias": lambda x: x[:],
    "row": lambda x: x[1],
    "column": lambda x: x[:, -1],
    "step": lambda x: x[::2],
    "transposed": lambda x: x.T,
    "flat": lambda x: x.view(-1),
    "copy": lambda x: x.clone(),
    "double": lambda x: x.double(),
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[:1].expand(4, -1),
}


@given(
    st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 3),
)
def test_a_write_shows_as_in_the_rank_of_the_call(
    names: list[str], is_input: bool, written: int
) -> None:
    def layer(x: Tensor) -> list[Tensor]:
        base = x if is_input else x * 1
        return [VIEWS[name](base) for name in names]

    inputs = [torch.arange(12.0).view(4, 3)]
    own = [inputs[0].clone()]
    result = call_with_changes("layer", inputs, lambda: layer(*inputs))
    copies = with_changes_made(own, received(result))
    originals = result[0]
    for outputs in (originals, copies):
        if names[written % len(names)] != "expanded":
            outputs[written % len(names)].fill_(-1)
    # Without the whole, two outputs may overlap, and neither contain the other.
    if is_input or {"whole", "alias", "flat", "transposed"} & set(names):
        assert all(map(torch.equal, originals, copies))
    assert torch.equal(inputs[0], own[0])
