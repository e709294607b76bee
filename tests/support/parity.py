"""Training runs on a single device and through the pipeline, and comparisons of their results."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from lightning_dlres import HeteroPipeStrategy, PipelinePlan
from lightning_dlres.pipeline.plan.plan import consecutive_replicas, even_split
from lightning_dlres.strategies.hetero_pipe.step.module_search import find_pipelined_module
from tests.support.models import QUIET, Task, loaders
from tests.support.rank_pool import RankContext, RankPool

SPLITS = {
    ("mlp", 2): (3, 5),
    ("mlp", 3): (2, 4, 2),
    ("cnn", 2): (5, 6),
    ("cnn", 3): (2, 5, 4),
    ("gpt", 2): (2, 3),
    ("gpt", 3): (1, 2, 2),
    ("gpt_list", 2): (1, 2),
    ("gpt_list", 3): (1, 1, 1),
}


@dataclass(frozen=True)
class ParityCase:
    """One training to compare.

    Attributes:
        network: "mlp", "cnn", "gpt" or "gpt_list".
        optimizer: "sgd" or "adamw".
        stages: Number of stages.
        replicas: Number of replicas.
        schedule: Schedule of the pipeline.
        accumulate: Batches of an optimizer step.
        clip: Largest norm of the gradients; 0 does not clip.
        ragged: True: the last batch of an epoch has a single sample.
        shuffle: True shuffles and augments the samples.
        workers: Processes of the loader.
        frozen: True freezes some layers.
        tied: True: two layers share a weight.
        dropout: Probability of dropout.
        double: True trains in float64.
        microbatches: Number of micro-batches of a batch.
        epochs: Number of epochs.
        precision: Precision of the Trainer; None: full precision.
    """

    network: str = "mlp"
    optimizer: str = "sgd"
    stages: int = 2
    replicas: int = 1
    schedule: str = "gpipe"
    accumulate: int = 1
    clip: float = 0.0
    ragged: bool = False
    shuffle: bool = False
    workers: int = 0
    frozen: bool = False
    tied: bool = False
    dropout: float = 0.0
    double: bool = False
    microbatches: int = 4
    epochs: int = 2
    precision: str | None = None

    @property
    def world_size(self) -> int:
        return self.stages * self.replicas

    def plain(self) -> ParityCase:
        """Return the case without its pipeline options, which a single device does not have."""
        return replace(self, stages=1, replicas=1, schedule="gpipe", microbatches=4)


@dataclass
class Outcome:
    """Result of one rank.

    Attributes:
        history: Logged values after each batch, validation and epoch.
        weights: State of the model at the end.
        owned: Names of the parameters that this rank held in training.
        resident_bytes: Bytes of these parameters.
        stage_bytes: Bytes that they must have by the plan; 0 without a pipeline.
        schedule: Schedule that the strategy chose; "" without a strategy.
    """

    history: list[dict[str, float]]
    weights: dict[str, Tensor]
    owned: list[str]
    resident_bytes: int
    stage_bytes: int
    schedule: str


class History(Callback):
    """Callback that records every logged value."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def _note(self, trainer: Trainer) -> None:
        self.rows.append(
            {k: float(v) for k, v in {**trainer.callback_metrics, **trainer.logged_metrics}.items()}
        )

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._note(trainer)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self._note(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self._note(trainer)


class Residence(Callback):
    """Callback that records the parameters that this rank holds during training, and checks that
    only they have optimizer state."""

    def __init__(self) -> None:
        self.owned: list[str] = []
        self.bytes = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        held = {name: p for name, p in module.named_parameters() if not p.is_meta}
        self.owned, self.bytes = (
            list(held),
            sum(p.numel() * p.element_size() for p in held.values()),
        )
        for parameter, state in trainer.optimizers[0].state.items():
            assert not parameter.is_meta or not state, "optimizer state for a remote parameter"


def run_case(
    environment: Any, case: ParityCase, strategy: HeteroPipeStrategy | None, **options: Any
) -> Outcome:
    """Train one case on this rank."""
    seed_everything(3, verbose=False)
    dtype = torch.float64 if case.double else torch.float32
    task = Task(case.network, case.optimizer, case.dropout, case.frozen, case.tied)
    # Ten batches an epoch. The last batch of a ragged epoch has one sample: fewer than the
    # micro-batches, and than the replicas.
    samples, batch = (8 * 9 + 1, 8) if case.ragged else (12 * 10, 12)
    train, validation = loaders(task, samples, batch, case.shuffle, case.workers, dtype)
    history, residence = History(), Residence()
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            strategy=strategy or "auto",
            accelerator="cpu",
            devices=case.world_size if strategy else 1,
            plugins=[environment] if environment else [],
            precision=case.precision or ("64-true" if case.double else "32-true"),
            max_epochs=case.epochs,
            accumulate_grad_batches=case.accumulate,
            gradient_clip_val=case.clip or None,
            callbacks=[history, residence],
            default_root_dir=directory,
            log_every_n_steps=1,
            num_sanity_val_steps=1,
            **QUIET,
            **options,
        )
        trainer.fit(task, train, validation)
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    stage_bytes = _stage_bytes(task, strategy) if strategy and case.world_size > 1 else 0
    schedule = strategy.schedule if strategy else ""
    return Outcome(history.rows, weights, residence.owned, residence.bytes, stage_bytes, schedule)


