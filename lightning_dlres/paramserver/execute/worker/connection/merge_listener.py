"""Connection over which a worker hears which keys have the pushes of all workers.

Values come over the other connection, where each one waits behind those before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.worker.state.exchange import Exchange

# Largest frame of a notice in bytes.
_FRAME_BYTES = 4096


class MergeListener:
    """Listener to the notices of one server; only for the thread of its link.

    Where pushes do not wait for those of other workers, it does nothing.

    Args:
        address: Address of the server.
        name: Name of the server in errors.
        exchange: State of the exchange.
        beside: Client of the link, whose `receive` ends when a notice comes.
        curve, server_key: See `core.wire.endpoint.Client`.
    """

    def __init__(
        self,
        address: str,
        name: str,
        exchange: Exchange,
        beside: Client,
        *,
        curve: CurveKeys | None,
        server_key: bytes | None,
    ) -> None:
        self._request = msgspec.msgpack.encode(exchange.request())
        self._client: Client | None = None
        if exchange.is_synchronous:
            self._client = Client(
                protocol.listener_name(exchange.worker, exchange.incarnation),
                address,
                server=name,
                curve=curve,
                server_key=server_key,
                max_frame_bytes=_FRAME_BYTES,
                beside=beside,
            )

    def listen(self) -> None:
        """Ask for notices; a server that was started again has to be asked again."""
        if self._client is not None and self._client.is_writable:
            self._client.send(protocol.LISTEN, details=self._request)

    def heard(self) -> Iterator[protocol.MergeNotice]:
        """Yield the notices that have come.

        Raises:
            ProtocolError: If the server sent bytes that are not a message, or a malformed notice.
        """
        if self._client is None or not self._client.is_readable:
            return
        while message := self._client.receive(0.0):
            if message.kind == protocol.NOTICE:
                yield from message.decode_details(list[protocol.MergeNotice])

    def reconnect(self) -> None:
        """Replace the connection by a new one."""
        if self._client is not None:
            self._client.reconnect()

    def close(self) -> None:
        """Close the connection. May be called again."""
        if self._client is not None:
            self._client.close()
