"""Session of a synchroniser: the ranks' process group, their mailbox, the engine and its shutdown.

The functions below serve both users of a session: the hook's state and the momentum optimizers.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from lightning_dlres.codecs.gradient import GradientCodec, gradient_codec, gradient_codec_names
from lightning_dlres.codecs.gradient.contract import require_contract
from lightning_dlres.core.checks import keyword_arguments
from lightning_dlres.core.comm.collectives import gather_bytes, wait_for_collective
from lightning_dlres.core.comm.mailbox import Mailbox, message_group, release_group
from lightning_dlres.core.comm.socket_mailbox import SocketMailbox
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.coordination import CoordinatorLink
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.plan.hosts import Hosts, ranks_by_host
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan
from lightning_dlres.gradsync.plan.units import GradientSpec

# Mailboxes by the name of their transport.
TRANSPORTS: dict[str, type[Mailbox]] = {"gloo": Mailbox, "zmq": SocketMailbox}


class SyncSession:
    """Connection of all ranks of the default process group, and the engine that uses it.

    All ranks create a session together.

    Args:
        timeout: Seconds that a rank waits for another.
        check: Called while waiting; raises if a rank is known to have failed.
        tracer: Gets a span for each task.
        group: Gloo group of all ranks, left to the caller after the session. None takes that of
            `message_group`, which may hang if a rank is lost.
        transport: "gloo" for messages over torch.distributed, or "zmq" for ZeroMQ.

    Attributes:
        mailbox: Sends messages to the other ranks, and receives theirs.
    """

    def __init__(
        self,
        *,
        timeout: float,
        check: Callable[[], None],
        tracer: Tracer,
        group: dist.ProcessGroup | None = None,
        transport: str = "gloo",
    ) -> None:
        self._tracer, self._owns_group = tracer, group is None
        self._group = group or message_group()
        self.mailbox = TRANSPORTS[transport](
            self._group,
            dist.get_rank(),
            [f"rank {rank}" for rank in range(dist.get_world_size())],
            timeout=timeout,
            check=check,
            tracer=tracer,
        )
        # If a script exits without `close`, abandon the threads: destroying gloo while a thread is
        # inside it aborts the process.
        self._finalizer = weakref.finalize(self, self.mailbox.close, orderly=False)
        self._synchroniser: GradientSynchroniser | None = None

    def start(
        self,
        plan: SyncPlan,
        codecs: Mapping[str, GradientCodec],
        states: CodecStates,
        *,
        coordinator: str = "none",
        replay_from: int = 1,
        keeps_previous: bool = False,
        keeps_zeros: bool = False,
    ) -> GradientSynchroniser:
        """Start the engine for a plan, and return it; called once, by all ranks together.

        Args:
            plan: Plan, the same on all ranks.
            codecs: Codecs of the plan by name, with equal options on all ranks.
            states: States of this rank's codecs.
            coordinator: "always" asks a coordinator on rank 0 when to send each payload; "replay"
                repeats its plan from step `replay_from` on; "none" asks none.
            replay_from: First step that repeats the plan of the step before.
            keeps_previous: True copies the codecs' states before each step, so that it can be
                undone.
            keeps_zeros: True keeps the residuals of gradients that are zero; see
                `GradientSynchroniser`.
        """
        self._synchroniser = GradientSynchroniser(
            plan,
            codecs,
            self.mailbox,
            self._tracer,
            states=states,
            coordinator=None if coordinator == "none" else CoordinatorLink(self.mailbox),
            replay_from=replay_from if coordinator == "replay" else None,
            keeps_previous=keeps_previous,
            keeps_zeros=keeps_zeros,
        )
        return self._synchroniser

    @property
    def synchroniser(self) -> GradientSynchroniser:
        """The engine, after `start`."""
        assert self._synchroniser is not None
        return self._synchroniser

    @contextmanager
    def ended_by_failures(self) -> Iterator[None]:
        """Context manager that ends the threads if its block raises."""
        try:
            yield
        except BaseException:
            self.close(orderly=False)
            raise

    def close(self, *, orderly: bool) -> None:
        """End the threads.

        Args:
            orderly: True after all ranks have finished their last step; False after a failure.
        """
        if self._synchroniser is not None:
            self._synchroniser.close()
        self._finalizer.detach()
        self.mailbox.close(orderly=orderly)
        if orderly and self._owns_group:
            release_group(self._group)


def hosts_of_ranks(
    identity: str, group: dist.ProcessGroup, timeout: float, check: Callable[[], None]
) -> Hosts:
    """Return the ranks of each host; called by all ranks together.

    Args:
        identity: Identity of this rank's host.
        group: Gloo group of all ranks.
        timeout: Deadline in seconds.
        check: Called while waiting; raises if a rank is known to have failed.

    Raises:
        PeerTimeoutError: If some rank does not take part in time.
        PeerLostError: If a rank has failed, or its connection broke.
    """
    identities = gather_bytes(identity.encode(errors="surrogateescape"), timeout, check, group)
    return ranks_by_host([one.decode(errors="surrogateescape") for one in identities])


def all_ranks_agree(
    flag: bool, group: dist.ProcessGroup, timeout: float, check: Callable[[], None]
) -> bool:
    """Return True if the flag is set on all ranks; called by all of them.

    Args:
        flag: Flag of this rank.
        group: Gloo group of all ranks.
        timeout: Deadline in seconds.
        check: Called while waiting; raises if a rank is known to have failed.

    Raises:
        PeerTimeoutError: If some rank does not take part in time.
        PeerLostError: If a rank has failed, or its connection broke.
    """
    value = torch.tensor([int(flag)])
    work = dist.all_reduce(value, op=dist.ReduceOp.MIN, group=group, async_op=True)
    wait_for_collective(work, "the other ranks", timeout, check)
    return bool(value)


def all_reduce_mean(buffer: Tensor, on_done: Callable[[], None] = lambda: None) -> Future[Tensor]:
    """Start to replace a buffer by its mean over all ranks; return its future.

    The arithmetic is that of DistributedDataParallel without a hook.

    Args:
        buffer: Gradients of any dtype, dense or sparse.
        on_done: Called from another thread when the buffer is the mean; not after an error.
    """
    work = dist.all_reduce(buffer.mul_(1 / dist.get_world_size()), async_op=True)
    assert work is not None

    def finish(future: Future[list[Tensor]]) -> Tensor:
        mean = future.value()[0]
        on_done()
        return mean

    return work.get_future().then(finish)  # type: ignore[no-any-return]


def random_gradients(
    plan: SyncPlan, seed: int, device: torch.device, element_bytes: int
) -> dict[str, Tensor]:
    """Return random gradients of a plan, by name, for a trial.

    Args:
        plan: The plan.
        seed: Seed of the random numbers.
        device: Device of the gradients.
        element_bytes: Bytes of an element: 2, 4 or 8.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = {2: torch.bfloat16, 8: torch.float64}.get(element_bytes, torch.float32)
    return {
        name: torch.randn(count, generator=generator, device=device).to(dtype)
        for name, count in plan.gradient_counts().items()
    }


