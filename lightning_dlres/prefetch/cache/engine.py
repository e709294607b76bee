"""The cache of one host as a machine without sockets, threads or clocks: takes, replies and
releases go in; requests and deliveries come out. Whoever drives it does the waiting.

- `lookahead=0` is Method C as published: a miss fetches the sample and the next k - 1 of its
  prefetch list, the sample goes to whoever asked, the others into the cache (C4, C5).
- Else requests go out ahead of need, bounded in bytes: what has been promised room, asked for or
  not, and what is in use never exceed the budget, so that no sample waits for room that later
  samples have taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError, StorageError, got_expected
from lightning_dlres.prefetch.cache.exchange import (
    CACHED_TIER,
    DIRECT_TIER,
    KEPT_TIER,
    BatchFailure,
    BatchReply,
    Counts,
    Request,
)
from lightning_dlres.prefetch.cache.index import CacheIndex, extend, missing
from lightning_dlres.prefetch.cache.space.cache_space import Bytes, CacheSpace, Lengths, Used
from lightning_dlres.prefetch.cache.space.entry_kernels import ASKED, BROKEN, DONE, KEPT, UNASKED
from lightning_dlres.prefetch.cache.space.pending_writes import PendingWrites
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples
from lightning_dlres.prefetch.order.sequence import Positions


@dataclass(eq=False)
class _Epoch:
    """An epoch that is under way: its index, its row in the cache space, which of its samples were
    taken, and how far they may be asked for."""

    number: int
    row: int
    index: CacheIndex
    is_taken: NDArray[np.bool_]
    reach: int = 0
    taken: int = 0


@dataclass(eq=False)
class _BatchRequest:
    """A wish that is not delivered yet; `ready` has what waits for it outside of the cache."""

    client: str
    take: int
    epoch: _Epoch
    positions: Positions
    ready: dict[int, Bytes] = field(default_factory=dict)
    # Only without look-ahead: how many positions have been gone through, and the hits among them.
    through: int = 0
    # Bytes in `ready` that the cache had promised room.
    beside: int = 0
    used: dict[int, NDArray[np.int64]] = field(default_factory=dict)


@dataclass(eq=False)
class PendingFetch:
    """A request under way; with `take`, its samples that this take misses go to it directly."""

    epoch: _Epoch
    positions: Positions
    take: _BatchRequest | None
    node: int


class PrefetchEngine:
    """Decides what is asked for, stored, delivered and evicted on one host.

    Args:
        sizes: int64[samples], in bytes.
        nodes: how many storage nodes there are; sample i is on node i mod `nodes`.
        space: where samples wait.
        kept: the pinned tier.
        prefetch: samples of one request, Method C's k.
        lookahead: bytes that may be promised room ahead of need; 0: fetch on a miss only; None:
            half of the capacity. The more room is left beside them, the fewer bytes eviction moves:
            one for every byte stored where half is left, ever more where next to nothing is.
        depth: requests under way to one node, at most.

    Raises:
        ConfigError: a number that cannot be.
    """

    def __init__(
        self,
        sizes: NDArray[np.int64],
        nodes: int,
        space: CacheSpace,
        kept: PinnedSamples,
        *,
        prefetch: int = 32,
        lookahead: int | None = None,
        depth: int = 4,
    ) -> None:
        for name, value in (("nodes", nodes), ("prefetch", prefetch), ("depth", depth)):
            if value < 1:
                raise ConfigError(got_expected(name, value, "at least 1", f"{name}=1"))
        budget = -(-space.capacity // 2) if lookahead is None else lookahead
        if not 0 <= budget <= space.capacity:
            raise ConfigError(
                got_expected("lookahead", lookahead, "at most the capacity", "lookahead=None")
            )
        self.counts = Counts()
        self._sizes, self._nodes, self._space, self._kept = sizes, nodes, space, kept
        self._prefetch, self._budget, self._depth = prefetch, budget, depth
        self._epochs: list[_Epoch] = []
        self._next_index: Callable[[int], CacheIndex | None] = _no_more
        self._promised = 0
        self._asked: dict[int, PendingFetch] = {}
        self._under_way = np.zeros(nodes, dtype=np.int64)
        self._tickets = 0
        self._outgoing: deque[Request] = deque()
        self._deliveries: deque[BatchReply] = deque()
        self._failures: list[BatchFailure] = []
        self._takes: deque[_BatchRequest] = deque()
        self._landings = PendingWrites(space)
        self._leases: dict[tuple[str, int], tuple[_Epoch, Used]] = {}
        self._beside: dict[tuple[str, int], int] = {}

    @property
    def blocked(self) -> bool:
        """Whether somebody waits and nothing is on its way: see `relieve`."""
        return bool(self._takes and self._budget and not self._asked)

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the cache space that were delivered and not released."""
        return sum(int(used[:, 2].sum()) for _, used in self._leases.values())

    def begin(
        self, number: int, index: CacheIndex, following: Callable[[int], CacheIndex | None]
    ) -> None:
        """Start an epoch, or go on with one that was looked ahead to.

        Args:
            number: of the epoch.
            index: what this host needs of it.
            following: returns the index of the epoch with a number, for the look-ahead, or None if
                there is no such epoch.

        Raises:
            ConfigError: two others are under way; `end` one of them first.
        """
        self._next_index = following
        for epoch in [epoch for epoch in self._epochs if epoch.number == number]:
            if np.array_equal(epoch.index.numbers, index.numbers) and not epoch.taken:
                self._pump()
                return
            self._give_up(epoch)
        if len(self._epochs) == 2:
            numbers = [epoch.number for epoch in self._epochs]
            raise ConfigError(f"epoch {number} starts while epochs {numbers} are under way.")
        self._open(number, index)
        self._pump()

    def end(self, number: int) -> None:
        """Give up what is left of an epoch, if it is under way; what is in use stays so."""
        for epoch in [epoch for epoch in self._epochs if epoch.number == number]:
            self._give_up(epoch)
        self._pump()

    def take(self, client: str, take: int, number: int, positions: Positions) -> None:
        """Ask for the samples at some positions (uint32[n]) of an epoch; a delivery with the same
        client and number of the take follows. No position may be taken twice.

        Raises:
            ConfigError: no such epoch is under way, or a position is not in it or was taken.
        """
        epoch = self._find(number)
        if len(positions) and int(positions.max()) >= len(epoch.index):
            raise ConfigError(
                f"positions of epoch {number} must be below {len(epoch.index)}, got "
                f"{int(positions.max())}."
            )
        if epoch.is_taken[positions].any() or len(np.unique(positions)) < len(positions):
            raise ConfigError(f"epoch {number}: a sample was taken twice; an epoch has each once.")
        epoch.is_taken[positions] = True
        if self._budget:
            places = self._space.places[epoch.row]
            kept = int((places[positions] == KEPT).sum())
            self.counts.hits += len(positions) - kept - missing(places, positions)
        self._takes.append(_BatchRequest(client, take, epoch, positions))
        epoch.taken += len(positions)
        self._pump()

    def release(self, client: str, take: int) -> None:
        """Let go of what was delivered: nobody looks at it any more."""
        _, used = self._leases.pop((client, take))
        del self._beside[client, take]
        self._space.release(used)
        self._landings.room_was_made()
        self._promised -= int(used[:, 2].sum()) if self._budget else 0
        self._pump()

    def drop_takes(self, client: str) -> None:
        """Forget what a client waits for; what it holds stays."""
        self._drop([take for take in self._takes if take.client == client])
        self._pump()

    def forget(self, client: str) -> None:
        """Let go of everything that a client holds or waits for: it is gone."""
        self._drop([take for take in self._takes if take.client == client])
        for holder, take in [key for key in self._leases if key[0] == client]:
            self.release(holder, take)
        self._pump()

    def arrive(self, ticket: int, data: Bytes) -> None:
        """Hand in the reply to a request: uint8, the samples one behind the other.

        Raises:
            KeyError: there is no such request.
        """
        asked = self._asked.pop(ticket)
        self._under_way[asked.node] -= 1
        epoch, positions = asked.epoch, asked.positions
        lengths = self._sizes[epoch.index.numbers[positions]]
        self._kept.put(epoch.index.numbers[positions], data)
        if epoch not in self._epochs:
            self._pump()
            return
        if asked.take is not None:
            positions, lengths, data = self._hand_over(asked.take, epoch, positions, lengths, data)
        self._landings.add(epoch.row, positions, lengths, data)
        self._pump()

    def fail(self, ticket: int, error: StorageError) -> None:
        """Say that a request has failed. Who waits for its samples is told; those that nobody waits
        for yet are asked for once more when somebody does.

        Raises:
            KeyError: there is no such request.
        """
        asked = self._asked.pop(ticket)
        self._under_way[asked.node] -= 1
        if asked.epoch in self._epochs:
            state = BROKEN if self._budget else UNASKED
            self._space.places[asked.epoch.row, asked.positions] = state
            waiting = [take for take in self._takes if self._waits_for(take, asked)]
            self._drop(waiting)
            self._failures += [BatchFailure(take.client, take.take, error) for take in waiting]
        self._pump()

    def failures(self) -> list[BatchFailure]:
        """Return the takes that have failed, each once."""
        found, self._failures = self._failures, []
        return found

    def work(self) -> bool:
        """Go on with an eviction pass by one slice; return whether there is more."""
        return self._space.advance()

    def relieve(self) -> bool:
        """Fetch directly, past the cache, what the first take in the queue lacks; return whether
        anything was done.

        For when nothing has moved for a while: its samples do not fit beside what is in use.
        """
        if not self._takes or not self._budget:
            return False
        take = self._takes[0]
        moved = self._from_landings(take)
        places = self._space.places[take.epoch.row]
        lacking = take.positions[places[take.positions] == UNASKED]
        self._ask_directly(take, lacking)
        self._pump()
        return moved or bool(len(lacking))

    def requests(self) -> list[Request]:
        """Return the requests to send now, each once."""
        found = list(self._outgoing)
        self._outgoing.clear()
        return found

    def deliveries(self) -> list[BatchReply]:
        """Return what can be handed to those who asked, each once. It is held until `release`."""
        found = list(self._deliveries)
        self._deliveries.clear()
        return found

    def management_bytes(self) -> int:
        """Return the bytes of indexes, lists and metadata of all samples."""
        indexes = sum(epoch.index.management_bytes() for epoch in self._epochs)
        own = self._sizes.nbytes + self._space.management_bytes() + self._kept.management_bytes()
        return indexes + own

    def _open(self, number: int, index: CacheIndex) -> None:
        row = 1 - self._epochs[0].row if self._epochs else 0
        self._space.clear(row, len(index))
        self._kept.choose(index.numbers)
        if len(self._kept.ready):
            kept = self._kept.ready[index.numbers]
            self._space.places[row, : len(index)][kept] = KEPT
        self._epochs.append(_Epoch(number, row, index, np.zeros(len(index), dtype=np.bool_)))

    def _give_up(self, epoch: _Epoch) -> None:
        self._epochs.remove(epoch)
        self._space.clear(epoch.row)
        self._drop([take for take in self._takes if take.epoch is epoch])
        self._landings.drop(epoch.row)
        self._promised = self._count_promised()

    def _drop(self, takes: list[_BatchRequest]) -> None:
        for take in takes:
            self._takes.remove(take)
            if take.used:
                # Marked as in use one after the other, and delivered by nobody now.
                self._space.release(np.array(list(take.used.values()), dtype=np.int64))
                self._landings.room_was_made()

    def _waits_for(self, take: _BatchRequest, asked: PendingFetch) -> bool:
        if asked.take is not None or not self._budget:
            return take is asked.take
        # It has waited for as long as the storage has tried: another try would take as long again.
        return take.epoch is asked.epoch and bool(np.isin(asked.positions, take.positions).any())

    def _count_promised(self) -> int:
        """Return the bytes of what is in use or has been promised room."""
        orphans = [used for epoch, used in self._leases.values() if epoch not in self._epochs]
        promised = sum(int(used[:, 2].sum()) for used in orphans)
        for epoch in self._epochs:
            places = self._space.places[epoch.row, : epoch.reach]
            counted = (places != DONE) & (places != KEPT)
            promised += int(self._sizes[epoch.index.numbers[: epoch.reach][counted]].sum())
        return promised

    def _find(self, number: int) -> _Epoch:
        for epoch in self._epochs:
            if epoch.number == number:
                return epoch
        raise ConfigError(
            f"epoch must be one under way, {[epoch.number for epoch in self._epochs]}, got "
            f"{number}. Begin it first."
        )

    def _pump(self) -> None:
        """Do all that can be done now."""
        self._landings.land()
        while self._takes and self._serve(self._takes[0]):
            self._takes.popleft()
        if self._budget:
            # Later takes of other clients do not wait for the first one's samples.
            waiting = {take.client for take in list(self._takes)[:1]}
            for take in list(self._takes)[1:]:
                if take.client not in waiting and self._serve(take):
                    self._takes.remove(take)
                else:
                    waiting.add(take.client)
            self._look_ahead()

    def _serve(self, take: _BatchRequest) -> bool:
        return self._serve_ahead(take) if self._budget else self._serve_on_miss(take)

    def _serve_ahead(self, take: _BatchRequest) -> bool:
        """Deliver a take if all of it is there: nothing is held while something is waited for."""
        places = self._space.places[take.epoch.row]
        positions = take.positions
        if take.ready:
            positions = positions[places[positions] != DONE]
        if missing(places, positions):
            self._ask_directly(take, positions[places[positions] == BROKEN])
            return False
        cached = positions[places[positions] != KEPT]
        rows = dict(zip(cached.tolist(), self._space.use(take.epoch.row, cached), strict=True))
        self._deliver(take, rows)
        return True

    def _serve_on_miss(self, take: _BatchRequest) -> bool:
        """Go through a take one sample after the other, up to a miss that is on its way (C4)."""
        row, index = take.epoch.row, take.epoch.index
        while take.through < len(take.positions):
            position = int(take.positions[take.through])
            place = int(self._space.places[row, position])
            if position not in take.ready and place != KEPT:
                if place == UNASKED:
                    self._ask(take.epoch, self._run_on_miss(index, position, row), take)
                    return False
                if place == ASKED and not self._from_landings(take, only=position):
                    return False
                if place >= 0:
                    one = np.array([position], dtype=np.uint32)
                    take.used[position] = self._space.use(row, one)[0]
                self.counts.hits += 1
            take.through += 1
        self._deliver(take, take.used)
        return True

    def _run_on_miss(self, index: CacheIndex, position: int, row: int) -> Positions:
        """Return a miss and those next ones of its list for which there is room."""
        run = index.on_miss(position, self._prefetch, self._space.places[row])
        # What found no room in one piece takes its part of the capacity nevertheless.
        beside = sum(self._beside.values()) + sum(take.beside for take in self._takes)
        room = self._space.capacity - self._space.live_bytes - self._landings.nbytes - beside
        fits = np.cumsum(self._sizes[index.numbers[run[1:]]]) <= room
        return run[: 1 + int(fits.sum())]

    def _deliver(self, take: _BatchRequest, used: dict[int, NDArray[np.int64]]) -> None:
        numbers = take.epoch.index.numbers[take.positions]
        places = np.empty((len(numbers), 3), dtype=np.int64)
        places[:, 2] = self._sizes[numbers]
        direct: list[Bytes] = []
        behind = kept_hits = 0
        for at, position in enumerate(take.positions.tolist()):
            if position in take.ready:
                data = take.ready[position]
                places[at, 0], places[at, 1] = DIRECT_TIER, behind
                behind += len(data)
                direct.append(data)
            elif position in used:
                places[at, 0], places[at, 1] = CACHED_TIER, used[position][1]
            else:
                kept_hits += 1
                number = numbers[at : at + 1]
                places[at, 0], places[at, 1] = KEPT_TIER, self._kept.offsets(number)[0]
        entries = np.array(list(used.values()), dtype=np.int64).reshape(-1, 3)
        self._leases[take.client, take.take] = (take.epoch, entries)
        self._beside[take.client, take.take] = take.beside
        done = np.concatenate(direct) if direct else np.empty(0, dtype=np.uint8)
        self._deliveries.append(BatchReply(take.client, take.take, numbers, places, done))
        counts = self.counts
        counts.samples += len(numbers)
        counts.taken_bytes += int(places[:, 2].sum())
        counts.kept_hits += kept_hits
        counts.direct_samples += len(direct)

    def _hand_over(
        self,
        take: _BatchRequest,
        epoch: _Epoch,
        positions: Positions,
        lengths: Lengths,
        data: Bytes,
    ) -> tuple[Positions, Lengths, Bytes]:
        """Give a take those samples of a reply that were asked for on its behalf; return the
        rest."""
        count = len(positions) if self._budget else 1
        behind = int(lengths[:count].sum())
        self._give(take, epoch, positions[:count], lengths[:count], data[:behind])
        return positions[count:], lengths[count:], data[behind:]

    def _give(
        self,
        take: _BatchRequest,
        epoch: _Epoch,
        positions: Positions,
        lengths: Lengths,
        data: Bytes,
    ) -> None:
        ends = np.cumsum(lengths).tolist()
        places = self._space.places[epoch.row]
        for position, length, end in zip(positions.tolist(), lengths.tolist(), ends, strict=True):
            take.ready[position] = data[end - length : end]
            places[position] = DONE
            if self._budget and position < epoch.reach:
                self._promised -= length

    def _from_landings(self, take: _BatchRequest, only: int | None = None) -> bool:
        """Give a take what it lacks of samples that have come and have no room."""
        wanted = take.positions if only is None else np.array([only], dtype=np.uint32)
        found = self._landings.take_out(take.epoch.row, wanted)
        for position, data in found:
            one = np.array([position], dtype=np.uint32)
            self._give(take, take.epoch, one, np.array([len(data)], dtype=np.int64), data)
            take.beside += len(data)
        return bool(found)

    def _look_ahead(self) -> None:
        behind = 0
        for at in range(2):
            if at == len(self._epochs):
                before = self._epochs[-1] if self._epochs else None
                index = self._next_index(before.number + 1) if before else None
                if before is None or index is None:
                    return
                self._open(before.number + 1, index)
            epoch = self._epochs[at]
            places = self._space.places[epoch.row]
            epoch.reach, self._promised = extend(
                epoch.index.numbers, self._sizes, places, epoch.reach, self._promised, self._budget
            )
            # What is needed within half of what may be asked for is not to wait for a full run.
            urgent = (self._epochs[0].taken + behind + epoch.reach) // 2 - behind
            for node in range(self._nodes):
                self._ask_ahead(epoch, node, places, urgent)
            if epoch.reach < len(epoch.index):
                return
            behind += len(epoch.index)

    def _ask_ahead(self, epoch: _Epoch, node: int, places: NDArray[np.int32], urgent: int) -> None:
        while self._under_way[node] < self._depth:
            run, whole = epoch.index.ahead(node, self._prefetch, epoch.reach, places)
            # A run that is still short waits for more, until it is needed soon.
            if not len(run) or not (whole or int(run[0]) < urgent):
                return
            self._ask(epoch, run, None)

    def _ask_directly(self, take: _BatchRequest, positions: Positions) -> None:
        """Ask for samples that go to a take and not into the cache."""
        nodes = take.epoch.index.numbers[positions] % self._nodes
        for node in np.unique(nodes).tolist():
            mine = positions[nodes == node]
            for at in range(0, len(mine), self._prefetch):
                self._ask(take.epoch, mine[at : at + self._prefetch], take)

    def _ask(self, epoch: _Epoch, positions: Positions, take: _BatchRequest | None) -> None:
        self._space.places[epoch.row, positions] = ASKED
        numbers = epoch.index.numbers[positions]
        node = int(numbers[0]) % self._nodes
        ticket, self._tickets = self._tickets, self._tickets + 1
        self._asked[ticket] = PendingFetch(epoch, positions, take, node)
        self._under_way[node] += 1
        self._outgoing.append(Request(ticket, node, numbers))
        counts = self.counts
        counts.requests += 1
        counts.requested_samples += len(numbers)
        counts.requested_bytes += int(self._sizes[numbers].sum())


def _no_more(number: int) -> CacheIndex | None:
    return None
