"""The client side of a connection: a ZeroMQ DEALER socket that connects to one server.

Invalid messages of the server raise an error in the client.
"""

from __future__ import annotations

import zmq

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.wire.endpoint import PORTS, Endpoint
from lightning_dlres.core.wire.frames import Buffer
from lightning_dlres.core.wire.keys import CurveKeys, check_key


class Client(Endpoint):
    """The side that connects, under a name; it reconnects automatically.

    Args:
        identity: Name of this client at the server, 1 to 255 bytes.
        endpoint: Address of the server, such as "tcp://10.0.0.1:5555".
        server: Name of the server in errors raised here.
        curve: Keys of this client; needs `server_key`.
        server_key: Public key of the server; needs `curve`.
        max_message_bytes: Largest message that the server may send, in bytes; None: no limit.
        send_timeout: Seconds that a send waits for a server that does not read.
        monitor: Report connections in `connection_events`.

    Raises:
        ConfigError: If the endpoint is not an address, or if only one of `curve` and `server_key`
            is given.
    """

    _opened_event = zmq.Event.HANDSHAKE_SUCCEEDED

    def __init__(
        self,
        identity: str,
        endpoint: str,
        *,
        server: str = "the server",
        curve: CurveKeys | None = None,
        server_key: bytes | None = None,
        max_message_bytes: int | None = None,
        send_timeout: float = 30.0,
        monitor: bool = False,
    ) -> None:
        if (curve is None) != (server_key is None):
            raise ConfigError("curve and server_key must be given together, got one. Pass both.")
        if server_key is not None:
            check_key("server_key", server_key)
        if not 0 < len(identity.encode()) < 256:
            raise ConfigError(got_expected("identity", identity, "1 to 255 bytes", '"rank 1"'))
        super().__init__(zmq.DEALER, send_timeout)
        self._peer_label = f"{server} ({endpoint})"
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(
            zmq.MAXMSGSIZE, -1 if max_message_bytes is None else max_message_bytes
        )
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if curve is not None and server_key is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
        if monitor:
            self._start_monitor()
        try:
            if endpoint.startswith("tcp:") and not _has_port(endpoint):
                raise ValueError("no port from 1 to 65535")
            self._socket.connect(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ConfigError(
                got_expected("endpoint", endpoint, f"an address ({error})", '"tcp://10.0.0.1:5555"')
            ) from error

    def send(self, kind: str, payload: Buffer = b"", *, sequence: int | None = None) -> int:
        """Send to the server; return the sequence number (given, or this socket's next).

        Raises:
            PeerTimeoutError: If the server does not read and the queue is full.
        """
        return self._send([], self._peer_label, kind, payload, sequence=sequence)[0]


def _has_port(endpoint: str) -> bool:
    port = endpoint.rpartition(":")[2]
    return port.isdecimal() and int(port) in PORTS[1:]
