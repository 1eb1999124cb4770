"""How lanes and places in the queue are shared between clients.

Pure: looks at who waits and who runs, and says who comes next, who gives way and who is turned out.
Knows neither generations nor streams, and nothing of how a client is told from another.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

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
