"""Calls to loggers in a training step are recorded, and made once afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger

from lightning_dlres.core.wire import payload
from lightning_dlres.strategies.hetero_pipe.replay.loggers import LoggerCall, isolated_loggers


class Series:
    """A series of logged values, an item of `Run`."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def append(self, value: Any) -> None:
        self.values.append(value)


class Run(dict[Any, Any]):
    """An experiment whose items are series, as Neptune's and Aim's are."""

    def __missing__(self, key: Any) -> Series:
        return self.setdefault(key, Series())


class RunLogger(Logger):
    """A logger of such an experiment."""

    def __init__(self) -> None:
        self._run = Run()

    @property
    def name(self) -> str:
        return "run"

    @property
    def version(self) -> int:
        return 0

    @property
    def experiment(self) -> Run:
        return self._run

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def test_calls_on_items_of_an_experiment_keep_their_keys() -> None:
    logger = RunLogger()
    with isolated_loggers([logger]) as calls:
        logger.experiment["loss"].append(torch.tensor(2.0))
        logger.experiment["norms"]["layer", 1].append(3)
        logger.experiment["name"] = "first"
    assert not logger.experiment
    logger.experiment["norms"] = Run()
    for call in calls:
        header, large = payload.encode(call.to_tree(), ("calls",))
        sent = payload.decode(payload.decode_header(header, "rank 1"), large)
        LoggerCall.replay(sent, [logger])
    assert logger.experiment["loss"].values == [torch.tensor(2.0)]
    assert logger.experiment["norms"]["layer", 1].values == [3]
    assert logger.experiment["name"] == "first"


def test_a_run_within_another_one_keeps_its_calls_for_itself() -> None:
    logger = RunLogger()
    with isolated_loggers([logger]) as outer:
        logger.experiment["loss"].append(1)
        with isolated_loggers([logger]) as inner:
            logger.experiment["loss"].append(2)
        logger.experiment["loss"].append(3)
    assert [call.args for call in outer] == [(1,), (3,)]
    assert [call.args for call in inner] == [(2,)]
    assert type(logger) is RunLogger
    assert logger.experiment == {}
    assert set(vars(logger)) == set(vars(RunLogger()))


def test_a_call_that_cannot_be_sent_is_named_with_its_keys() -> None:
    logger = RunLogger()
    with isolated_loggers([logger]) as calls:
        logger.experiment["figure"].append(object())
    with pytest.warns(UserWarning, match=r"logger\.experiment\['figure'\]\.append\(\.\.\.\)"):
        LoggerCall.replay(calls[0].to_tree(), [logger])
