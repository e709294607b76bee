"""Sums of gradients over the ranks that hold a parameter, compressed between replicas.

The gradients of a stage's own layers are compressed. As with the buckets of an all-reduce, they are
sent as soon as backward has passed their layer. Small gradients, those of parameters that several
stages hold, and those of parameters outside of the layers stay on the all-reduce.

A rank does not know if other replicas have a gradient of a parameter. If it has none itself, it
sends its residual on top of a zero gradient. A flag tells the replicas if the rank had a gradient.
If no replica had one, but residuals of earlier steps arrive, the parameter gets these as its
gradient. If only zeros arrive, it has no gradient, as in plain training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core.comm.collectives import wait_for_reason
from lightning_dlres.core.comm.mailbox import MESSAGE_REASON_SECONDS
from lightning_dlres.core.errors import PeerError, PeerLostError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.pipeline.execute.gradients import GradientBucket, GradientSync
from lightning_dlres.pipeline.execute.replica_compression import ReplicaCompression, flags_name
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer


@dataclass(frozen=True)
class _Transfer:
    """Gradients of a bucket that are being summed.

    Attributes:
        parameters: Parameters of the bucket that are not frozen.
        data: float32: their gradients as one vector, replaced by the means over the replicas.
        flags: float32: 1 for each of `parameters` with a gradient on this rank, else 0; replaced by
            the means, too. Longer than `parameters` if the bucket has frozen ones; the rest is 0.
        done: Completed with a mark, or with an error. The means are in `data` and `flags` once
            `ReplicaCompression.wait_for` has waited for the mark; on the CPU, at once.
    """

    parameters: list[nn.Parameter]
    data: Tensor
    flags: Tensor
    done: Future[Any]


class CompressedGradientSync(GradientSync):
    """Sums the gradients of a step over the ranks that hold the parameters, partly compressed.

    Args:
        layer_parameters: Trainable parameters of every layer of this stage, by position.
        non_pipelined: Trainable parameters outside of the layers.
        compression: Compression between the replicas.
        tracer: Records a span for every bucket.
        check: Called while waiting; raises if a rank is known to have failed.
        options: Further arguments of `GradientSync`.
    """

    def __init__(
        self,
        layer_parameters: Sequence[Sequence[nn.Parameter]],
        non_pipelined: Sequence[nn.Parameter],
        *,
        compression: ReplicaCompression,
        tracer: Tracer,
        check: Callable[[], None],
        **options: Any,
    ) -> None:
        names = compression.names
        super().__init__(
            [[p for p in parameters if p not in names] for parameters in layer_parameters],
            non_pipelined,
            tracer=tracer,
            check=check,
            **options,
        )
        self._compression = compression
        trained = {p for parameters in layer_parameters for p in parameters if p in names}
        # Buckets to send, with their indices in the compression. A bucket of frozen parameters is
        # not sent. All replicas train the same parameters, so none waits for it.
        self._compressed_buckets = [
            (index, bucket)
            for index, bucket in enumerate(compression.buckets)
            if not trained.isdisjoint(bucket.parameters)
        ]
        # Parameters with compressed gradients that are not frozen.
        self._trained = trained
        self._transfers: list[_Transfer] = []
        # Number of `_compressed_buckets` that were sent in this step.
        self._started = 0

    def begin(self, *, loss_scale: float, has_data: bool) -> None:
        self._compression.begin(loss_scale=loss_scale, has_data=has_data)

    def undo_step(self) -> None:
        self._compression.undo_step()

    def layer_done(self, position: int, buffer: GradientBuffer) -> None:
        while (
            self._started < len(self._compressed_buckets)
            and self._compressed_buckets[self._started][1].position >= position
        ):
            self._start(*self._compressed_buckets[self._started], buffer)
            self._started += 1
        super().layer_done(position, buffer)

    def _wait(self, buffer: GradientBuffer) -> None:
        # First the compressed gradients: their error names a rank that is late.
        for transfer in self._transfers:
            self._unpack(transfer, buffer)
        self._transfers.clear()
        self._started = 0
        super()._wait(buffer)

    def _start(self, index: int, bucket: GradientBucket, buffer: GradientBuffer) -> None:
        parameters = [p for p in bucket.parameters if p in self._trained]
        gradients = [buffer.pop(p) for p in parameters]
        # Copy the gradients: the buffer may share its tensors with autograd, and the means are
        # written in place. The copy is in float32, like the codecs' residuals.
        data = torch.cat(
            [
                torch.zeros(p.numel(), device=p.device)
                if g is None
                else (g.to_dense() if g.is_sparse else g).reshape(-1).to(torch.float32)
                for p, g in zip(parameters, gradients, strict=True)
            ]
        )
        # The plan fixes the number of flags: one for each parameter of the bucket, even if the user
        # freezes some later. Trained parameters have the first flags.
        flags = data.new_zeros(len(bucket.parameters))
        flags[: len(parameters)] = data.new_tensor([float(g is not None) for g in gradients])
        names = self._compression.names
        sizes = [p.numel() for p in parameters]
        named = dict(zip([names[p] for p in parameters], data.split(sizes), strict=True))
        done: Future[Any] = Future()
        self._transfers.append(_Transfer(parameters, data, flags, done))
        start = time.perf_counter_ns()

        def finish(error: BaseException | None) -> None:
            self._tracer.add(
                "compressed sum",
                "sync",
                start,
                time.perf_counter_ns(),
                stages=str(bucket.stages),
                nbytes=bucket.nbytes,
            )
            if error is None:
                done.set_result(self._compression.mark())
            else:
                done.set_exception(error)

        self._compression.start({**named, flags_name(index): flags}, finish)

    def _unpack(self, transfer: _Transfer, buffer: GradientBuffer) -> None:
        """Put the sums of a bucket into the buffer."""
        error = transfer.done.exception()
        if error is not None:
            raise self._reason_of(error)
        self._compression.wait_for(transfer.done.result())
        totals = transfer.data.mul_(self._compression.replicas).split(
            [p.numel() for p in transfer.parameters]
        )
        flags = transfer.flags.tolist()
        for parameter, total, flag in zip(transfer.parameters, totals, flags, strict=False):
            # No replica has a gradient if the flag is 0, but residuals of earlier steps may arrive.
            if flag or bool(total.any()):
                buffer.put(parameter, total.view(parameter.shape).to(parameter.dtype))

    def _reason_of(self, error: BaseException) -> BaseException:
        """Return the reason of a broken connection, or else the error itself.

        A failing rank announces the reason to all ranks. That is a better error: the connection may
        be to another rank, which stopped because of the failure.
        """
        if isinstance(error, PeerLostError):
            try:
                wait_for_reason(self._check, MESSAGE_REASON_SECONDS)
            except PeerError as reason:
                return reason
        return error
