"""Client that asks servers for their state; it takes part in no job."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dlres.core.errors import ConfigError, PeerError, PeerTimeoutError, text_of
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.protocol import ServerStatus

# Largest state of a server, in bytes.
_FRAME_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class ServerSample:
    """State of a server at one time.

    Attributes:
        address: Address that was asked.
        status: Its state; None if it gave none.
        error: Reason why it gave none.
    """

    address: str
    status: ServerStatus | None = None
    error: str = ""


class StatusClient:
    """Connections to all servers.

    Args:
        addresses: Addresses of the servers, such as "tcp://10.0.0.1:5600"; "tcp://" may be missing.
        curve: Keys of this client; None without encryption.
        server_key: Public key of the servers, with `curve`.

    Raises:
        ConfigError: If an address or a key is wrong.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        curve: CurveKeys | None = None,
        server_key: bytes | None = None,
    ) -> None:
        self._clients: dict[str, Client] = {}
        try:
            for address in addresses:
                full = address if "://" in address else f"tcp://{address}"
                self._clients[full] = Client(
                    f"status {secrets.token_hex(8)}",
                    full,
                    server="the server",
                    curve=curve,
                    server_key=server_key,
                    max_frame_bytes=_FRAME_BYTES,
                )
        except ConfigError:
            self.close()
            raise

    def ask(self, timeout: float) -> list[ServerSample]:
        """Return the states of all servers.

        A server that does not answer within `timeout` seconds has a sample with an error.
        """
        deadline = time.monotonic() + timeout
        sequences = {
            address: client.send(protocol.STATUS) if client.is_writable else -1
            for address, client in self._clients.items()
        }
        return [
            self._answer(address, sequences[address], timeout, deadline)
            for address in self._clients
        ]

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    def _answer(self, address: str, sequence: int, timeout: float, deadline: float) -> ServerSample:
        client = self._clients[address]
        try:
            while True:
                # Read received messages even after the deadline.
                message = client.receive(max(0.0, deadline - time.monotonic()))
                if message is not None and message.sequence == sequence:
                    status = message.decode(ServerStatus)
                    return ServerSample(address=address, status=status)
                if message is None and time.monotonic() >= deadline:
                    raise PeerTimeoutError(f"no answer within {format_seconds(timeout)}")
        except PeerError as error:
            return ServerSample(address=address, error=text_of(error))
