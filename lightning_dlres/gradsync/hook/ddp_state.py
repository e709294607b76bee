"""State of the communication hook of torch's DistributedDataParallel.

The hook gets a bucket: a flat buffer with the gradients of some parameters. It splits the buffer
into gradients again, because a codec encodes each of them by itself. Parameters are known by
identity, so it does not matter that DDP sorts them into other buckets after the first step. Without
`name_parameters`, the hook learns the parameters in the first step, whose buckets torch averages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.optim import Optimizer

from lightning_dlres.core.checks import (
    finite,
    flag,
    function,
    instance,
    timeout_seconds,
    whole_number,
)
from lightning_dlres.core.comm.collectives import no_check
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.planning import AUTO, check_optimizers, is_adam_like
from lightning_dlres.gradsync.execute.saved_states import MEMORY_ORDERS, LoadedStates
from lightning_dlres.gradsync.execute.session import (
    all_reduce_mean,
    gradient_codecs,
)
from lightning_dlres.gradsync.hook import powersgd
from lightning_dlres.gradsync.hook.loaded_states import require_states
from lightning_dlres.gradsync.hook.optimizer_steps import OptimizerSteps
from lightning_dlres.gradsync.hook.options import (
    as_text,
    check_choices,
    checked_topology,
    require_all_ranks,
)
from lightning_dlres.gradsync.hook.parameter_names import ParameterNames
from lightning_dlres.gradsync.hook.planned_sync import PlannedSync
from lightning_dlres.gradsync.hook.planner import HookPlanner
from lightning_dlres.gradsync.hook.state_view import SyncStateView
from lightning_dlres.gradsync.plan.plan import RAW

NONE = "none"


class GradientSyncState(SyncStateView):
    """State of `compressed_hook`: the plan, the codec's states, and the threads.

    Use one state for one DistributedDataParallel module.

    Args:
        algorithm: "auto" measures the ranks and links at the start, and takes the algorithm with
            the shortest predicted step; torch's all-reduce is one of them. Other values: the name
            of a gradient codec, "raw" for uncompressed gradients that travel like compressed ones,
            "powersgd" for torch's PowerSGD hook, or "none" for torch's all-reduce.
        codec_options: Keyword arguments of the codec, or of `PowerSGD`.
        topology: "ps" (each rank is the parameter server of a part of the gradients), "ring", or
            "auto" for the one with the shorter predicted step, or, where predictions of at least
            three ranks are close, the one with the shorter step in a trial.
        coordinator: "always" asks a coordinator on rank 0 when to send each payload; "replay"
            learns its plan in a step and repeats it; "none" sends payloads within milliseconds
            after they are ready. "auto" tries "replay" and "none" at the start, and takes "replay"
            if it gains more than 2 %.
        transport: "gloo" sends messages over torch.distributed, and "zmq" over ZeroMQ, encrypted
            between hosts. "auto" takes "gloo".
        hierarchy: "auto" adds uncompressed gradients inside each host, and compresses only what
            travels between hosts. It has no effect with one host, or with one rank on each.
            "off" lets each rank synchronise by itself.
        host: Identity of this rank's host, the same for all its ranks. None: its host name, boot
            and network namespace.
        min_bytes: Gradients with fewer bytes are not compressed.
        replan: "auto" measures again when the steps have become slower or faster. If it pays, that
            changes `algorithm` or `topology`, where they are "auto". False keeps the first plan.
        bucket_cap_mb: MiB of the buckets, as given to DistributedDataParallel: "auto" compares with
            an all-reduce of them.
        timeout: Time that a rank waits for another: seconds, text such as "10min", or a timedelta.
        optimizers: Optimizers that get the gradients. "auto" takes only codecs that suit them; None
            counts as optimizers like Adam.
        check: Called while waiting; raises if a rank is known to have failed.
        keeps_previous: True makes `undo_step` possible, with a second copy of the residuals. Use it
            with a gradient scaler, which skips steps. It needs `optimizers` if several backwards
            of an optimizer step synchronise gradients.
        tracer: Gets a span for each task; None: a new tracer, which takes up to 30 MiB.
            `Tracer(enabled=False)` keeps none.

    Attributes:
        tracer: Spans of all tasks.
        loss_scale: Factor of the loss in the next backward, such as that of a gradient scaler; a
            power of two. Residuals are kept without it, so they fit any later scale.
        has_data: Set it to False for a backward without samples on this rank. Residuals of
            gradients that are zero then stay unchanged.
        last_ready: `time.perf_counter` when this rank's last gradient of the newest step was ready.

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
        transport: Literal["auto", "gloo", "zmq"] = "auto",
        hierarchy: Literal["auto", "off"] = "auto",
        host: str | None = None,
        min_bytes: int = 16 << 10,
        replan: Literal["auto", False] = "auto",
        bucket_cap_mb: float = 25,
        timeout: float | str | timedelta = "5min",
        optimizers: Sequence[Optimizer] | None = None,
        check: Callable[[], None] | None = None,
        keeps_previous: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        is_powersgd = algorithm == powersgd.POWERSGD
        self._power_sgd = powersgd.power_sgd(codec_options) if is_powersgd else None
        other_options = None if is_powersgd else codec_options
        codecs = gradient_codecs(algorithm, other_options, (AUTO, NONE, RAW, powersgd.POWERSGD))
        self._has_plan = algorithm != NONE and not is_powersgd
        topology = checked_topology(topology, codecs)
        check_choices(
            coordinator=coordinator,
            transport=transport,
            hierarchy=hierarchy,
            host=host,
            replan=replan,
        )
        checked_optimizers = check_optimizers(optimizers)
        function("check", check)
        self._keeps_previous = flag("keeps_previous", keeps_previous)
        self._optimizer_steps = OptimizerSteps(checked_optimizers if keeps_previous else ())
        self._planner = HookPlanner(
            algorithm=algorithm,
            topology=topology,
            codecs=codecs,
            min_bytes=whole_number("min_bytes", min_bytes, "min_bytes=0", least=0),
            is_adam_like=is_adam_like(checked_optimizers),
            is_coordinated=coordinator in ("always", "replay"),
            bucket_bytes=int(
                finite("bucket_cap_mb", bucket_cap_mb, "bucket_cap_mb=25", above=True) * (1 << 20)
            ),
        )
        if tracer is not None:
            instance("tracer", tracer, (Tracer,), "a Tracer or None", "tracer=None")
        self.tracer = tracer or Tracer()
        self._sync = PlannedSync(
            self._planner,
            coordinator=coordinator,
            transport="gloo" if transport == AUTO else transport,
            has_hierarchy=hierarchy == AUTO,
            host=host,
            may_replan=replan == AUTO,
            timeout=timeout_seconds(timeout),
            check=check or no_check,
            keeps_previous=keeps_previous,
            tracer=self.tracer,
        )
        # Compared between the ranks at the start.
        self._options = as_text(
            algorithm=algorithm,
            codec_options=codec_options,
            topology=topology,
            coordinator=coordinator,
            transport=transport,
            hierarchy=hierarchy,
            min_bytes=min_bytes,
            replan=replan,
            bucket_cap_mb=bucket_cap_mb,
            optimizers="like Adam" if is_adam_like(checked_optimizers) else "like SGD",
        )
        self.loss_scale, self.has_data, self.last_ready = 1.0, True, 0.0
        self._step, self._names, self._loaded = 0, ParameterNames(), LoadedStates()
        # True until the hook has learnt the parameters in its first step.
        self._is_learning = True
        # Set by `open`, by the first bucket, by the first of these two, and by `close`.
        self._is_open = self._has_begun = self._is_connected = self._is_closed = False
        # Step whose backward has begun without the hook.
        self._begun_step = -1
        # True if the current backward belongs to the optimizer step of the one before.
        self._continues = False

    def name_parameters(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        sparse: Collection[Tensor] = (),
    ) -> None:
        """Give names to all parameters of the module, before the first step.

        Checkpoints find residuals by these names. Without this method, the hook numbers the
        parameters, and does not compress the first step.

        Args:
            parameters: The result of `module.named_parameters()`. Parameters that need no gradient
                are ignored, as DistributedDataParallel ignores them when it is made.
            sparse: Parameters with sparse gradients, as `sparse_parameters` finds them. Torch's
                all-reduce averages these gradients, and plans leave them out.

        Raises:
            ConfigError: If two parameters have one name, or a new one comes after `open` or the
                first step.
        """
        self._names.add(parameters, sparse, is_late=self._has_begun or self._is_open)
        self._is_learning = not self._names.specs

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start to replace the gradients of a bucket by their means; return its future buffer.

        Raises:
            PeerError: If a rank was lost or late, now or in an earlier call.
            ConfigError: If the state was closed, or the algorithm cannot handle the bucket.
        """
        with self._keeping_failures():
            if not self._has_begun:
                require_all_ranks(bucket.parameters()[0])
            self._has_begun = True
            # A backward that has begun without the hook may get it.
            if bucket.index() == 0 and self._begun_step != self._step:
                self._begin_backward()
            future = self._reduce(bucket, bucket.buffer())
            if bucket.is_last():
                self._sync.end_step()
                self._names.end_mean()
            return future

    def begin_unhooked(self) -> None:
        """Begin a backward without the hook; called by all ranks together.

        The ranks may measure again, and so need the hook from this backward on.

        Raises:
            PeerError: If a rank is lost or late, now or in an earlier call.
            ConfigError: If the state was closed.
        """
        with self._keeping_failures():
            self._has_begun = True
            self._begin_backward()
        self._begun_step = self._step
        self.note_ready()

    def end_unhooked(self) -> None:
        """End a backward without the hook."""
        self._step += 1
        self._names.end_mean()
        self._note_done()

    def _begin_backward(self) -> None:
        finite("loss_scale", self.loss_scale, "loss_scale=1.0", above=True)
        self._connect()
        self._continues = self._optimizer_steps.begin_backward()
        if self._power_sgd is not None and self._keeps_previous and not self._continues:
            self._power_sgd.keep()
        self._sync.begin_backward(self._step, self._continues)

    def _reduce(self, bucket: GradBucket, buffer: Tensor) -> Future[Tensor]:
        step, is_learning = self._step, self._is_learning
        self.note_ready()
        if bucket.is_last():
            self._step += 1
            self._is_learning = False
        mean = functools.partial(all_reduce_mean, buffer, self._note_done)
        if self._power_sgd is not None and dist.get_world_size() > 1:
            self._loaded.take()
            names = self._names.of(bucket.parameters())
            return self._power_sgd.reduce(bucket, names, self.loss_scale)
        if buffer.is_sparse or bucket.parameters()[0] in self._names.sparse:
            # DDP gives each sparse gradient a bucket of its own.
            return mean()
        if is_learning:
            self._names.add_unnamed(bucket.parameters())
            return mean()
        self.open(buffer.device, buffer.element_size())
        if self.synchroniser is None and self._sync.unsent.is_empty:
            # Return before views of the gradients are made, which cost time.
            return mean()
        layout = self._names.layout_of(bucket)
        gradients = layout.gradients(buffer)
        unused = self._names.unused(layout)
        has_unsent = self._sync.unsent.add_to(gradients, self.loss_scale, unused)
        if self.synchroniser is None:
            return mean()
        is_host = buffer.device.type == "cpu"
        # A GPU's future also orders the work of its streams.
        future: Future[Tensor] = Future() if is_host else Future(devices=[buffer.device])
        self._sync.start(
            step,
            gradients,
            functools.partial(self._finish, future, buffer),
            loss_scale=self.loss_scale,
            # Without data, the rank would send zeros, and the unsent gradients would be lost.
            has_data=self.has_data or has_unsent,
            continues=self._continues,
            unused=unused,
        )
        return future

    def undo_step(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Restore the codecs' states from before the last step, which an optimizer skipped.

        Args:
            parameters: Those of the optimizer; None for all. PowerSGD restores all in any case.

        Raises:
            ConfigError: If the state was made without `keeps_previous`.
        """
        if not self._keeps_previous:
            raise ConfigError(
                got_expected("keeps_previous", False, "True for `undo_step`", "keeps_previous=True")
            )
        self._optimizer_steps.end()
        if self._power_sgd is not None:
            self._power_sgd.undo()
        names = None if parameters is None else self._names.known(parameters)
        self._sync.undo_step(names)

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the codecs' states of this rank: numbers, strings and tensors.

        Every rank has its own. The tensors are not copied: save them before the next step.
        """
        own = {"step": self._step, "algorithm": self.algorithm}
        if self._loaded:
            return {**own, **self._loaded.to_pass_on(dist.get_rank())}
        saved = self._sync.saved_states()
        if self._power_sgd is not None:
            saved[powersgd.POWERSGD] = self._power_sgd.state_dict(dist.get_rank())
        if saved:
            saved[MEMORY_ORDERS] = self._names.memory_orders()
        return {**saved, **own}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks of an earlier run, or of an earlier step of this.

        With the same plan, this rank continues exactly. Else residuals are shared out again, with a
        warning. After the first step, all ranks call it together, to replace the present states.

        Args:
            states: Results of `state_dict`, by rank.

        Raises:
            ConfigError: If these are no states of all ranks, or the state was closed.
            PeerError: If a rank is lost or late.
        """
        require_states(states)
        self._refuse_after_close()
        self._step = states[0]["step"]
        states = self._loaded.load(states)
        states = powersgd.without_reordered_errors(states, self._names.memory_orders())
        self._optimizer_steps.end()
        if self._power_sgd is not None and dist.get_world_size() > 1:
            self._power_sgd.load_state_dicts(states, dist.get_rank(), dist.get_world_size())
            return
        if self._is_open:
            self._sync.reload(
                self._names.specs, self._loaded.take(self._names.memory_orders()), self._step
            )
        # Any algorithm can send what PowerSGD left out.
        self._sync.unsent.put(powersgd.mean_errors(states))

    def close(self) -> None:
        """End the threads. All ranks call it together, unless one has failed.

        Raises:
            PeerError: If a rank does not call it in time.
            ConfigError: If another rank closes another state.
        """
        self._is_closed = True
        self._optimizer_steps.close()
        self._names.close()
        self._sync.close()
        if self._power_sgd is not None and self.failure is None:
            self._power_sgd.close()

    def open(self, device: torch.device, element_bytes: int = 4) -> None:
        """Connect the ranks and make the plan, unless that was done; called by all ranks together.

        The hook calls it with the first bucket that it synchronises. A call before
        `name_parameters` does nothing.

        Args:
            device: Device of the gradients.
            element_bytes: Bytes of an element of a gradient.

        Raises:
            PeerError: If a rank is lost or late.
            ConfigError: If the codec does not run on the device, or the ranks' options differ.
        """
        is_alone = dist.get_world_size() == 1
        if self._is_open or not self._names.specs or (self._power_sgd is not None and not is_alone):
            return
        self._connect()
        self._is_open = True
        self._sync.open(
            self._names.specs,
            self._loaded.take(self._names.memory_orders()),
            step=self._step,
            device=device,
            element_bytes=element_bytes,
            has_plan=self._has_plan and not is_alone,
        )

    def _connect(self) -> None:
        """Connect the ranks, unless that was done, and compare their options."""
        if not self._is_connected and dist.get_world_size() > 1:
            self._is_connected = True
            own = as_text(step=self._step, saved_states=len(self._loaded), parameters=self._names)
            is_used = self._has_plan or self._power_sgd is not None
            self._sync.connect({**self._options, **own}, is_used=is_used)

    def _finish(self, future: Future[Tensor], buffer: Tensor, error: BaseException | None) -> None:
        if error is None:
            self._note_done()
            future.set_result(buffer)
            return
        self._fail(error)
        # DDP shows only the type of this error. Callers raise `failure` after backward.
        future.set_exception(error)  # type: ignore[arg-type]
