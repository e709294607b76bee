"""What a callback and a precision plugin share: a Trainer's training steps under an offloader."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_dlres._compat import is_compiled
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.side_effects import tensors_in
from lightning_dlres.memory.offloader import Offloader
from lightning_dlres.memory.options import MemoryOptions
from lightning_dlres.memory.report.report import draw_memory

_SUPPORTED = (SingleDeviceStrategy, DDPStrategy)


class TrainingSteps:
    """The training steps of one `fit`.

    Args:
        options: the limits.
        what: whose they are, for messages.

    Raises:
        ConfigError: the strategy or the device cannot work with it.
    """

    def __init__(self, options: MemoryOptions, trainer: Trainer, what: str) -> None:
        refuse(trainer.strategy, what)
        holders = [type(holder).__name__ for holder in _holders(trainer)]
        if len(holders) > 1:
            raise ConfigError(
                f"{what}: got {' and '.join(holders)} in one Trainer, expected one of them, as "
                "each would move what the other has saved. Leave the others out."
            )
        self._options, self._trainer, self._what = options, trainer, what
        # The directory is looked at now, not when the first step is over.
        settings = options.on(trainer.strategy.root_device, self._ranks_on_host())
        if "compress" in options.actions and MemoryAction.COMPRESS not in settings.actions:
            rank_zero_info(
                f"{what}: without numba-cuda nothing is compressed on a GPU. Install it: "
                "pip install 'lightning-dlres[cuda]'."
            )
        self.offloader: Offloader | None = None
        self._open: ExitStack | None = None

    def begin(self, module: LightningModule, batch: Any, is_stepping: bool = True) -> None:
        """A training step begins; what was left open by one that did not end is given up."""
        self.abandon()
        if self.offloader is None:
            self.offloader = self._made(module)
        optimizers = self._trainer.optimizers
        entries = sum(len(optimizer.state) for optimizer in optimizers)
        shape = (_shape_of(batch), is_stepping, entries, module.training)
        if self.offloader.is_idle(shape):
            return
        stays = list(tensors_in([*module.parameters(), *module.buffers()]))

        def held() -> list[Tensor]:
            return [*stays, *self._held(module), *tensors_in(batch)]

        stack = ExitStack()
        stack.enter_context(self.offloader.step(shape, stays, held))
        self._open = stack

    def end(self) -> None:
        """The training step is over.

        Raises:
            ConfigError: it was measured, and no plan meets the limits.
        """
        stack, self._open = self._open, None
        if stack is not None:
            stack.close()

    def abandon(self) -> None:
        """What has begun did not end as it should."""
        stack, self._open = self._open, None
        if stack is not None:
            error = _Abandoned()
            stack.__exit__(_Abandoned, error, None)

    def close(self) -> None:
        """Give up the memory that was taken."""
        self.abandon()
        if self.offloader is not None:
            self.offloader.close()

    def summary(self) -> str | None:
        """Return one line: predicted beside measured; None where nothing was planned."""
        offloader = self.offloader
        if offloader is None or offloader.plan is None:
            return None
        plan, measured = offloader.plan, offloader.measured
        if not measured.seconds and plan.changes_nothing:
            return f"dlres memory: everything was kept, planned {plan.prediction()}."
        if not measured.seconds:
            return f"dlres memory: planned {plan.prediction()}; no step followed the plan."
        took = sorted(measured.seconds)[len(measured.seconds) // 2]
        line = (
            f"dlres memory: saved data at most {format_bytes(plan.saved_peak)} planned, "
            f"{format_bytes(measured.saved_peak)} measured (all kept: "
            f"{format_bytes(plan.plain_saved_peak)}); step {format_seconds(plan.seconds)} "
            f"planned, {format_seconds(took)} measured"
        )
        if measured.device_peak is not None:
            line += (
                f"; device at most {format_bytes(plan.peak)} planned, "
                f"{format_bytes(measured.device_peak)} measured"
            )
        if measured.unlike:
            line += f"; {len(measured.unlike)} steps unlike the planned one ({measured.unlike[-1]})"
        return line + "."

    def _made(self, module: LightningModule) -> Offloader:
        strategy = self._trainer.strategy
        return Offloader(
            module,
            self._options.on(strategy.root_device, self._ranks_on_host()),
            strategy.root_device,
            self._history,
            is_compiled(module),
            rank_zero_info,
            not isinstance(self._trainer.profiler, PyTorchProfiler),  # type: ignore[attr-defined]
            warn=rank_zero_warn,
            given=self._options.given(),
        )

    def _ranks_on_host(self) -> int:
        trainer = self._trainer
        return max(1, trainer.world_size // max(1, trainer.num_nodes))

    def _history(self, parameter: nn.Parameter) -> int:
        return sum(
            tensor.nbytes
            for optimizer in self._trainer.optimizers
            if parameter in optimizer.state
            for tensor in tensors_in(optimizer.state[parameter])
        )

    def _held(self, module: LightningModule) -> Iterator[Tensor]:
        for parameter in module.parameters():
            yield from tensors_in(parameter.grad)
        for optimizer in self._trainer.optimizers:
            for state in optimizer.state.values():
                yield from tensors_in(state)


def memory_of(trainer: Trainer) -> tuple[str, str, bytes] | None:
    """Return, of the Trainer's callback or precision plugin that has a memory plan, the line, the
    plan as text, and the picture; None if there is none."""
    for holder in _holders(trainer):
        steps = holder.training_steps
        if steps is None or steps.offloader is None:
            continue
        plan, profile = steps.offloader.plan, steps.offloader.profile
        line = steps.summary()
        if plan is not None and profile is not None and line is not None:
            picture = draw_memory(plan, profile, steps.offloader.measured.curve)
            text = f"```\n{plan.table()}\n```\n\n```\n{profile.table()}\n```"
            return line, text, picture
    return None


def _holders(trainer: Trainer) -> list[Any]:
    """Return the Trainer's callbacks and precision plugin that have training steps."""
    parts = [*trainer.callbacks, trainer.precision_plugin]  # type: ignore[attr-defined]
    return [part for part in parts if hasattr(part, "training_steps")]


class _Abandoned(BaseException):
    """Closes a step without its end."""


def refuse(strategy: Strategy, what: str) -> None:
    """Raise where saved data are not the strategy's own device's.

    Raises:
        ConfigError: the strategy shards or streams the model itself, or its device has no tiers.
    """
    if not isinstance(strategy, _SUPPORTED):
        raise ConfigError(
            f"{what}: got the strategy {type(strategy).__name__}, expected a model that is whole "
            "on its device: a single device, or DDP. Strategies that shard a model have options of "
            "their own for activations (FSDP: cpu_offload and activation_checkpointing_policy)."
        )
    device = strategy.root_device
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{what}: got the device {device}, expected a CUDA device or the CPU. Try "
            'Trainer(accelerator="gpu") or "cpu".'
        )


def _shape_of(batch: Any) -> Hashable:
    return tuple((tuple(t.shape), str(t.dtype)) for t in tensors_in(batch))
