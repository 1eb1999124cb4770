"""Who waits for a lane, who has one, and which lanes are free.

Owns these three and whose turn it was last, and nothing of what happens on a lane: generations are
moved as it is told.
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

# How lanes and places in the queue are shared between clients. Pure: looks at who waits and who
# runs, and says who comes next, who gives way and who is turned out. Knows neither generations
# nor streams, and nothing of how a client is told from another.


MIN_TURN_TOKENS = 64  # that an answer gets before its lane goes to another client
MAX_STANDING_S = 1.0  # that an answer stands still before another of its client makes room
ROWS_PER_TURN_TOKEN = 8  # that were computed for its turn: of them too it has to make something
MIN_TURN_S = 0.5  # or so long, where tokens are slow: who stands waits for time, not for tokens
TURN_PER_BEGINNING = 2.0  # times what the computing of its rows took


@dataclass(frozen=True, slots=True)
class Seat:
    """One that decodes on a lane: whose it is, whether its client leaves it unread, how many tokens
    it has got since it had the lane, in steps of `turn_s` together, and how many rows were computed
    for it to begin there, which took `prefill_s`.
    """

    client: str
    is_unread: bool
    num_tokens: int
    num_prefilled: int = 0
    turn_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def has_had_its_turn(self) -> bool:
        """Whether its turn was worth what it took to begin it, by tokens or by time."""
        least = max(MIN_TURN_TOKENS, self.num_prefilled // ROWS_PER_TURN_TOKEN)
        least_s = max(MIN_TURN_S, TURN_PER_BEGINNING * self.prefill_s)
        return self.num_tokens >= least or self.turn_s >= least_s


@dataclass(frozen=True, slots=True)
class Held:
    """All choices of one request that have not ended: `is_waiting` when none has a lane."""

    stream_id: int
    client: str
    num_choices: int
    is_waiting: bool
    is_unread: bool = False


def in_turn(
    waiting: Sequence[str], num_running: Mapping[str, int], last_turn: Mapping[str, int]
) -> list[int]:
    """The indexes of `waiting`, which are clients in order of their coming, as they get lanes: the
    client with the fewest comes first, of several the one whose last turn is longest ago.
    """
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


def by_priority(waiting: Sequence[tuple[str, int]]) -> list[int]:
    """The indexes of `waiting`, clients and priorities in order of their coming, where those of a
    client change places among each other so that its lowest priorities come first.
    """
    own: defaultdict[str, list[int]] = defaultdict(list)
    for index, (client, _) in enumerate(waiting):
        own[client].append(index)
    rising = {
        client: iter(sorted(indexes, key=lambda index: waiting[index][1]))
        for client, indexes in own.items()
    }
    return [next(rising[client]) for client, _ in waiting]


def gives_way(
    seats: Sequence[Seat], num_running: Mapping[str, int], waiting: Collection[str]
) -> int | None:
    """The index of the seat whose lane goes to one of the clients that wait, while none is free;
    None: each keeps his.

    What nobody reads makes room for anybody. Else a client gives a lane up to one that would still
    have no more than it: so lanes change hands until they are shared, and then no more.
    """
    if not waiting:
        return None

    def claim(index: int) -> tuple[int, int]:
        return num_running.get(seats[index].client, 0), index  # the last that came goes first

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


def goes_round(seats: Sequence[Seat], standing: Collection[str]) -> int | None:
    """The index of the seat whose lane goes to another answer of the same client, one of those in
    `standing`: they have answers that were on a lane before and have stood still for long enough.
    """
    own = [i for i, seat in enumerate(seats) if seat.client in standing and seat.has_had_its_turn]
    return max(own, key=lambda i: seats[i].num_tokens) if own else None


def turned_out(requests: Iterable[Held], num_places: int) -> list[int]:
    """The ids of the streams, in order of their coming, that have to go so that the choices of the
    others fit into `num_places`.

    The client that holds most choices loses first what it does not read, then what came last; only
    what has no lane is taken. Of clients with as many it is the one that came last.
    """
    held = list(requests)
    num_held = Counter[str]()
    for request in held:
        num_held[request.client] += request.num_choices
    candidates = [(i, request) for i, request in enumerate(held) if request.is_waiting]
    gone = []
    while candidates and num_held.total() > num_places:
        chosen = max(candidates, key=lambda c: (num_held[c[1].client], c[1].is_unread, c[0]))
        candidates.remove(chosen)
        num_held[chosen[1].client] -= chosen[1].num_choices
        gone.append(chosen[1].stream_id)
    return gone


def may_enter(num_held: Mapping[str, int], num_places: int, client: str, num_choices: int) -> bool:
    """Whether a request is worth its work: there is a place for each choice, or another client
    would still hold more than this one does then, and loses some of its own (`turned_out`).
    """
    if num_choices > num_places:
        return False
    if sum(num_held.values()) + num_choices <= num_places:
        return True
    own = num_held.get(client, 0) + num_choices
    return any(num > own for other, num in num_held.items() if other != client)


MAX_ASKED = 8  # of those that wait, whether they could begin: each looks through the prefix tree


class Roster:
    """`waiting` in order of their coming, `running` in the order in which they got their lanes."""

    def __init__(self, num_lanes: int) -> None:
        self._free_lanes = list(range(num_lanes))
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []
        self._passed_over: set[Generation] = set()  # they wait, and not for the disk
        self._heir: Generation | None = None  # who gets the lane that one of its client's left
        self._last_turn: dict[str, int] = {}  # by client, of those that are here
        self._num_turns = 0

    def __repr__(self) -> str:
        num_decoding = sum(g.is_decoding for g in self.running)
        return (
            f"{len(self.waiting)} waiting, {len(self.running) - num_decoding} prefilling, "
            f"{num_decoding} decoding, {len(self._free_lanes)} lanes free"
        )

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do for one of them, as far as is known here."""
        for g in self.running:
            if g.lease.has_arrived if g.is_restoring else not (g.is_unread and g.is_decoding):
                return True
        waiting = self._eligible()
        if self.running:  # who was passed over waits for those, or for a lane of theirs
            waiting = [g for g in waiting if g not in self._passed_over]
        return bool(waiting)

    @property
    def first_free_lane(self) -> int | None:
        """The lowest, so that few lanes use few rows; None: all are taken."""
        return self._free_lanes[0] if self._free_lanes else None

    def parted(self) -> tuple[list[Generation], list[Generation], list[Generation]]:
        """Of those that run: who is being restored, who prefills, who decodes and is read."""
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

    def queue(self, generations: Iterable[Generation]) -> None:
        """They wait for lanes."""
        self.waiting.extend(generations)

    def give_up(self, generation: Generation) -> None:
        """It waits no more."""
        self.waiting.remove(generation)
        if generation is self._heir:
            self._heir = None

    def seat(self, generation: Generation, lane: int) -> None:
        """One of those that wait runs on `lane`, which was free."""
        self.give_up(generation)
        self._free_lanes.remove(lane)
        self.running.append(generation)
        present = {g.prepared.request.client for g in (*self.waiting, *self.running)}
        self._last_turn = {c: turn for c, turn in self._last_turn.items() if c in present}
        self._last_turn[generation.prepared.request.client] = self._num_turns
        self._num_turns += 1

    def pass_over(self) -> None:
        """Who still waits, and not for the disk, has no better chance before a lane is free."""
        self._passed_over = set(self._eligible())

    def wait_again(self, generation: Generation) -> None:
        """It runs no more, and waits for another lane; its own is not free yet."""
        self.running.remove(generation)
        self.waiting.insert(0, generation)

    def read(self, stream_id: int, *, is_behind: bool) -> None:
        """The stream's client does not read what it is sent, or does so again."""
        for generation in (*self.running, *self.waiting):
            if generation.prepared.stream_id == stream_id:
                generation.is_unread = is_behind
        self._passed_over.clear()

    def let_go(self, generation: Generation) -> None:
        """It runs no more; its lane is not free yet."""
        self.running.remove(generation)

    def free(self, lane: int) -> None:
        """Nothing that is in the lane is needed any more."""
        self._free_lanes.append(lane)
        self._free_lanes.sort()
        self._passed_over.clear()

    # --- between clients: see luceasync.engine.scheduler ----------------------------------------

    def in_turn(self) -> list[Generation]:
        """Those that may have a lane, in the order in which they get one: what a client says of its
        own requests changes nothing between clients.
        """
        waiting = self._eligible()
        if len(waiting) < 2:  # nearly always
            return waiting
        wanted = [(g.prepared.request.client, g.prepared.request.priority) for g in waiting]
        eligible = [waiting[i] for i in by_priority(wanted)]
        clients = [g.prepared.request.client for g in eligible]
        order = [eligible[i] for i in in_turn(clients, self._num_lanes_of(), self._last_turn)]
        return sorted(order, key=lambda g: g is not self._heir)

    def gives_way(self, can_begin: Callable[[Generation], bool]) -> Generation | None:
        """Who leaves its lane to somebody who waits and `can_begin`, while none is free."""
        if self._free_lanes or not (eligible := self._eligible()):
            return None
        decoding = [g for g in self.running if g.is_decoding]
        seats = [_seat(g) for g in decoding]
        waiting = {g.prepared.request.client for g in eligible}
        chosen = gives_way(seats, self._num_lanes_of(), waiting)
        if chosen is not None:
            ready = self._first_ready(can_begin)
            chosen = gives_way(seats, self._num_lanes_of(), ready)
        if chosen is None:
            standing = self._standing(eligible)
            chosen = goes_round(seats, standing)
            heir = None if chosen is None else standing[seats[chosen].client]
            self._heir = heir if heir is not None and can_begin(heir) else None
            chosen = None if self._heir is None else chosen
        return None if chosen is None else decoding[chosen]

    def _first_ready(self, can_begin: Callable[[Generation], bool]) -> set[str]:
        """The client of the first of those that wait who would begin on a lane at once, of as many
        as are worth asking now.
        """
        asked = self.in_turn()[:MAX_ASKED]
        return {g.prepared.request.client for g in [*islice(filter(can_begin, asked), 1)]}

    def _standing(self, waiting: Iterable[Generation]) -> dict[str, Generation]:
        """By client, who left a lane long ago: who came last waits first."""
        now = time.monotonic()
        return {
            g.prepared.request.client: g
            for g in waiting
            if g.left_at is not None and now - g.left_at >= MAX_STANDING_S
        }

    def turned_out(self, num_places: int) -> set[int]:
        """The streams that have to go so that the others have a place."""
        if len(self.running) + len(self.waiting) <= num_places:
            return set()
        return set(turned_out(self._held(), num_places))

    def _held(self) -> list[Held]:
        """The requests that are here, in order of their coming."""
        by_stream: dict[int, list[Generation]] = {}
        for generation in (*self.running, *self.waiting):
            by_stream.setdefault(generation.prepared.stream_id, []).append(generation)
        return [
            Held(
                stream_id,
                choices[0].prepared.request.client,
                len(choices),
                is_waiting=all(g.lane is None for g in choices),
                is_unread=choices[0].is_unread,
            )
            for stream_id, choices in sorted(by_stream.items())
        ]

    def _eligible(self) -> list[Generation]:
        """Who could use a lane now: its client reads, and nothing of it is awaited."""
        return [g for g in self.waiting if not g.lease.awaited and not g.is_unread]

    def _num_lanes_of(self) -> Counter[str]:
        return Counter(g.prepared.request.client for g in self.running)


