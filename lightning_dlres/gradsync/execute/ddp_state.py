"""State of the communication hook of torch's DistributedDataParallel.

The hook gets a bucket: a flat buffer with the gradients of some parameters. It splits the buffer
into gradients again, because a codec encodes each of them by itself. Parameters are known by
identity, so it does not matter that DDP sorts them into other buckets after the first step. Without
`name_parameters`, the hook learns the parameters in the first step, and torch averages its buckets.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.optim import Optimizer

from lightning_dlres.core.checks import (
    flag,
    function,
    instance,
    one_of,
    timeout_seconds,
    whole_number,
)
from lightning_dlres.core.comm.collectives import no_check
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.coordinator_trial import tried_coordinator
from lightning_dlres.gradsync.execute.planning import (
    AUTO,
    SyncPlanningOptions,
    check_optimizers,
    codecs_for_auto,
    is_adam_like,
    plan_synchronisation,
)
from lightning_dlres.gradsync.execute.saved_states import (
    continue_states,
    save_states,
    saved_plan,
    unsent_mean,
)
from lightning_dlres.gradsync.execute.session import (
    SyncSession,
    all_ranks_agree,
    all_reduce_mean,
    flat_gradients,
    gloo_group,
    gradient_codecs,
    spec_of,
)
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.plan.cost_model import auto_codecs
from lightning_dlres.gradsync.plan.decision import SyncDecision
from lightning_dlres.gradsync.plan.graph import TOPOLOGIES
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan, choices_by_size, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from lightning_dlres.kernels.gradients.layout import BLOCK

NONE = "none"
# First step that repeats a plan. DDP sorts parameters into other buckets after step 0, and step 1
# is slow because connections are made in it.
_REPLAYED_STEP = 3
_COORDINATORS = (AUTO, "always", "replay", NONE)


class GradientSyncState:
    """State of `compressed_hook`: the plan, the codec's states, and the threads.

    Use one state for one DistributedDataParallel module.

    Args:
        algorithm: "auto" measures the ranks and links at the start, and takes the algorithm with
            the shortest predicted step, or torch's all-reduce. Other values: the name of a gradient
            codec, "raw" for uncompressed gradients over the same tasks, or "none" for torch's
            all-reduce.
        codec_options: Keyword arguments of the codec.
        topology: "ps" (each rank is the parameter server of a part of the gradients), "ring", or
            "auto" for the one with the shorter predicted step.
        coordinator: "always" asks a coordinator on rank 0 when to send each payload; "replay"
            learns its plan in a step and repeats it; "none" sends payloads as soon as they are
            ready. "auto" tries "replay" and "none" at the start, and takes "replay" if it gains
            more than 2 %.
        min_bytes: Gradients with fewer bytes are not compressed.
        timeout: Time that a rank waits for another: seconds, text such as "10min", or a timedelta.
        optimizers: Optimizers that get the gradients. "auto" takes only codecs that suit them; None
            counts as optimizers like Adam.
        check: Called while waiting; raises if a rank is known to have failed.
        keeps_previous: True makes `undo_step` possible, with a second copy of the residuals. Use it
            with a gradient scaler, which skips steps.
        tracer: Gets a span for each task; None makes one.

    Attributes:
        tracer: Spans of all tasks.
        loss_scale: Factor of the loss in the next backward, such as that of a gradient scaler; a
            power of two. Residuals are kept without it, so they fit any later scale.
        has_data: Set it to False for a backward without samples on this rank, whose gradients are
            zero. The residuals of this rank then stay unchanged.
        last_ready: Time, from `time.perf_counter`, at which the last gradient of the newest step
            was ready on this rank.
        decision: Decision of the cost model, with its table; None if nothing was left to "auto".

    Raises:
        ConfigError: If an argument has a bad value.
    """

    def __init__(
        self,
        *,
        algorithm: str = AUTO,
        codec_options: Mapping[str, Any] | None = None,
        topology: str = AUTO,
        coordinator: Literal["auto", "always", "replay", "none"] = "auto",
        min_bytes: int = 16 << 10,
        timeout: float | str | timedelta = "5min",
        optimizers: Sequence[Optimizer] | None = None,
        check: Callable[[], None] | None = None,
        keeps_previous: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self._codecs = gradient_codecs(algorithm, codec_options, (AUTO, NONE, RAW))
        # The argument, and what "auto" chose in the run whose checkpoint this one continues.
        self._algorithm = self._resumed_algorithm = algorithm
        self._topology = one_of("topology", topology, (AUTO, *TOPOLOGIES), "topology='ps'")
        self._coordinator = one_of("coordinator", coordinator, _COORDINATORS, "coordinator='none'")
        if any(codec.transforms_gradient for codec in self._codecs.values()):
            if topology == "ring":
                rule = "'ps' for a codec with momentum or clipping"
                raise ConfigError(got_expected("topology", topology, rule, "topology='ps'"))
            self._topology = "ps"
        self._min_bytes = whole_number("min_bytes", min_bytes, "min_bytes=0", least=0)
        self._timeout = timeout_seconds(timeout)
        self._is_adam_like = is_adam_like(check_optimizers(optimizers))
        function("check", check)
        self._check = check or no_check
        self._keeps_previous = flag("keeps_previous", keeps_previous)
        if tracer is not None:
            instance("tracer", tracer, (Tracer,), "a Tracer or None", "tracer=None")
        self.tracer = tracer or Tracer()
        self.loss_scale, self.has_data, self.last_ready = 1.0, True, 0.0
        self.decision: SyncDecision | None = None
        self._step = 0
        self._names: dict[nn.Parameter, str] = {}
        self._specs: list[GradientSpec] = []
        # True until the hook has learnt the parameters in its first step.
        self._is_learning = True
        self._is_open = False
        self._states = CodecStates()
        self._plan: SyncPlan | None = None
        self._saved: list[Mapping[str, Any]] = []
        self._session: SyncSession | None = None
        self._control: dist.ProcessGroup | None = None
        self._failure: BaseException | None = None

    def name_parameters(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Give names to all parameters of the module, before the first step.

        Checkpoints need names. Without them, parameters are numbered, and the first step is not
        compressed.

        Args:
            parameters: The result of `module.named_parameters()`. DistributedDataParallel ignores
                parameters that need no gradient when it is made, and so does this method.
        """
        for name, parameter in parameters:
            if parameter.requires_grad:
                self._names[parameter] = name
                self._specs.append(spec_of(name, parameter))
        self._is_learning = not self._specs

    @property
    def algorithm(self) -> str:
        """The algorithm; that of the cost model's decision once there is one."""
        return self._resumed_algorithm if self.decision is None else self.decision.algorithm

    @property
    def suits_adam(self) -> bool:
        """True if the algorithm's gradients may be given to an optimizer like Adam."""
        return all(codec.suits_adam for codec in self._codecs.values())

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the synchronisation; None while there is none."""
        return self._failure

    @property
    def steps(self) -> int:
        """Number of steps whose buckets were all given to the hook, earlier runs included."""
        return self._step

    @property
    def plan(self) -> SyncPlan | None:
        """Plan of the synchronisation; None before its first step."""
        return self._plan

    @property
    def synchroniser(self) -> GradientSynchroniser | None:
        """Engine; None before its first step, after `close`, and with torch's all-reduce."""
        return None if self._session is None else self._session.synchroniser

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start to replace the gradients of a bucket by their means; return its future buffer.

        Raises:
            PeerError: If a rank was lost or late in an earlier call.
        """
        if self._failure is not None:
            raise self._failure
        step, is_learning = self._step, self._is_learning
        if bucket.is_last():
            self.last_ready = time.perf_counter()
            self._step += 1
            self._is_learning = False
        buffer = bucket.buffer()
        if buffer.is_sparse:
            # A sparse gradient has a bucket of its own. Codecs need dense gradients.
            return all_reduce_mean(buffer)
        if is_learning:
            self._learn(bucket)
            return all_reduce_mean(buffer)
        self.open(buffer.device, buffer.element_size())
        if self._session is None:
            if self._saved:
                self._add_unsent(bucket)
            return all_reduce_mean(buffer)
        future: Future[Tensor] = Future()
        done = functools.partial(self._finish, future, buffer)
        self._session.synchroniser.start(
            step,
            self._gradients_of(bucket),
            done,
            loss_scale=self.loss_scale,
            has_data=self.has_data,
        )
        return future

    def undo_step(self) -> None:
        """Restore the codecs' states from before the last step, which an optimizer skipped.

        Raises:
            ConfigError: If the state was made without `keeps_previous`.
        """
        if not self._keeps_previous:
            raise ConfigError(
                got_expected("keeps_previous", False, "True for `undo_step`", "keeps_previous=True")
            )
        if self._session is not None:
            self._session.synchroniser.undo_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the codecs' states of this rank: numbers, strings and tensors.

        Every rank has its own. The tensors are not copied: save them before the next step.
        """
        units: Mapping[str, Any] = {}
        if self._plan is not None:
            units = save_states(self._states, self._plan)
        elif self._saved and len(self._saved) == dist.get_world_size():
            # Nothing was sent since these states were loaded.
            units = self._saved[dist.get_rank()]
        return {**units, "step": self._step, "algorithm": self.algorithm}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks of an earlier run, before the first step.

        With the same plan, this rank continues exactly. After a change of the plan or of the number
        of ranks, residuals are shared out again, and a warning says so.

        Args:
            states: Results of `state_dict`, by rank.

        Raises:
            ConfigError: If there is no state, or the first step has begun.
        """
        if not states:
            raise ConfigError(
                got_expected("states", [], "the states of all ranks", "states=[state of rank 0]")
            )
        if self._is_open:
            got, rule = "states after the first step", "loaded before it"
            raise ConfigError(got_expected("states", got, rule, "a new GradientSyncState"))
        self._step = states[0]["step"]
        self._saved = [one for one in states if "units" in one]

    def close(self) -> None:
        """End the threads. All ranks call it together, unless one has failed.

        Raises:
            PeerError: If a rank does not call it in time.
        """
        session, self._session = self._session, None
        control, self._control = self._control, None
        is_orderly = False
        try:
            if session is not None and control is not None and self._failure is None:
                # Other ranks may not have finished: their last messages may need the coordinator
                # or go through this rank.
                all_ranks_agree(True, control, self._timeout, self._check)
                is_orderly = True
        finally:
            if session is not None:
                session.close(orderly=is_orderly)
            if control is not None and is_orderly:
                dist.destroy_process_group(control)

    def open(self, device: torch.device, element_bytes: int = 4) -> None:
        """Connect the ranks and make the plan, unless that was done; called by all ranks together.

        The first step calls it. `name_parameters` must be called before.

        Args:
            device: Device of the gradients.
            element_bytes: Bytes of an element of a gradient.

        Raises:
            PeerError: If a rank is lost or late.
        """
        if self._is_open or not self._specs:
            return
        self._is_open = True
        if self._algorithm == NONE or dist.get_world_size() == 1:
            return
        self._require_kernels(device)
        self._control = gloo_group()
        session = SyncSession(timeout=self._timeout, check=self._check, tracer=self.tracer)
        with session.ended_by_failures():
            self._plan = self._plan_on(session, device, element_bytes)
            if self._plan is not None:
                self._start(session, self._plan, device)
                self._session = session
                return
        session.close(orderly=True)

    def _require_kernels(self, device: torch.device) -> None:
        if device.type != "cpu" and not all(c.runs_on_gpus() for c in self._codecs.values()):
            raise ConfigError(
                f"algorithm must be one that runs on {device.type} here, got {self._algorithm!r}. "
                "Install the package's extra `cuda`, or use algorithm='fp16'."
            )

    def _start(self, session: SyncSession, plan: SyncPlan, device: torch.device) -> None:
        saved, self._saved = self._saved, []
        continue_states(saved, plan, self._codecs, dist.get_rank(), device, self._states)
        coordinator = self._coordinator
        if coordinator == AUTO:
            coordinator = tried_coordinator(
                plan, self._codecs, device, timeout=self._timeout, check=self._check
            )
        session.start(
            plan,
            self._codecs,
            self._states,
            coordinator=coordinator,
            replay_from=self._step + _REPLAYED_STEP,
            keeps_previous=self._keeps_previous,
        )

    def _learn(self, bucket: GradBucket) -> None:
        for parameter in bucket.parameters():
            name = self._names.setdefault(parameter, f"parameter {len(self._specs)}")  # type: ignore[arg-type]
            self._specs.append(spec_of(name, parameter))

    def _plan_on(
        self, session: SyncSession, device: torch.device, element_bytes: int
    ) -> SyncPlan | None:
        """Return the plan, the same on all ranks; None for torch's all-reduce."""
        if AUTO not in (self._algorithm, self._topology):
            return make_plan(
                self._specs,
                choices_by_size(
                    self._specs,
                    self._codecs.get(self._algorithm),
                    least_elements=-(-self._min_bytes // 4),
                    world_size=dist.get_world_size(),
                ),
                world_size=dist.get_world_size(),
                topology=self._topology,
                alignment=BLOCK,
            )
        if self._algorithm == AUTO:
            runnable = {
                name: codec
                for name, codec in codecs_for_auto().items()
                if device.type == "cpu" or codec.runs_on_gpus()
            }
            self._codecs = auto_codecs(runnable, is_adam_like=self._is_adam_like)
        topologies = tuple(TOPOLOGIES) if self._topology == AUTO else (self._topology,)
        plan = saved_plan(self._saved, self._specs, self._codecs, topologies, dist.get_world_size())
        if plan is not None:
            # A new measurement might lead to another plan, and the run would not continue exactly.
            self._resumed_algorithm = self._saved[0]["algorithm"]
            return plan
        self.decision = plan_synchronisation(
            self._specs,
            self._codecs,
            session.mailbox,
            SyncPlanningOptions(
                algorithm=self._algorithm,
                topology=self._topology,
                is_adam_like=self._is_adam_like,
                least_bytes=self._min_bytes,
                device=device,
                element_bytes=element_bytes,
                is_coordinated=self._coordinator in ("always", "replay"),
            ),
        )
        return self.decision.plan

    def _add_unsent(self, bucket: GradBucket) -> None:
        """Add the residuals of an earlier run to the gradients of a single rank."""
        for name, gradient in self._gradients_of(bucket).items():
            unsent = unsent_mean(self._saved, GradientSpec(name=name, count=gradient.numel()))
            gradient.add_(unsent.to(gradient), alpha=self.loss_scale)
        if bucket.is_last():
            self._saved = []

    def _gradients_of(self, bucket: GradBucket) -> dict[str, Tensor]:
        """Return flat real views of a bucket's gradients by name."""
        names = [self._names[parameter] for parameter in bucket.parameters()]  # type: ignore[index]
        return dict(zip(names, flat_gradients(bucket), strict=True))

    def _finish(self, future: Future[Tensor], buffer: Tensor, error: BaseException | None) -> None:
        if error is None:
            future.set_result(buffer)
            return
        # The executor passes the same error to all buckets.
        self._failure = error
        # DDP shows only the type of this error. Callers raise `failure` after backward.
        future.set_exception(error)  # type: ignore[arg-type]
