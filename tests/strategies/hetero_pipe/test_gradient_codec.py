"""Training with compressed gradients between replicas, compared with uncompressed training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres import ConfigError, HeteroPipeStrategy, PeerLostError, PipelinePlan
from lightning_dlres.pipeline.plan.plan import consecutive_replicas
from lightning_dlres.strategies.hetero_pipe.checkpoints import CHECKPOINT_KEY
from tests.support.killing_layer import KillingLayer
from tests.support.lr_search import FruitlessSearch
from tests.support.models import QUIET, Samples
from tests.support.parity import relative
from tests.support.rank_pool import RankContext, RankPool

# An epoch has two batches of ten samples. In three micro-batches, the replicas have unequal parts.
EPOCHS, SAVED_EPOCHS, BATCHES = 3, 2, 2
# Split of five layers by number of stages. Each of two stages has a gradient to compress.
SPLITS = {1: (5,), 2: (2, 3)}


class Wide(LightningModule):
    """Classifier with two weights whose gradients are compressed.

    Args:
        optimizer: "sgd" or "adamw".
        inexact_from: First batch whose loss cannot be computed per micro-batch.
        victim: Rank that is killed in its second step.
    """

    def __init__(
        self, optimizer: str = "sgd", inexact_from: int = 1000, victim: int | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(16, 260),
            nn.Tanh() if victim is None else KillingLayer(victim, 9),
            nn.Linear(260, 20),
            nn.Tanh(),
            nn.Linear(20, 5),
        )
        self._optimizer, self._inexact_from, self.lr = optimizer, inexact_from, 0.1

    def on_train_start(self) -> None:
        if isinstance(self.net[1], KillingLayer):
            self.net[1].rank = self.global_rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        loss = F.cross_entropy(output, batch[1])
        is_inexact = self.trainer.fit_loop.total_batch_idx >= self._inexact_from
        return loss + 0.1 * output.std(0).mean() if is_inexact else loss

    def configure_optimizers(self) -> Any:
        if self._optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@dataclass
class Recorder(Callback):
    """Callback that records the weights and the residuals of this rank, and the loss scale.

    Attributes:
        weights: Weights after each batch.
        residuals: States of compression after each batch; empty without compression.
        begun: States of compression at the beginning of each run of a step.
        scales: Loss scale after each batch.
    """

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    residuals: list[dict[str, Any]] = field(default_factory=list)
    begun: list[dict[str, Any]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        deployment = getattr(trainer.strategy, "_deployment", None)
        self.compression = deployment.compression if deployment is not None else None
        if self.compression is not None:
            begin = self.compression.begin

            def noting(**options: Any) -> None:
                self.begun.append(self.compression.state_dict())
                begin(**options)

            self.compression.begin = noting

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        held = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
        self.weights.append(held)
        if self.compression is not None:
            self.residuals.append(self.compression.state_dict())
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler is not None else 1.0)


def fit(
    context: RankContext | None,
    codec: str | None,
    *,
    stages: int = 1,
    schedule: str = "1f1b",
    model: dict[str, Any] | None = None,
    epochs: int = EPOCHS,
    scale: float | None = None,
    directory: str | None = None,
    resume: str | None = None,
    late: str | None = None,
    is_searching: bool = False,
    is_deferred: bool = False,
    **options: Any,
) -> tuple[list[dict[str, Tensor]], Recorder, list[str]]:
    """Train, and return the weights after each batch, the callback and the warnings.

    Args:
        context: The rank; None for one device without this package.
        codec: Codec of the gradients.
        stages: Number of stages.
        schedule: Schedule of the pipeline.
        model: Arguments of the model.
        epochs: Last epoch.
        scale: First scale of a gradient scaler; None for full precision.
        directory: Where to save a checkpoint after `SAVED_EPOCHS`.
        resume: Checkpoint to continue from.
        late: Path of a checkpoint that is saved after the run.
        is_searching: True searches a learning rate first, and does not use it.
        is_deferred: True builds the model on its ranks only.
        **options: Further arguments of the Trainer.
    """
    seed_everything(3, verbose=False)
    recorder, callbacks = Recorder(), []
    if directory is not None:
        saver = ModelCheckpoint(
            directory,
            "saved",
            every_n_epochs=SAVED_EPOCHS,
            save_on_train_epoch_end=True,
        )
        callbacks.append(saver)
    if is_searching:
        callbacks.append(FruitlessSearch())
    plugins: list[Any] = [] if context is None else [context.environment]
    if scale is not None:
        scaler = GradScaler("cpu", init_scale=scale)
        plugins.append(MixedPrecision("16-mixed", "cpu", scaler))
    strategy: Any = "auto"
    if context is not None:
        plan = PipelinePlan(
            replicas=consecutive_replicas(context.world_size, stages), split=SPLITS[stages]
        )
        strategy = HeteroPipeStrategy(
            plan=plan,
            microbatches=3,
            schedule=schedule,
            gradient_codec=codec,
            deferred_init=is_deferred,
            timeout=30,
        )
    with pytest.WarningsRecorder(_ispytest=True) as record:
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=context.world_size if context is not None else 1,
            plugins=plugins,
            max_epochs=epochs,
            callbacks=[recorder, *callbacks],
            **{**QUIET, "enable_checkpointing": directory is not None, **options},
        )
        loader = DataLoader(Samples(False, 10 * BATCHES), batch_size=10)
        trainer.fit(Wide(**(model or {})), loader, ckpt_path=resume)
        if late is not None:
            trainer.save_checkpoint(late)
    texts = [str(w.message) for w in record]
    recorder.compression = None
    return recorder.weights, recorder, [t for t in texts if "residuals" in t or "diverge" in t]


def equal_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two ranks have the same states, equal to the bit."""
    tensors: dict[Any, list[Tensor]] = {}
    for states in (one, other):
        for entry in states["units"]:
            for name, tensor in entry["tensors"].items():
                key = entry["gradient"], entry["start"], entry["part"], name
                tensors.setdefault(key, []).append(tensor)
    return all(len(pair) == 2 and torch.equal(*pair) for pair in tensors.values())


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_search_of_the_learning_rate_leaves_no_residuals(
    pool: RankPool, is_deferred: bool, tmp_path: Path
) -> None:
    options = {"is_deferred": is_deferred, "default_root_dir": str(tmp_path), "epochs": 1}
    direct = pool.run(fit, 2, "onebit", **options)
    searched = pool.run(fit, 2, "onebit", is_searching=True, **options)
    for (weights, _, _), (others, _, _) in zip(direct, searched, strict=True):
        # The callback has also seen the steps of the search.
        for one, other in zip(weights, others[-len(weights) :], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def compare(context: RankContext, codec: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """Return the weights of a compressed run by batch, those without, and the last residuals."""
    plain, _, _ = fit(context, None, **options)
    weights, recorder, _ = fit(context, codec, **options)
    return weights, plain, recorder.residuals[-1]


@pytest.mark.parametrize(
    ("ranks", "codec", "options"),
    [
        (2, "int8", {"schedule": "gpipe", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        (4, "fp16", {"stages": 2}),
        pytest.param(3, "int8", {"schedule": "auto"}, marks=pytest.mark.exhaustive),
        pytest.param(3, "fp16", {"schedule": "gpipe"}, marks=pytest.mark.exhaustive),
        pytest.param(
            4,
            "int8",
            {"stages": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_training_is_near_that_without_compression(
    pool: RankPool, ranks: int, codec: str, options: dict[str, Any]
) -> None:
    results = pool.run(compare, ranks, codec, options)
    stages = options.get("stages", 1)
    for rank, (weights, plain, residuals) in enumerate(results):
        assert {"net.0.weight", "net.2.weight"} & {e["gradient"] for e in residuals["units"]}
        assert len(weights) == len(plain) == EPOCHS * BATCHES
        for batch, (one, other) in enumerate(zip(weights, plain, strict=True)):
            replica = results[rank % stages][0][batch]
            assert all(torch.equal(one[name], replica[name]) for name in one), "replicas are equal"
            assert all(relative(one[name], other[name]) < 0.01 for name in one)
        assert any(not torch.equal(weights[-1][name], plain[-1][name]) for name in weights[-1])


def save_and_resume(context: RankContext, directory: str, options: dict[str, Any]) -> list[Any]:
    """Return the weights and residuals at the end of a whole run, and of its resumed rest."""
    whole = fit(context, "tbq", directory=directory, late=f"{directory}/late.ckpt", **options)
    rest = fit(context, "tbq", resume=f"{directory}/saved.ckpt", **options)
    assert len(rest[0]) == (EPOCHS - SAVED_EPOCHS) * BATCHES
    assert not rest[2]
    return [(weights[-1], recorder.residuals[-1]) for weights, recorder, _ in (whole, rest)]


@pytest.mark.parametrize(
    ("ranks", "stages"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.exhaustive)]
)
def test_a_resumed_run_continues_exactly(
    pool: RankPool, tmp_path: Path, ranks: int, stages: int
) -> None:
    for whole, rest in pool.run(
        save_and_resume, ranks, str(tmp_path), {"stages": stages}, timeout=120
    ):
        assert all(torch.equal(value, rest[0][name]) for name, value in whole[0].items())
        assert whole[1]["units"]
        assert equal_states(whole[1], rest[1])
    late = torch.load(tmp_path / "late.ckpt", weights_only=True)[CHECKPOINT_KEY]
    assert late["step"] == EPOCHS * BATCHES
    assert [len(replica["units"]) > 0 for replica in late["replicas"]] == [True] * (ranks // stages)
    # Another number of replicas shares the residuals out again, and one replica has no use for
    # them. A plain Trainer ignores them.
    for others, text in ((3, "shared out again among 3"), (1, "residuals of compressed gradients")):
        resumed = pool.run(fit, others, "tbq", resume=str(tmp_path / "saved.ckpt"))
        assert all(len(weights) == BATCHES for weights, _, _ in resumed)
        assert any(text in warning for warning in resumed[0][2])
    ((weights, _, warned),) = pool.run(fit_plainly, 1, str(tmp_path / "saved.ckpt"))
    assert len(weights) == BATCHES
    assert not warned


def fit_plainly(context: RankContext, resume: str) -> Any:
    return fit(None, None, resume=resume)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_skipped_step_leaves_no_residuals(pool: RankPool, accumulate: int) -> None:
    # The first steps overflow in float16, until the scale is small enough.
    results = pool.run(
        fit, 2, "onebit", scale=2.0**21, epochs=4, accumulate_grad_batches=accumulate
    )
    for _, recorder, _ in results:
        windows = range(accumulate - 1, 4 * BATCHES, accumulate)
        before, before_scale, skipped = {"units": []}, 2.0**21, []
        for batch in windows:
            residuals, scale = recorder.residuals[batch], recorder.scales[batch]
            skipped.append(scale < before_scale)
            assert equal_states(residuals, before) == skipped[-1]
            before, before_scale = residuals, scale
        assert skipped[0]
        assert not skipped[-1]


def test_a_step_that_runs_again_leaves_no_residuals(pool: RankPool) -> None:
    model = {"inexact_from": 3}
    for _, recorder, _ in pool.run(fit, 2, "onebit", schedule="auto", model=model):
        assert len(recorder.begun) == EPOCHS * BATCHES + 1, "batch 3 runs twice"
        assert equal_states(recorder.begun[3], recorder.begun[4])
        assert not equal_states(recorder.begun[4], recorder.begun[5])


@pytest.mark.parametrize(
    ("codec", "texts"),
    [
        ("tbq", ["gradient_codec='tbq' may diverge with AdamW"]),
        pytest.param("int8", [], marks=pytest.mark.exhaustive),
    ],
)
def test_few_bits_for_adam_are_warned_of(pool: RankPool, codec: str, texts: list[str]) -> None:
    for _, _, warned in pool.run(fit, 2, codec, model={"optimizer": "adamw"}, epochs=1):
        assert [text.partition(":")[0] for text in warned] == texts


def test_a_killed_replica_is_named(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(fit, 2, "int8", model={"victim": 1}, timeout=60)
    assert [outcome.error_type for outcome in outcomes] == [PeerLostError.__name__, "RankDied"]
    assert "stage 0 of replica 1 (rank 1)" in outcomes[0].error_message


@pytest.mark.parametrize("codec", ["no such codec", "raw", "zvc", 1, ["int8"]])
def test_unknown_codecs_are_refused(codec: Any) -> None:
    with pytest.raises(ConfigError, match=r"gradient_codec must be None or one of \['bf16'"):
        HeteroPipeStrategy(gradient_codec=codec)
