"""Which choices wait for a lane, which have one, and what runs next.

Lanes, places in the queue and prefill chunks are shared fairly between clients; prefill and decode
get equal time.
The decisions are pure functions below `Scheduler`, which owns the queues and the free lanes. What
happens on a lane is for luceasync.engine.lanes and luceasync.engine.steps.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Literal

from luceasync.engine.sequence import Generation

MIN_TURN_TOKENS = 64  # that an answer gets before its lane may go to another client
# That an answer is paused before another one of the same client makes way for it.
MAX_STANDING_S = 1.0
ROWS_PER_TURN_TOKEN = 8  # prefilled for a turn: the turn must yield one token for this many rows
MIN_TURN_S = 0.5  # also ends a turn, where tokens are slow
TURN_PER_PREFILL = 2.0  # times the prefill of a turn: also ends it
# Chunks in a row for later, shorter prompts of a client before an earlier one gets a chunk.
MAX_SKIPPED = 8
MAX_RESUMED = 3  # chunks in a row for answers that lost their lanes, before a new prompt gets one
# Waiting choices per step that are checked for whether they can begin: each walks the tree.
MAX_ASKED = 8

StepKind = Literal["prefill", "decode", "idle"]


class Scheduler:
    """`waiting` in order of arrival, `running` in the order in which they got their lanes."""

    def __init__(self, num_lanes: int) -> None:
        self._free_lanes = list(range(num_lanes))
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []
        self._passed_over: set[Generation] = set()  # waiting, but not for the disk
        self._heir: Generation | None = None  # gets the lane that another choice of its client left
        self._last_turn: dict[str, int] = {}  # by client, for those with choices in the engine
        self._num_turns = 0
        self._last_chunk: dict[str, int] = {}  # by client, too
        self._num_chunks = 0
        self._num_resumed = 0  # chunks in a row for answers that had begun
        self._prefill_s = 0.0  # since decode had its share last, while both had work
        self._decode_s = 0.0

    def __repr__(self) -> str:
        num_decoding = sum(g.is_decoding for g in self.running)
        return (
            f"{len(self.waiting)} waiting, {len(self.running) - num_decoding} prefilling, "
            f"{num_decoding} decoding, {len(self._free_lanes)} lanes free"
        )

    @property
    def has_work(self) -> bool:
        """Whether a step may have something to do."""
        for g in self.running:
            if g.lease.has_arrived if g.is_restoring else not (g.is_unread and g.is_decoding):
                return True
        waiting = self._eligible()
        if self.running:  # those passed over wait for a running prefill, or for its lane
            waiting = [g for g in waiting if g not in self._passed_over]
        return bool(waiting)

    # --- the queue and the lanes ---------------------------------------------------------------

    @property
    def first_free_lane(self) -> int | None:
        """The lowest free lane, so that passes cover few rows; None if all are taken."""
        return self._free_lanes[0] if self._free_lanes else None

    def enqueue(self, generations: Iterable[Generation]) -> None:
        """Add to the end of the queue."""
        self.waiting.extend(generations)

    def withdraw(self, generation: Generation) -> None:
        """Remove from the queue."""
        self.waiting.remove(generation)
        if generation is self._heir:
            self._heir = None

    def assign(self, generation: Generation, lane: int) -> None:
        """Move a waiting generation to `lane`, which was free."""
        self.withdraw(generation)
        self._free_lanes.remove(lane)
        self.running.append(generation)
        present = {g.client for g in (*self.waiting, *self.running)}
        for last in (self._last_turn, self._last_chunk):
            for client in last.keys() - present:
                del last[client]
        self._last_turn[generation.client] = self._num_turns
        self._num_turns += 1

    def requeue(self, generation: Generation) -> None:
        """Move a running generation to the front of the queue; its lane is not free yet."""
        self.running.remove(generation)
        self.waiting.insert(0, generation)

    def retire(self, generation: Generation) -> None:
        """Remove a running generation; its lane is not free yet."""
        self.running.remove(generation)

    def free(self, lane: int) -> None:
        """Nothing in the lane is needed any more."""
        self._free_lanes.append(lane)
        self._free_lanes.sort()
        self._passed_over.clear()

    def pass_over(self) -> None:
        """Do not retry the waiting generations before a lane is free, except those that wait for
        the disk."""
        self._passed_over = set(self._eligible())

    def set_unread(self, stream_id: int, *, is_unread: bool) -> None:
        """The stream's client stops reading, or reads again. Choices that are not read get no
        steps."""
        for generation in (*self.running, *self.waiting):
            if generation.prepared.stream_id == stream_id:
                generation.is_unread = is_unread
        self._passed_over.clear()

    # --- which gets a lane, and which gives one up ---------------------------------------------

    def in_turn(self) -> list[Generation]:
        """Waiting generations that may have a lane, in the order in which they get one. Priorities
        order the requests of one client and change nothing between clients."""
        waiting = self._eligible()
        if len(waiting) < 2:  # nearly always
            return waiting
        wanted = [(g.client, g.prepared.request.priority) for g in waiting]
        eligible = [waiting[i] for i in order_by_priority(wanted)]
        clients = [g.client for g in eligible]
        order = [eligible[i] for i in order_by_turn(clients, self._num_lanes_of(), self._last_turn)]
        return sorted(order, key=lambda g: g is not self._heir)

    def to_preempt(self, can_begin: Callable[[Generation], bool]) -> Generation | None:
        """The generation that leaves its lane to a waiting one for which `can_begin` holds; None if
        a lane is free, or if all keep theirs."""
        if self._free_lanes or not (eligible := self._eligible()):
            return None
        decoding = [g for g in self.running if g.is_decoding]
        seats = [_seat(g) for g in decoding]
        waiting = {g.client for g in eligible}
        chosen = seat_to_preempt(seats, self._num_lanes_of(), waiting)
        if chosen is not None:
            ready = self._first_ready(can_begin)
            chosen = seat_to_preempt(seats, self._num_lanes_of(), ready)
        if chosen is None:
            standing = self._standing(eligible)
            chosen = seat_to_rotate(seats, standing)
            heir = None if chosen is None else standing[seats[chosen].client]
            self._heir = heir if heir is not None and can_begin(heir) else None
            chosen = None if self._heir is None else chosen
        return None if chosen is None else decoding[chosen]

    def streams_to_evict(self, num_places: int) -> set[int]:
        """The ids of the streams that must be evicted so that the choices of the others fit."""
        if len(self.running) + len(self.waiting) <= num_places:
            return set()
        return set(requests_to_evict(self._open_requests(), num_places))

    def _first_ready(self, can_begin: Callable[[Generation], bool]) -> set[str]:
        """The client of the first waiting generation that could begin on a lane at once; only a few
        are checked."""
        asked = self.in_turn()[:MAX_ASKED]
        return {g.client for g in [*islice(filter(can_begin, asked), 1)]}

    def _standing(self, waiting: Iterable[Generation]) -> dict[str, Generation]:
        """By client, the generation that left a lane first and has been paused for long: the last
        in the queue."""
        now = time.monotonic()
        return {
            g.client: g
            for g in waiting
            if g.left_at is not None and now - g.left_at >= MAX_STANDING_S
        }

    def _open_requests(self) -> list[OpenRequest]:
        """All requests with choices in the engine, in order of arrival."""
        by_stream: dict[int, list[Generation]] = {}
        for generation in (*self.running, *self.waiting):
            by_stream.setdefault(generation.prepared.stream_id, []).append(generation)
        return [
            OpenRequest(
                stream_id,
                choices[0].client,
                len(choices),
                is_waiting=all(g.lane is None for g in choices),
                is_unread=choices[0].is_unread,
            )
            for stream_id, choices in sorted(by_stream.items())
        ]

    def _eligible(self) -> list[Generation]:
        """Waiting generations that could use a lane: their client reads, and they await nothing."""
        return [g for g in self.waiting if not g.lease.awaited and not g.is_unread]

    def _num_lanes_of(self) -> Counter[str]:
        return Counter(g.client for g in self.running)

    # --- what runs next ------------------------------------------------------------------------

    def partition(self) -> tuple[list[Generation], list[Generation], list[Generation]]:
        """The running generations that are being restored, those in prefill, and those that decode
        and whose client reads."""
        restoring: list[Generation] = []
        prefilling: list[Generation] = []
        decoding: list[Generation] = []
        for generation in self.running:
            if generation.last_token is not None:
                if not generation.is_unread:
                    decoding.append(generation)
            elif generation.is_restoring:
                restoring.append(generation)
            else:
                prefilling.append(generation)
        return restoring, prefilling, decoding

    def next_step(self, num_prefilling: int, num_decoding: int) -> StepKind:
        """The kind of step to run, so that prefill and decode get equal time."""
        return next_step(num_prefilling, num_decoding, self._prefill_s, self._decode_s)

    def next_prefill(self, prefilling: Sequence[Generation]) -> Generation:
        """The generation whose prompt gets the next chunk. The choice counts as its turn."""
        prompts = [
            UnfinishedPrompt(
                g.client,
                g.prepared.request.priority,
                len(g.to_prefill) - g.num_prefilled,
                g.num_skipped,
                is_resumed=g.has_spoken,
            )
            for g in prefilling
        ]
        resumes = self._num_resumed < MAX_RESUMED
        index = next_prefill(prompts, self._last_chunk, resumes=resumes)
        chosen = prefilling[index]
        own = [g for g in prefilling if g.client == chosen.client]
        for g in own[: own.index(chosen)]:
            g.num_skipped += 1
        # Otherwise the next chunk would again go to a shorter one.
        if chosen.num_skipped >= MAX_SKIPPED:
            for g in own:
                g.num_skipped = min(g.num_skipped, MAX_SKIPPED - 1)
        chosen.num_skipped = 0
        self._num_resumed = self._num_resumed + 1 if prompts[index].is_resumed else 0
        self._last_chunk[chosen.client] = self._num_chunks
        self._num_chunks += 1
        return chosen

    def account(self, step: StepKind, seconds: float, *, both: bool) -> None:
        """A step has taken `seconds`; `both`: the other kind had work, too."""
        if not both:
            self._prefill_s = self._decode_s = 0.0
        elif step == "prefill":
            self._prefill_s, self._decode_s = seconds, 0.0
        else:
            self._decode_s += seconds


# --- prefill or decode -------------------------------------------------------------------------


def next_step(
    num_prefilling: int, num_decoding: int, prefill_s: float, decode_s: float
) -> StepKind:
    """The kind of step to run. `prefill_s`, `decode_s`: how long each has run since the other one
    last waited.

    A chunk of a long prompt may take as long as many decode steps: equal turns would starve the
    streams, so the time is shared equally.
    """
    if num_prefilling == 0:
        return "decode" if num_decoding else "idle"
    if num_decoding == 0:
        return "prefill"
    return "prefill" if decode_s >= prefill_s else "decode"


# --- prompts, between clients -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnfinishedPrompt:
    """A prompt that has a lane: its remaining tokens, and the chunks that later prompts of its
    client have had since its own last one. `is_resumed`: its answer had begun and lost its lane."""

    client: str
    priority: int
    num_left: int
    num_skipped: int
    is_resumed: bool


def next_prefill(
    prompts: Sequence[UnfinishedPrompt], last_chunk: Mapping[str, int], *, resumes: bool
) -> int:
    """The index of the prompt that gets a chunk; `prompts` are in the order in which they got
    lanes.

    The client whose last chunk is longest ago comes first, and of its prompts those with its lowest
    priority value; of these the one with the fewest tokens left, but later prompts cannot hold up
    an earlier one for ever. `resumes`: the chunk goes to a resumed answer if there is one, as a
    client is reading it.
    """
    candidates = [i for i, prompt in enumerate(prompts) if prompt.is_resumed == resumes]
    candidates = candidates or [*range(len(prompts))]
    turns = {prompts[i].client: last_chunk.get(prompts[i].client, -1) for i in candidates}
    client = min(turns, key=turns.__getitem__)
    own = [i for i in candidates if prompts[i].client == client]
    lowest = min(prompts[i].priority for i in own)
    first = [i for i in own if prompts[i].priority == lowest]
    held_up = [i for i in first if prompts[i].num_skipped >= MAX_SKIPPED]
    return held_up[0] if held_up else min(first, key=lambda i: prompts[i].num_left)


# --- lanes, between clients --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seat:
    """A lane that decodes: its client, whether the client leaves it unread, and its turn: the
    tokens since it got the lane, the `turn_s` seconds of the steps that gave them, and the rows
    that were prefilled for it, which took `prefill_s`."""

    client: str
    is_unread: bool
    num_tokens: int
    num_prefilled: int = 0
    turn_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def has_had_its_turn(self) -> bool:
        """Whether its turn was long enough to justify its prefill, by tokens or by time."""
        min_tokens = max(MIN_TURN_TOKENS, self.num_prefilled // ROWS_PER_TURN_TOKEN)
        min_s = max(MIN_TURN_S, TURN_PER_PREFILL * self.prefill_s)
        return self.num_tokens >= min_tokens or self.turn_s >= min_s


def _seat(g: Generation) -> Seat:
    num_run = g.num_prefilled - g.num_cached
    return Seat(g.client, g.is_unread, g.num_in_turn, num_run, g.turn_s, g.prefill_s)


def order_by_turn(
    waiting: Sequence[str], num_running: Mapping[str, int], last_turn: Mapping[str, int]
) -> list[int]:
    """The indexes of `waiting`, clients in order of arrival, in the order in which they get lanes:
    the client with the fewest lanes comes first; of several, the one whose last turn is longest
    ago."""
    queues: defaultdict[str, deque[int]] = defaultdict(deque)
    for index, client in enumerate(waiting):
        queues[client].append(index)
    heap = [
        (num_running.get(client, 0), last_turn.get(client, -1), queue[0], client)
        for client, queue in queues.items()
    ]
    heapify(heap)
    order = []
    next_turn = max(last_turn.values(), default=-1) + 1
    while heap:
        num_lanes, _, index, client = heappop(heap)
        order.append(index)
        queue = queues[client]
        queue.popleft()
        if queue:
            heappush(heap, (num_lanes + 1, next_turn, queue[0], client))
        next_turn += 1
    return order


def order_by_priority(waiting: Sequence[tuple[str, int]]) -> list[int]:
    """The indexes of `waiting`, clients and priorities in order of arrival. The entries of each
    client are permuted among the client's own places so that its lowest priorities come first."""
    own: defaultdict[str, list[int]] = defaultdict(list)
    for index, (client, _) in enumerate(waiting):
        own[client].append(index)
    rising = {
        client: iter(sorted(indexes, key=lambda index: waiting[index][1]))
        for client, indexes in own.items()
    }
    return [next(rising[client]) for client, _ in waiting]


