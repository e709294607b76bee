"""Micro-batches hold each sample of the batch once and in order, and can be joined again."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.pipeline.stage.microbatch import (
    InputCutter,
    cut,
    cut_batch,
    join,
    microbatch_sizes,
    own_copy,
    samples_in,
    share,
)
from tests.support.examples import examples

counts = st.integers(1, 40)


class Pair(NamedTuple):
    a: Any
    b: Any


@given(counts, counts)
def test_sizes_are_even_and_none_is_empty(samples: int, microbatches: int) -> None:
    sizes = microbatch_sizes(samples, microbatches)
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, microbatches)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= 1


@pytest.mark.parametrize(("samples", "microbatches"), [(0, 2), (3, 0), (-1, 1), (1, -1)])
def test_no_samples_or_no_microbatches_is_an_error(samples: int, microbatches: int) -> None:
    with pytest.raises(ConfigError, match=f"got {samples} samples and {microbatches} micro"):
        microbatch_sizes(samples, microbatches)


@given(st.integers(0, 40), st.integers(1, 9))
def test_replicas_share_microbatches(count: int, parts: int) -> None:
    shares = [share(count, parts, part) for part in range(parts)]
    assert [m for one in shares for m in one] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def batch(samples: int) -> dict[str, Any]:
    """Return a batch with every kind of content that is cut; each value identifies its sample."""
    x = torch.arange(samples * 6.0).view(samples, 2, 3)
    return {
        "x": x,
        "pair": Pair(x[:, 0], (x[:, 0, 0] > 3, [torch.arange(samples)])),
        "array": np.arange(samples * 2.0).reshape(samples, 2),
        "names": [f"sample {i}" for i in range(samples)],
        "ids": tuple(2**70 + i for i in range(samples)),
    }


@settings(max_examples=examples(40))
@given(counts, counts)
def test_cutting_and_joining_changes_nothing(samples: int, microbatches: int) -> None:
    sizes, whole = microbatch_sizes(samples, microbatches), batch(samples)
    parts = cut_batch(whole, sizes)
    assert [len(part["x"]) for part in parts] == sizes
    assert [name for part in parts for name in part["names"]] == whole["names"]
    assert tuple(number for part in parts for number in part["ids"]) == whole["ids"]
    tensors = [{k: v for k, v in part.items() if k not in ("names", "ids")} for part in parts]
    joined = join(tensors, sizes)
    assert type(joined["pair"]) is Pair
    for value, expected in (
        (joined["x"], whole["x"]),
        (joined["pair"].a, whole["pair"].a),
        (joined["pair"].b[0], whole["pair"].b[0]),
        (joined["pair"].b[1][0], whole["pair"].b[1][0]),
        (torch.from_numpy(joined["array"]), torch.from_numpy(whole["array"])),
    ):
        assert torch.equal(value, expected)


@given(counts, counts)
def test_microbatches_do_not_depend_on_the_number_of_replicas(
    samples: int, microbatches: int
) -> None:
    sizes = microbatch_sizes(samples, microbatches)
    parts = cut(torch.arange(samples), sizes)
    for replicas in (1, 2, 3):
        by_replica = [parts[m] for p in range(replicas) for m in share(len(sizes), replicas, p)]
        assert torch.equal(torch.cat(by_replica), torch.arange(samples))


def test_values_without_a_sample_dimension_are_in_every_part() -> None:
    mask, scale, config = torch.ones(7, 7), torch.tensor(2.0), {"name": "x", "sizes": [1, 2, 3]}
    whole = {"x": torch.zeros(5, 7), "mask": mask, "scale": scale, "config": config}
    for part in cut(whole, [3, 2]):
        assert part["mask"].shape == (7, 7)
        assert part["scale"] == 2.0
        assert part["config"] == config


def test_parts_are_views_that_keep_their_gradient() -> None:
    x = torch.zeros(4, 2, requires_grad=True)
    parts = cut([x], [3, 1])
    assert parts[1][0].data_ptr() == x[3:].data_ptr()
    sum(part[0].sum() for part in parts).backward()
    assert torch.equal(x.grad, torch.ones(4, 2))


def test_the_first_tensor_with_dimensions_gives_the_number_of_samples() -> None:
    assert samples_in([torch.tensor(1.0), {"x": torch.zeros(3, 5)}, torch.zeros(9)]) == 3
    assert samples_in({"x": 1, "y": torch.tensor(2)}) is None


def test_one_part_is_passed_through_untouched() -> None:
    part = {"loss": torch.tensor(1.0)}
    assert join([part], [4]) is part


@pytest.mark.parametrize(
    "outputs",
    [
        [torch.tensor(1.0), torch.tensor(2.0)],
        [torch.ones(2, 3), torch.ones(2, 3)],
        [torch.ones(7, 3), torch.ones(7, 3)],
    ],
    ids=["mean over the batch", "one part is of another size", "time first"],
)
def test_outputs_without_samples_cannot_be_joined(outputs: list[torch.Tensor]) -> None:
    with pytest.raises(UnsupportedStepError, match=r"shape .* micro-batch of \d samples"):
        join(outputs, [2, 1])


def test_outputs_of_different_structure_cannot_be_joined() -> None:
    with pytest.raises(UnsupportedStepError, match="different structures"):
        join([(torch.ones(1), 3), (torch.ones(1), 4)], [1, 1])
    with pytest.raises(UnsupportedStepError, match="different structures"):
        join([(torch.ones(1), None), (torch.ones(1), torch.ones(1))], [1, 1])


@pytest.mark.parametrize(
    "whole", [[["a", "b"], ["c", "d"]], [["a"], ["b"]], [{"id": 1}, {"id": 2}]], ids=str
)
def test_lists_of_plain_data_for_every_sample_are_cut(whole: list[Any]) -> None:
    assert cut_batch([torch.zeros(2), whole], [1, 1])[1][1] == whole[1:]


def test_outputs_with_a_nan_in_each_part_can_be_joined() -> None:
    join([(torch.ones(1), float("nan")), (torch.ones(1), float("nan"))], [1, 1])


def test_a_table_that_once_was_no_samples_stays_whole() -> None:
    cutter, table = InputCutter(), torch.arange(4.0)

    def cut_rows(samples: int, sizes: list[int], name: str = "table") -> list[int]:
        parts = cutter.cut(((torch.zeros(samples, 2),), {name: table}), sizes)
        assert [part[0][0].shape[0] for part in parts] == sizes
        return [part[1][name].shape[0] for part in parts]

    # Nothing shows yet that its rows are no samples.
    assert cut_rows(4, [2, 2]) == [2, 2]
    assert cut_rows(6, [3, 3]) == [4, 4]
    assert cut_rows(4, [2, 2]) == [4, 4]
    # Other arguments are not compared with these.
    assert cut_rows(4, [2, 2], "other") == [2, 2]
    table = torch.arange(5.0)
    assert cut_rows(5, [3, 2]) == [3, 2]


def test_sparse_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sparse_coo cannot be sent .* \.to_dense\(\)"):
        cut({"x": torch.eye(4).to_sparse()}, [2, 2])


LISTS: dict[str, Any] = {
    "numbers": [1, 2, 3, 4],
    "texts": ["a", "b", "c", "d"],
    "tensors": [torch.zeros(3), torch.zeros(2), torch.zeros(5), torch.zeros(())],
    "nested": {"lengths": ([1.0, 2.0, 3.0, 4.0], 7)},
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_list_with_an_element_for_each_sample_is_refused(kind: str) -> None:
    inputs = [torch.zeros(4, 2), LISTS[kind]]
    with pytest.raises(UnsupportedStepError, match=r"there are samples \(4\)"):
        InputCutter().cut(inputs, [2, 2])
    # One micro-batch has all samples.
    InputCutter().cut(inputs, [4])


@pytest.mark.parametrize(
    "fixed",
    [(1, 2, 3, 4), [torch.zeros(4, 1)] * 4, [[1], [2], [3], [4]], [1, 2, 3]],
    ids=["tuple", "tensors with samples", "lists", "another length"],
)
def test_other_sequences_are_in_every_micro_batch(fixed: Any) -> None:
    for _, part in InputCutter().cut([torch.zeros(4, 2), fixed], [2, 2]):
        assert len(part) == len(fixed)


def test_a_list_that_had_another_length_is_fixed() -> None:
    cutter, sizes = InputCutter(), [224, 224]
    cutter.cut([torch.zeros(8, 3), sizes], [4, 4])
    for _, part in cutter.cut([torch.zeros(2, 3), sizes], [1, 1]):
        assert part == sizes


def test_a_part_of_the_inputs_may_change_in_place() -> None:
    whole = torch.arange(4.0)
    first, second = (own_copy(part, [2, 2]) for part in InputCutter().cut(whole, [2, 2]))
    versions = second._version
    first.add_(1)
    assert second._version == versions
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]
