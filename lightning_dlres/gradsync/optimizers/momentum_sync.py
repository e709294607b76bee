"""Synchronisation of an optimizer's momentum over all ranks, with two-way error feedback.

It is also the state of `momentum_hook`, which averages gradients in the warm-up only.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future, collect_all

from lightning_dlres.core.checks import function, one_of, timeout_seconds, whole_number
from lightning_dlres.core.comm.collectives import no_check
from lightning_dlres.core.comm.mailbox import message_group, release_group
from lightning_dlres.core.errors import ConfigError, PeerError, got_expected
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.saved_states import (
    LoadedStates,
    continue_states,
    copy_states,
    save_states,
    unsent_mean,
)
from lightning_dlres.gradsync.execute.session import (
    SyncSession,
    all_ranks_agree,
    all_reduce_mean,
    gradient_codecs,
)
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.hook.options import (
    as_text,
    require_equal_options,
    require_same_parameters,
)
from lightning_dlres.gradsync.optimizers.shared_overflows import SharedOverflows
from lightning_dlres.gradsync.plan.graph import TOPOLOGIES
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, choices_by_size, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from lightning_dlres.kernels.gradients.layout import BLOCK

# Momenta are encoded as float32, whatever the parameter's dtype.
_ELEMENT_BYTES = 4
# Name of the flags of a step. They travel like a momentum, so that an error names the late rank.
_FLAGS = "flags"


class MomentumSync:
    """Replaces the momenta of all ranks by their means, which travel compressed.

    Use one for each optimizer and its DistributedDataParallel module.

    Args:
        algorithm: Name of a gradient codec, or "raw" for uncompressed momenta.
        codec_options: Keyword arguments of the codec.
        topology: "ps" (parameter server) or "ring".
        coordinator: "always" asks a coordinator on rank 0 when to send each payload; "none" sends
            payloads within milliseconds after they are ready.
        min_bytes: Momenta with fewer bytes are not compressed.
        timeout: Time that a rank waits for another: seconds, text such as "10min", or a timedelta.
            None: that of the strategy, or 5 minutes without one.
        check: Called while waiting; raises if a rank is known to have failed.

    Attributes:
        tracer: Spans of all tasks.
        has_hook: True once `momentum_hook` has run.
        last_ready: Time, from `time.perf_counter`, at which the last gradient of the newest
            backward was ready on this rank.
        is_attached: True if a strategy uses it.
        shares_overflows: True if a gradient scaler checks the gradients. If local ones are not
            finite on some rank, all ranks then get NaN, so that their scalers skip the same steps
            and keep the same scale.

    Raises:
        ConfigError: If an argument has a bad value.
    """

    def __init__(
        self,
        *,
        algorithm: str = "onebit",
        codec_options: Mapping[str, Any] | None = None,
        topology: str = "ps",
        coordinator: Literal["always", "none"] = "none",
        min_bytes: int = 16 << 10,
        timeout: float | str | timedelta | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._algorithm = algorithm
        self._codecs = gradient_codecs(algorithm, codec_options)
        self._topology = one_of("topology", topology, TOPOLOGIES, "topology='ps'")
        self._coordinator = one_of(
            "coordinator", coordinator, ("always", "none"), "coordinator='none'"
        )
        self._min_bytes = whole_number("min_bytes", min_bytes, "min_bytes=0", least=0)
        self._has_timeout = timeout is not None
        self._timeout = timeout_seconds("5min" if timeout is None else timeout)
        function("check", check)
        self._check = check or no_check
        self.tracer = Tracer()
        self.has_hook, self.last_ready = False, 0.0
        self.is_attached = self.shares_overflows = False
        self._overflows = SharedOverflows()
        self._step = 0
        # Parameters whose gradients stay local, by identity.
        self._local: set[Tensor] = set()
        self._specs: list[GradientSpec] = []
        # Optimizer of these parameters.
        self._owner: weakref.ref[Any] | None = None
        self._device = torch.device("cpu")
        # Options as text, which the ranks compare at the start.
        self._options = as_text(
            algorithm=algorithm,
            codec_options=codec_options,
            topology=topology,
            coordinator=coordinator,
            min_bytes=min_bytes,
        )
        self._session: SyncSession | None = None
        self._group: dist.ProcessGroup | None = None
        self._failure: BaseException | None = None
        self._loaded = LoadedStates()
        # Saved states from the end of the last session; None without one.
        self._ended: dict[str, Any] | None = None

    def attach(
        self,
        check: Callable[[], None],
        tracer: Tracer,
        *,
        timeout: float,
        shares_overflows: bool,
    ) -> None:
        """Use the check and the tracer of a strategy; called before the first step.

        Args:
            check: See the class.
            tracer: Gets a span for each task.
            timeout: Seconds that a rank waits for another, unless `timeout` was set.
            shares_overflows: See the class.
        """
        self._check, self.tracer = check, tracer
        self.is_attached, self.shares_overflows = True, shares_overflows
        if not self._has_timeout:
            self._timeout = timeout

    def note_options(self, **options: object) -> None:
        """Note options of the optimizer, which must be equal on all ranks; see `reduce`."""
        self._options |= as_text(**options)

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 without a process group."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the synchronisation; None while there is none."""
        engine = self.synchroniser
        return self._failure or (None if engine is None else engine.failure)

    @property
    def synchroniser(self) -> GradientSynchroniser | None:
        """Engine, with the plan and the codec's states; None until momenta are synchronised."""
        return None if self._session is None else self._session.synchroniser

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start to average the gradients of a bucket; return its future buffer.

        Gradients are kept if the optimizer synchronises the momenta of their parameters.

        Raises:
            ConfigError: If the gradients are sparse, or, in the first call, options of the ranks
                differ.
        """
        if not self.has_hook and self.world_size > 1:
            # At the start: making a group hangs if a rank is lost.
            group = self._connected()
            require_equal_options(self._options, group, self._timeout, self._check)
        self.has_hook = True
        if bucket.is_last():
            self.last_ready = time.perf_counter()
        buffer = bucket.buffer()
        if buffer.is_sparse:
            rule, fix = "dense with OneBitAdam", "sparse=False in the embedding"
            raise ConfigError(got_expected("gradients", "sparse ones", rule, fix))
        # Means overflow on all ranks, local gradients may do so on one.
        is_shared = self.shares_overflows and bool(self._local)
        if is_shared:
            self._overflows.check(buffer)
        future = self._mean(bucket, buffer)
        if not is_shared:
            return future
        return self._overflows.add(future, buffer, is_last=bucket.is_last())

    def _mean(self, bucket: GradBucket, buffer: Tensor) -> Future[Tensor]:
        """Start to average the gradients of a bucket that do not stay local."""
        averaged = [
            gradient
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if parameter not in self._local
        ]
        if len(averaged) == len(bucket.gradients()):
            return all_reduce_mean(buffer)
        if not averaged:
            future: Future[Tensor] = Future()
            future.set_result(buffer)
            return future
        starts = [gradient.storage_offset() - buffer.storage_offset() for gradient in averaged]
        means = [
            all_reduce_mean(buffer[start : start + gradient.numel()])
            for start, gradient in zip(starts, averaged, strict=True)
        ]

        def finish(done: Future[list[Future[Tensor]]]) -> Tensor:
            for mean in done.value():
                # Raises the error of an all-reduce that failed.
                mean.value()
            return buffer

        return collect_all(means).then(finish)

    def require_owner(self, optimizer: object) -> None:
        """Check that no other optimizer's momenta are synchronised here.

        Raises:
            ConfigError: If another optimizer has called `take_over`.
        """
        if self._specs and (self._owner is None or self._owner() is not optimizer):
            got, rule = "one that synchronises another optimizer", "used by one OneBitAdam"
            raise ConfigError(
                got_expected("sync", got, rule, "a MomentumSync of its own for each optimizer")
            )

    def take_over(self, parameters: Iterable[tuple[str, Tensor]], optimizer: object) -> None:
        """Keep the gradients of these parameters local from now on, instead of averaging them.

        Args:
            parameters: Names and parameters, in the same order on all ranks.
            optimizer: Their optimizer.
        """
        self._owner = weakref.ref(optimizer)
        for name, parameter in parameters:
            self._local.add(parameter)
            self._specs.append(GradientSpec(name=name, count=parameter.numel()))
            self._device = parameter.device

    def require_same(self, parameters: Sequence[Tensor]) -> None:
        """Check that all ranks have the same parameters in the same order; called by all of them.

        Raises:
            ConfigError: If the parameters of two ranks differ clearly.
            PeerError: If a rank is lost or late.
        """
        require_same_parameters(parameters, self._connected(), self._timeout, self._check)

    def release(self) -> None:
        """Average all gradients again, as before `take_over`.

        After momenta have been synchronised, all ranks call it together.
        """
        self.close()
        self._ended = None
        self._local.clear()
        self._specs.clear()

    def agree(self, flag: bool) -> bool:
        """Return True if the flag is set on all ranks; called by all of them.

        Raises:
            PeerError: If a rank is lost or late.
        """
        if self.world_size == 1:
            return flag
        try:
            return all_ranks_agree(flag, self._connected(), self._timeout, self._check)
        except PeerError as error:
            self._failure = error
            raise

    def _connected(self) -> dist.ProcessGroup:
        """Return the group of all messages; the first call is one of all ranks together."""
        if self._group is None:
            self._group = message_group()
        return self._group

    def begin_step(self, flags: Sequence[bool]) -> list[bool]:
        """Begin a step of all ranks; return True for each flag that is set on any rank.

        Args:
            flags: One flag for the step, and one for each parameter given to `take_over`.

        Raises:
            PeerError: If a rank is lost or late.
        """
        if self.world_size == 1:
            return list(flags)
        if self._session is None:
            self._session = self._open()
        # Every step has a number of its own, also if it is skipped: a rank may begin the next one
        # while others have not finished this one.
        self._step += 1
        # On the device of the momenta, whose stream orders all work of the session.
        values = torch.tensor(flags, dtype=torch.float32, device=self._device)
        self._session.synchroniser.run(self._step, {_FLAGS: values})
        return [value > 0 for value in values.tolist()]

    def average(self, momenta: Mapping[str, Tensor]) -> None:
        """Replace momenta by their means over all ranks; called by all ranks after `begin_step`.

        Args:
            momenta: Flat contiguous momenta by the names given to `take_over`; the same names on
                all ranks.

        Raises:
            PeerError: If a rank is lost or late. The momenta are then undefined.
        """
        if self._session is not None:
            self._session.synchroniser.run(self._step, momenta)
            return
        # A single rank sends nothing. Add what the ranks of an earlier run have not sent.
        saved = self._loaded.take_of(momenta)
        if saved:
            for name, momentum in momenta.items():
                spec = GradientSpec(name=name, count=momentum.numel())
                momentum.add_(unsent_mean(saved, spec).to(momentum))

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has not sent yet, as numbers, strings and tensors.

        Every rank has its own. The tensors are not copied: save them before the next step.
        """
        engine = self.synchroniser
        if engine is None:
            kept = self._ended or self._loaded.to_pass_on(_rank())
            return {"step": self._step, "algorithm": self._algorithm, **kept}
        units = save_states(engine.states, engine.plan)
        return {"step": self._step, "algorithm": self._algorithm, **units}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks of an earlier run.

        With the same plan, this rank continues exactly. After a change of the plan or of the number
        of ranks, residuals are shared out again, and a warning says so. Without this method,
        training goes on, but what was not sent is lost. After momenta have been synchronised, all
        ranks call it together.

        Args:
            states: Results of `state_dict`, by rank.

        Raises:
            ConfigError: If there is no state.
        """
        if not states:
            raise ConfigError(
                got_expected("states", [], "the states of all ranks", "states=[state of rank 0]")
            )
        self.close()
        self._ended = None
        self._step = states[0]["step"]
        self._loaded.load(states)

    def close(self) -> None:
        """End the threads. All ranks call it together, unless one has failed.

        `state_dict` then still has what this rank has not sent, and a later step goes on with it.

        Raises:
            PeerError: If a rank does not call it in time.
        """
        try:
            if self._session is not None and self.failure is None:
                # Other ranks may not have finished: their last messages may need the coordinator
                # or go through this rank. After a failure they are in another collective call.
                self._check()
                self.agree(True)
        finally:
            self._end_session()

    def _end_session(self) -> None:
        failure = self.failure
        if self._session is not None:
            if failure is None:
                engine = self._session.synchroniser
                self._ended = save_states(engine.states, engine.plan)
            self._session.close(orderly=failure is None)
        if self._group is not None and failure is None:
            release_group(self._group)
        self._session = self._group = None

    def _open(self) -> SyncSession:
        """Connect the ranks; called by all of them together."""
        choices = choices_by_size(
            self._specs,
            self._codecs.get(self._algorithm),
            least_elements=-(-self._min_bytes // _ELEMENT_BYTES),
            world_size=self.world_size,
        )
        flags = GradientSpec(name=_FLAGS, count=1 + len(self._specs))
        plan = make_plan(
            [*self._specs, flags],
            [*choices, CodecChoice(codec=RAW, partitions=1)],
            world_size=self.world_size,
            topology=self._topology,
            alignment=BLOCK,
        )
        states = CodecStates()
        if self._ended is None:
            continue_states(self._loaded.take(), plan, self._codecs, _rank(), self._device, states)
        else:
            copy_states(self._ended, plan, self._codecs, self._device, states)
            self._ended = None
        session = SyncSession(
            timeout=self._timeout,
            check=self._check,
            tracer=self.tracer,
            group=self._connected(),
        )
        session.start(plan, self._codecs, states, coordinator=self._coordinator)
        return session


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
