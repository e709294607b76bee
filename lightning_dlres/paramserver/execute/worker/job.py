"""Job of a parameter server, as a worker knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dlres.codecs.gradient.base import GradientCodec
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.consistency import BSP
from lightning_dlres.paramserver.plan.keys import Key


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job of a parameter server, equal on all workers but for `worker`.

    Attributes:
        token: Random bytes that only the workers know.
        worker: Index of this worker.
        workers: Number of workers.
        servers: Address of each server.
        keys: All keys.
        optimizers: All optimizers.
        consistency: "bsp", "ssp" or "asp".
        staleness: Largest number of pushes by which a worker may be ahead of another under "ssp".
        worker_deadline: Seconds of silence after which servers shut a worker out.
        codec: Codec of gradients; None for raw bytes.
        codec_options: Its options.
        curve: Keys of the workers; None without encryption.
        server_keys: Public key of each server.
        timeout: Longest wait for servers and other workers, in seconds.
        retry_seconds: Time without an answer after which a message is sent again.
        log_bytes: Bytes of pushes that are kept for a restarted server, at least.
        log_directory: Directory in memory, for a log that outlives this process; None: own memory.
    """

    token: bytes
    worker: int
    workers: int
    servers: Sequence[str]
    keys: Sequence[Key]
    optimizers: Sequence[protocol.OptimizerSetup]
    consistency: str = BSP
    staleness: int = 0
    worker_deadline: float = 60.0
    codec: GradientCodec | None = None
    codec_options: Mapping[str, Any] | None = None
    curve: CurveKeys | None = None
    server_keys: Sequence[bytes] = ()
    timeout: float = 300.0
    retry_seconds: float = 1.0
    log_bytes: int = 0
    log_directory: Path | None = None
