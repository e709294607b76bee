"""Checks of the options: those of one rank, and, before the first message, that all ranks agree.

Ranks whose options differ would wait for messages that never come, or refuse each other's payloads.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.checks import one_of
from lightning_dlres.core.comm.collectives import gather_bytes
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.gradsync.execute.planning import AUTO
from lightning_dlres.gradsync.execute.session import TRANSPORTS
from lightning_dlres.gradsync.plan.graph import TOPOLOGIES

_COORDINATORS = (AUTO, "always", "replay", "none")
# Relative difference between the norms of a parameter on two ranks, up to which it is the same one:
# processors of different kinds may round values differently.
_SAME_NORM = 1e-3


def checked_topology(topology: str, codecs: Mapping[str, GradientCodec]) -> str:
    """Return the topology, which is "ps" if a codec needs it.

    Raises:
        ConfigError: If there is no such topology, or a codec does not work with it.
    """
    one_of("topology", topology, (AUTO, *TOPOLOGIES), "topology='ps'")
    if not any(codec.transforms_gradient for codec in codecs.values()):
        return topology
    if topology == "ring":
        rule = "'ps' for a codec with momentum or clipping"
        raise ConfigError(got_expected("topology", topology, rule, "topology='ps'"))
    return "ps"


def check_choices(
    *, coordinator: object, transport: object, hierarchy: object, host: object, replan: object
) -> None:
    """Check arguments of `GradientSyncState`.

    Raises:
        ConfigError: If one has a bad value.
    """
    one_of("coordinator", coordinator, _COORDINATORS, "coordinator='none'")
    one_of("transport", transport, (AUTO, *TRANSPORTS), "transport='gloo'")
    one_of("hierarchy", hierarchy, (AUTO, "off"), "hierarchy='auto'")
    if host is not None and not (isinstance(host, str) and host):
        raise ConfigError(got_expected("host", host, "a non-empty text or None", "host=None"))
    if replan is not False and replan != AUTO:
        raise ConfigError(got_expected("replan", replan, "'auto' or False", "replan=False"))


def as_text(**options: object) -> dict[str, str]:
    """Return values of options as text, by the names of the options."""
    return {
        name: repr(dict(sorted(value.items(), key=repr)) if isinstance(value, Mapping) else value)
        for name, value in options.items()
    }


def require_equal_options(
    options: Mapping[str, str],
    group: dist.ProcessGroup,
    timeout: float,
    check: Callable[[], None],
    fix: str = "Give all ranks the same options.",
) -> None:
    """Raise an error on all ranks if an option differs between them; called by all ranks together.

    Args:
        options: Values as text, by the names of the options.
        group: Gloo group of all ranks.
        timeout: Deadline in seconds.
        check: Called while waiting; raises if a rank is known to have failed.
        fix: Last sentence of the error.

    Raises:
        ConfigError: If an option differs. The error names it, and two ranks with their values.
        PeerError: If a rank is lost or late.
    """
    texts = gather_bytes(msgspec.json.encode(options), timeout, check, group)
    first, *others = (from_json(text, dict[str, str]) for text in texts)
    for name in first:
        for rank, other in enumerate(others, 1):
            if first[name] != other.get(name):
                raise ConfigError(
                    f"{name} must be the same on all ranks, got {first[name]} on rank 0 and "
                    f"{other.get(name)} on rank {rank}. {fix}"
                )


def require_same_parameters(
    parameters: Sequence[Tensor],
    group: dist.ProcessGroup,
    timeout: float,
    check: Callable[[], None],
) -> None:
    """Raise an error on all ranks unless all have the same parameters in the same order.

    The order of a group that is made from a set differs in each process.

    Args:
        parameters: Parameters of this rank.
        group: Gloo group of all ranks.
        timeout: Deadline in seconds.
        check: Called while waiting; raises if a rank is known to have failed.

    Raises:
        ConfigError: If shapes or values differ clearly.
        PeerError: If a rank is lost or late.
    """
    # JSON has no infinities and NaN.
    finite = (p.detach().double().nan_to_num(0, 0, 0) for p in parameters)
    own = [(list(values.shape), float(values.norm())) for values in finite]
    texts = gather_bytes(msgspec.json.encode(own), timeout, check, group)
    first, *others = (from_json(text, list[tuple[list[int], float]]) for text in texts)
    for rank, other in enumerate(others, 1):
        is_same = len(first) == len(other) and all(
            shape == other_shape and math.isclose(norm, other_norm, rel_tol=_SAME_NORM)
            for (shape, norm), (other_shape, other_norm) in zip(first, other, strict=True)
        )
        if not is_same:
            raise ConfigError(
                f"params must be the same on all ranks, got others, or another order, on rank "
                f"{rank} than on rank 0. Make the groups from lists, not from sets."
            )


def require_all_ranks(parameter: Tensor) -> None:
    """Refuse the gradients of a DistributedDataParallel over a part of the ranks.

    They would become means over all ranks. A bucket does not show the group of its module, so the
    module is searched for.

    Args:
        parameter: A parameter of the module.

    Raises:
        ConfigError: If its process group has fewer ranks than the default one.
    """
    ranks = dist.get_world_size()
    for module in gc.get_objects():
        if not issubclass(type(module), DistributedDataParallel):
            continue
        size = dist.get_world_size(module.process_group)
        if size != ranks and any(each is parameter for each in module.parameters()):
            raise ConfigError(
                f"process_group of DistributedDataParallel must be one of all {ranks} ranks for "
                f"compressed_hook, got one of {size}. Use process_group=None."
            )
