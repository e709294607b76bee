"""Bytes that no real client sends, functions that send them, and the memory of the receiver."""

from __future__ import annotations

import itertools
import random
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import zmq

from lightning_dlres.core.wire.message import pack

SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
# Greeting of a client that asks for ZMTP's mechanism NULL, which has no keys.
NULL_GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
BANNERS = {
    "five bytes": b"\x01\x00\x01\x00x",
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "redis inline": b"PING\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(508),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(200),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zmtp 1.0": SIGNATURE + b"\x00\x00" + b"\x01\x00" + b"\x02\x01a\x02\x00b" * 3,
    "zmtp 2.0": SIGNATURE + b"\x01\x05" + b"\x00\x01a" + b"\x01\x01b\x00\x01c" * 3,
    "half a greeting": SIGNATURE,
    "other mechanism": SIGNATURE + b"\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32),
    "nothing": b"",
}


def connect_raw(stack: ExitStack, address: str) -> socket.socket:
    """Return a plain socket that is connected to "tcp://..." or "ipc://...", without ZeroMQ."""
    kind, _, location = address.partition("://")
    if kind == "ipc":
        raw = socket.socket(socket.AF_UNIX)
        raw.settimeout(20)
        raw.connect(location)
    else:
        host, _, port = location.rpartition(":")
        raw = socket.create_connection((host, int(port)), 20)
    return stack.enter_context(raw)


def is_closed(raw: socket.socket) -> bool:
    """Return True if the other side has closed the connection, after reading all that it sent."""
    try:
        while raw.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def frame(data: bytes, more: bool = False, claimed: int | None = None) -> bytes:
    """Return a ZMTP 3 frame; `claimed` is a false length for its header."""
    length = len(data) if claimed is None else claimed
    # Flags of ZMTP 3: 2 for a length of 8 bytes, 1 if more frames of the message follow.
    return bytes([2 | more]) + struct.pack(">Q", length) + data


def greeting(name: bytes = b"") -> bytes:
    """Return the handshake of a client without keys."""
    properties = b"".join(
        bytes([len(key)]) + key + struct.pack(">I", len(value)) + value
        for key, value in ((b"Socket-Type", b"DEALER"), (b"Identity", name))
    )
    ready = b"\x05READY" + properties
    return NULL_GREETING + b"\x06" + struct.pack(">Q", len(ready)) + ready


def greet(raw: socket.socket, name: bytes = b"") -> None:
    """Do the handshake of a client without keys."""
    raw.sendall(greeting(name))
    received = b""
    while b"READY" not in received:
        more = raw.recv(4096)
        if not more:
            # A server under attack may take a new connection for an old one of the same descriptor.
            raise ConnectionResetError("the server closed the connection")
        received += more


def malformed(draw: random.Random, kinds: list[str], typed: list[bytes]) -> Iterator[list[bytes]]:
    """Yield messages forever: frames that are almost valid, deeply nested, large, or random.

    Args:
        draw: Generator of random numbers.
        kinds: Kinds of messages that the server accepts.
        typed: Payloads that the server can decode.
    """
    while True:
        kind = draw.choice([*kinds, "", "sing", "k" * 64, "\x1b[2J\n"])
        payload = draw.choice([*typed, b"", b"\xc1", draw.randbytes(draw.randrange(64))])
        choice = draw.randrange(8)
        if choice == 0:
            payload = b"\x91" * draw.choice([100, 1500, 60_000])
        elif choice == 1 and payload:
            changed = bytearray(payload)
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            payload = bytes(changed)
        elif choice == 2:
            payload = payload[: draw.randrange(len(payload) + 1)] * draw.randrange(4)
        frames = [bytes(part) for part in pack(kind, draw.randrange(1 << 62), payload)]
        if choice == 3:
            frames[0] = draw.choice([b"\x91" * 1500, b"\xdf\xff\xff\xff\xff", draw.randbytes(40)])
        elif choice == 4:
            claims = {"kind": kind, "sequence": 1 << 60, "checksum": 0, "length": 1 << 62}
            frames[0] = msgspec.msgpack.encode(claims)
        elif choice == 5:
            frames = [draw.randbytes(draw.randrange(20)) for _ in range(draw.randrange(1, 9))]
        yield frames


def attack_with(
    stack: ExitStack,
    address: str,
    messages: Iterable[list[bytes]],
    good: Callable[[], None],
) -> None:
    """Send hostile messages to a server, and use it as a good client in between.

    Args:
        stack: Closes the sockets at the end of the test.
        address: Address of the server.
        messages: Frames of the messages.
        good: Uses the server as a good client.
    """
    draw = random.Random(0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    slow = connect_raw(stack, address)
    greet(slow, b"slow")
    half_open = [connect_raw(stack, address) for _ in range(5)]
    half_open[0].sendall(BANNERS["half a greeting"])
    banners = itertools.cycle(BANNERS.values())
    bare: zmq.Socket[bytes] | None = None
    for number, frames in enumerate(messages):
        if number % 50 == 0:
            if bare is not None:
                bare.close(linger=30_000)
            bare = context.socket(zmq.DEALER)
            bare.setsockopt(zmq.SNDTIMEO, 20_000)
            if number % 100:
                bare.setsockopt(zmq.IDENTITY, f"hostile {number}".encode())
            bare.connect(address)
            with ExitStack() as passing, suppress(OSError):
                raw = connect_raw(passing, address)
                raw.sendall(next(banners) + draw.randbytes(draw.randrange(100)))
                claims = connect_raw(passing, address)
                greet(claims)
                claims.sendall(frame(b"x", more=bool(number % 3), claimed=1 << 40))
        assert bare is not None
        bare.send_multipart(frames)
        if number % 10 == 0:
            # This client never reads its replies, and is dropped at some point.
            with suppress(OSError):
                for at, part in enumerate(frames):
                    slow.sendall(frame(part, more=at + 1 < len(frames)))
        if number % 100 == 0:
            good()
    good()


def resident_bytes(pid: int | str = "self") -> int:
    """Return the private resident memory of a process, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])