def seat_to_preempt(
    seats: Sequence[Seat], num_running: Mapping[str, int], waiting: Collection[str]
) -> int | None:
    """The index of the seat whose lane goes to one of the waiting clients while no lane is free;
    None: all keep theirs.

    Unread answers make way for any client. Otherwise a client gives up a lane only to one that
    would still have no more lanes than it: lanes change hands until they are shared evenly.
    """
    if not waiting:
        return None

    def claim(index: int) -> tuple[int, int]:
        return num_running.get(seats[index].client, 0), index  # the latest arrival goes first

    unread = [i for i, seat in enumerate(seats) if seat.is_unread]
    if unread:
        return max(unread, key=claim)
    fewest = min(num_running.get(client, 0) for client in waiting)
    others = [
        i
        for i, seat in enumerate(seats)
        if seat.num_tokens >= MIN_TURN_TOKENS and num_running.get(seat.client, 0) > fewest + 1
    ]
    return max(others, key=claim) if others else None


def seat_to_rotate(seats: Sequence[Seat], standing: Collection[str]) -> int | None:
    """The index of the seat whose lane goes to another answer of the same client, which must be in
    `standing`: its clients have answers that lost a lane and have been paused for long enough."""
    own = [i for i, seat in enumerate(seats) if seat.client in standing and seat.has_had_its_turn]
    return max(own, key=lambda i: seats[i].num_tokens) if own else None


