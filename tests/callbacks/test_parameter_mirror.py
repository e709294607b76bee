"""Training with `ParameterMirror` equals plain training: on the CPU bit by bit, on a GPU closely.

On a GPU, the processor updates the parameters, and its kernels round in another way.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_dlres.callbacks import ActivationOffload, ParameterMirror, ResourceReport
from lightning_dlres.core.device.link_use import LinkUse
from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.memory.profile.shared_links import shared_links
from tests.support.examples import checkered
from tests.support.mirror_models import (
    NETWORKS,
    OPTIMIZERS,
    WIDTH,
    Classifier,
    data,
    tensors_of,
)
from tests.support.models import QUIET

WINDOWS: list[int | str] = ["auto", "min", 6000]
# Largest difference on a GPU, absolute and relative.
GPU_TOLERANCE = 2e-3
# The accelerator of the running test.
WHERE = {"accelerator": "cpu"}


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)], autouse=True)
def _accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WHERE, "accelerator", request.param)


def assert_same(own: Any, expected: Any, name: str = "") -> None:
    """Assert that tensors, numbers or lists of them are equal, or close on a GPU."""
    if WHERE["accelerator"] == "cpu":
        is_tensor = isinstance(own, Tensor)
        assert torch.equal(own, expected) if is_tensor else own == expected, name
        return
    if isinstance(own, Tensor):
        own, expected = own.cpu(), expected.cpu()
    torch.testing.assert_close(own, expected, rtol=GPU_TOLERANCE, atol=GPU_TOLERANCE)


def train(
    module: LightningModule, callbacks: list[Callback], *, epochs: int = 3, **options: Any
) -> Trainer:
    """Train a module on the accelerator of the test."""
    trainer = Trainer(
        devices=1, max_epochs=epochs, callbacks=callbacks, **{**WHERE, **QUIET, **options}
    )
    trainer.fit(module, data(), data(16))
    return trainer


def compare(
    make: Any,
    callbacks: list[Callback],
    *,
    plain_callbacks: tuple[Callback, ...] = (),
    **options: Any,
) -> None:
    """Train plainly and with callbacks, and assert that everything is equal."""
    results = []
    for added in ([], callbacks):
        seed_everything(3, verbose=False)
        module = make()
        own = [copy.deepcopy(callback) for callback in plain_callbacks]
        trainer = train(module, [*own, *added], **options)
        results.append((module, trainer))
    (plain, plain_trainer), (ours, trainer) = results
    assert_same(ours.losses, plain.losses)
    for (name, own), expected in zip(
        ours.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert_same(own, expected, name)
    for optimizer, plain_optimizer in zip(
        trainer.optimizers, plain_trainer.optimizers, strict=True
    ):
        states = zip(tensors_of(optimizer), tensors_of(plain_optimizer), strict=True)
        for own, expected in states:
            assert_same(own, expected)


@pytest.mark.parametrize(("network", "window"), checkered(NETWORKS, WINDOWS))
def test_all_kinds_of_networks_train_alike(network: str, window: int | str) -> None:
    # Where a gradient is zero but for rounding, AdamW turns the rounding into whole steps.
    optimizer = "sgd" if WHERE["accelerator"] == "gpu" else "adamw"
    compare(lambda: Classifier(network, optimizer), [ParameterMirror(window=window)])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("update", ["layerwise", "after_backward"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 3},
    ],
    ids=["plain", "norm", "value", "accumulate"],
)
def test_all_kinds_of_optimizers_train_alike(
    optimizer: str, update: Any, options: dict[str, Any]
) -> None:
    if WHERE["accelerator"] == "gpu" and optimizer == "lbfgs" and "gradient_clip_val" in options:
        pytest.skip("it diverges, so all differences grow")
    compare(lambda: Classifier("twice", optimizer), [ParameterMirror(update=update)], **options)


class Adversarial(LightningModule):
    """Two networks with an optimizer each, in manual optimization, with a gradient penalty.

    The weights of one network are clamped through `data` between two of its forwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator_optimizer, critic_optimizer = self.optimizers()
        real = batch[0].requires_grad_()
        fake = self.generator(batch[0][:, :4].detach())
        score = self.critic(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        loss = (
            self.critic(fake.detach()).mean() - score.mean() + (slope.norm(dim=1) - 1).pow(2).mean()
        )
        critic_optimizer.zero_grad()
        self.manual_backward(loss)
        critic_optimizer.step()
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.3, 0.3)
        generator_loss = -self.critic(fake).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.losses += [loss.item(), generator_loss.item()]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.critic(batch[0]).mean().item())

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01, fused=True),
            torch.optim.RMSprop(self.critic.parameters(), lr=0.01),
        )