def _seat(g: Generation) -> Seat:
    """What its lane is to one that decodes."""
    num_run = g.num_prefilled - g.num_cached
    return Seat(
        g.prepared.request.client, g.is_unread, g.num_in_turn, num_run, g.turn_s, g.prefill_s
    )


# What the engine does next, a prefill or a decode. Looks at counts and times, touches nothing.


Step = Literal["prefill", "decode", "idle"]


@dataclass(frozen=True, slots=True)
class Load:
    """The work at hand, and how long each kind has run since the other one waited last."""

    num_prefilling: int
    num_decoding: int
    prefill_s: float
    decode_s: float


def next_step(load: Load) -> Step:
    """Prefill and decode get equal time while both have work; neither waits for the other to
    finish.

    A chunk of a long prompt may take as long as many decode steps: equal turns would starve the
    streams.
    """
    if load.num_prefilling == 0:
        return "decode" if load.num_decoding else "idle"
    if load.num_decoding == 0:
        return "prefill"
    return "prefill" if load.decode_s >= load.prefill_s else "decode"


def next_prefill(have_spoken: Sequence[bool]) -> int:
    """The index of the prompt that gets a chunk, of those in the order in which they got lanes:
    first who has spoken and lost its lane meanwhile, for somebody reads it; else who came first.
    """
    return have_spoken.index(True) if True in have_spoken else 0


class Balance:
    """How long prefill and decode have run while both were wanted."""

    def __init__(self) -> None:
        self._prefill_s = 0.0  # since decode had its share last
        self._decode_s = 0.0

    def next_step(self, num_prefilling: int, num_decoding: int) -> Step:
        """See `next_step`."""
        return next_step(Load(num_prefilling, num_decoding, self._prefill_s, self._decode_s))

    def account(self, step: Step, seconds: float, *, both: bool) -> None:
        """A step has taken so long; `both`: the other kind had work too."""
        if not both:
            self._prefill_s = self._decode_s = 0.0
        elif step == "prefill":
            self._prefill_s, self._decode_s = seconds, 0.0
        else:
            self._decode_s += seconds
