"""Checked options of training with parameter servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_dlres.codecs.gradient import GradientCodec, gradient_codec_names
from lightning_dlres.core.checks import (
    local_path,
    one_of,
    require_both,
    timeout_seconds,
    whole_number,
)
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.units import format_bytes, parse_bytes, parse_seconds
from lightning_dlres.core.wire.addresses import has_port
from lightning_dlres.paramserver.execute.server.consistency import CONSISTENCIES
from lightning_dlres.paramserver.gradient_codecs import job_codec
from lightning_dlres.paramserver.protocol import FRAME_BYTES

EMBEDDED = "embedded"
_LEAST_KEY_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig:
    """Options; `ParameterServerStrategy` describes each."""

    consistency: str
    staleness: int
    servers: str | Sequence[str]
    embedded_servers: int
    codec: str | None
    codec_options: Mapping[str, Any] | None
    key_bytes: int | str
    overlap: bool
    worker_deadline: float | str
    log_bytes: int | str
    log_directory: str | Path | None
    key: str | Path | None
    server_key: str | Path | Sequence[str | Path] | None
    timeout: float | str | timedelta

    def __post_init__(self) -> None:
        one_of("consistency", self.consistency, CONSISTENCIES, "consistency='bsp'")
        whole_number("staleness", self.staleness, "staleness=2", least=0)
        whole_number("embedded_servers", self.embedded_servers, "embedded_servers=1")
        if self.addresses() and self.embedded_servers != 1:
            rule, fix = "1 with servers that run elsewhere", "embedded_servers=1"
            raise ConfigError(got_expected("embedded_servers", self.embedded_servers, rule, fix))
        self.made_codec()
        if not _LEAST_KEY_BYTES <= self.key_size() <= FRAME_BYTES:
            rule = f"64 KiB to {format_bytes(FRAME_BYTES)}"
            raise ConfigError(got_expected("key_bytes", self.key_bytes, rule, "key_bytes='512KiB'"))
        self.log_size()
        if not self.deadline_seconds() > 0:
            got, rule = self.worker_deadline, "a time above 0"
            raise ConfigError(got_expected("worker_deadline", got, rule, "worker_deadline='1min'"))
        timeout_seconds(self.timeout)
        local_path(
            "log_directory", self.log_directory, "a local directory", "log_directory='/dev/shm'"
        )
        local_path("key", self.key, "the path of a key's file", "key='worker.key'")
        rule = "the path of a key's file, or one per server"
        for path in self._server_keys():
            if path is None:
                raise ConfigError(got_expected("server_key", self.server_key, rule, "'server.key'"))
            local_path("server_key", path, rule, "server_key='server.key'")
        require_both("key", self.key is not None, "server_key", self.server_key is not None)
        if self.key is not None and self.is_embedded:
            raise ConfigError(
                got_expected("key", str(self.key), "None with embedded servers", "key=None")
            )

    @property
    def is_embedded(self) -> bool:
        """True if rank 0 runs the servers."""
        return self.servers == EMBEDDED

    def addresses(self) -> list[str]:
        """Return the addresses of servers that run elsewhere; empty with embedded servers.

        Raises:
            ConfigError: If they are no addresses, or one is there twice.
        """
        if self.is_embedded:
            return []
        servers = [self.servers] if isinstance(self.servers, str) else self.servers
        is_list = isinstance(servers, Sequence) and len(servers) > 0
        if not is_list or not all(map(_is_address, servers)):
            rule = '"embedded" or the addresses of servers'
            fix = "servers=['tcp://10.0.0.1:5600']"
            raise ConfigError(got_expected("servers", self.servers, rule, fix))
        if len(set(servers)) < len(servers):
            rule, fix = "different addresses", f"servers={list(dict.fromkeys(servers))}"
            raise ConfigError(got_expected("servers", self.servers, rule, fix))
        return list(servers)

    def made_codec(self) -> GradientCodec | None:
        """Return the codec of pushed gradients; None to leave them as they are.

        Raises:
            ConfigError: If there is no such codec, or an option is wrong.
        """
        if self.codec is not None:
            one_of("codec", self.codec, gradient_codec_names(), "codec='fp16'")
        return job_codec(self.codec or "", self.codec_options)

    def key_size(self) -> int:
        """Return the largest number of bytes of a key."""
        return parse_bytes(self.key_bytes, "key_bytes")

    def log_size(self) -> int:
        """Return the bytes of pushes that are kept, at least."""
        return parse_bytes(self.log_bytes, "log_bytes")

    def deadline_seconds(self) -> float:
        """Return the seconds of silence after which servers shut a worker out."""
        return parse_seconds(self.worker_deadline, "worker_deadline")

    def key_paths(self) -> list[Path]:
        """Return the files of the servers' public keys."""
        return [Path(key) for key in self._server_keys()]

    def _server_keys(self) -> Sequence[str | Path]:
        keys = self.server_key
        if keys is None:
            return []
        # An empty list is refused as a path.
        return keys if isinstance(keys, (list, tuple)) and keys else [keys]  # type: ignore[list-item]


def _is_address(server: object) -> bool:
    return isinstance(server, str) and server.startswith("tcp://") and has_port(server)
