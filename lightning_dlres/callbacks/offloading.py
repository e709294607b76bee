"""Offloading in a Trainer: the base class and the training steps of `ActivationOffload` and
`MemoryPrecision`."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_dlres._compat import is_compiled
from lightning_dlres.callbacks.open_step import OpenStep
from lightning_dlres.core.device.link_use import LinkUse, UsesLink
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.memory.config import DEFAULT_ACTIONS, MemoryConfig
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.side_effects import tensors_in
from lightning_dlres.memory.offloader import Offloader
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.profile.step_profile import StepProfile
from lightning_dlres.memory.report.report import draw_memory

_SUPPORTED = (SingleDeviceStrategy, DDPStrategy)


class MemoryBudget:
    """Base class of `ActivationOffload` and `MemoryPrecision`: their arguments and their plan.

    Attributes:
        training_steps: Offloaded training steps of the latest `fit`; None before the first.
    """

    def __init__(
        self,
        *,
        budget: int | float | str = 0.9,
        saved_budget: int | float | str | None = None,
        host_budget: int | str | None = None,
        disk: str | Path | None = None,
        disk_budget: int | str | None = None,
        min_size: int | str = "64KiB",
        actions: Sequence[str] = DEFAULT_ACTIONS,
        profile_steps: int = 2,
        exact: bool = True,
        on_over_budget: Literal["error", "warn"] = "error",
        plan: MemoryPlan | str | Path | None = None,
    ) -> None:
        """Check and keep the arguments.

        Args:
            budget: Memory that the device may hold in a step: bytes ("8GiB"), a share of the
                device's memory (0.9 or "90%"; on the CPU: of the available memory), or "min" for as
                little as possible.
            saved_budget: Memory that saved tensors alone may take on the device: bytes, or a share
                of what plain training saves. None: no separate limit.
            host_budget: Bytes of pinned host memory for tensors that leave a GPU. None: four fifths
                of the available memory.
            disk: Directory on a fast local disk, for tensors that do not fit the host budget. On
                the CPU all offloaded tensors go there; None then means the system's directory for
                temporary files.
            disk_budget: Bytes on that disk in the planned steps; those that are measured may take
                more. None: no limit.
            min_size: Size below which tensors stay, in bytes.
            actions: Some of "compress", "offload", "reuse" and "recompute". "reuse" lets layers
                write their input's gradient into their input's memory, if nothing else reads it.
                "recompute" lets modules run again in backward. It is off by default: it is exact
                only for a forward that depends on nothing but its inputs, its weights and torch's
                random state. Modules with visible side effects are never recomputed, but effects
                outside of the module cannot be seen.
            profile_steps: Steps that are measured per batch shape. The first one measures memory,
                the others measure time.
            exact: True: "reuse" and "recompute" patch a module only if an extra step shows that it
                computes the same bits. False: rounding may differ.
            on_over_budget: Behaviour if no plan meets the budget, for example when a larger batch
                arrives late in training. "error" ends training; "warn" continues with the
                smallest peak.
            plan: Plan of an earlier run, or the path of the JSON that its `to_json` wrote. Steps
                that match it follow it from the start. Other steps are measured first.

        Raises:
            ConfigError: If an argument has a bad value.
        """
        super().__init__()
        self._config = MemoryConfig(
            budget=budget,
            saved_budget=saved_budget,
            host_budget=host_budget,
            disk=disk,
            disk_budget=disk_budget,
            min_size=min_size,
            actions=actions,
            profile_steps=profile_steps,
            exact=exact,
            on_over_budget=on_over_budget,
            plan=plan,
        )
        self.training_steps: TrainingSteps | None = None

    @property
    def plan(self) -> MemoryPlan | None:
        """Return the latest plan; None before the measured steps are over."""
        offloader = self._offloader
        return offloader.plan if offloader is not None else None

    @property
    def profile(self) -> StepProfile | None:
        """Return the profile that the latest plan was made from; None before the first one."""
        offloader = self._offloader
        return offloader.profile if offloader is not None else None

    @property
    def _offloader(self) -> Offloader | None:
        return self.training_steps.offloader if self.training_steps is not None else None

    def __getstate__(self) -> dict[str, Any]:
        # The state of a run cannot be pickled, and must not reach another process.
        return {**self.__dict__, "training_steps": None}


class TrainingSteps:
    """Offloaded training steps of one `fit`.

    Args:
        config: Options that the user has chosen.
        trainer: Trainer of this `fit`.
        name: Class name of the callback or plugin, for messages.

    Attributes:
        offloader: Offloader of these steps; None before the first one.
        is_closed: True after `close`, with which the `fit` ends.

    Raises:
        ConfigError: If the strategy or the device is not supported, if the Trainer has another
            callback or plugin that offloads, or if an option does not suit the device.
    """

    def __init__(self, config: MemoryConfig, trainer: Trainer, name: str) -> None:
        require_supported(trainer.strategy, name)
        part_names = [type(part).__name__ for part in _offloading_parts(trainer)]
        if len(part_names) > 1:
            raise ConfigError(
                f"{name} must be the only part of a Trainer that offloads, got "
                f"{' and '.join(part_names)} in one Trainer. Remove all but one: each would move "
                "what the other has saved."
            )
        self._config, self._name = config, name
        # The callback or plugin keeps the steps after the run, but must not keep Trainer and model.
        self._trainer: Trainer = weakref.proxy(trainer)
        self.is_closed = False
        # `for_device` checks the directory: do it before training, not after the first step.
        offloader_config = config.for_device(trainer.strategy.root_device, self._ranks_on_host())
        if "compress" in config.actions and MemoryAction.COMPRESS not in offloader_config.actions:
            rank_zero_info(
                f"{name}: without numba-cuda nothing is compressed on a GPU. Install it: "
                "pip install 'lightning-dlres[cuda]'."
            )
        self.offloader: Offloader | None = None
        self._open_step = OpenStep()

    def begin(self, module: LightningModule, batch: Any, is_stepping: bool = True) -> None:
        """Begin a training step. A step that was left open is abandoned.

        Args:
            module: LightningModule that is trained.
            batch: Batch of this step. `MemoryPrecision` has it from before its transfer to the
                device.
            is_stepping: Whether the optimizer steps after this batch.
        """
        self.abandon()
        if self.offloader is None:
            self.offloader = self._make_offloader(module)
        optimizers = self._trainer.optimizers
        state_entries = sum(len(optimizer.state) for optimizer in optimizers)
        # Steps with equal keys should save the same tensors, and find the same memory in use by
        # everything else, such as the optimizers' states.
        key = (_shape_of(batch), is_stepping, state_entries, module.training)
        if self.offloader.is_idle(key):
            return
        # Weights and buffers never move: training and the optimizer access them at any time.
        exempt = list(tensors_in([*module.parameters(), *module.buffers()]))

        def resident_tensors() -> list[Tensor]:
            return [*exempt, *self._gradients_and_states(module), *tensors_in(batch)]

        self._open_step.begin(self.offloader.step(key, exempt, resident_tensors))

    def end(self) -> None:
        """End the training step.

        Raises:
            ConfigError: If the step was measured, and no plan meets the limits.
        """
        self._open_step.end()

    def abandon(self) -> None:
        """Close a step that did not reach its end, such as after an exception; no effect without an
        open step."""
        self._open_step.abandon()

    def close(self) -> None:
        """Release the model, and the memory and disk space of offloaded tensors, except what live
        graphs hold."""
        self.abandon()
        self.is_closed = True
        if self.offloader is not None:
            self.offloader.close()

    def summary(self) -> str | None:
        """Return one line that compares the plan with the measurements; None without a plan."""
        offloader = self.offloader
        if offloader is None or offloader.plan is None:
            return None
        plan, measured = offloader.plan, offloader.measurements
        if not measured.seconds and plan.changes_nothing:
            return (
                "dlres memory: all saved tensors stayed on the device; planned "
                f"{plan.prediction()}."
            )
        if not measured.seconds:
            return f"dlres memory: planned {plan.prediction()}; no step followed the plan."
        median = sorted(measured.seconds)[len(measured.seconds) // 2]
        line = (
            f"dlres memory: saved tensors at most {format_bytes(plan.saved_peak)} planned, "
            f"{format_bytes(measured.saved_peak)} measured (plain training: "
            f"{format_bytes(plan.plain_saved_peak)}); step {format_seconds(plan.seconds)} "
            f"planned, {format_seconds(median)} measured"
        )
        if measured.device_peak is not None:
            line += (
                f"; device at most {format_bytes(plan.peak)} planned, "
                f"{format_bytes(measured.device_peak)} measured"
            )
        if measured.mismatches:
            count = len(measured.mismatches)
            steps = "step" if count == 1 else "steps"
            line += f"; {count} {steps} did not match the plan (latest: {measured.mismatches[-1]})"
        return line + "."

    def _make_offloader(self, module: LightningModule) -> Offloader:
        strategy = self._trainer.strategy
        profiler = self._trainer.profiler  # type: ignore[attr-defined]
        return Offloader(
            module,
            self._config.for_device(strategy.root_device, self._ranks_on_host()),
            strategy.root_device,
            optimizer_bytes=self._optimizer_bytes,
            is_compiled=is_compiled(module),
            log=rank_zero_info,
            warn=rank_zero_warn,
            # Measuring needs torch's profiler, and a second profiler would crash the program.
            may_profile=not isinstance(profiler, PyTorchProfiler),
            link_use=self._link_use,
            given_plan=self._config.load_plan(),
        )

    def _link_use(self) -> LinkUse:
        """Return what the Trainer's other callbacks copy in a step."""
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return sum((one.link_use() for one in callbacks if isinstance(one, UsesLink)), LinkUse())

    def _ranks_on_host(self) -> int:
        trainer = self._trainer
        return max(1, trainer.world_size // max(1, trainer.num_nodes))

    def _optimizer_bytes(self, parameter: nn.Parameter) -> int:
        return sum(
            tensor.nbytes
            for optimizer in self._trainer.optimizers
            if parameter in optimizer.state
            for tensor in tensors_in(optimizer.state[parameter])
        )

    def _gradients_and_states(self, module: LightningModule) -> Iterator[Tensor]:
        for parameter in module.parameters():
            yield from tensors_in(parameter.grad)
        for optimizer in self._trainer.optimizers:
            for state in optimizer.state.values():
                yield from tensors_in(state)


def memory_report(trainer: Trainer) -> tuple[str, str, bytes] | None:
    """Return (summary, plan text, PNG) of the active memory plan, or None."""
    for part in _offloading_parts(trainer):
        steps = part.training_steps
        if steps is None or steps.offloader is None:
            continue
        plan, profile = steps.offloader.plan, steps.offloader.profile
        line = steps.summary()
        if plan is not None and profile is not None and line is not None:
            picture = draw_memory(plan, profile, steps.offloader.measurements.curve)
            text = f"```\n{plan.table()}\n```\n\n```\n{profile.table()}\n```"
            return line, text, picture
    return None


def _offloading_parts(trainer: Trainer) -> list[MemoryBudget]:
    """Return the Trainer's callbacks and precision plugin that offload."""
    parts = [*trainer.callbacks, trainer.precision_plugin]  # type: ignore[attr-defined]
    return [part for part in parts if isinstance(part, MemoryBudget)]


def require_supported(strategy: Strategy, name: str) -> None:
    """Check that a strategy keeps the whole model on one supported device.

    Args:
        strategy: Strategy of the Trainer.
        name: Class name of the callback or plugin, for messages.

    Raises:
        ConfigError: If the strategy shards or streams the model, or its device is not supported.
    """
    if not isinstance(strategy, _SUPPORTED):
        raise ConfigError(
            f"the strategy must keep the whole model on its device for {name} (a single device, or "
            f"DDP), got {type(strategy).__name__}. Use the strategy's own options for activations "
            "(FSDP: cpu_offload and activation_checkpointing_policy; HeteroPipeStrategy: "
            "memory_limit and recompute)."
        )
    device = strategy.root_device
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"the device must be a CUDA device or the CPU for {name}, got {device}. Use "
            'Trainer(accelerator="gpu") or Trainer(accelerator="cpu").'
        )


def _shape_of(batch: Any) -> Hashable:
    return tuple((tuple(t.shape), str(t.dtype)) for t in tensors_in(batch))