class SharpnessAware(Classifier):
    """Two backwards a step, the second with weights that were moved through `data`."""

    def __init__(self) -> None:
        super().__init__("twice", "sgd")
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.network(batch[0]), batch[1]))
        moved = [(p, p.data, p.grad.clone()) for p in self.parameters() if p.grad is not None]
        for number, (parameter, value, gradient) in enumerate(moved):
            if number % 2:
                parameter.data = value + 0.05 * gradient.sign()
            else:
                parameter.data.add_(0.05 * gradient.sign())
        optimizer.zero_grad()
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.manual_backward(loss)
        for number, (parameter, value, gradient) in enumerate(moved):
            if number % 2:
                parameter.data = value
            else:
                parameter.data.sub_(0.05 * gradient.sign())
        optimizer.step()
        self.losses.append(loss.item())


class SparseEmbedding(Classifier):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__("twice", "sgd")
        self.table = nn.Embedding(9, WIDTH, sparse=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = (batch[0][:, :3] * 2).abs().long() % 9
        loss = F.cross_entropy(self.network(self.table(tokens).mean(1)), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SkippedSteps(Classifier):
    """Every third step returns None."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class MovingAverage(Callback):
    """Weights are exchanged for their moving average in validation, through `data`."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not hasattr(self, "means"):
            self.means = [p.data.clone() for p in pl_module.parameters()]
        for mean, parameter in zip(self.means, pl_module.parameters(), strict=True):
            mean.mul_(0.9).add_(parameter.data, alpha=0.1)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if hasattr(self, "means"):
            self.kept = [p.data.clone() for p in pl_module.parameters()]
            for mean, parameter in zip(self.means, pl_module.parameters(), strict=True):
                parameter.data.copy_(mean)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if hasattr(self, "means"):
            for kept, parameter in zip(self.kept, pl_module.parameters(), strict=True):
                parameter.data = kept


class GradientNorms(Callback):
    """Gradients are read before the update, and changed."""

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.norm() + 1)


class Unfreezing(BackboneFinetuning):
    """The backbone trains from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)


class WithBackbone(Classifier):
    """A network whose first part `Unfreezing` freezes."""

    def __init__(self) -> None:
        super().__init__("twice", "sgd")
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([self.backbone(batch[0]), batch[1]], batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9, fused=True)


@pytest.mark.parametrize(
    "make",
    [Adversarial, SharpnessAware, SparseEmbedding, SkippedSteps],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("window", WINDOWS)
def test_steps_of_the_users_own_kind_train_alike(make: Any, window: int | str) -> None:
    compare(make, [ParameterMirror(window=window)])


@pytest.mark.parametrize("callback", [MovingAverage(), GradientNorms()], ids=["average", "norms"])
def test_callbacks_that_change_weights_or_gradients_work(callback: Callback) -> None:
    compare(Classifier, [ParameterMirror()], plain_callbacks=(callback,))


def test_layers_may_be_unfrozen_later() -> None:
    compare(WithBackbone, [ParameterMirror()], plain_callbacks=(Unfreezing(),))


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_precisions_train_alike(precision: Any) -> None:
    compare(Classifier, [ParameterMirror()], precision=precision)


def test_a_loss_scaler_works() -> None:
    def options() -> dict[str, Any]:
        device = "cuda" if WHERE["accelerator"] == "gpu" else "cpu"
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)
        return {"plugins": MixedPrecision("16-mixed", device, scaler=scaler)}

    seed_everything(3, verbose=False)
    plain = Classifier()
    train(plain, [], **options())
    seed_everything(3, verbose=False)
    ours = Classifier()
    train(ours, [ParameterMirror()], **options())
    assert_same(ours.losses, plain.losses)


@pytest.mark.parametrize("is_first", [True, False])
def test_activations_leave_the_device_in_the_same_trainer(is_first: bool) -> None:
    callbacks: list[Callback] = [
        ParameterMirror(window="min"),
        ActivationOffload(budget="min", min_size=64),
    ]
    optimizer = "sgd" if WHERE["accelerator"] == "gpu" else "adamw"
    compare(
        lambda: Classifier("tied embedding", optimizer), callbacks if is_first else callbacks[::-1]
    )


def test_activations_get_the_part_of_the_link_that_the_mirror_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uses: list[LinkUse] = []

    def recorded(links: Any, use: LinkUse, seconds: float) -> Any:
        uses.append(use)
        return shared_links(links, use, seconds)

    monkeypatch.setattr("lightning_dlres.memory.offloader.shared_links", recorded)
    mirror = ParameterMirror(window="min")
    module = Classifier()
    train(module, [ActivationOffload(budget="min", min_size=64), mirror])
    assert mirror.mirror is not None
    assert mirror.mirror.plan is not None
    trained = [p for p in module.parameters() if p.requires_grad]
    gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
    # Forward and backward fetch most layers once each.
    assert mirror.mirror.plan.fetched_bytes > gradient_bytes
    assert set(uses) == {LinkUse(mirror.mirror.plan.fetched_bytes, gradient_bytes)}


def test_checkpoints_are_those_of_plain_training(tmp_path: Path) -> None:
    checkpoints = []
    for name, callbacks in (("plain", []), ("ours", [ParameterMirror()])):
        seed_everything(3, verbose=False)
        trainer = train(Classifier(), callbacks, epochs=2)
        trainer.save_checkpoint(tmp_path / name)
        checkpoints.append(torch.load(tmp_path / name, weights_only=False))
    plain, ours = checkpoints
    for name, value in plain["state_dict"].items():
        assert_same(ours["state_dict"][name], value)
    # Each tensor is written by itself, not the whole region.
    sizes = [(tmp_path / name).stat().st_size for name in ("plain", "ours")]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)
    results = []
    for callbacks, start in (([], "plain"), ([], "ours"), ([ParameterMirror()], "plain")):
        seed_everything(4, verbose=False)
        module = Classifier()
        trainer = Trainer(**WHERE, devices=1, max_epochs=4, callbacks=callbacks, **QUIET)
        trainer.fit(module, data(), data(16), ckpt_path=tmp_path / start)
        results.append(module.state_dict())
    for resumed in results[1:]:
        for name, value in results[0].items():
            assert_same(resumed[name], value)


@pytest.mark.parametrize("task", ["validate", "test", "predict"])
def test_evaluation_streams_the_layers_too(task: str) -> None:
    seed_everything(3, verbose=False)
    plain = Classifier("tied embedding")
    ours = copy.deepcopy(plain)
    for module, callbacks in ((plain, []), (ours, [mirror := ParameterMirror(window="min")])):
        trainer = Trainer(**WHERE, devices=1, callbacks=callbacks, **QUIET)
        getattr(trainer, task)(module, data())
    assert_same(ours.losses, plain.losses)
    assert len(ours.losses) == len(data())
    assert mirror.mirror is not None
    assert 0 < mirror.mirror.window.peak_bytes < sum(u.nbytes for u in mirror.mirror.units)


def test_the_report_shows_the_plan_beside_the_measurement(tmp_path: Path) -> None:
    train(Classifier(), [ParameterMirror(window="min"), ResourceReport(dir=tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "## Parameter mirror" in text
    assert "planned; forward and backward" in text
    assert "Window of the device" in text
    assert "Mirror in host memory" in text


def test_one_callback_serves_several_fits() -> None:
    def twice(callbacks: list[Callback]) -> dict[str, Tensor]:
        seed_everything(3, verbose=False)
        module = Classifier()
        train(module, callbacks, epochs=1)
        train(module, callbacks, epochs=1)
        return module.state_dict()

    plain, ours = twice([]), twice([ParameterMirror()])
    for name, value in plain.items():
        assert_same(ours[name], value)


def test_a_tensor_that_will_not_see_updates_is_named(recwarn: pytest.WarningsRecorder) -> None:
    module = Classifier()
    module.alias = module.network.head.weight.data
    train(module, [ParameterMirror()], epochs=1)
    # The second run begins with parameters in a mirror, which are no such tensors.
    train(module, [ParameterMirror()], epochs=1)
    named = [str(w.message) for w in recwarn if "will not see updates" in str(w.message)]
    assert len(named) == 1
    assert "network.head.weight" in named[0]


def test_ordinary_parameters_are_not_said_to_be_shared(recwarn: pytest.WarningsRecorder) -> None:
    train(Classifier(), [ParameterMirror()], epochs=1)
    assert not [w for w in recwarn if "will not see updates" in str(w.message)]


def test_other_strategies_are_refused() -> None:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", callbacks=[ParameterMirror()], **QUIET
    )
    with pytest.raises(ConfigError, match="must be one for a single device"):
        ParameterMirror().setup(trainer, Classifier(), "fit")


def test_two_mirrors_are_refused() -> None:
    with pytest.raises(ConfigError, match="one ParameterMirror, got 2"):
        train(Classifier(), [ParameterMirror(), ParameterMirror()])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": "large"}, "window must be"),
        ({"window": True}, "window must be"),
        ({"window": 0}, "window must be a number of bytes above 0"),
        ({"disk": "s3://bucket"}, "disk must be a local directory"),
        ({"update": "layers"}, "update must be one of"),
        ({"profile_steps": 0}, "profile_steps must be"),
        ({"fused": 1}, "fused must be"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParameterMirror(**arguments)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    callback = ParameterMirror(disk=tmp_path / "none")
    with pytest.raises(ConfigError, match="disk must be an existing directory"):
        train(Classifier(), [callback])


def test_the_mirror_may_lie_in_a_file(tmp_path: Path) -> None:
    compare(Classifier, [ParameterMirror(disk=tmp_path, window="min")])
    assert not list(tmp_path.iterdir())


class Interrupted(Classifier):
    """A step of the first fit raises."""

    interrupt_at = 4

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if len(self.losses) == self.interrupt_at:
            raise ValueError("interrupted")
        return loss


class OptimizerReplaced(Callback):
    """The optimizer is another one from the second epoch on."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.05, fused=True)]


class WeightsAssigned(Callback):
    """The parameters are other ones from the second epoch on; the optimizer has the old ones."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            values = {name: value.clone() for name, value in pl_module.state_dict().items()}
            pl_module.load_state_dict(values, assign=True)


class Unfused(Classifier):
    """An optimizer without fused and foreach kernels, by the user's choice."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, foreach=False)


class GradientsReadLate(Callback):
    """Gradients are read after the update, and backward hooks read weights."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen: list[Tensor] = []
        for module in pl_module.network.modules():
            if isinstance(module, nn.Linear):
                module.register_full_backward_hook(
                    lambda module, *args: self.seen.append(module.weight.detach().clone())
                )

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        pl_module.losses += [float(gradient.norm()) for gradient in gradients]
        pl_module.losses += [float(weight.sum()) for weight in self.seen]
        self.seen.clear()


@pytest.mark.parametrize("update", ["layerwise", "after_backward"])
def test_training_goes_on_after_an_interrupted_step(update: Any) -> None:
    results = []
    for callbacks in ([], [ParameterMirror(update=update)]):
        seed_everything(3, verbose=False)
        module = Interrupted("twice", "sgd")
        trainer = Trainer(**WHERE, devices=1, max_epochs=2, callbacks=callbacks, **QUIET)
        with pytest.raises(ValueError, match="interrupted"):
            trainer.fit(module, data(), data(16))
        module.interrupt_at = -1
        trainer.fit(module, data(), data(16))
        results.append((module.losses, module.state_dict()))
    assert_same(results[1][0], results[0][0])
    for name, value in results[0][1].items():
        assert_same(results[1][1][name], value)


@pytest.mark.parametrize(
    "callback",
    [OptimizerReplaced(), WeightsAssigned(), GradientsReadLate()],
    ids=["optimizer", "weights", "late"],
)
def test_callbacks_that_replace_or_read_parts_work(callback: Callback) -> None:
    compare(lambda: Classifier("twice", "sgd"), [ParameterMirror()], plain_callbacks=(callback,))


class LateGradientHooks(Callback):
    """Hooks that halve gradients, attached when training has begun."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        for parameter in pl_module.parameters():
            parameter.register_post_accumulate_grad_hook(halve)


class ReturningHook(Callback):
    """A hook that returns a tensor, which torch does not allow."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for parameter in pl_module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad)  # type: ignore[arg-type, return-value]


def test_a_gradient_hook_that_returns_a_tensor_is_named() -> None:
    trainer = Trainer(**QUIET, max_steps=2, callbacks=[ReturningHook(), ParameterMirror()])
    with pytest.raises(UnsupportedStepError, match="must return None"):
        trainer.fit(Classifier(), data())


class LateStepHook(Callback):
    """Hook of the optimizer's step that changes options and gradients, attached in training."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def change(optimizer: torch.optim.Optimizer, *args: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)

        trainer.optimizers[0].register_step_pre_hook(change)


class ReplacedStep(Callback):
    """The optimizer's step is replaced by one that clips gradients first."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        step = optimizer.step

        def clipping(closure: Any = None, **kwargs: Any) -> Any:
            loss = closure()
            nn.utils.clip_grad_value_(pl_module.parameters(), 1e-3)
            step(**kwargs)
            return loss

        optimizer.step = clipping  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("update", ["layerwise", "after_backward"])
@pytest.mark.parametrize("callback", [LateGradientHooks, LateStepHook, ReplacedStep])
def test_code_that_changes_gradients_late_is_noticed(callback: Any, update: Any) -> None:
    own = (callback(),)
    compare(
        lambda: Classifier("twice", "sgd"), [ParameterMirror(update=update)], plain_callbacks=own
    )


def test_weight_averaging_with_batchnorm_needs_the_last_gradients() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    compare(
        lambda: Classifier("convolutions", "sgd"),
        [ParameterMirror(update="layerwise")],
        plain_callbacks=(averaging,),
    )


@pytest.mark.parametrize("update", ["layerwise", "after_backward"])
def test_the_users_choice_of_kernels_is_kept(update: Any) -> None:
    compare(Unfused, [ParameterMirror(update=update)])


def test_a_model_trains_plainly_after_evaluation_and_pickling() -> None:
    results = []
    for callbacks in ([], [ParameterMirror(window="min")]):
        seed_everything(3, verbose=False)
        module = Classifier()
        trainer = Trainer(**WHERE, devices=1, callbacks=callbacks, **QUIET)
        trainer.validate(module, data(), verbose=False)
        trainer = train(module, callbacks, epochs=1)
        module = pickle.loads(pickle.dumps(module.network)).cpu()
        module(torch.ones(2, WIDTH)).sum().backward()
        results.append([p.grad for p in module.parameters()])
    for expected, own in zip(*results, strict=True):
        assert_same(own, expected)


class Pickled(Callback):
    """The model is pickled amid training, and the copy is used."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        copied = pickle.loads(pickle.dumps(pl_module.network)).cpu()
        pl_module.losses.append(float(copied(torch.ones(2, WIDTH)).sum()))


def test_a_model_can_be_pickled_amid_training() -> None:
    compare(Classifier, [ParameterMirror()], plain_callbacks=(Pickled(),))


class SelectivelyCheckpointed(Classifier):
    """Activation checkpointing that keeps the results of some operations."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        output = checkpoint(
            self.network, batch[0].requires_grad_(), use_reentrant=False, context_fn=contexts
        )
        loss = F.cross_entropy(output, batch[1])
        self.losses.append(loss.item())
        return loss


def test_selective_checkpointing_works() -> None:
    compare(SelectivelyCheckpointed, [ParameterMirror(window="min")])


class Compiled(Classifier):
    """A network that torch.compile has compiled, whose layers have different sizes."""

    def __init__(self, way: str) -> None:
        super().__init__("recurrent", "sgd")
        layers = [nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH), nn.Linear(WIDTH, 4)]
        self.network = nn.Sequential(*layers)
        if way == "network":
            self.network.compile(backend="aot_eager")
        else:
            for layer in self.network:
                layer.compile(backend="aot_eager")


@pytest.mark.parametrize("way", ["network", "layers"])
@pytest.mark.parametrize("window", ["min", 1 << 20])
def test_compiled_networks_train_alike(way: str, window: int | str) -> None:
    torch.compiler.reset()
    compare(lambda: Compiled(way), [ParameterMirror(window=window)], epochs=2)
