"""The profile of a run (Method E, E1, E3, E5): what all ranks have measured, put together."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_dlres.core.errors import ConfigError, DlresError, PeerLostError
from lightning_dlres.core.host.free_memory import available_bytes
from lightning_dlres.core.units import format_bytes
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.comm.rank_group import RankGroup
from lightning_dlres.pipeline.profile.cluster import Cluster, Device, Link
from lightning_dlres.pipeline.profile.config import ProfileConfig, ProfileSamples
from lightning_dlres.pipeline.profile.cpu_cache import CpuCacheFlusher
from lightning_dlres.pipeline.profile.device_kinds import (
    completed,
    kinds_of,
    powers_of,
    times_of_kinds,
)
from lightning_dlres.pipeline.profile.device_measurement import DeviceMeasurement, measure, typical
from lightning_dlres.pipeline.profile.layer_times import LayerMeasurement, is_lack_of_memory
from lightning_dlres.pipeline.profile.link_probe import (
    MOST_ROUNDS,
    MOST_SECONDS,
    pairs_to_measure,
    probe,
)
from lightning_dlres.pipeline.profile.optimizer_costs import UpdateBytes, state_ratio, update_bytes
from lightning_dlres.pipeline.profile.profiled_model import ProfiledModel
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, RunProfile, StepCosts

_SHARE_OF_FREE_MEMORY = 0.9
# All ranks measure at once, as they will train: ranks of one machine share its caches and memory.
# Several times, since what else a machine does for a while must not make a device look slow.
_ROUNDS = 5
# A link's probe takes the less of the time of a profile, the shorter that is.
_PROBES = 60


class ProfilingError(DlresError):
    """Some rank had no memory to run the layers; raised on all."""


class Profiler:
    """Measures this rank, and puts together what all ranks have measured.

    Args:
        model: the model to measure, and how it warns.
        ranks: the ranks of the run.
        log: shows a line to the user, on rank 0.
        slowdown: factor of an emulated slower device; None where nothing is emulated.
        memory_limit: bytes that this rank's device may hold; None finds it.
        layer_context: entered around every forward (mixed precision).
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
        """Measure; called by all ranks.

        Args:
            samples: the same on all ranks.
            config: see there.
            optimizers: the run's, for the size of their state and their time.
            gradient_copies: see `StepCosts`.
        """
        caches = CpuCacheFlusher()
        device, connection = self._model.device, self._ranks
        ranks = [_RankDevice(*told) for told in self._everywhere(list(self._describe()))]
        room = _room_for(ranks, connection.rank)
        mine = self._measure_at_once(samples, config, optimizers, caches, room)
        layers = mine.layers
        own = [t for layer in layers for t in (layer.forward, layer.backward)]
        found = connection.gather(own)
        self._log_guesses(found)
        times = completed(found)
        kinds = kinds_of([rank.name for rank in ranks], times)
        of_kinds = times_of_kinds(kinds, times)
        powers = powers_of(of_kinds)
        links, message = self._probe([rank.host for rank in ranks], mine, caches, config)
        others = times_of_kinds(
            kinds, connection.gather([mine.loss, mine.update, message, mine.run_overhead_seconds])
        )
        losses, updates, messages, run_overheads = (
            tuple(column) for column in zip(*others, strict=True)
        )
        cluster = Cluster(
            kinds=tuple(_kind_names(kinds, [rank.name for rank in ranks], powers)),
            devices=tuple(
                Device(kind=kind, power=powers[kind], host=rank.host, memory_limit=rank.limit)
                for kind, rank in zip(kinds, ranks, strict=True)
            ),
            links=links,
        )
        moment = _update_bytes(optimizers, device)
        step = StepCosts(
            loss=losses,
            loss_bytes=mine.loss_bytes,
            message=messages,
            run_overhead_seconds=run_overheads,
            update=updates,
            state_bytes_per_parameter_byte=max(map(state_ratio, optimizers), default=0.0),
            update_bytes_per_byte=moment.of_all,
            gradient_copies=gradient_copies,
        )
        return RunProfile(
            layer_profiles(self._model, layers, of_kinds, moment),
            step,
            cluster,
            samples.microbatches,
            _host_memory(ranks),
        )

    def _measure_at_once(
        self,
        samples: ProfileSamples,
        config: ProfileConfig,
        optimizers: Sequence[Optimizer],
        caches: CpuCacheFlusher,
        room: int | None,
    ) -> DeviceMeasurement:
        connection = self._ranks
        rounds = min(_ROUNDS, config.repeats)
        share = replace(
            config, repeats=-(-config.repeats // rounds), seconds=config.seconds / rounds
        )
        found: list[DeviceMeasurement] = []
        failure: Exception | None = None
        connection.any_rank(False)
        for _ in range(rounds):
            load: Callable[[], None] | None = None
            if failure is None:
                try:
                    mine, load = measure(
                        self._model,
                        samples,
                        share,
                        self._layer_context,
                        optimizers,
                        caches,
                        room,
                        self._slowdown,
                    )
                    found.append(mine)
                except Exception as error:
                    failure = error
            # Who is done first stays busy: alone, the others would look faster than they will be.
            connection.any_rank(False, load if self._slowdown is None else None)
            del load
        if connection.any_rank(failure is not None):
            self._explain(failure)
        return typical(found)

    def _explain(self, failure: Exception | None) -> NoReturn:
        """Raise what stopped the measurement; called by all ranks."""
        no_room = failure is None or is_lack_of_memory(failure)
        only_room = self._ranks.all_ranks(no_room)
        told = failure is not None and (only_room or not no_room)
        text = f"{type(failure).__name__}: {failure}" if told else None
        first = next(filter(None, self._everywhere(text)))
        if only_room:
            raise ProfilingError(first)
        if failure is not None and not no_room:
            raise failure
        raise PeerLostError(f"Another rank raised while the layers were profiled: {first}")

    def _probe(
        self,
        hosts: list[str],
        mine: DeviceMeasurement,
        caches: CpuCacheFlusher,
        config: ProfileConfig,
    ) -> tuple[tuple[Link, ...], float]:
        mailbox = self._ranks.mailbox
        size = sorted(layer.sizes.output_bytes for layer in mine.layers)[len(mine.layers) // 2]
        rounds = min(MOST_ROUNDS, 2 * config.repeats)
        long_enough = min(MOST_SECONDS, config.seconds / _PROBES)
        links, message = [], 0.0
        for a, b in pairs_to_measure(hosts):
            found = probe(mailbox, a, b, size, caches, rounds, long_enough)
            if found is not None:
                message = max(message, found.message * mine.wall_per_cpu_second)
            told = [found.link.latency, found.link.bytes_per_second] if found is not None else None
            latency, bandwidth = self._ranks.broadcast(told, a)
            links.append(Link(ranks=(a, b), latency=latency, bytes_per_second=bandwidth))
        return tuple(links), message

    def _log_guesses(self, seconds: Sequence[Sequence[float]]) -> None:
        for rank, row in enumerate(seconds):
            pairs = zip(self._model.names, row[::2], strict=True)
            without = [name for name, value in pairs if math.isnan(value)]
            if without:
                self._log(
                    f"dlres: rank {rank} has no room to run {', '.join(without)} for one "
                    "micro-batch: their times there are guessed from those of other ranks."
                )

    def _everywhere(self, mine: Tree) -> list[Any]:
        connection = self._ranks
        return [
            connection.broadcast(mine if rank == connection.rank else None, rank)
            for rank in range(connection.world_size)
        ]

    def _describe(self) -> _RankDevice:
        device, limit = self._model.device, self._memory_limit
        is_cuda = device.type == "cuda"
        free = _free_bytes(device)
        if limit is None and is_cuda:
            limit = int((free or 0) * _SHARE_OF_FREE_MEMORY)
        tensors = chain(self._model.root.parameters(), self._model.root.buffers())
        held = sum(_bytes(tensor) for tensor in tensors if tensor.device.type == "cpu")
        return _RankDevice(_host(), _device_name(device), is_cuda, limit, free, held)


class _RankDevice(NamedTuple):
    """What a rank tells of its device; `free` is what the device has left, or the rank's host where
    the ranks there share its memory, and `held` what the rank has of the model by now."""

    host: str
    name: str
    is_cuda: bool
    limit: int | None
    free: int | None
    held: int


def _room_for(devices: Sequence[_RankDevice], rank: int) -> int | None:
    """Return the bytes that a rank may take while all of them measure; None: not known."""
    mine = devices[rank]
    beside = [d for d in devices if d.host == mine.host and not d.is_cuda and not mine.is_cuda]
    free = [device.free for device in beside or [mine] if device.free is not None]
    limits = [mine.limit] if mine.limit is not None else []
    if free:
        limits.append(int(min(free) * _SHARE_OF_FREE_MEMORY / max(len(beside), 1)))
    return min(limits, default=None)


def _host_memory(devices: Sequence[_RankDevice]) -> dict[str, int]:
    found = {}
    for host in {device.host for device in devices}:
        # A GPU has a limit in any case.
        sharing = [d for d in devices if d.host == host and d.free is not None and d.limit is None]
        if sharing:
            free = min(device.free for device in sharing if device.free is not None)
            # What the ranks have of the model by now, their stages take the place of.
            found[host] = int((free + sum(d.held for d in sharing)) * _SHARE_OF_FREE_MEMORY)
    return found


def profile_for_cluster(
    model: ProfiledModel,
    samples: ProfileSamples,
    config: ProfileConfig,
    layer_context: Callable[[], AbstractContextManager[Any]],
    optimizers: Sequence[Optimizer],
    gradient_copies: int,
    cluster: Cluster,
    factors: Sequence[float],
) -> RunProfile:
    """Measure in this process alone, for devices that are described.

    Args:
        model, samples, config, layer_context, optimizers, gradient_copies: see `Profiler`.
        cluster: the devices.
        factors: by how much a layer takes longer on each kind of device than here.

    Raises:
        ConfigError: If a layer does not fit into this machine's memory.
    """
    device = model.device
    free = _free_bytes(device)
    room = None if free is None else int(free * _SHARE_OF_FREE_MEMORY)
    found, _ = measure(model, samples, config, layer_context, optimizers, CpuCacheFlusher(), room)
    layers = found.layers
    for name, layer in zip(model.names, layers, strict=True):
        if math.isnan(layer.forward):
            raise ConfigError(
                f"layer {name!r} cannot be measured here: free memory must be enough to run it "
                f"forward and backward on one micro-batch, got {format_bytes(free or 0)}. Plan on "
                "a machine with more memory, or with more micro-batches."
            )
    times = [[t * f for layer in layers for t in (layer.forward, layer.backward)] for f in factors]
    moment = _update_bytes(optimizers, device)
    step = StepCosts(
        loss=tuple(found.loss * factor for factor in factors),
        loss_bytes=found.loss_bytes,
        update=tuple(found.update * factor for factor in factors),
        state_bytes_per_parameter_byte=max(map(state_ratio, optimizers), default=0.0),
        update_bytes_per_byte=moment.of_all,
        gradient_copies=gradient_copies,
    )
    return RunProfile(
        layer_profiles(model, layers, times, moment), step, cluster, samples.microbatches
    )


def layer_profiles(
    model: ProfiledModel,
    measured: Sequence[LayerMeasurement],
    times: Sequence[Sequence[float]],
    moment: UpdateBytes,
) -> tuple[LayerProfile, ...]:
    """Put together what is known of the layers.

    Args:
        model: the model with its layers.
        measured: the layers' sizes.
        times: for every kind of device the seconds of forward and backward of every layer, in
            turns.
        moment: what the optimizer needs for a moment.
    """
    users: dict[nn.Parameter, int] = {}
    for module in model.modules:
        for parameter in set(module.parameters()):
            users[parameter] = users.get(parameter, 0) + 1
    names = {parameter: name for name, parameter in model.root.named_parameters()}
    found = []
    for index, (name, module, layer) in enumerate(
        zip(model.names, model.modules, measured, strict=True)
    ):
        own = [p for p in set(module.parameters()) if users[p] == 1]
        shared = [p for p in set(module.parameters()) if users[p] > 1]
        found.append(
            LayerProfile(
                name=name,
                parameter_bytes=sum(_bytes(p) for p in own),
                gradient_bytes=sum(_bytes(p) for p in own if p.requires_grad),
                shared={names[p]: _bytes(p) for p in sorted(shared, key=names.__getitem__)},
                input_bytes=layer.sizes.input_bytes,
                output_bytes=layer.sizes.output_bytes,
                gradient_output_bytes=layer.sizes.gradient_output_bytes,
                saved_bytes=layer.sizes.saved_bytes,
                workspace_bytes=layer.sizes.workspace_bytes,
                update_bytes=moment.of([_bytes(p) for p in module.parameters() if p.requires_grad]),
                forward=tuple(row[2 * index] for row in times),
                backward=tuple(row[2 * index + 1] for row in times),
            )
        )
    return tuple(found)


def _update_bytes(optimizers: Sequence[Optimizer], device: torch.device) -> UpdateBytes:
    # There is one, or none where nothing is trained.
    return update_bytes(optimizers[0], device) if optimizers else UpdateBytes()


def _free_bytes(device: torch.device) -> int | None:
    """Return what a GPU, or the CPU's host, has left; None where that is not known."""
    if device.type != "cuda":
        return available_bytes()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


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
