"""Tests of log calls: recorded, sent to other ranks, and merged over micro-batches."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.strategies.hetero_pipe.replay.logs import (
    LogRecord,
    isolated_log_calls,
    merge_parts,
)
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates
from tests.support.sent_trees import send


class LoggingModule(LightningModule):
    """Module that records its calls of `log`."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.logged: list[tuple[Any, ...]] = []

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:  # type: ignore[override]
        self.logged.append((name, value, args, options))


def midrange(values: Tensor) -> Tensor:
    """Return the mean of the extremes: a reduce function defined at the top of a user's module."""
    return (values.max() + values.min()) / 2


class Reductions:
    """Class with a reduce function that has an import path."""

    @staticmethod
    def first(values: Tensor) -> Tensor:
        return values[0]


def send_and_receive(record: LogRecord, metrics: MetricStates) -> LogRecord:
    """Return the record as another rank receives it."""
    return LogRecord.from_tree(send(record.to_tree(metrics)), metrics)


# --- Recording.


def test_log_calls_are_recorded_and_not_forwarded() -> None:
    module = LoggingModule()
    with isolated_log_calls(module) as records:
        module.log("a", 1.0)
        module.log("b", 2.0, True, False, on_step=True)
        module.log_dict({"c": 3.0, "d": torch.tensor(4.0)}, prog_bar=True)
        module.log(name="e", value=module.metric, batch_size=3)
        module.log("g", 6.0, False, True, True, True, "sum", False, False, None, True, 8)
    assert not module.logged
    assert [record.name for record in records] == ["a", "b", "c", "d", "e", "g"]
    assert records[1].options == {"prog_bar": True, "logger": False, "on_step": True}
    assert records[3].options["prog_bar"] is True
    assert records[4].value is module.metric
    assert (records[5].options["reduce_fx"], records[5].options["batch_size"]) == ("sum", 8)
    with isolated_log_calls(module), pytest.raises(TypeError, match="unexpected keyword"):
        module.log("h", 7.0, no_such_option=1)
    module.log("f", 5.0)
    assert [call[0] for call in module.logged] == ["f"], "logging works again"


def test_an_error_in_the_context_ends_the_recording() -> None:
    module = LoggingModule()
    with pytest.raises(KeyError), isolated_log_calls(module):
        raise KeyError
    module.log("a", 1.0)
    assert module.logged


def test_nested_recordings_separate_their_records() -> None:
    module = LoggingModule()
    with isolated_log_calls(module) as outer:
        with isolated_log_calls(module) as inner:
            module.log("a", 1.0)
        module.log("b", 1.0)
    assert [r.name for r in inner] == ["a"]
    assert [r.name for r in outer] == ["b"]


def test_replay_makes_the_recorded_log_call() -> None:
    module = LoggingModule()
    LogRecord("a", 1.0, {"on_step": True}).replay(module)
    assert module.logged == [("a", 1.0, (), {"on_step": True})]


# --- Sending.


def test_records_are_sent_as_plain_data() -> None:
    module = LoggingModule()
    metrics = MetricStates(module)
    value = torch.tensor(2.0, requires_grad=True) * 1
    record = send_and_receive(LogRecord("a", value, {"prog_bar": True, "batch_size": 4}), metrics)
    assert (record.name, record.options) == ("a", {"prog_bar": True, "batch_size": 4})
    assert torch.equal(record.value, value)
    assert not record.value.requires_grad
    assert send_and_receive(LogRecord("n", np.float32(0.5), {}), metrics).value == 0.5
    assert send_and_receive(LogRecord("m", module.metric, {}), metrics).value is module.metric


@pytest.mark.parametrize(
    "function",
    [
        torch.mean,
        torch.max,
        torch.sum,
        max,
        sum,
        np.mean,
        statistics.mean,
        midrange,
        Reductions.first,
    ],
    ids=lambda f: f"{f.__module__}.{f.__qualname__}",
)
def test_reduce_functions_are_sent_by_name(function: Any) -> None:
    record = send_and_receive(
        LogRecord("a", 1.0, {"reduce_fx": function}), MetricStates(LoggingModule())
    )
    assert record.options["reduce_fx"] is function


@pytest.mark.parametrize(
    "function",
    [lambda values: values[0], partial(torch.sum, dim=0), torch.ones(1).max],
    ids=["lambda", "partial", "method"],
)
def test_functions_without_an_import_path_are_refused(function: Any) -> None:
    with pytest.raises(UnsupportedStepError, match=r"'my_log'.*top of a module"):
        LogRecord("my_log", 1.0, {"reduce_fx": function}).to_tree(MetricStates(LoggingModule()))