def spec_of(name: str, parameter: Tensor) -> GradientSpec:
    """Return the description of a gradient; a complex element counts as two real ones."""
    parts = 2 if parameter.is_complex() else 1
    return GradientSpec(name=name, count=parts * parameter.numel())


def flat_bounds(bucket: GradBucket) -> list[tuple[int, int]]:
    """Return the first element of each gradient in a bucket's buffer, and the end of its elements.

    The elements are in the order of memory, whatever the strides of the gradient. Complex gradients
    are real in the buffer, and twice as long.
    """
    offset = int(bucket.buffer().storage_offset())
    bounds = []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        # DDP flattens complex gradients to real ones, but counts complex elements.
        parts = 2 if parameter.is_complex() else 1
        start = parts * (int(gradient.storage_offset()) - offset)
        bounds.append((start, start + parts * int(parameter.numel())))
    return bounds


def gradient_codecs(
    algorithm: str, codec_options: object, others: Sequence[str] = (RAW,)
) -> dict[str, GradientCodec]:
    """Return the codec of an algorithm by its name; an empty dict for algorithms without one.

    Args:
        algorithm: Name of a gradient codec, or one of `others`.
        codec_options: Keyword arguments of the codec, or None.
        others: Further names that are allowed, of algorithms without a codec.

    Raises:
        ConfigError: If no gradient codec has that name, an option is unknown or bad, or a codec
            from outside of this package breaks a rule of `GradientCodec`.
    """
    options = keyword_arguments("codec_options", codec_options)
    names = gradient_codec_names()
    if not isinstance(algorithm, str) or algorithm not in [*others, *names]:
        rule = f"one of {[*others, *names]}"
        raise ConfigError(got_expected("algorithm", algorithm, rule, "algorithm='int8'"))
    if algorithm in others:
        if options:
            rule = f"None for algorithm {algorithm!r}"
            raise ConfigError(got_expected("codec_options", options, rule, "codec_options=None"))
        return {}
    kind = type(gradient_codec(algorithm))
    known = inspect.signature(kind).parameters
    if not options.keys() <= known.keys():
        rule = f"arguments of {kind.__name__}: {sorted(known)}"
        raise ConfigError(got_expected("codec_options", options, rule, "codec_options=None"))
    codec = kind(**options)
    require_contract(codec)
    return {algorithm: codec}
