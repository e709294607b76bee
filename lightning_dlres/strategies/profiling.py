"""The profile of a run (Method E, E1, E5): the user's own layers and loss, on every rank, with a
few training samples.

The samples come straight from the dataset, beside the loader, and random state is put back:
training sees the same batches as without profiling. Weights, buffers, metrics and logs stay as they
were."""

from __future__ import annotations

import inspect
import os
import socket
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dlres import _compat
from lightning_dlres.core import rng
from lightning_dlres.core._compat import LiveBytes
from lightning_dlres.core.errors import ConfigError, DlresError, got_expected
from lightning_dlres.core.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.cluster import (
    kinds_of,
    pairs_to_measure,
    powers_of,
    probe,
    times_of_kinds,
)
from lightning_dlres.pipeline.layers import Clock, LayerMeasurement, measure_layers
from lightning_dlres.pipeline.microbatch import cut_batch, microbatch_sizes, samples_in
from lightning_dlres.pipeline.partition import ModelLayers
from lightning_dlres.pipeline.profile import Cluster, Device, LayerProfile, Link, StepProfile
from lightning_dlres.strategies.capture import find_pipelined_module
from lightning_dlres.strategies.connection import Connection
from lightning_dlres.strategies.copies import a_copy
from lightning_dlres.strategies.metrics import MetricStates
from lightning_dlres.strategies.optimizers import state_ratio, update_seconds
from lightning_dlres.strategies.step import LightningStep, SplitBatch, StepContext
from lightning_dlres.strategies.zeroing import zeroes_every_step

_SHARE_OF_FREE_MEMORY = 0.9
# All ranks measure at once, as they will train: ranks of one machine share its caches and memory.
# Several times, since what else a machine does for a while must not make a device look slow.
_ROUNDS = 5


@dataclass(frozen=True)
class ProfileConfig:
    """How the model is profiled before training (Method E, E5).

    Args:
        samples: Number of training samples to run; "auto": one micro-batch.
        batch: Number of samples in a profiled batch; "auto": that of the loader.
        microbatch: Number of samples that are run at once; "auto": as many as in training.
        repeats: Least number of runs of every layer.
        seconds: Least time over which the layers are measured on every rank. A throttled processor
            shows its sustained speed only over a while.

    Raises:
        ConfigError: a number is not positive.
    """

    samples: int | Literal["auto"] = "auto"
    batch: int | Literal["auto"] = "auto"
    microbatch: int | Literal["auto"] = "auto"
    repeats: int = 5
    seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "microbatch"):
            value = getattr(self, name)
            if value != "auto" and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                expected = "a positive integer or 'auto'"
                raise ConfigError(got_expected(f"profile.{name}", value, expected, "'auto'"))
        if self.repeats < 1 or not self.seconds >= 0:
            raise ConfigError(
                f"profile: got repeats={self.repeats}, seconds={self.seconds}, expected at least 1 "
                "and a number that is not negative. Try ProfileConfig()."
            )


@dataclass(frozen=True)
class DeviceMeasurement:
    """What a run costs on one device.

    Attributes:
        layers: what each layer costs.
        loss: seconds of the loss of one micro-batch, forward and backward.
        loss_bytes: what it needs for a moment.
        update: seconds that the optimizer takes for a byte of a gradient.
        pace: by how much time on the wall exceeds that of the processor.
    """

    layers: list[LayerMeasurement]
    loss: float
    loss_bytes: int
    update: float
    pace: float


class NotMeasured(DlresError):
    """The layers could not be run on some rank; raised on all."""


@dataclass(frozen=True)
class RunProfile:
    """What was measured: everything that a planner needs."""

    layers: tuple[LayerProfile, ...]
    step: StepProfile
    cluster: Cluster
    microbatches: int


@dataclass(frozen=True)
class ProfileSamples:
    """What rank 0 read: micro-batches as the first layer gets them, the batches they were made
    from, and how many micro-batches there are in a training batch."""

    inputs: list[Tree]
    batches: list[Any]
    microbatches: int


