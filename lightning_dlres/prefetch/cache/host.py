"""The process that keeps the cache of a host: one for all ranks and workers, so that samples are
held once, and apart from them, so that neither waits for the other's interpreter.

It ends by itself when nobody uses it any more; its memory goes with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from lightning_dlres.core.compiled import load_all
from lightning_dlres.core.errors import (
    ConfigError,
    DlresError,
    PeerError,
    ProtocolError,
    text_of,
)
from lightning_dlres.core.host import shared_memory
from lightning_dlres.core.host.disk import trim
from lightning_dlres.core.host.free_memory import available_bytes
from lightning_dlres.core.units import format_bytes
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.core.wire.frames import Message
from lightning_dlres.core.wire.net import Server
from lightning_dlres.prefetch.cache import messages
from lightning_dlres.prefetch.cache.engine import PrefetchEngine
from lightning_dlres.prefetch.cache.epochs import needed
from lightning_dlres.prefetch.cache.exchange import BatchReply
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.cache.launch import PROGRESS, failure_path
from lightning_dlres.prefetch.cache.messages import Begin, HostConfig
from lightning_dlres.prefetch.cache.space.cache_space import CacheSpace, check_fits
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples
from lightning_dlres.prefetch.storage.base import Storage
from lightning_dlres.prefetch.storage.registry import open_storage

# Nothing has moved for so long: what is in use, or promised to ranks that do not come for it, does
# not leave room for what is needed next. Where that goes on, nobody waits as long again.
_PATIENCE, _LEAST_PATIENCE = 0.1, 0.001
# Ranks start and restart: the first may be slow, and the next may come soon.
_UNUSED_AT_START, _UNUSED = 60.0, 3.0
_WAIT = 0.5
_SWITCH_SECONDS = 0.0002
_PROGRESS_SECONDS = 0.5
# Of the log. What has been printed for longest is of least interest.
_MOST_LOG_BYTES, _TRIM_SECONDS = 1 << 20, 10.0


class CacheHost:
    """Serves the processes of a host until nobody has used it for a while.

    Args:
        storage: where samples come from.
        config: of the cache.
        path: of the Unix socket to listen at.

    Raises:
        ConfigError: a sample is larger than the cache, or the memory is not there.
    """

    def __init__(self, storage: Storage, config: HostConfig, path: Path) -> None:
        self._storage, self._config = storage, config
        self._digest = messages.fingerprint(config)
        table = storage.table
        largest = int(table.sizes.max())
        check_fits(largest, config.capacity, table.key(int(table.sizes.argmax())), config.share)
        _check_memory(config)
        self._cache = shared_memory.create("dlres-cache", config.capacity)
        directory = Path(config.kept_directory) if config.kept_directory else None
        self._kept_memory = shared_memory.create(
            "dlres-kept", min(config.kept, table.total_bytes), directory
        )
        # What is compiled takes no arrays that are mapped from a file and not to be written to.
        sizes = np.array(table.sizes)
        self._space = CacheSpace(self._cache.data, len(table), config.threshold)
        self._kept = PinnedSamples(self._kept_memory.data, sizes)
        self._engine = PrefetchEngine(
            sizes,
            storage.nodes,
            self._space,
            self._kept,
            prefetch=config.prefetch,
            lookahead=config.lookahead,
            depth=config.depth,
        )
        self._joined = messages.Joined(
            pid=os.getpid(),
            cache_path=self._cache.path,
            cache_bytes=self._cache.nbytes,
            kept_path=self._kept_memory.path,
            kept_bytes=self._kept_memory.nbytes,
            samples=len(table),
            total_bytes=table.total_bytes,
            largest=largest,
            digest=table.digest,
            encoding=table.encoding,
            nodes=storage.nodes,
            note=storage.note,
        )
        # Of every process: the epoch it is in, None before its first.
        self._clients: dict[str, int | None] = {}
        self._connections: dict[int, str] = {}
        self._begun: dict[int, Begin] = {}
        self._last_used = time.monotonic() + _UNUSED_AT_START - _UNUSED
        self._last_move = time.monotonic()
        self._patience = _PATIENCE
        self._next_trim = 0.0
        self._server = Server(path=path, monitor=True)
        storage.on_reply = self._server.interrupt

    def run(self) -> None:
        """Serve until nobody is left."""
        while self._clients or time.monotonic() < self._last_used + _UNUSED:
            message = self._server.receive(self._wait())
            if time.monotonic() > self._next_trim:
                self._next_trim = time.monotonic() + _TRIM_SECONDS
                trim(sys.stderr.fileno(), _MOST_LOG_BYTES)
            # First: a new connection may have the number of one that was closed before it.
            for event in self._server.connection_events():
                if not event.opened:
                    gone = self._connections.pop(event.connection, "")
                    self._leave(gone)
                    self._engine.forget(gone)
            if message is not None:
                self._handle(message)
            self._move()

    def close(self) -> None:
        """Give back everything."""
        self._storage.close()
        self._server.close()

    def _wait(self) -> float:
        if self._space.passing:
            return 0.0
        return self._patience if self._engine.blocked else _WAIT

    def _move(self) -> None:
        for reply in self._storage.replies():
            self._last_move = time.monotonic()
            if isinstance(reply.data, DlresError):
                self._engine.fail(reply.fetch_id, reply.data)
            else:
                self._engine.arrive(reply.fetch_id, reply.data)
        if self._engine.blocked and time.monotonic() > self._last_move + self._patience:
            self._engine.relieve()
            self._patience = max(self._patience / 4, _LEAST_PATIENCE)
        for request in self._engine.requests():
            self._storage.submit(request.ticket, request.node, request.numbers)
        for delivery in self._engine.deliveries():
            self._last_move = time.monotonic()
            if not len(delivery.direct):
                self._patience = min(2 * self._patience, _PATIENCE)
            self._send(delivery.client, messages.DELIVERY, self._pack(delivery))
        for failure in self._engine.failures():
            self._refuse(failure.client, failure.take, failure.error)
        self._engine.work()

    def _pack(self, delivery: BatchReply) -> bytes:
        table = self._storage.table
        keys = [table.key(number).encode() for number in delivery.numbers.tolist()]
        ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
        return messages.pack_delivery(
            messages.Delivered(
                delivery.take,
                delivery.numbers,
                delivery.places,
                ends,
                b"".join(keys),
                delivery.direct,
            )
        )

    def _handle(self, message: Message) -> None:
        peer, take = message.peer, -1
        try:
            if message.kind == messages.JOIN:
                self._join(message)
            elif message.kind == messages.RELEASE:
                # Also of processes that have left: what they look at stays until then.
                self._last_move = time.monotonic()
                for released in messages.unpack_release(message.payload, peer):
                    self._engine.release(peer, released)
            elif peer not in self._clients:
                raise ConfigError("the cache was not joined, or this connection was given up.")
            elif message.kind == messages.TAKE:
                take, generation, positions = messages.unpack_take(message.payload, peer)
                self._engine.take(peer, take, generation, positions)
            elif message.kind == messages.BEGIN:
                self._begin(peer, message.decode(Begin))
            elif message.kind == messages.LEAVE:
                self._leave(peer)
                self._send(peer, messages.LEFT, b"")
            elif message.kind == messages.METRICS:
                self._send(peer, messages.MEASURED, msgspec.msgpack.encode(self._measure()))
            else:
                raise ProtocolError(f"{peer} sent {message.kind!r}, which is not known here.")
        except (DlresError, KeyError, MemoryError) as error:
            self._server.refusals.note(f"{message.kind!r} of {peer}: {error!r}")
            if message.kind != messages.RELEASE:
                self._refuse(peer, take, error)

    def _join(self, message: Message) -> None:
        wish = message.decode(messages.Join)
        if wish.config != self._digest:
            raise ConfigError(
                "the cache of this host was started with other arguments than this process has. "
                "Give all ranks the same, or each data set a name of its own."
            )
        self._clients[message.peer] = None
        self._connections[message.connection] = message.peer
        self._send(message.peer, messages.JOINED, msgspec.msgpack.encode(self._joined))

    def _begin(self, peer: str, begin: Begin) -> None:
        known = self._begun.get(begin.generation)
        if known is not None and known != begin:
            raise ConfigError(
                f"All ranks must start the same epoch, got {begin} and {known}. Give them the same "
                "seed, batch size and checkpoint."
            )
        before, self._clients[peer] = self._clients[peer], begin.generation
        self._end_unused()
        if known is None:
            self._begun[begin.generation] = begin
            try:
                self._engine.begin(begin.generation, self._index(begin), self._following)
            except DlresError:
                del self._begun[begin.generation]
                self._clients[peer] = before
                raise
        self._send(peer, messages.BEGUN, b"")

    def _end_unused(self) -> None:
        """Give up epochs in which no process is any more."""
        used = {generation for generation in self._clients.values() if generation is not None}
        for generation in [g for g in self._begun if used and g < min(used)]:
            del self._begun[generation]
            self._engine.end(generation)

    def _index(self, begin: Begin) -> CacheIndex:
        kept = self._kept.ready if len(self._kept.ready) else None
        numbers = needed(len(self._storage.table), begin)
        return CacheIndex.build(numbers, self._storage.nodes, kept)

    def _following(self, generation: int) -> CacheIndex | None:
        """Return what is needed after an epoch if nothing unusual happens: the whole next one."""
        before = self._begun.get(generation - 1)
        if before is None or not before.more:
            return None
        return self._index(msgspec.structs.replace(before, epoch=before.epoch + 1, consumed=0))

    def _measure(self) -> messages.Metrics:
        return messages.Metrics(
            **vars(self._engine.counts),
            evicted=self._space.evicted,
            passes=self._space.passes,
            moved_bytes=self._space.moved_bytes,
            cache_bytes=self._space.live_bytes,
            used_bytes=self._space.end,
            peak_bytes=self._space.peak,
            capacity=self._space.capacity,
            management_bytes=self._engine.management_bytes(),
        )

    def _refuse(self, peer: str, take: int, error: Exception) -> None:
        name = type(error).__name__ if isinstance(error, DlresError) else "ProtocolError"
        failed = messages.Failed(take, name, text_of(error))
        self._send(peer, messages.FAILED, msgspec.msgpack.encode(failed))

    def _send(self, peer: str, kind: str, payload: bytes) -> None:
        try:
            self._server.send(peer, kind, payload)
        except PeerError:
            self._leave(peer)

    def _leave(self, peer: str) -> None:
        if peer in self._clients:
            del self._clients[peer]
            self._last_used = time.monotonic()
            self._engine.drop_takes(peer)
            self._end_unused()
            if not self._clients:
                # Whoever comes next counts epochs anew.
                for generation in list(self._begun):
                    self._engine.end(generation)
                    self._engine.end(generation + 1)
                self._begun.clear()


def _check_memory(config: HostConfig) -> None:
    wanted = config.capacity + (0 if config.kept_directory else config.kept)
    free = available_bytes()
    if free is not None and wanted > free:
        raise ConfigError(
            f"capacity and pinned must be at most {format_bytes(free)} together, which this host "
            f"has free, got {format_bytes(wanted)}. Give less: an epoch needs little more than "
            "prefetch samples for every storage node."
        )


class _Progress:
    """Tells those that wait what is done before anything is served."""

    def __init__(self, directory: Path) -> None:
        self._path, self._next = directory / PROGRESS, time.monotonic() + _PROGRESS_SECONDS

    def __call__(self, done: str) -> None:
        if time.monotonic() > self._next:
            self._path.write_text(done)
            self._next = time.monotonic() + _PROGRESS_SECONDS


def main() -> NoReturn:
    """Read a configuration from standard input and serve; the first argument is the directory that
    is this cache's, the second a descriptor that locks it."""
    directory, lock = Path(sys.argv[1]), int(sys.argv[2])
    # A crash below Python is told with its stack, too: it is in the log, and so in others' errors.
    faulthandler.enable()
    # ^C is for those that use the cache; without them it ends by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Threads that receive must not keep the one that decides waiting for 5 ms each time.
    sys.setswitchinterval(_SWITCH_SECONDS)
    status = 1
    try:
        # Security: the configuration names a module to import. It comes from the process of this
        # user that has started this one. Never take a configuration from the socket.
        config = from_json(sys.stdin.buffer.read(), HostConfig)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = _serve(config, directory)
    except SystemExit:
        shutil.rmtree(directory, ignore_errors=True)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread that hangs in a read would keep the interpreter from ending.
        os._exit(status)


def _serve(config: HostConfig, directory: Path) -> int:
    with contextlib.ExitStack() as stack:
        try:
            storage = open_storage(config.source, directory, _Progress(directory))
            stack.callback(storage.close)
            # Compiled functions are loaded before anybody waits for them, those of the storage's
            # module too, which is only imported when it is opened.
            load_all()
            host = CacheHost(storage, config, directory / "cache.sock")
        except DlresError as error:
            failed = messages.Failed(-1, type(error).__name__, text_of(error))
            (directory / "failed.part").write_bytes(msgspec.json.encode(failed))
            # Whoever waits for the socket finds this instead.
            (directory / "failed.part").rename(failure_path(directory, config))
            return 1
        stack.callback(host.close)
        try:
            host.run()
        except Exception:
            # Before the connections close: those at their other ends will read it.
            traceback.print_exc()
            sys.stderr.flush()
            return 1
    # What it has printed is of interest only where it has not come to this. The lock goes last: who
    # finds none makes a new one, and what is here then belongs to the next cache.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    shutil.rmtree(directory, ignore_errors=True)
    for ending in (".log", ".lock"):
        directory.with_name(directory.name + ending).unlink(missing_ok=True)
    return 0
