"""Profiler: measures every rank's device and the links, and combines them into one profile."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_dlres.core.comm.rank_group import RankGroup
from lightning_dlres.core.errors import ConfigError, DlresError, PeerLostError
from lightning_dlres.core.host.free_memory import limiting_group
from lightning_dlres.core.units import format_bytes
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.profile.cluster import Cluster, Device, Link
from lightning_dlres.pipeline.profile.config import ProfileConfig, ProfileSamples
from lightning_dlres.pipeline.profile.cpu_cache import CpuCacheFlusher
from lightning_dlres.pipeline.profile.device_kinds import (
    fill_missing_times,
    kind_names,
    kinds_of,
    powers_of,
    times_of_kinds,
)
from lightning_dlres.pipeline.profile.device_measurement import (
    DeviceMeasurement,
    measure_device,
    median_measurement,
)
from lightning_dlres.pipeline.profile.layer_sizes import bytes_of
from lightning_dlres.pipeline.profile.layer_times import LayerMeasurement
from lightning_dlres.pipeline.profile.link_probe import (
    MAX_MESSAGE_SECONDS,
    MAX_ROUNDS,
    pairs_to_measure,
    probe_link,
)
from lightning_dlres.pipeline.profile.optimizer_costs import UpdateBytes, state_ratio, update_bytes
from lightning_dlres.pipeline.profile.profiled_model import ProfiledModel
from lightning_dlres.pipeline.profile.ranks.rank_device import (
    FREE_MEMORY_SHARE,
    RankDevice,
    bytes_for_measuring,
    free_bytes,
    host_memory,
    with_own_limits,
)
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, RunProfile, StepCosts
from lightning_dlres.pipeline.stage.layer_errors import is_lack_of_memory

# Largest number of rounds. All ranks measure at once, as they will train: ranks of one host share
# its caches and memory. Other work of the host may slow a round; the median ignores that round.
_ROUNDS = 5
# A bandwidth probe sends messages that take at least `ProfileConfig.seconds` divided by this; see
# `probe_link`.
_PROBE_TIME_DIVISOR = 60


class ProfilingError(DlresError):
    """Error on all ranks: a rank has too little memory to run the layers."""


class Profiler:
    """Measures this rank's device and combines the measurements of all ranks.

    Args:
        model: The model to measure.
        ranks: The ranks of the run.
        log: Shows a line to the user, on rank 0.
        slowdown: Factor of an emulated slower device; None where nothing is emulated.
        memory_limit: Bytes that the model may take on this rank's device; None: most of the free
            memory on a GPU, no limit on the CPU.
        layer_context: Returns a context manager for every forward (mixed precision).
    """

    def __init__(
        self,
        model: ProfiledModel,
        ranks: RankGroup,
        log: Callable[[str], None],
        slowdown: float | None,
        memory_limit: int | None,
        layer_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model, self._ranks, self._log = model, ranks, log
        self._slowdown, self._memory_limit = slowdown, memory_limit
        self._layer_context = layer_context

    def run(
        self,
        samples: ProfileSamples,
        config: ProfileConfig,
        optimizers: Sequence[Optimizer],
        gradient_copies: int,
    ) -> RunProfile:
        """Return the profile: this rank's sizes, all ranks' times and links. All ranks call this.

        Args:
            samples: Samples to run, the same on all ranks.
            config: Options of the profile.
            optimizers: Optimizers of the run, for their times and the sizes of their states.
            gradient_copies: See `StepCosts`.

        Raises:
            ProfilingError: If a rank has too little memory to run the layers.
            PeerLostError: If another rank has failed.
            Exception: The error of this rank's measurement, if it is not a lack of memory.
        """
        flusher = CpuCacheFlusher()
        described = [RankDevice(*fields) for fields in self._all_gather(list(self._describe()))]
        ranks = with_own_limits(described)
        available = bytes_for_measuring(ranks, self._ranks.rank)
        measurement = self._measure_together(samples, config, optimizers, flusher, available)
        # One row per rank: forward of layer 0, backward of layer 0, forward of layer 1, ...
        rows = self._ranks.gather(
            [t for layer in measurement.layers for t in (layer.forward, layer.backward)]
        )
        self._log_estimates(rows)
        rank_times = fill_missing_times(rows)
        kinds = kinds_of([rank.name for rank in ranks], rank_times)
        times = times_of_kinds(kinds, rank_times)
        powers = powers_of(times)
        links, message_seconds = self._probe_links(
            [rank.host for rank in ranks], measurement, flusher, config
        )
        own_times = measurement.loss, measurement.update, message_seconds
        other_times = times_of_kinds(
            kinds, self._ranks.gather([*own_times, measurement.run_overhead_seconds])
        )
        losses, updates, messages, run_overheads = (
            tuple(column) for column in zip(*other_times, strict=True)
        )
        cluster = Cluster(
            kinds=tuple(kind_names(kinds, [rank.name for rank in ranks], powers)),
            devices=tuple(
                Device(kind=kind, power=powers[kind], host=rank.host, memory_limit=rank.limit)
                for kind, rank in zip(kinds, ranks, strict=True)
            ),
            links=links,
        )
        update = _update_bytes(optimizers, self._model.device)
        step = StepCosts(
            loss=losses,
            loss_bytes=measurement.loss_bytes,
            message=messages,
            run_overhead_seconds=run_overheads,
            update=updates,
            state_bytes_per_parameter_byte=max(map(state_ratio, optimizers), default=0.0),
            update_bytes_per_byte=update.total,
            gradient_copies=gradient_copies,
        )
        return RunProfile(
            layer_profiles(self._model, measurement.layers, times, update),
            step,
            cluster,
            samples.microbatches,
            host_memory(ranks),
        )

    def _measure_together(
        self,
        samples: ProfileSamples,
        config: ProfileConfig,
        optimizers: Sequence[Optimizer],
        flusher: CpuCacheFlusher,
        available: int | None,
    ) -> DeviceMeasurement:
        """Measure this device in several rounds, each at the same time on all ranks."""
        rounds = min(_ROUNDS, config.repeats)
        round_config = replace(
            config, repeats=-(-config.repeats // rounds), seconds=config.seconds / rounds
        )
        measurements: list[DeviceMeasurement] = []
        failure: Exception | None = None
        self._ranks.any_rank(False)  # a barrier: all ranks start together
        for _ in range(rounds):
            load: Callable[[], None] | None = None
            if failure is None:
                try:
                    measurement, load = measure_device(
                        self._model,
                        samples,
                        round_config,
                        layer_context=self._layer_context,
                        optimizers=optimizers,
                        flusher=flusher,
                        limit=available,
                        slowdown=self._slowdown,
                    )
                    measurements.append(measurement)
                except Exception as error:
                    failure = error
            # A rank that is done stays busy until all are: otherwise the others would look faster
            # than they are in training. A rank that failed still takes part in every round.
            self._ranks.any_rank(False, load if self._slowdown is None else None)
            del load
        if self._ranks.any_rank(failure is not None):
            self._raise_failure(failure)
        return median_measurement(measurements)

    def _raise_failure(self, failure: Exception | None) -> NoReturn:
        """Raise the error that stopped the measurement; called by all ranks.

        If one rank lacks memory and another one has a different error, the different error counts.
        """
        is_fatal = failure is not None and not is_lack_of_memory(failure)
        all_lack_memory = self._ranks.all_ranks(not is_fatal)
        is_reported = is_fatal or (all_lack_memory and failure is not None)
        text = f"{type(failure).__name__}: {failure}" if is_reported else None
        first = next(filter(None, self._all_gather(text)))
        if all_lack_memory:
            raise ProfilingError(first)
        if failure is not None and is_fatal:
            raise failure
        raise PeerLostError(f"Another rank raised while the layers were profiled: {first}")

    def _probe_links(
        self,
        hosts: list[str],
        measurement: DeviceMeasurement,
        flusher: CpuCacheFlusher,
        config: ProfileConfig,
    ) -> tuple[tuple[Link, ...], float]:
        """Return the measured links, and this rank's seconds for a message; see `StepCosts`."""
        layers = measurement.layers
        median_bytes = sorted(layer.sizes.output_bytes for layer in layers)[len(layers) // 2]
        links, message_seconds = [], 0.0
        for a, b in pairs_to_measure(hosts):
            probe = probe_link(
                self._ranks.mailbox,
                a,
                b,
                median_bytes,
                flusher,
                rounds=min(MAX_ROUNDS, 2 * config.repeats),
                min_message_seconds=min(MAX_MESSAGE_SECONDS, config.seconds / _PROBE_TIME_DIVISOR),
            )
            own_link = None
            if probe is not None:
                wall_seconds = probe.message_seconds * measurement.wall_per_cpu_second
                message_seconds = max(message_seconds, wall_seconds)
                own_link = [probe.link.latency, probe.link.bytes_per_second]
            latency, bandwidth = self._ranks.broadcast(own_link, a)
            links.append(Link(ranks=(a, b), latency=latency, bytes_per_second=bandwidth))
        return tuple(links), message_seconds

    def _log_estimates(self, rows: Sequence[Sequence[float]]) -> None:
        """Log the layers that a rank has not run; see `fill_missing_times`."""
        for rank, row in enumerate(rows):
            pairs = zip(self._model.names, row[::2], strict=True)
            missing = [name for name, value in pairs if math.isnan(value)]
            if missing:
                self._log(
                    f"dlres: rank {rank} has too little memory to run {', '.join(missing)} for one "
                    "micro-batch. Their times there are estimated from those of other ranks."
                )

    def _all_gather(self, own: Tree) -> list[Any]:
        """Return every rank's tree, in the order of ranks."""
        ranks = self._ranks
        return [
            ranks.broadcast(own if rank == ranks.rank else None, rank)
            for rank in range(ranks.world_size)
        ]

    def _describe(self) -> RankDevice:
        device, limit = self._model.device, self._memory_limit
        is_cuda = device.type == "cuda"
        free = free_bytes(device)
        if limit is None and is_cuda:
            limit = int((free or 0) * FREE_MEMORY_SHARE)
        tensors = chain(self._model.root.parameters(), self._model.root.buffers())
        held = bytes_of(tensor for tensor in tensors if tensor.device.type == "cpu")
        group = "" if is_cuda else limiting_group()
        return RankDevice(_host(), _device_name(device), is_cuda, limit, free, held, group)


def profile_for_cluster(
    model: ProfiledModel,
    samples: ProfileSamples,
    config: ProfileConfig,
    *,
    layer_context: Callable[[], AbstractContextManager[Any]],
    optimizers: Sequence[Optimizer],
    gradient_copies: int,
    cluster: Cluster,
    factors: Sequence[float],
) -> RunProfile:
    """Measure in this process alone, and return the profile for a described cluster.

    Args:
        model: The model to measure.
        samples: Samples to run.
        config: Options of the profile.
        layer_context: Returns a context manager for every forward (mixed precision).
        optimizers: Optimizers of the run.
        gradient_copies: See `StepCosts`.
        cluster: The described devices and links.
        factors: Ratio of a layer's time on each kind of device to its time here.

    Raises:
        ConfigError: If a layer does not fit into the free memory of this process's device.
    """
    device = model.device
    free = free_bytes(device)
    measurement, _ = measure_device(
        model,
        samples,
        config,
        layer_context=layer_context,
        optimizers=optimizers,
        flusher=CpuCacheFlusher(),
        limit=None if free is None else int(free * FREE_MEMORY_SHARE),
    )
    layers = measurement.layers
    for name, layer in zip(model.names, layers, strict=True):
        if math.isnan(layer.forward):
            raise ConfigError(
                f"layer {name!r} cannot be measured here: free memory must be enough to run it "
                f"forward and backward on one micro-batch, got {format_bytes(free or 0)}. Plan on "
                "a device with more memory, or with more micro-batches."
            )
    times = [[t * f for layer in layers for t in (layer.forward, layer.backward)] for f in factors]
    update = _update_bytes(optimizers, device)
    step = StepCosts(
        loss=tuple(measurement.loss * factor for factor in factors),
        loss_bytes=measurement.loss_bytes,
        run_overhead_seconds=tuple(measurement.run_overhead_seconds * f for f in factors),
        update=tuple(measurement.update * factor for factor in factors),
        state_bytes_per_parameter_byte=max(map(state_ratio, optimizers), default=0.0),
        update_bytes_per_byte=update.total,
        gradient_copies=gradient_copies,
    )
    return RunProfile(
        layer_profiles(model, layers, times, update), step, cluster, samples.microbatches
    )


def layer_profiles(
    model: ProfiledModel,
    measurements: Sequence[LayerMeasurement],
    times: Sequence[Sequence[float]],
    update: UpdateBytes,
) -> tuple[LayerProfile, ...]:
    """Return the profiles of all layers.

    Args:
        model: The model with its layers.
        measurements: Measurement of every layer; only the sizes count.
        times: Seconds, one row per kind of device: forward of layer 0, backward of layer 0, forward
            of layer 1, ...
        update: Temporary memory of the optimizer's step.
    """
    users: dict[nn.Parameter, int] = {}
    for module in model.modules:
        for parameter in set(module.parameters()):
            users[parameter] = users.get(parameter, 0) + 1
    names = {parameter: name for name, parameter in model.root.named_parameters()}
    profiles = []
    for index, (name, module, layer) in enumerate(
        zip(model.names, model.modules, measurements, strict=True)
    ):
        own = [p for p in set(module.parameters()) if users[p] == 1]
        shared = [p for p in set(module.parameters()) if users[p] > 1]
        profiles.append(
            LayerProfile(
                name=name,
                parameter_bytes=bytes_of(own),
                gradient_bytes=bytes_of(p for p in own if p.requires_grad),
                shared={names[p]: bytes_of([p]) for p in sorted(shared, key=names.__getitem__)},
                **layer.sizes._asdict(),
                update_bytes=update.of(
                    [bytes_of([p]) for p in module.parameters() if p.requires_grad]
                ),
                forward=tuple(row[2 * index] for row in times),
                backward=tuple(row[2 * index + 1] for row in times),
            )
        )
    return tuple(profiles)


def _update_bytes(optimizers: Sequence[Optimizer], device: torch.device) -> UpdateBytes:
    # A run has one optimizer, or none if it trains nothing.
    return update_bytes(optimizers[0], device) if optimizers else UpdateBytes()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _host() -> str:
    """Return the host's name. Each network namespace of a host counts as a host of its own, since
    the links between namespaces may differ from those within."""
    name, namespace = socket.gethostname(), Path("/proc/self/ns/net")
    return f"{name} {os.readlink(namespace)}" if namespace.exists() else name