def read_samples(
    trainer: Trainer, context: StepContext, config: ProfileConfig, microbatches: int
) -> ProfileSamples:
    """Read a few training samples, beside the loader; on one rank."""
    saved = rng.snapshot(context.device)
    try:
        loader = _compat.train_loader(trainer)
        batch = _whole(config.batch, getattr(loader, "batch_size", None))
        size = _whole(config.microbatch, -(-batch // microbatches) if batch else None)
        data = _few_samples(loader, _whole(config.samples, size))
        data = trainer.precision_plugin.convert_input(data)
        data = trainer.strategy.batch_to_device(data, torch.device("cpu"))
        takes_index = len(inspect.signature(context.module.training_step).parameters) > 1
        found = samples_in(data) or 1
        if size is None:
            # The loader makes whole batches only.
            batch, size = found, max(microbatch_sizes(found, microbatches))
        parts = max(1, found // size)
        sizes = [size] * (parts - 1) + [found - size * (parts - 1)]
        split = context.split_batch or cut_batch
        batches = [data] if parts == 1 else list(split(data, sizes))
        inputs = []
        for part in batches:
            args = (part, 0) if takes_index else (part,)
            with torch.no_grad():
                inputs.append(LightningStep(context, args, untouched=True).module_inputs())
        return ProfileSamples(inputs, batches, min(microbatches, batch or microbatches))
    finally:
        rng.restore(saved, context.device)


def _whole(asked: int | str, otherwise: int | None) -> Any:
    return asked if isinstance(asked, int) else otherwise


def _few_samples(loader: Any, samples: int | None) -> Any:
    loader = a_copy(loader)
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if indexed and callable(collate) and samples is not None:
        return collate([dataset[index] for index in range(min(samples, len(dataset)))])
    return next(iter(loader))


class Profiler:
    """Measures this rank, and puts together what all ranks have measured.

    Args:
        context: what all steps share.
        connection: the ranks.
        slowdown: factor of an emulated slower device; None where nothing is emulated.
        memory_limit: bytes that this rank's device may hold; None finds it.
        layer_context: entered around every forward (mixed precision).
    """

    def __init__(
        self,
        context: StepContext,
        connection: Connection,
        slowdown: float | None,
        memory_limit: int | None,
        layer_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._context, self._connection = context, connection
        self._slowdown, self._memory_limit = slowdown, memory_limit
        self._layer_context = layer_context

    def run(
        self,
        samples: ProfileSamples,
        config: ProfileConfig,
        optimizers: Sequence[Optimizer],
        gradient_copies: int,
    ) -> RunProfile:
        """Measure; called by all ranks.

        Args:
            samples: the same on all ranks.
            config: see there.
            optimizers: the run's, for the size of their state and their time.
            gradient_copies: see `StepProfile`.
        """
        mine = self._measure_at_once(samples, config, optimizers)
        layers = mine.layers
        device, connection = self._context.device, self._connection
        times = connection.gather([t for layer in layers for t in (layer.forward, layer.backward)])
        hosts = self._everywhere([_host(), _device_name(device), self._limit()])
        kinds = kinds_of([name for _, name, _ in hosts], times)
        of_kinds = times_of_kinds(kinds, times)
        powers = powers_of(of_kinds)
        links, message = self._probe([host for host, _, _ in hosts], layers, mine.pace)
        others = times_of_kinds(kinds, connection.gather([mine.loss, mine.update, message]))
        losses, updates, messages = (tuple(column) for column in zip(*others, strict=True))
        cluster = Cluster(
            kinds=tuple(_kind_names(kinds, [name for _, name, _ in hosts], powers)),
            devices=tuple(
                Device(kind=kind, power=powers[kind], host=host, memory_limit=limit)
                for kind, (host, _, limit) in zip(kinds, hosts, strict=True)
            ),
            links=links,
        )
        step = StepProfile(
            loss=losses,
            loss_bytes=mine.loss_bytes,
            message=messages,
            update=updates,
            state_bytes_per_parameter_byte=max(map(state_ratio, optimizers), default=0.0),
            gradient_copies=gradient_copies,
        )
        return RunProfile(
            layer_profiles(self._context.pipelined.layers, layers, of_kinds),
            step,
            cluster,
            samples.microbatches,
        )

    def _measure_at_once(
        self, samples: ProfileSamples, config: ProfileConfig, optimizers: Sequence[Optimizer]
    ) -> DeviceMeasurement:
        connection = self._connection
        rounds = min(_ROUNDS, config.repeats)
        share = replace(
            config, repeats=-(-config.repeats // rounds), seconds=config.seconds / rounds
        )
        found: list[DeviceMeasurement] = []
        reason: str | None = None
        for _ in range(rounds):
            connection.any_rank(False)
            if reason is None:
                try:
                    found.append(
                        measure(
                            self._context,
                            samples,
                            share,
                            self._layer_context,
                            optimizers,
                            self._slowdown,
                        )
                    )
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
        if connection.any_rank(reason is not None):
            raise NotMeasured(next(filter(None, self._everywhere(reason))))
        return _typical(found)

    def _probe(
        self, hosts: list[str], layers: Sequence[LayerMeasurement], pace: float
    ) -> tuple[tuple[Link, ...], float]:
        mailbox = self._connection.mailbox
        size = sorted(layer.output_bytes for layer in layers)[len(layers) // 2]
        links, message = [], 0.0
        for a, b in pairs_to_measure(hosts):
            found = probe(mailbox, a, b, size)
            if found is not None:
                message = max(message, found.message * pace)
            told = [found.link.latency, found.link.bytes_per_second] if found is not None else None
            latency, bandwidth = self._connection.broadcast(told, a)
            links.append(Link(ranks=(a, b), latency=latency, bytes_per_second=bandwidth))
        return tuple(links), message

    def _everywhere(self, mine: Tree) -> list[Any]:
        connection = self._connection
        return [
            connection.broadcast(mine if rank == connection.rank else None, rank)
            for rank in range(connection.world_size)
        ]

    def _limit(self) -> int | None:
        if self._memory_limit is not None:
            return self._memory_limit
        device = self._context.device
        if device.type == "cuda":
            return int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_FREE_MEMORY)
        return None


def profile_here(
    trainer: Trainer,
    module: LightningModule,
    path: str | None,
    split_batch: SplitBatch | None,
    config: ProfileConfig,
    microbatches: int,
    cluster: Cluster,
    factors: Sequence[float],
) -> RunProfile:
    """Measure in this process alone, for devices that are described.

    Args:
        trainer: one that is about to train `module` on a single device.
        path: name of the module to pipeline; None finds it.
        split_batch: the user's way to cut a batch.
        config: how to measure.
        microbatches: into how many the batch is cut.
        cluster: the devices.
        factors: by how much a layer takes longer on each kind of device than here.
    """
    pipelined, device = find_pipelined_module(module, path), trainer.strategy.root_device
    precision = trainer.precision_plugin.train_step_context
    context = StepContext(module, pipelined, MetricStates(module), device, precision, split_batch)
    samples = read_samples(trainer, context, config, microbatches)
    found = measure(context, samples, config, precision, trainer.optimizers)
    layers = found.layers
    times = [[t * f for layer in layers for t in (layer.forward, layer.backward)] for f in factors]
    step = StepProfile(
        loss=tuple(found.loss * factor for factor in factors),
        loss_bytes=found.loss_bytes,
        update=tuple(found.update * factor for factor in factors),
        state_bytes_per_parameter_byte=max(map(state_ratio, trainer.optimizers), default=0.0),
        gradient_copies=1 if zeroes_every_step(trainer, module) else 2,
    )
    return RunProfile(
        layer_profiles(pipelined.layers, layers, times), step, cluster, samples.microbatches
    )


def measure(
    context: StepContext,
    samples: ProfileSamples,
    config: ProfileConfig,
    layer_context: Callable[[], AbstractContextManager[Any]],
    optimizers: Sequence[Optimizer] = (),
    slowdown: float | None = None,
) -> DeviceMeasurement:
    """Return what the layers, the loss and the optimizer cost on this device; `slowdown` where
    speeds are emulated, with one rank for each core or not: then processor time counts alone."""
    clock, runs, losses = Clock(context.device, paced=slowdown is None), [], []
    slowdown = slowdown or 1.0
    count = len(samples.inputs)
    for inputs, batch in zip(samples.inputs, samples.batches, strict=True):
        layers, output = measure_layers(
            context.pipelined.layers.modules,
            context.pipelined.bind,
            inputs,
            context.device,
            layer_context,
            slowdown,
            -(-config.repeats // count),
            config.seconds / count,
            clock,
        )
        runs.append(layers)
        losses.append(_measure_loss(context, batch, output, config.repeats))
    pace = clock.pace()
    weights = [p for module in context.pipelined.layers.modules for p in module.parameters()]
    update = max(
        (update_seconds(optimizer, weights, clock, config.repeats) for optimizer in optimizers),
        default=0.0,
    )
    return DeviceMeasurement(
        [_mean(list(alike)) for alike in zip(*runs, strict=True)],
        statistics.fmean(seconds for seconds, _ in losses) * pace * slowdown,
        max(nbytes for _, nbytes in losses),
        update * pace,
        pace,
    )


def _typical(rounds: Sequence[DeviceMeasurement]) -> DeviceMeasurement:
    """Return the median of every time."""
    layers = [
        replace(
            alike[0],
            forward=statistics.median(layer.forward for layer in alike),
            backward=statistics.median(layer.backward for layer in alike),
        )
        for alike in zip(*(found.layers for found in rounds), strict=True)
    ]
    return DeviceMeasurement(
        layers,
        statistics.median(found.loss for found in rounds),
        max(found.loss_bytes for found in rounds),
        statistics.median(found.update for found in rounds),
        statistics.median(found.pace for found in rounds),
    )


def _measure_loss(
    context: StepContext, batch: Any, output: Tree, repeats: int
) -> tuple[float, int]:
    """Return the counted seconds of the step from the module's call on, forward and backward, and
    the bytes that it needs; zeros where user code cannot be run outside of training."""
    clock, saved = Clock(context.device), rng.snapshot(context.device)
    takes_index = len(inspect.signature(context.module.training_step).parameters) > 1
    args = (batch, 0) if takes_index else (batch,)
    leaves = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), output)
    wanted = [t for t in tensors_of(leaves) if t.requires_grad]
    wanted += [p for p in context.pipelined.layers.outer() if p.device == context.device]
    spent, live = [], LiveBytes()
    try:
        with torch.enable_grad():
            for run in range(repeats + 1):
                step = LightningStep(context, args, untouched=True)
                start = clock.now()
                # Counting bytes takes time: in the run that warms up.
                with live if run == 0 else nullcontext():
                    given = map_tensors(Tensor.clone, leaves) if run == 0 else leaves
                    loss = step.finish(given, None, [samples_in(batch) or 1])
                    del given
                    if loss.requires_grad and wanted:
                        torch.autograd.grad(loss, wanted, allow_unused=True)
                if run:
                    spent.append(clock.between(start, clock.now()))
                step.undo_metrics()
    except Exception as error:
        rank_zero_warn(
            f"dlres: the loss could not be timed before training ({type(error).__name__}: "
            f"{error}); the plan counts it as nothing."
        )
        return 0.0, 0
    finally:
        rng.restore(saved, context.device)
    return statistics.fmean(spent), live.peak


def layer_profiles(
    layers: ModelLayers,
    measured: Sequence[LayerMeasurement],
    times: Sequence[Sequence[float]],
) -> tuple[LayerProfile, ...]:
    """Put together what is known of the layers.

    Args:
        layers: the model.
        measured: their sizes.
        times: for every kind of device the seconds of forward and backward of every layer, in
            turns.
    """
    users: dict[nn.Parameter, int] = {}
    for module in layers.modules:
        for parameter in set(module.parameters()):
            users[parameter] = users.get(parameter, 0) + 1
    names = {parameter: name for name, parameter in layers.root.named_parameters()}
    found = []
    for index, (name, module, sizes) in enumerate(
        zip(layers.names, layers.modules, measured, strict=True)
    ):
        own = [p for p in set(module.parameters()) if users[p] == 1]
        shared = [p for p in set(module.parameters()) if users[p] > 1]
        found.append(
            LayerProfile(
                name=name,
                parameter_bytes=sum(_bytes(p) for p in own),
                gradient_bytes=sum(_bytes(p) for p in own if p.requires_grad),
                shared={names[p]: _bytes(p) for p in sorted(shared, key=names.__getitem__)},
                input_bytes=sizes.input_bytes,
                output_bytes=sizes.output_bytes,
                gradient_output_bytes=sizes.gradient_output_bytes,
                saved_bytes=sizes.saved_bytes,
                workspace_bytes=sizes.workspace_bytes,
                forward=tuple(row[2 * index] for row in times),
                backward=tuple(row[2 * index + 1] for row in times),
            )
        )
    return tuple(found)


def _mean(runs: list[LayerMeasurement]) -> LayerMeasurement:
    return LayerMeasurement(
        sum(run.forward for run in runs) / len(runs),
        sum(run.backward for run in runs) / len(runs),
        max(run.input_bytes for run in runs),
        max(run.output_bytes for run in runs),
        max(run.gradient_output_bytes for run in runs),
        max(run.saved_bytes for run in runs),
        max(run.workspace_bytes for run in runs),
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _host() -> str:
    """Return the host's name; two network namespaces of one machine count as two hosts, as their
    link is what matters."""
    namespace = Path("/proc/self/ns/net")
    return (
        f"{socket.gethostname()} {os.readlink(namespace)}"
        if namespace.exists()
        else socket.gethostname()
    )


def _kind_names(kinds: Sequence[int], names: Sequence[str], powers: Sequence[float]) -> list[str]:
    by_kind = dict(zip(kinds, names, strict=True))
    return [f"{by_kind[kind]} ({powers[kind]:.2f})" for kind in range(len(powers))]
