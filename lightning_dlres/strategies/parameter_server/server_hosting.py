"""Servers of a run: embedded in rank 0, or those of `dlres ps serve`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch

from lightning_dlres.core.comm.collectives import gather_bytes
from lightning_dlres.core.comm.rank_addresses import (
    LOOPBACK,
    RankAddress,
    listening_addresses,
    own_address,
)
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.host.identity import host_identity
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.keys import CurveKeys, load_keys, load_public_key
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.protocol import TOKEN_BYTES
from lightning_dlres.paramserver.setup.config import ParameterServerConfig
from lightning_dlres.paramserver.setup.model_keys import ModelKeys


class _RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a rank that rank 0 needs to start servers."""

    host_id: str
    own: str
    main: str
    public_key: bytes


class _ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of rank 0 that the others need to connect; empty on other ranks."""

    token: bytes = b""
    addresses: list[str] = []
    public_key: bytes = b""


@dataclass(frozen=True)
class HostedServers:
    """Servers of a run, as a rank reaches them.

    Attributes:
        token: Token of the job.
        addresses: Address of each server.
        curve: Keys of this rank; None without encryption.
        server_keys: Public key of each server; empty without encryption.
        stack: Servers that run in this process.
    """

    token: bytes
    addresses: list[str]
    curve: CurveKeys | None
    server_keys: list[bytes]
    stack: ExitStack

    def close(self) -> None:
        """Stop the servers of this process."""
        self.stack.close()


def host_servers(
    options: ParameterServerConfig, rank: int, timeout: float, check: Callable[[], None]
) -> HostedServers:
    """Return the servers of a run, started if they are embedded; called by all ranks together.

    Between hosts, embedded servers are encrypted and admit the ranks only.

    Args:
        options: Options of the strategy.
        rank: This rank.
        timeout: Deadline of each exchange with all ranks, in seconds.
        check: Called while waiting; raises if a rank is known to have failed.

    Raises:
        ConfigError: If a file of keys is wrong, or other hosts cannot reach rank 0.
        PeerError: If a rank is late or lost.
    """
    keys = CurveKeys.generate()
    is_embedded = options.is_embedded
    address = own_address(host_identity()) if is_embedded else RankAddress("", "", "")
    own = _RankFacts(**asdict(address), public_key=keys.public)
    gathered = gather_bytes(msgspec.msgpack.encode(own), timeout, check)
    ranks = [from_msgpack(data, _RankFacts) for data in gathered]
    stack, facts = ExitStack(), _ServerFacts()
    is_local = len({one.host_id for one in ranks}) == 1
    try:
        if rank == 0:
            servers = []
            if is_embedded:
                addresses = [RankAddress(one.host_id, one.own, one.main) for one in ranks]
                bind = LOOPBACK if is_local else listening_addresses(addresses)[0]
                # In a forked process, torch makes its pool of threads anew at the first use. Two
                # servers that use it first at the same time would find none.
                torch.set_num_threads(torch.get_num_threads())
                # The keys of rank 0 serve as those of the servers, too.
                servers = [
                    stack.enter_context(
                        ParameterServer(
                            bind=bind,
                            curve=None if is_local else keys,
                            allowed=() if is_local else [one.public_key for one in ranks],
                        )
                    )
                    for _ in range(options.embedded_servers)
                ]
            facts = _ServerFacts(
                token=secrets.token_bytes(TOKEN_BYTES),
                addresses=[server.address for server in servers] or options.addresses(),
                public_key=keys.public,
            )
        data = gather_bytes(msgspec.msgpack.encode(facts), timeout, check)[0]
        facts = from_msgpack(data, _ServerFacts)
    except BaseException:
        stack.close()
        raise
    if is_embedded:
        count = len(facts.addresses)
        curve = None if is_local else keys
        server_keys = [] if is_local else [facts.public_key] * count
        return HostedServers(facts.token, facts.addresses, curve, server_keys, stack)
    return HostedServers(facts.token, facts.addresses, *_own_keys(options), stack)


def job_of(
    options: ParameterServerConfig,
    hosted: HostedServers,
    keys: ModelKeys,
    rank: int,
    ranks: int,
    timeout: float,
) -> Job:
    """Return the job of a run.

    Args:
        options: Options of the strategy.
        hosted: Its servers.
        keys: Keys of the model.
        rank: This rank.
        ranks: Number of ranks.
        timeout: Longest wait for a server or another rank, in seconds.
    """
    return Job(
        token=hosted.token,
        worker=rank,
        workers=ranks,
        servers=hosted.addresses,
        keys=keys.keys,
        optimizers=keys.setups,
        consistency=options.consistency,
        staleness=options.staleness,
        worker_deadline=options.deadline_seconds(),
        codec=options.made_codec(),
        codec_options=options.codec_options,
        curve=hosted.curve,
        server_keys=hosted.server_keys,
        timeout=timeout,
        log_bytes=options.log_size(),
        log_directory=None if options.log_directory is None else Path(options.log_directory),
    )


def _own_keys(options: ParameterServerConfig) -> tuple[CurveKeys | None, list[bytes]]:
    """Return the user's keys: of this rank, and of each server."""
    if options.key is None:
        return None, []
    count = len(options.addresses())
    public = [load_public_key(path) for path in options.key_paths()]
    if len(public) not in (1, count):
        raise ConfigError(
            f"server_key must be one key, or one per server ({count}), got {len(public)}. Pass the "
            "file of each server."
        )
    return load_keys(Path(options.key)), public * (count // len(public))
