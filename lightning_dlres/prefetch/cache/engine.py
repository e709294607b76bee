"""Engine of a host's cache: a state machine without sockets, threads or clocks.

Batch requests, storage replies and releases go in; fetches and batch replies come out. The driver
(`CacheHost`, or a test) does all the waiting.

- `lookahead=0` is the method as published (Zhejiang Lab, "Prefetch cache management for distributed
  deep learning training"). Each storage node has a prefetch list: its samples, in the order of the
  epoch. A miss fetches the sample and the next k - 1 of its prefetch list. The sample goes to the
  client that requested it, the others go into the cache space.
- Otherwise fetches go out ahead of need, within a budget of bytes. Bytes are reserved from it for
  the samples in use, and for those that may be fetched, whether they have arrived or not. So a
  sample never waits for room that later samples have taken.

Id spaces, by the name that the code uses:

- sample_id: Index of a sample in the data set.
- epoch_slot: Position of a sample in this host's part of an epoch, in the order of the epoch. Valid
  for one epoch.
- epoch_id: Number of an epoch. Each client counts the epochs that it begins, from 0; all clients
  must agree. Valid until every client has left the epoch.
- row: Row of the slot table that an open epoch uses, 0 or 1, assigned by `PrefetchWindow`. At most
  two epochs are open.
- client: Name that a process gives itself when it joins. Valid for one connection.
- request_id: Number of a batch request, counted by its client. Valid until the batch is released.
- fetch_id: Number of a request to a storage node, counted by `InflightFetches`. Valid until the
  storage replies.
- entry: Index of a stored sample's record in the metadata list of `CacheSpace`. Valid from store to
  eviction; then another sample gets it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError, StorageError, got_expected
from lightning_dlres.prefetch.cache.epochs import EpochProgress
from lightning_dlres.prefetch.cache.exchange import (
    DIRECT_TIER,
    PINNED_TIER,
    BatchFailure,
    BatchReply,
    Counts,
    Fetch,
)
from lightning_dlres.prefetch.cache.in_flight import (
    BatchRequest,
    InflightFetches,
    LeaseTable,
    PrefetchWindow,
)
from lightning_dlres.prefetch.cache.index import CacheIndex, count_missing
from lightning_dlres.prefetch.cache.space.cache_space import (
    Bytes,
    CacheSpace,
    EpochSlots,
    Lengths,
    PendingWrites,
)
from lightning_dlres.prefetch.cache.space.entry_kernels import (
    DONE,
    FAILED,
    FETCHING,
    PINNED,
    UNFETCHED,
)
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples


class PrefetchEngine:
    """Decides which samples are fetched, stored, delivered and evicted on one host.

    Args:
        sizes: int64[samples], in bytes.
        nodes: Number of storage nodes; sample i is on node i mod `nodes`.
        space: Memory in which samples wait.
        pinned: Pinned tier, whose samples stay for all epochs.
        prefetch: Maximum number of samples in one fetch; k in the paper.
        lookahead: Budget in bytes for samples that are in use or may be fetched. 0: fetch on a miss
            only. None: half of the capacity. With that, eviction moves about one byte for each
            stored byte. It moves many times as much with nearly the whole capacity.
        max_inflight_requests: Maximum number of prefetches in flight to one node.

    Raises:
        ConfigError: If a number is out of its range.
    """

    def __init__(
        self,
        sizes: NDArray[np.int64],
        nodes: int,
        space: CacheSpace,
        pinned: PinnedSamples,
        *,
        prefetch: int = 32,
        lookahead: int | None = None,
        max_inflight_requests: int = 4,
    ) -> None:
        for name, value in (
            ("nodes", nodes),
            ("prefetch", prefetch),
            ("max_inflight_requests", max_inflight_requests),
        ):
            if value < 1:
                raise ConfigError(got_expected(name, value, "at least 1", f"{name}=1"))
        budget = -(-space.capacity // 2) if lookahead is None else lookahead
        if not 0 <= budget <= space.capacity:
            raise ConfigError(
                got_expected(
                    "lookahead",
                    lookahead,
                    f"0 to the capacity, {space.capacity}",
                    f"lookahead={space.capacity}",
                )
            )
        self.counts = Counts()
        self._sizes, self._nodes, self._space, self._pinned = sizes, nodes, space, pinned
        self._prefetch, self._budget = prefetch, budget
        self._fetches = InflightFetches(sizes, nodes, space, max_inflight_requests, self.counts)
        self._leases = LeaseTable()
        self._window = PrefetchWindow(
            sizes=sizes,
            nodes=nodes,
            space=space,
            pinned=pinned,
            fetches=self._fetches,
            leases=self._leases,
            prefetch=prefetch,
            budget=budget,
        )
        # Oldest first. Requests of one client are served in this order.
        self._requests: deque[BatchRequest] = deque()
        self._replies: deque[BatchReply] = deque()
        self._failures: list[BatchFailure] = []
        self._pending_writes = PendingWrites(space)

    @property
    def is_stalled(self) -> bool:
        """True if a batch request waits and no fetch is in flight; never with `lookahead=0`."""
        return bool(self._requests and self._budget and not self._fetches)

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the cache space that were delivered and not released."""
        return self._leases.in_use_bytes

    def begin_epoch(
        self, epoch_id: int, index: CacheIndex, index_of_epoch: Callable[[int], CacheIndex | None]
    ) -> None:
        """Open an epoch, or continue one that was prefetched.

        Args:
            epoch_id: Number of the epoch. The epoch after it has `epoch_id` + 1.
            index: Samples that this host needs in this epoch.
            index_of_epoch: Returns the index of a later epoch by its epoch_id, to prefetch it;
                None if there is no such epoch.

        Raises:
            ConfigError: If two other epochs are open. End one of them first.
        """
        self._window.index_of_epoch = index_of_epoch
        epoch = self._window.find(epoch_id)
        if epoch is not None:
            is_same = np.array_equal(epoch.index.sample_ids, index.sample_ids)
            if is_same and not epoch.num_requested:
                self._advance()
                return
            # It was prefetched in another order, or is begun again.
            self._abort_epoch(epoch)
        self._window.open_epoch(epoch_id, index)
        self._advance()

    def end_epoch(self, epoch_id: int) -> None:
        """Close an epoch, if it is open, and drop its samples; leased batches stay in place."""
        epoch = self._window.find(epoch_id)
        if epoch is not None:
            self._abort_epoch(epoch)
        self._advance()

    def request_batch(
        self, client: str, request_id: int, epoch_id: int, epoch_slots: EpochSlots
    ) -> None:
        """Add a batch request; a reply with the same client and request_id follows.

        Args:
            client: Name of the process that makes the request.
            request_id: Unique for this client.
            epoch_id: Number of an open epoch.
            epoch_slots: uint32[n]. Each slot of an epoch may be requested once.

        Raises:
            ConfigError: If the epoch is not open, or a slot is not in it or was requested before.
        """
        epoch = self._window.find(epoch_id)
        if epoch is None:
            open_ids = [epoch.epoch_id for epoch in self._window.epochs]
            raise ConfigError(
                f"epoch_id must be one of the open epochs, {open_ids}, got {epoch_id}. Begin the "
                "epoch first."
            )
        epoch.mark_requested(epoch_slots)
        if self._budget:
            states = self._space.slot_table[epoch.row]
            num_pinned = int((states[epoch_slots] == PINNED).sum())
            self.counts.hits += len(epoch_slots) - num_pinned - count_missing(states, epoch_slots)
        self._requests.append(BatchRequest(client, request_id, epoch, epoch_slots))
        self._advance()

    def release(self, client: str, request_id: int) -> None:
        """Release a delivered batch, whose samples its client no longer reads.

        Raises:
            KeyError: If there is no such batch.
        """
        lease = self._leases.pop(client, request_id)
        self._space.release(lease.used)
        self._pending_writes.retry()
        if self._budget:
            self._window.unreserve(lease.nbytes)
        self._advance()

    def drop_requests(self, client: str) -> None:
        """Drop the waiting batch requests of a client; the batches that it has leased stay."""
        self._drop([request for request in self._requests if request.client == client])
        self._advance()

    def forget_client(self, client: str) -> None:
        """Drop the batch requests of a disconnected client, and release its batches."""
        self._drop([request for request in self._requests if request.client == client])
        for request_id in self._leases.leased_request_ids(client):
            self.release(client, request_id)
        self._advance()

    def arrive(self, fetch_id: int, data: Bytes) -> None:
        """Take in the reply to a fetch.

        Args:
            fetch_id: The fetch.
            data: uint8[sum of the samples' sizes], the samples of the fetch without gaps.

        Raises:
            KeyError: If there is no such fetch.
        """
        fetch = self._fetches.pop(fetch_id)
        epoch, epoch_slots = fetch.epoch, fetch.epoch_slots
        sample_ids = epoch.index.sample_ids[epoch_slots]
        lengths = self._sizes[sample_ids]
        # Before the check for an aborted epoch, because a pinned sample serves all epochs.
        self._pinned.put(sample_ids, data)
        if epoch not in self._window.epochs:
            self._advance()
            return
        if fetch.request is not None:
            # Without a budget only the missed sample, which is the first, goes to the request.
            count = len(epoch_slots) if self._budget else 1
            nbytes = int(lengths[:count].sum())
            self._add_direct(fetch.request, epoch_slots[:count], lengths[:count], data[:nbytes])
            epoch_slots, lengths, data = epoch_slots[count:], lengths[count:], data[nbytes:]
        self._pending_writes.add(epoch.row, epoch_slots, lengths, data)
        self._advance()

    def fail(self, fetch_id: int, error: StorageError) -> None:
        """Take in the failure of a fetch.

        Batch requests that wait for its samples fail. A later request that names one of these
        samples fetches it again.

        Raises:
            KeyError: If there is no such fetch.
        """
        fetch = self._fetches.pop(fetch_id)
        if fetch.epoch in self._window.epochs:
            state = FAILED if self._budget else UNFETCHED
            self._space.slot_table[fetch.epoch.row, fetch.epoch_slots] = state
            waiting = [request for request in self._requests if fetch.delays(request)]
            self._drop(waiting)
            self._failures += [
                BatchFailure(request.client, request.request_id, error) for request in waiting
            ]
        self._advance()

    def pop_failures(self) -> list[BatchFailure]:
        """Return the batch requests that have failed, each once."""
        failures, self._failures = self._failures, []
        return failures

    def advance_eviction(self) -> bool:
        """Advance an eviction pass by one slice; return true if there is more to do."""
        return self._space.advance()

    def fetch_bypassing_cache(self) -> bool:
        """Fetch missing samples of the oldest batch request, which do not go into the cache space.

        Call this when the engine has been stalled for a while. The missing samples then do not fit
        beside the samples in use, or beside samples that other ranks have not requested yet.

        Returns:
            True if the request got a sample, or if a fetch was added for it.
        """
        if not self._requests or not self._budget:
            return False
        request = self._requests[0]
        has_moved = self._move_pending_writes_to(request)
        states = self._space.slot_table[request.epoch.row]
        unfetched = request.epoch_slots[states[request.epoch_slots] == UNFETCHED]
        self._fetch_directly(request, unfetched)
        self._advance()
        return has_moved or bool(len(unfetched))

    def pop_fetches(self) -> list[Fetch]:
        """Return the fetches to send now, each once."""
        return self._fetches.pop_unsent()

    def pop_replies(self) -> list[BatchReply]:
        """Return the batches to deliver now, each once. Each is leased until `release`."""
        replies = list(self._replies)
        self._replies.clear()
        return replies

    def management_bytes(self) -> int:
        """Return the bytes of indexes, lists and metadata of all samples."""
        indexes = sum(epoch.index.management_bytes() for epoch in self._window.epochs)
        own = self._sizes.nbytes + self._space.management_bytes() + self._pinned.management_bytes()
        return indexes + own

    def _abort_epoch(self, epoch: EpochProgress) -> None:
        self._window.close_epoch(epoch)
        self._drop([request for request in self._requests if request.epoch is epoch])
        self._pending_writes.drop(epoch.row)

    def _drop(self, requests: list[BatchRequest]) -> None:
        for request in requests:
            self._requests.remove(request)
            if request.used:
                # These samples were marked as in use, and no client will ever release them.
                self._space.release(np.array(list(request.used.values()), dtype=np.int64))
                self._pending_writes.retry()

    def _advance(self) -> None:
        """Do everything that can be done now: store, serve and prefetch."""
        self._pending_writes.write()
        while self._requests and self._serve(self._requests[0]):
            self._requests.popleft()
        if self._budget:
            # A client's requests are served in order, but no client waits for another's samples.
            blocked_clients = {request.client for request in list(self._requests)[:1]}
            for request in list(self._requests)[1:]:
                if request.client not in blocked_clients and self._serve(request):
                    self._requests.remove(request)
                else:
                    blocked_clients.add(request.client)
            self._window.prefetch_ahead()

    def _serve(self, request: BatchRequest) -> bool:
        """Deliver a batch if it is complete; return true if it was delivered."""
        return self._serve_whole(request) if self._budget else self._serve_in_order(request)

    def _serve_whole(self, request: BatchRequest) -> bool:
        """Deliver a batch once all of its samples are there; mark none as in use before that."""
        states = self._space.slot_table[request.epoch.row]
        epoch_slots = request.epoch_slots
        if request.direct:
            # Samples in `direct` have the state DONE. They are not missing.
            epoch_slots = epoch_slots[states[epoch_slots] != DONE]
        if count_missing(states, epoch_slots):
            self._fetch_directly(request, epoch_slots[states[epoch_slots] == FAILED])
            return False
        cached = epoch_slots[states[epoch_slots] != PINNED]
        used = self._space.use(request.epoch.row, cached)
        self._deliver(request, dict(zip(cached.tolist(), used, strict=True)))
        return True

    def _serve_in_order(self, request: BatchRequest) -> bool:
        """Serve the samples of a request one after the other, up to a miss that is in flight."""
        row, index = request.epoch.row, request.epoch.index
        while request.num_served < len(request.epoch_slots):
            slot = int(request.epoch_slots[request.num_served])
            state = int(self._space.slot_table[row, slot])
            if slot not in request.direct and state != PINNED:
                if state == UNFETCHED:
                    self._fetches.add(request.epoch, self._run_for_miss(index, slot, row), request)
                    return False
                if state == FETCHING and not self._move_pending_writes_to(request, only=slot):
                    return False
                if state >= 0:  # the entry of a sample in the cache space
                    one = np.array([slot], dtype=np.uint32)
                    request.used[slot] = self._space.use(row, one)[0]
                self.counts.hits += 1
            request.num_served += 1
        self._deliver(request, request.used)
        return True

    def _run_for_miss(self, index: CacheIndex, slot: int, row: int) -> EpochSlots:
        """Return the slots to fetch on a miss: the missed one, and those after it on the same node
        whose samples have room."""
        run = index.run_on_miss(slot, self._prefetch, self._space.slot_table[row])
        # Samples that were handed over for lack of contiguous room count as stored. Otherwise hits
        # and fetches would depend on fragmentation, and not only on order and sizes.
        unstored = self._leases.unstored_bytes
        unstored += sum(request.unstored_bytes for request in self._requests)
        occupied = self._space.live_bytes + self._pending_writes.nbytes + unstored
        free = self._space.capacity - occupied
        fits = np.cumsum(self._sizes[index.sample_ids[run[1:]]]) <= free
        return run[: 1 + int(fits.sum())]

    def _deliver(self, request: BatchRequest, used: dict[int, NDArray[np.int64]]) -> None:
        """Lease a complete batch to its client; see `BatchRequest.reply` for `used`."""
        reply = request.reply(used, self._sizes, self._pinned)
        self._leases.add(request, np.array(list(used.values()), dtype=np.int64).reshape(-1, 3))
        self._replies.append(reply)
        self.counts.samples += len(reply.sample_ids)
        self.counts.delivered_bytes += int(reply.locations[:, 2].sum())
        self.counts.pinned_hits += int((reply.locations[:, 0] == PINNED_TIER).sum())
        self.counts.direct_samples += int((reply.locations[:, 0] == DIRECT_TIER).sum())

    def _add_direct(
        self, request: BatchRequest, epoch_slots: EpochSlots, lengths: Lengths, data: Bytes
    ) -> None:
        """Hand samples to a batch request without storing them in the cache space."""
        ends = np.cumsum(lengths).tolist()
        states = self._space.slot_table[request.epoch.row]
        for slot, length, end in zip(epoch_slots.tolist(), lengths.tolist(), ends, strict=True):
            request.direct[slot] = data[end - length : end]
            states[slot] = DONE
            if self._budget and slot < request.epoch.reach:
                self._window.unreserve(length)

    def _move_pending_writes_to(self, request: BatchRequest, only: int | None = None) -> bool:
        """Hand a batch request its samples that wait for room, or only the one of slot `only`;
        return true if any sample waited."""
        epoch_slots = request.epoch_slots if only is None else np.array([only], dtype=np.uint32)
        removed = self._pending_writes.remove(request.epoch.row, epoch_slots)
        for slot, data in removed:
            one = np.array([slot], dtype=np.uint32)
            self._add_direct(request, one, np.array([len(data)], dtype=np.int64), data)
            request.unstored_bytes += len(data)
        return bool(removed)

    def _fetch_directly(self, request: BatchRequest, epoch_slots: EpochSlots) -> None:
        """Fetch samples that go to a batch request and not into the cache space."""
        nodes = request.epoch.index.sample_ids[epoch_slots] % self._nodes
        for node in np.unique(nodes).tolist():
            slots_of_node = epoch_slots[nodes == node]
            for start in range(0, len(slots_of_node), self._prefetch):
                run = slots_of_node[start : start + self._prefetch]
                self._fetches.add(request.epoch, run, request)
