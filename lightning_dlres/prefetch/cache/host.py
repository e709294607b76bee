"""Process that keeps the cache of a host.

One process serves all ranks and workers of the host, so that each sample is held once. It is apart
from them, so that neither waits for the other's interpreter lock. It ends by itself when no process
uses it any more, and frees its memory.
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
    EpochTakenError,
    PeerError,
    text_of,
)
from lightning_dlres.core.host import shared_memory
from lightning_dlres.core.host.disk import trim
from lightning_dlres.core.host.free_memory import available_bytes
from lightning_dlres.core.units import format_bytes
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.core.wire.message import Message, protocol_error
from lightning_dlres.core.wire.server import Server
from lightning_dlres.prefetch.cache import messages
from lightning_dlres.prefetch.cache.engine import PrefetchEngine
from lightning_dlres.prefetch.cache.epochs import BegunEpoch, needed_samples
from lightning_dlres.prefetch.cache.exchange import BatchReply
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.cache.launch import PROGRESS, failure_path
from lightning_dlres.prefetch.cache.messages import Begin, HostConfig
from lightning_dlres.prefetch.cache.space.cache_space import CacheSpace, check_fits
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples
from lightning_dlres.prefetch.storage.base import Storage
from lightning_dlres.prefetch.storage.registry import open_storage

# Stall timeout, in seconds; shortened after each stall, down to the minimum. A stall means that the
# cache has no room for the oldest request's samples: all room is in use, or holds samples that
# other ranks have not requested yet. The samples are then fetched without being stored. The shorter
# timeout keeps later requests from waiting as long again.
_STALL_SECONDS, _MIN_STALL_SECONDS = 0.1, 0.001
# Seconds without any client after which the process ends. The first rank may take long to start.
# After the last client has left, another one may join soon.
_IDLE_SECONDS_AT_START, _IDLE_SECONDS = 60.0, 3.0
# Seconds that the loop waits for a message.
_POLL_SECONDS = 0.5
# Interpreter switch interval, in seconds. With the default of 5 ms, the threads that read from the
# storage would delay the thread that runs the engine.
_SWITCH_SECONDS = 0.0002
# Seconds between two reports of progress before the process listens.
_PROGRESS_SECONDS = 0.5
# Maximum size of the log, and seconds between two checks of it. The oldest lines are dropped.
_MAX_LOG_BYTES, _TRIM_SECONDS = 1 << 20, 10.0


class CacheHost:
    """Server of a host's cache, for all processes of the host.

    One thread runs everything, so the engine needs no lock. Replies of the storage interrupt its
    wait for messages.

    Args:
        storage: Where samples come from.
        config: Configuration of the cache.
        path: Unix socket to listen at.

    Raises:
        ConfigError: If a sample is larger than the cache, or the host lacks the memory.
    """

    def __init__(self, storage: Storage, config: HostConfig, path: Path) -> None:
        self._storage, self._config = storage, config
        self._digest = messages.fingerprint(config)
        table = storage.table
        largest = int(table.sizes.max())
        check_fits(largest, config.capacity, table.key(int(table.sizes.argmax())), config.share)
        _check_memory(config)
        self._cache = shared_memory.create("dlres-cache", config.capacity)
        directory = Path(config.pinned_directory) if config.pinned_directory else None
        self._pinned_memory = shared_memory.create(
            "dlres-pinned", min(config.pinned, table.total_bytes), directory
        )
        # A copy: compiled functions take no read-only arrays, such as those mapped from a file.
        sizes = np.array(table.sizes)
        self._space = CacheSpace(self._cache.data, len(table), config.threshold)
        self._pinned = PinnedSamples(self._pinned_memory.data, sizes)
        self._engine = PrefetchEngine(
            sizes,
            storage.nodes,
            self._space,
            self._pinned,
            prefetch=config.prefetch,
            lookahead=config.lookahead,
            max_inflight_requests=config.max_inflight_requests,
        )
        self._joined = messages.Joined(
            pid=os.getpid(),
            cache_path=self._cache.path,
            cache_bytes=self._cache.nbytes,
            pinned_path=self._pinned_memory.path,
            pinned_bytes=self._pinned_memory.nbytes,
            samples=len(table),
            total_bytes=table.total_bytes,
            largest=largest,
            digest=table.digest,
            encoding=table.encoding,
            nodes=storage.nodes,
            note=storage.note,
        )
        # The epoch_id that each client is in; None before its first epoch.
        self._clients: dict[str, int | None] = {}
        # The client of each connection, by the connection's number.
        self._connections: dict[int, str] = {}
        # Epochs that were begun, and that at least one client has not left yet; by epoch_id.
        self._begun: dict[int, BegunEpoch] = {}
        # In the future, so that the first client has `_IDLE_SECONDS_AT_START` to join.
        self._last_used = time.monotonic() + _IDLE_SECONDS_AT_START - _IDLE_SECONDS
        self._last_progress = time.monotonic()
        self._stall_seconds = _STALL_SECONDS
        self._next_trim = 0.0
        self._server = Server(path=path, monitor=True)
        storage.on_reply = self._server.interrupt

    def run(self) -> None:
        """Serve until there was no client for a while."""
        while self._clients or time.monotonic() < self._last_used + _IDLE_SECONDS:
            message = self._server.receive(self._poll_seconds())
            if time.monotonic() > self._next_trim:
                self._next_trim = time.monotonic() + _TRIM_SECONDS
                trim(sys.stderr.fileno(), _MAX_LOG_BYTES)
            # Before the message: a new connection may have the number of a closed one.
            for event in self._server.connection_events():
                if not event.opened:
                    client = self._connections.pop(event.connection, "")
                    self._leave(client)
                    self._engine.forget_client(client)
            if message is not None:
                self._handle(message)
            self._advance()

    def close(self) -> None:
        """Close the storage and the socket."""
        self._storage.close()
        self._server.close()

    def _poll_seconds(self) -> float:
        if self._space.is_evicting:
            return 0.0
        return self._stall_seconds if self._engine.is_stalled else _POLL_SECONDS

    def _advance(self) -> None:
        """Pass replies of the storage to the engine, and send everything that it has decided."""
        for reply in self._storage.replies():
            self._last_progress = time.monotonic()
            if isinstance(reply.data, DlresError):
                self._engine.fail(reply.fetch_id, reply.data)
            else:
                self._engine.arrive(reply.fetch_id, reply.data)
        stall_deadline = self._last_progress + self._stall_seconds
        if self._engine.is_stalled and time.monotonic() > stall_deadline:
            self._engine.fetch_bypassing_cache()
            self._stall_seconds = max(self._stall_seconds / 4, _MIN_STALL_SECONDS)
        for fetch in self._engine.pop_fetches():
            self._storage.submit(fetch.fetch_id, fetch.node, fetch.sample_ids)
        for batch in self._engine.pop_replies():
            self._last_progress = time.monotonic()
            if not len(batch.direct):
                self._stall_seconds = min(2 * self._stall_seconds, _STALL_SECONDS)
            self._send(batch.client, messages.BATCH_REPLY, self._pack(batch))
        for failure in self._engine.pop_failures():
            self._refuse(failure.client, failure.request_id, failure.error)
        self._engine.advance_eviction()

    def _pack(self, reply: BatchReply) -> bytes:
        table = self._storage.table
        keys = [table.key(sample_id).encode() for sample_id in reply.sample_ids.tolist()]
        key_ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
        return messages.pack_batch_reply(
            messages.DeliveredBatch(
                reply.request_id,
                reply.sample_ids,
                reply.locations,
                key_ends,
                b"".join(keys),
                reply.direct,
            )
        )

    def _handle(self, message: Message) -> None:
        peer, request_id = message.peer, -1
        try:
            if message.kind == messages.JOIN:
                self._join(message)
            elif message.kind == messages.RELEASE:
                # A process that has left may still release batches that it read.
                self._last_progress = time.monotonic()
                for released in messages.unpack_release(bytes(message.payload), peer):
                    self._engine.release(peer, released)
            elif peer not in self._clients:
                raise ConfigError(
                    f"The first message of a connection must be {messages.JOIN!r}, got "
                    f"{message.kind!r}. Connect and join again."
                )
            elif message.kind == messages.BATCH_REQUEST:
                request_id, epoch_id, epoch_slots = messages.unpack_batch_request(
                    bytes(message.payload), peer
                )
                self._engine.request_batch(peer, request_id, epoch_id, epoch_slots)
            elif message.kind == messages.BEGIN:
                self._begin_epoch(peer, message.decode(Begin))
            elif message.kind == messages.LEAVE:
                self._leave(peer)
                self._send(peer, messages.LEFT, b"")
            elif message.kind == messages.METRICS:
                self._send(peer, messages.MEASURED, msgspec.msgpack.encode(self._metrics()))
            else:
                raise protocol_error(peer, f"{message.kind!r}", "a kind of `cache.messages`")
        except (DlresError, KeyError, MemoryError) as error:
            self._server.refusals.note(f"{message.kind!r} of {peer}: {error!r}")
            if message.kind != messages.RELEASE:
                self._refuse(peer, request_id, error)

    def _join(self, message: Message) -> None:
        join = message.decode(messages.Join)
        if join.config != self._digest:
            raise ConfigError(
                "The arguments of a cache must be the same in all processes of a host, got "
                "arguments that differ from those of the process that started it. Pass the same "
                "arguments on all ranks, or use another `cache` name for another data set."
            )
        self._clients[message.peer] = None
        self._connections[message.connection] = message.peer
        self._send(message.peer, messages.JOINED, msgspec.msgpack.encode(self._joined))

    def _begin_epoch(self, peer: str, begin: Begin) -> None:
        epoch_id, known = begin.epoch_id, self._begun.get(begin.epoch_id)
        used = {used for client, used in self._clients.items() if client != peer}
        clash = known.clash(begin) if known is not None else ""
        if clash and epoch_id in used:
            raise EpochTakenError(clash)
        for begun in list(self._begun):
            # An epoch that clashes and is not used is one of an earlier job.
            if begun not in used and (begun != epoch_id or clash):
                self._end_epoch(begun, next_used=epoch_id)
        if epoch_id not in self._begun:
            index = self._index(begin)
            self._begun[epoch_id] = BegunEpoch(begin)
            try:
                self._engine.begin_epoch(epoch_id, index, self._index_of_next_epoch)
            except ConfigError as error:
                # Two epochs are open, whose clients have not left yet.
                del self._begun[epoch_id]
                raise EpochTakenError(str(error)) from error
        self._begun[epoch_id].ranks.add(begin.rank)
        self._clients[peer] = epoch_id
        self._send(peer, messages.BEGUN, b"")

    def _end_unused_epochs(self) -> None:
        """End the epochs that every client has left."""
        used = {epoch_id for epoch_id in self._clients.values() if epoch_id is not None}
        for epoch_id in [begun for begun in self._begun if used and begun < min(used)]:
            self._end_epoch(epoch_id, next_used=epoch_id + 1)

    def _end_epoch(self, epoch_id: int, next_used: int) -> None:
        """End a begun epoch, and the one after it, which may have been opened to prefetch it,
        unless that is begun or is `next_used`."""
        del self._begun[epoch_id]
        self._engine.end_epoch(epoch_id)
        if epoch_id + 1 != next_used and epoch_id + 1 not in self._begun:
            self._engine.end_epoch(epoch_id + 1)

    def _index(self, begin: Begin) -> CacheIndex:
        is_pinned = self._pinned.is_ready if len(self._pinned.is_ready) else None
        sample_ids = needed_samples(len(self._storage.table), begin)
        return CacheIndex.build(sample_ids, self._storage.nodes, is_pinned)

    def _index_of_next_epoch(self, epoch_id: int) -> CacheIndex | None:
        """Return the index of an epoch that no client has begun yet, to prefetch it.

        This assumes the next whole epoch with the same arguments. If the clients then begin another
        one, the engine drops these samples.
        """
        before = self._begun.get(epoch_id - 1)
        if before is None or not before.begin.has_next:
            return None
        begin = before.begin
        return self._index(msgspec.structs.replace(begin, epoch=begin.epoch + 1, consumed=0))

    def _metrics(self) -> messages.Metrics:
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

    def _refuse(self, peer: str, request_id: int, error: Exception) -> None:
        name = type(error).__name__ if isinstance(error, DlresError) else "ProtocolError"
        failed = messages.Failed(request_id, name, text_of(error))
        self._send(peer, messages.FAILED, msgspec.msgpack.encode(failed))

    def _send(self, peer: str, kind: str, payload: bytes) -> None:
        try:
            self._server.send(peer, kind, payload)
        except PeerError:
            self._leave(peer)

    def _leave(self, peer: str) -> None:
        """Forget a client. Its leased batches stay until they are released or its connection
        ends."""
        if peer in self._clients:
            del self._clients[peer]
            self._last_used = time.monotonic()
            self._engine.drop_requests(peer)
            self._end_unused_epochs()
            if not self._clients:
                # The next client counts its epochs from 0.
                for epoch_id in list(self._begun):
                    self._end_epoch(epoch_id, next_used=0)


def _check_memory(config: HostConfig) -> None:
    nbytes = config.capacity + (0 if config.pinned_directory else config.pinned)
    free = available_bytes()
    if free is not None and nbytes > free:
        raise ConfigError(
            f"capacity and pinned must be at most {format_bytes(free)} together, which this host "
            f"has free, got {format_bytes(nbytes)}. Use a smaller capacity: an epoch needs little "
            "more than `prefetch` samples for each storage node."
        )


class _Progress:
    """Writes progress to a file, for processes that wait for this one to listen."""

    def __init__(self, directory: Path) -> None:
        self._path, self._next = directory / PROGRESS, time.monotonic() + _PROGRESS_SECONDS

    def __call__(self, text: str) -> None:
        if time.monotonic() > self._next:
            self._path.write_text(text)
            self._next = time.monotonic() + _PROGRESS_SECONDS


def main() -> NoReturn:
    """Read a configuration from standard input and serve until the process ends.

    The first argument of the command is the cache's directory, the second a descriptor that holds
    its lock.
    """
    directory, lock = Path(sys.argv[1]), int(sys.argv[2])
    # The stack of a crash in native code goes to the log, and so into the errors of the clients.
    faulthandler.enable()
    # Ctrl-C is meant for the ranks; without them this process ends by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
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
        # A normal exit would wait for a thread that hangs in a read.
        os._exit(status)


def _serve(config: HostConfig, directory: Path) -> int:
    with contextlib.ExitStack() as stack:
        try:
            storage = open_storage(config.source, directory, _Progress(directory))
            stack.callback(storage.close)
            # Compile now, and not while a rank waits for its first batch. This comes after the
            # storage is opened, which imports the storage's module.
            load_all()
            host = CacheHost(storage, config, directory / "cache.sock")
        except DlresError as error:
            failed = messages.Failed(-1, type(error).__name__, text_of(error))
            (directory / "failed.part").write_bytes(msgspec.json.encode(failed))
            # Processes that wait for the socket find this file instead.
            (directory / "failed.part").rename(failure_path(directory, config))
            return 1
        stack.callback(host.close)
        try:
            host.run()
        except Exception:
            # Written before the connections close, because the clients read the log then.
            traceback.print_exc()
            sys.stderr.flush()
            return 1
    # The log is needed only after an error. The lock's file goes last. A process that finds no such
    # file makes one and starts the next cache, to which the directory and the log then belong.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    shutil.rmtree(directory, ignore_errors=True)
    for ending in (".log", ".lock"):
        directory.with_name(directory.name + ending).unlink(missing_ok=True)
    return 0
