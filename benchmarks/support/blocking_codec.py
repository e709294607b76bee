"""Communication hook that encodes a bucket, gathers those of all ranks, and decodes them before it
returns.

This is the obvious way to add a codec to DistributedDataParallel. Backward waits for the codec and
the network, and every rank decodes the gradients of all ranks. `benchmarks.gradsync` compares it
with our engine.

DDP compares the hook's annotations with classes. So this module must not turn them into strings
with `from __future__ import annotations`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from lightning_dlres.codecs.gradient import gradient_codec


class BlockingCodec:
    """State of `blocking_hook`: a codec, and its residuals for each parameter.

    Args:
        codec: Name of a gradient codec; it has its default options.
    """

    def __init__(self, codec: str) -> None:
        self._codec = type(gradient_codec(codec))()
        self._states: dict[nn.Parameter, dict[str, Tensor]] = {}

    def reduce(self, bucket: GradBucket) -> None:
        """Replace the gradients of a bucket by their means."""
        world_size, codec = dist.get_world_size(), self._codec
        parameters = bucket.parameters()
        gradients = [gradient.reshape(-1) for gradient in bucket.gradients()]
        sizes = [codec.payload_bytes(gradient.numel()) for gradient in gradients]
        payload = torch.empty(sum(sizes), dtype=torch.uint8)
        for parameter, gradient, piece in zip(
            parameters, gradients, payload.split(sizes), strict=True
        ):
            if parameter not in self._states:
                self._states[parameter] = codec.new_state(gradient.numel(), gradient.device)
            codec.compress(gradient, self._states[parameter], piece, scale=1.0, seed=0)
        gathered = [torch.empty_like(payload) for _ in range(world_size)]
        dist.all_gather(gathered, payload)
        pieces = [received.split(sizes) for received in gathered]
        for number, gradient in enumerate(gradients):
            for rank in range(world_size):
                codec.expand(
                    pieces[rank][number], gradient, scale=1 / world_size, accumulate=rank > 0
                )


def blocking_hook(state: BlockingCodec, bucket: GradBucket) -> Future[Tensor]:
    """Communication hook that returns after its bucket is synchronised."""
    state.reduce(bucket)
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done
