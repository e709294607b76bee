"""The page that lists what works: it has a row for each Trainer argument and each callback of the
installed Lightning, and each row that works or is refused has a test."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer, callbacks

from lightning_dlres import ConfigError
from lightning_dlres.strategies.hetero_pipe.unsupported_callbacks import refuse_callbacks
from tests.strategies.hetero_pipe.trainer import test_arguments, test_callbacks

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "hetero_pipe_trainer.md"
HERE = "tests/strategies/hetero_pipe"
ALONE = "trainer/test_arguments::test_an_argument_alone"
CALLBACK = "trainer/test_callbacks::test_a_callback_alone"
REFUSED_CALLBACKS = "test_misuse::test_callbacks_and_optimizers_over_all_weights_are_refused"
CALLBACKS_ACT_ALIKE = "test_trainer::test_callbacks_act_alike_on_all_ranks"
LAUNCH = "test_launch::test_an_ordinary_script_trains"
FILES = "trainer/test_arguments::test_files_are_those_of_a_single_device"
MONITORS = "trainer/test_callbacks::test_monitors_and_summaries_show_the_whole_model_on_rank_zero"
TUNER = "trainer/test_callbacks::test_the_tuner_finds_the_learning_rate_but_not_the_batch_size"
SAVED_ON_EXCEPTION = "trainer/test_callbacks::test_a_checkpoint_is_saved_if_all_ranks_raise"
NO_SCRIPT = "test_outside_of_steps::test_a_script_that_is_no_file_is_refused"
SETUP_ERRORS = "test_errors::test_setup_errors_name_the_fault"

# Test of each row, as "file::function" or "file::function[case]", below the folder `HERE`. The
# cases of `ALONE` and `CALLBACK` are named after the row.
ARGUMENT_TESTS = {
    "accelerator": LAUNCH,
    "strategy": LAUNCH,
    "devices": LAUNCH,
    "num_nodes": "trainer/test_arguments::test_one_device_on_each_of_two_nodes",
    "precision": "trainer/test_arguments::test_true_half_precision",
    "logger": FILES,
    "callbacks": "trainer/test_callbacks::test_callbacks_together",
    "fast_dev_run": "trainer/test_arguments::test_arguments_together",
    "limit_test_batches": "trainer/test_arguments::test_test_and_predict_may_be_limited",
    "limit_predict_batches": "trainer/test_arguments::test_test_and_predict_may_be_limited",
    "overfit_batches": f"{ALONE}[overfit_batches=0.5]",
    "log_every_n_steps": FILES,
    "enable_checkpointing": FILES,
    "plugins": "test_outside_of_steps::test_predictions_are_written_and_a_late_checkpoint_is_there",
    "sync_batchnorm": "trainer/test_arguments::test_sync_batchnorm_is_refused_on_several_devices",
    "default_root_dir": FILES,
    **{name: f"{ALONE}[{name}]" for name in test_arguments.ALONE if "=" not in name},
}
CALLBACK_TESTS = {
    "BackboneFinetuning": REFUSED_CALLBACKS,
    "BaseFinetuning": REFUSED_CALLBACKS,
    "BasePredictionWriter": ARGUMENT_TESTS["plugins"],
    "BatchSizeFinder": TUNER,
    "Callback": "trainer/test_callbacks::test_callbacks_together",
    "EarlyStopping": CALLBACKS_ACT_ALIKE,
    "LearningRateFinder": "trainer/test_callbacks::test_callbacks_together",
    "LearningRateMonitor": CALLBACKS_ACT_ALIKE,
    "ModelCheckpoint": CALLBACKS_ACT_ALIKE,
    "ModelPruning": REFUSED_CALLBACKS,
    "ModelSummary": MONITORS,
    "OnExceptionCheckpoint": SAVED_ON_EXCEPTION,
    "StochasticWeightAveraging": REFUSED_CALLBACKS,
    "ThroughputMonitor": MONITORS,
    "EMAWeightAveraging": REFUSED_CALLBACKS,
    "WeightAveraging": REFUSED_CALLBACKS,
    **{name: f"{CALLBACK}[{name}]" for name in test_callbacks.MORE_CASES},
}
FEATURE_TESTS = {
    "parameter groups": "trainer/test_arguments::test_optimizers_and_schedulers",
    "learning rate schedulers": "trainer/test_arguments::test_optimizers_and_schedulers",
    "`IterableDataset`": "test_trainer::test_training_works_with_a_loader_of_unknown_length",
    "`Tuner.lr_find`": TUNER,
    "`Tuner.scale_batch_size`": TUNER,
    "`training_step` returns `None`": (
        "trainer/test_skipped_steps::test_a_step_that_returns_none_skips_the_batch"
    ),
    "`torch.compile` of layers in an `nn.Sequential`": (
        "trainer/test_compiled_modules::test_compiled_layers_train_as_on_one_device"
    ),
    "`torch.compile` of the whole `nn.Sequential`": SETUP_ERRORS,
    "`torch.compile` of modules that code calls which is cut": SETUP_ERRORS,
    "`nn.SyncBatchNorm`": (
        "trainer/test_arguments::test_layers_that_synchronise_batches_are_refused"
    ),
    "Lazy modules that have seen no batch": (
        "../test_lazy_parameters::test_a_lazy_module_is_named_before_training"
    ),
    "TorchScript": SETUP_ERRORS,
    "weights in hooks, such as averages of the user's own": (
        "test_misuse::test_weights_of_other_stages_cannot_be_used_in_hooks"
    ),
    'scripts without `if __name__ == "__main__"`': (
        "trainer/test_scripts::test_a_script_without_a_guard_trains"
    ),
    "notebooks and interactive sessions": "trainer/test_scripts::test_a_notebook_is_refused",
    "scripts from standard input or `python -c`": NO_SCRIPT,
}


@dataclass(frozen=True)
class Row:
    """A row of a table of the page."""

    name: str
    result: str
    remarks: str

    @property
    def message(self) -> str:
        """The quoted message of a refusal."""
        match = re.match(r'"(.+?)"', self.remarks)
        assert match is not None, f"the row {self.name} quotes no message"
        return match[1]


@cache
def tables() -> dict[str, dict[str, Row]]:
    """Return the rows of the page by heading and first cell."""
    found: dict[str, dict[str, Row]] = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("|")]
        rows = [Row(*(cell.strip() for cell in line.split("|")[1:-1])) for line in lines[2:]]
        found[heading] = {row.name: row for row in rows}
        assert len(found[heading]) == len(rows), f"a row of {heading} is there twice"
    return found


ROWS = {
    "Arguments of the Trainer": {f"`{name}`": test for name, test in ARGUMENT_TESTS.items()},
    "Callbacks": {f"`{name}`": test for name, test in CALLBACK_TESTS.items()},
    "Other features": FEATURE_TESTS,
}


def test_every_argument_of_the_trainer_has_a_row() -> None:
    names = [f"`{name}`" for name in inspect.signature(Trainer).parameters]
    assert sorted(tables()["Arguments of the Trainer"]) == sorted(names)


def test_every_callback_has_a_row() -> None:
    names = [f"`{name}`" for name in callbacks.__all__]
    assert sorted(tables()["Callbacks"]) == sorted(names)


@cache
def functions_in(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if hasattr(node, "name")}


@pytest.mark.parametrize("heading", ROWS)
def test_every_row_that_works_or_is_refused_has_a_test(heading: str) -> None:
    rows, tests = tables()[heading], ROWS[heading]
    assert {row.result for row in rows.values()} <= {"works", "refused", "differs"}
    without_test = {name for name, row in rows.items() if row.result != "differs"} - tests.keys()
    assert not without_test
    assert not tests.keys() - rows.keys(), "a test names a row that is not on the page"
    for test in tests.values():
        file, function, case = re.fullmatch(r"(.+)::(\w+)(?:\[(.+)\])?", test).groups()  # type: ignore[union-attr]
        assert function in functions_in(ROOT / HERE / f"{file}.py"), test
        cases = {**test_arguments.ALONE, **test_callbacks.MORE_CASES}
        assert case is None or case in cases, test


REFUSED = {
    row.name: row
    for table in tables().values()
    for row in table.values()
    if row.result == "refused"
}


@pytest.mark.parametrize("name", [n for n in REFUSED if n in tables()["Callbacks"]])
def test_the_page_quotes_the_message_of_a_refused_callback(name: str) -> None:
    kind: Any = getattr(callbacks, name.strip("`"))
    # The constructors need other arguments, which do not matter here.
    trainer: Any = SimpleNamespace(callbacks=[object.__new__(kind)])
    with pytest.raises(ConfigError) as error:
        refuse_callbacks(trainer)
    assert REFUSED[name].message in str(error.value)


@pytest.mark.parametrize("name", [n for n in REFUSED if n not in tables()["Callbacks"]])
def test_the_package_has_the_message_of_any_other_refusal(name: str) -> None:
    words = re.sub(r"\W+", " ", REFUSED[name].message)
    sources = (ROOT / "lightning_dlres").glob("**/*.py")
    # The text of a message is in several literals, and has placeholders.
    texts = (re.sub(r"\W+", " ", re.sub(r'"\s+f?"', "", source.read_text())) for source in sources)
    if "BatchSizeFinder" in words:
        words = words.partition("pipeline ")[2]
    parts = words.split(" got ")
    assert any(all(part in text for part in parts) for text in texts), words