# --- places in the queue, between clients ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The choices of one request that have not ended; `is_waiting` if none has a lane."""

    stream_id: int
    client: str
    num_choices: int
    is_waiting: bool
    is_unread: bool = False


def requests_to_evict(requests: Iterable[OpenRequest], num_places: int) -> list[int]:
    """The ids of the streams, in order of eviction, that must be evicted so that the choices of the
    others fit into `num_places`.

    The client that holds most choices first loses those that it does not read, then its latest;
    only requests without a lane are evicted. Of clients that hold equally many it is the latest.
    """
    listed = list(requests)
    num_held = Counter[str]()
    for request in listed:
        num_held[request.client] += request.num_choices
    candidates = [(i, request) for i, request in enumerate(listed) if request.is_waiting]
    evicted = []
    while candidates and num_held.total() > num_places:
        chosen = max(candidates, key=lambda c: (num_held[c[1].client], c[1].is_unread, c[0]))
        candidates.remove(chosen)
        num_held[chosen[1].client] -= chosen[1].num_choices
        evicted.append(chosen[1].stream_id)
    return evicted


def may_enter(num_held: Mapping[str, int], num_places: int, client: str, num_choices: int) -> bool:
    """Whether to accept a request: there is a place for each choice, or another client would still
    hold more than this one does then, and loses some of its requests (`requests_to_evict`)."""
    if num_choices > num_places:
        return False
    if sum(num_held.values()) + num_choices <= num_places:
        return True
    own = num_held.get(client, 0) + num_choices
    return any(num > own for other, num in num_held.items() if other != client)