def test_metric_that_is_no_submodule_is_refused() -> None:
    with pytest.raises(UnsupportedStepError, match=r"'hidden'.*SumMetric that is no submodule"):
        LogRecord("hidden", SumMetric(), {}).to_tree(MetricStates(LoggingModule()))


@pytest.mark.parametrize(
    "path", ["no_such_module:f", "torch:no_such_function", "torch:__version__"]
)
def test_error_names_a_function_that_this_rank_does_not_have(path: str) -> None:
    tree = ["a", ["value", 1.0], {"reduce_fx": ["function", path]}]
    with pytest.raises(UnsupportedStepError, match=path):
        LogRecord.from_tree(tree, MetricStates(LoggingModule()))


# --- Merging.


def merge_one_name(values: list[Any], sizes: list[int], **options: Any) -> LogRecord:
    """Merge the values of one name over micro-batches of the given sizes."""
    (record,) = merge_parts([[LogRecord("a", value, options)] for value in values], sizes)
    return record


sizes_and_values = st.lists(st.tuples(st.integers(1, 9), st.floats(-1e3, 1e3)), min_size=1)


@given(sizes_and_values)
def test_merged_mean_is_the_mean_over_samples(micro_batches: list[tuple[int, float]]) -> None:
    samples = [value for size, value in micro_batches for _ in range(size)]
    sizes = [size for size, _ in micro_batches]
    values = [torch.tensor(value) for _, value in micro_batches]
    for reduce_fx in ("mean", torch.mean):
        value = merge_one_name(values, sizes, reduce_fx=reduce_fx).value
        assert float(value) == pytest.approx(statistics.fmean(samples), rel=1e-5, abs=1e-3)
    assert torch.equal(
        merge_one_name(values, sizes).value, merge_one_name(values, sizes, reduce_fx="mean").value
    )


@given(sizes_and_values)
def test_merged_sums_and_extremes_are_those_of_all_values(
    micro_batches: list[tuple[int, float]],
) -> None:
    sizes, values = [size for size, _ in micro_batches], [value for _, value in micro_batches]
    # Lightning ignores the case.
    for name, expected in (("sum", sum(values)), ("MAX", max(values)), ("Min", min(values))):
        value = merge_one_name(values, sizes, reduce_fx=name).value
        assert float(value) == pytest.approx(expected, rel=1e-5, abs=1e-2)


@pytest.mark.parametrize(
    ("function", "expected"), [(torch.max, 9.0), (torch.sum, 14.0), (max, 9.0), (midrange, 5.0)]
)
def test_reduce_functions_get_all_values_at_once(function: Any, expected: float) -> None:
    assert merge_one_name([1.0, 9.0, 4.0], [2, 1, 1], reduce_fx=function).value == expected


def test_merged_values_keep_dtype_and_shape() -> None:
    assert merge_one_name([torch.tensor(1.0).double()] * 2, [1, 1]).value.dtype == torch.float64
    assert merge_one_name([torch.tensor(1.0).half()] * 2, [1, 1]).value.dtype == torch.float16
    assert merge_one_name([1, 2], [1, 1]).value == 1.5, "the mean of integers is not an integer"
    assert merge_one_name([torch.tensor([2.0]), torch.tensor([5.0])], [2, 1]).value.tolist() == [
        3.0
    ]


def test_merging_keeps_options_and_sums_batch_sizes() -> None:
    options = {"on_step": True, "batch_size": 3}
    record = merge_one_name([1.0, 2.0], [2, 1], **options)
    assert record.options == {"on_step": True, "batch_size": 6}
    assert options["batch_size"] == 3
    assert merge_one_name([1.0, 2.0], [2, 1], batch_size=None).options == {"batch_size": None}


def test_a_logged_metric_is_not_merged() -> None:
    metric = MeanMetric()
    assert merge_one_name([metric, metric], [1, 1]).value is metric


def test_merging_keeps_the_order_of_names_and_repeated_names() -> None:
    part = [LogRecord("b", 1.0, {}), LogRecord("a", 2.0, {}), LogRecord("b", 3.0, {})]
    assert [(r.name, float(r.value)) for r in merge_parts([part, part], [1, 1])] == [
        ("b", 1.0),
        ("a", 2.0),
        ("b", 3.0),
    ]


def test_a_name_is_merged_over_those_micro_batches_that_log_it() -> None:
    micro_batches = [
        [LogRecord("a", 1.0, {})],
        [LogRecord("a", 4.0, {}), LogRecord("b", 6.0, {})],
        [LogRecord("b", 9.0, {}), LogRecord("a", 1.0, {})],
    ]
    records = merge_parts(micro_batches, [1, 1, 2])
    assert {record.name: float(record.value) for record in records} == {"a": 1.75, "b": 8.0}