def _stage_bytes(task: Task, strategy: HeteroPipeStrategy) -> int:
    """Count the bytes that the stage should hold, from the plan alone."""
    plan = strategy.plan
    assert plan is not None
    _, stage = plan.position(strategy.global_rank)
    pipelined = find_pipelined_module(task, None)
    own = {
        p for index in plan.layers_of(stage) for p in pipelined.layers.modules[index].parameters()
    }
    inside = {p for module in pipelined.layers.modules for p in module.parameters()}
    outside = {p for p in task.parameters() if p not in inside}
    shared = {
        p
        for n, p in task.named_parameters(remove_duplicate=False)
        if pipelined.layers.layer_of(n) is None
    }
    return sum(p.numel() * p.element_size() for p in own | outside | shared)


def make_strategy(case: ParityCase) -> HeteroPipeStrategy:
    """Return the strategy for a case, with a split that cuts between layers of every kind."""
    layers = {"mlp": 8, "cnn": 11, "gpt": 5, "gpt_list": 3}[case.network]
    split = SPLITS.get((case.network, case.stages)) or even_split(layers, case.stages)
    plan = PipelinePlan(replicas=consecutive_replicas(case.world_size, case.stages), split=split)
    return HeteroPipeStrategy(
        plan=plan, microbatches=case.microbatches, schedule=case.schedule, timeout=60
    )  # type: ignore[arg-type]


def train_on_rank(context: RankContext, case: ParityCase) -> Outcome:
    """Train a case in a rank of the pool."""
    return run_case(context.environment, case, make_strategy(case))


def train_plainly(context: RankContext, case: ParityCase) -> Outcome:
    """Train a case on a single device, without this package's strategy."""
    return run_case(None, case, None)


def relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference over the norm."""
    norm = float(torch.linalg.vector_norm(b.double()))
    return (
        float(torch.linalg.vector_norm(a.double() - b.double())) / norm
        if norm
        else float(a.abs().max())
    )


def assert_same_history(
    actual: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float
) -> None:
    """Assert that every logged value agrees, row by row."""
    assert len(actual) == len(expected)
    for index, (row, other) in enumerate(zip(actual, expected, strict=True)):
        assert row.keys() == other.keys(), (index, row.keys() ^ other.keys())
        for name in row:
            assert abs(row[name] - other[name]) <= tolerance * max(abs(other[name]), 1.0), (
                index,
                name,
                row[name],
                other[name],
            )


def steps_in(history: list[dict[str, float]]) -> int:
    """Return for how many training batches there are logged values."""
    return sum("train_loss_step" in row for row in history)


def assert_same_training(outcomes: list[Outcome], expected: Outcome, tolerance: float) -> None:
    """Assert that every rank logged what was expected and ends with the expected weights."""
    for outcome in outcomes:
        assert_same_history(outcome.history, expected.history, tolerance)
        assert outcome.weights.keys() == expected.weights.keys()
        for name, value in outcome.weights.items():
            if value.is_floating_point():
                assert relative(value, expected.weights[name]) <= tolerance, name


def assert_partitioned(case: ParityCase, outcomes: list[Outcome]) -> None:
    """Assert that ranks own disjoint parts, of the bytes that the plan says."""
    for outcome in outcomes:
        assert outcome.owned
        assert outcome.resident_bytes == outcome.stage_bytes
    if case.world_size > 1 and not case.tied:
        first, last = set(outcomes[0].owned), set(outcomes[case.stages - 1].owned)
        if case.network == "gpt_list":
            first, last = ({n for n in names if n.startswith("blocks")} for names in (first, last))
        assert first
        assert last
        assert not first & last


_PLAIN: dict[ParityCase, Outcome] = {}


def plain_outcome(pool: RankPool, case: ParityCase) -> Outcome:
    """Return the plain run of a case; equal ones run once in a session."""
    key = case.plain()
    if key not in _PLAIN:
        (_PLAIN[key],) = pool.run(train_plainly, 1, key)
    return _PLAIN[key]
