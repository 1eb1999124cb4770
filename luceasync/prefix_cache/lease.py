"""What one generation needs from the prefix cache, and how far its own tokens are saved.

Values and pure choices: positions in, positions out. Does not know the tree, lanes or files.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from luceasync.disk_cache.codec import Half
from luceasync.host_cache.copy_stream import Ticket
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.nodes import MissReason, NodeKey
from luceasync.prefix_cache.conversations import ConversationName, ConversationTurn
from luceasync.prefix_cache.memory import NodeSize
from luceasync.prefix_tree.cost import Arrival
from luceasync.prefix_tree.node import Match, Node, Tier
from luceasync.prefix_tree.policy import PrefillCut, plan_cuts
from luceasync.request import Request, Restore
from luceasync.text.prompt import RenderedPrompt

MIN_LAST_TOKENS = 16  # in the last prefill chunk of a prompt
MAX_OPENER_TOKENS = CHUNK_TOKENS  # more than that is a turn, which the answer continues
MIN_STATE_TOKENS = CHUNK_TOKENS  # fewest tokens that a state must save a prompt that parts there
MAX_STATE_BYTES = 8  # of a state, per byte of the rows that are not run again

# --- where the chunks of a prefill end ---------------------------------------------------------


def opener_of(boundaries: Sequence[int], num_tokens: int) -> int | None:
    """Where the opening of the answer begins: at the last turn's end, shortly before the prompt's
    end. None if there is no such place, or too little before it to be worth saving."""
    last = boundaries[-1] if boundaries else 0
    is_near = 0 < num_tokens - last <= MAX_OPENER_TOKENS
    return last if is_near and last >= CHUNK_TOKENS else None


def split_points(boundaries: Sequence[int], num_tokens: int, chunk_tokens: int) -> tuple[int, ...]:
    """Turn boundaries at which prefill chunks end besides the multiples of `chunk_tokens`.

    At the first one, other conversations most often part from this one; the others are at least a
    quarter of a chunk apart, so that many short turns cost few extra passes. The opening of the
    answer is run together with the tokens before it: the state between them is taken within the
    chunk. Chunks depend on the prompt alone, not on what is saved or found of it. (The one
    exception is the split where a prompt parts from another one: see `fork_of`.)
    """
    points: list[int] = []
    opener = opener_of(boundaries, num_tokens)
    for boundary in boundaries:
        before = boundary - points[-1] if points else boundary
        least = max(CHUNK_TOKENS, chunk_tokens // 4) if points else CHUNK_TOKENS
        is_apart = before >= least and num_tokens - boundary >= MIN_LAST_TOKENS
        if is_apart and boundary != opener:
            points.append(boundary)
    return tuple(points)


def chunk_end(begin: int, num_tokens: int, chunk_tokens: int, splits: Sequence[int] = ()) -> int:
    """Where the prefill chunk that starts at `begin` ends: at a multiple of `chunk_tokens`, at a
    split, or with the prompt.

    Ends lie at fixed positions, so that numbers do not depend on what else is running.
    """
    end = min(num_tokens, (begin // chunk_tokens + 1) * chunk_tokens)
    after = bisect_right(splits, begin)
    return min(end, splits[after]) if after < len(splits) else end


def chunk_ends(
    begin: int, num_tokens: int, chunk_tokens: int, splits: Sequence[int] = ()
) -> list[int]:
    """The ends of all chunks of a prefill from `begin` on, ascending."""
    ends = []
    while begin < num_tokens:
        begin = chunk_end(begin, num_tokens, chunk_tokens, splits)
        ends.append(begin)
    return ends


# --- where prompts part within a turn ----------------------------------------------------------
# A node that ends there serves both prompts. Models that can continue from within a node find what
# two prompts share anyway; it is then stored once.


def min_state_tokens(token: NodeSize) -> int:
    """How many tokens a state must save to be worth its bytes; `token`: the sizes of one token and
    of the state after it. Several prompts are expected to part there, so the state may be larger
    than what it saves once. If tokens have no rows, the minimum applies."""
    if not token.span_bytes:
        return MIN_STATE_TOKENS
    worth_bytes = MAX_STATE_BYTES * token.span_bytes
    return max(MIN_STATE_TOKENS, -(-token.end_bytes // worth_bytes))


def fork_of(
    num_shared: int, num_tokens: int, known_end: int, turns: Iterable[int], min_tokens: int
) -> int | None:
    """Where the prefill of a prompt of `num_tokens` tokens should end a node because another prompt
    shares its first `num_shared` tokens. None if nothing parts, or if an end is near: `known_end`,
    up to which the prompt is saved, or one of the `turns` that its prefill saves anyway.

    The place is a multiple of 64 tokens: prompts that part a few tokens earlier, as those do that
    end with dates and names, most often find it too.
    """
    if num_shared >= num_tokens:
        return None
    fork = num_shared // CHUNK_TOKENS * CHUNK_TOKENS
    before = max([known_end, *(turn for turn in turns if turn <= num_shared)])
    return fork if fork - before >= min_tokens else None


def fork_behind_tools(tools_end: int | None, num_tokens: int, min_tokens: int) -> int | None:
    """Where prompts with the same tools, which end at `tools_end`, and another system message part
    from a prompt of `num_tokens` tokens; None if there is no such place, or if it saves little.
    Depends on the prompt alone, so that the first prompt with these tools already saves the state.
    """
    fork = (tools_end or 0) // CHUNK_TOKENS * CHUNK_TOKENS
    return fork if min_tokens <= fork < num_tokens else None


# --- where a client marks a prompt within a turn -----------------------------------------------
# A place is within a prefill chunk, or between two: chunks end where they would without marks, so a
# mark changes no number of the run.


def marked_places(
    marks: Iterable[int],
    begin: int,
    ends: Sequence[int],
    *,
    opener: int | None,
    turns: Iterable[int] = (),
    min_tokens: int,
) -> tuple[int, ...]:
    """Places of a prefill from `begin` on, whose chunks end at `ends`, at which a state is saved
    for the `marks` shortly behind them: multiples of 64 tokens of their chunk, the last in each.
    None in the chunk of the `opener`, where a state is taken already; none that saves fewer than
    `min_tokens`: since `begin`, another place, or one of the `turns`, which are saved anyway.

        chunk [start ........ end)   mark
              |-- 64 --|-- 64 --|x     x = mark: the place is the last multiple before it
    """
    by_chunk: dict[int, int] = {}
    for mark in sorted(marks):
        chunk = bisect_right(ends, mark)
        if chunk < len(ends) and mark > begin:
            start = ends[chunk - 1] if chunk else begin
            by_chunk[chunk] = start + (mark - start) // CHUNK_TOKENS * CHUNK_TOKENS
    places: list[int] = []
    others = sorted({begin, *turns})
    for chunk, place in by_chunk.items():
        is_between = place == (ends[chunk - 1] if chunk else begin)
        has_opener = opener is not None and bisect_right(ends, opener) == chunk
        before = max([begin, *places, *others[: bisect_right(others, place)]])
        if (is_between or not has_opener) and place - before >= min_tokens:
            places.append(place)
    return tuple(places)


@dataclass(frozen=True, slots=True)
class MatchMemo:
    """A prompt's longest match in some tiers of its tree, valid for one version of the tree."""

    num_changes: int
    tiers: frozenset[Tier]
    match: Match


@dataclass(slots=True, eq=False)
class Lease:
    """A generation's side of the prefix cache. Only its own methods write its fields.

    `begun`: tokens that were generated on a lane that the generation has left; they are prefilled
    like the prompt. `sequence`: its prompt, followed by the generated tokens. `path`: the keys of
    the nodes, root first, that hold its tokens `[0, path_end)`. `cuts`: what its prefill will still
    save. `splits`: where prefill chunks end besides the fixed positions. `places`: where the state
    is wanted even within a chunk, at the opener and near the client's marks. `forks`: places within
    a turn where other prompts part from this one: after its tools, and where a prompt parts with
    which it shares `num_shared` tokens. `is_main`: its turn is on the main line of its
    conversation; if not, `spared` are the ends of that line. `awaited`: nodes on their way from the
    disk. `sought`: files that are being looked for, of nodes below `sought_below`, and the ends
    `sought_ends`. `logits`: those after the prompt, float32 [vocab], if no token has to be run.
    """

    request: Request
    rendered: RenderedPrompt
    begun: Sequence[int] = ()
    sequence: array[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    spared: tuple[NodeKey, ...] = ()
    is_main: bool = False
    memo: MatchMemo | None = None
    match: Match | None = None
    logits: Tensor | None = None
    path: list[NodeKey] = field(default_factory=list)
    path_end: int = 0
    splits: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    num_shared: int = 0
    forks: tuple[int, ...] = ()
    cuts: deque[PrefillCut] = field(default_factory=deque)
    saved: list[NodeKey] = field(default_factory=list)  # nodes that its own run has saved
    awaited: set[NodeKey] = field(default_factory=set)
    sought: set[tuple[NodeKey, Half]] = field(default_factory=set)
    sought_below: set[NodeKey | None] = field(default_factory=set)
    sought_ends: set[NodeKey] = field(default_factory=set)
    fetched: set[NodeKey] = field(default_factory=set)  # nodes that have come from the disk
    num_fetched_bytes: int = 0
    num_ordered_bytes: int = 0  # of all nodes it has ever waited for
    without_disk: bool = False  # the disk failed to provide a node just now
    used_disk: bool = False
    safe_end: int = 0  # where the last state of its path ends that the disk has, or will have
    prompt_node: NodeKey | None = None  # its end is written only if no turn's end follows
    decision: str | None = None
    fault: MissReason | None = None
    started_s: float | None = None  # when the first node was ordered
    first_arrival: Arrival | None = None  # of bytes from the disk
    lane_s: float | None = None  # when it got its lane
    ticket: Ticket | None = None  # of the copies into the lane
    has_arrived: bool = False  # the copies are over, and the engine's thread was notified
    restore: Restore = field(default_factory=Restore)

    def __post_init__(self) -> None:
        self.sequence = array("i", self.rendered.ids)
        self.sequence.extend(self.begun)
        self.num_prompt_tokens = len(self.sequence)

    @property
    def tenant(self) -> bytes:
        """The 32-byte key under which its nodes are shared."""
        return self.rendered.tenant.key

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where turns of the prompt end."""
        return self.rendered.boundaries

    @property
    def keep_prompt(self) -> bool:
        """Whether the client wants the prompt cached, with or without an answer."""
        return self.request.keep_prefix and not self.begun

    @property
    def is_run_whole(self) -> bool:
        """Whether nothing may be restored, because log-probabilities of the prompt are wanted."""
        return self.request.prompt_top_logprobs is not None and not self.begun

    @property
    def turn(self) -> ConversationTurn | None:
        """A turn of the conversation that the client names, and how much of the prompt the next one
        may share: everything except the opening of the answer."""
        if not self.request.conversation:
            return None
        name = ConversationName(self.tenant, self.request.client, self.request.conversation)
        num_tokens = len(self.rendered.ids)
        return ConversationTurn(name, opener_of(self.boundaries, num_tokens) or num_tokens)

    @property
    def prompt(self) -> array[int]:
        """The token ids to prefill: the prompt, and what was generated on an earlier lane."""
        return self.sequence[: self.num_prompt_tokens]

    @property
    def returns(self) -> bool:
        """Whether a later prompt may begin with all of its sequence."""
        return self.rendered.answer_returns(self.sequence[len(self.rendered.ids) :])

    @property
    def opener(self) -> int | None:
        """Where the opening of the answer begins; later prompts most often part there."""
        return opener_of(self.boundaries, self.num_prompt_tokens)

    def is_opening(self, node: Node) -> bool:
        """Whether the node is only the opening of the answer: a few tokens, which are quick to run
        again."""
        return (node.begin, node.end) == (self.opener, self.num_prompt_tokens)

    def has_unsaved(self, tokens: array[int]) -> bool:
        """Whether `tokens` begin with more of its sequence than its path has."""
        num_tokens = self.path_end + 1
        is_there = num_tokens <= min(len(tokens), len(self.sequence))
        return is_there and tokens[:num_tokens] == self.sequence[:num_tokens]

    def is_worth_waiting(self, num_coming: int, num_there: int) -> bool:
        """Whether to wait for `num_coming` tokens of the prompt, which will be saved soon, instead
        of running from `num_there` on: if they are a chunk more, or all that is left to run."""
        is_all = num_there < num_coming == self.num_prompt_tokens
        return is_all or num_coming >= num_there + CHUNK_TOKENS

    # --- what is restored ------------------------------------------------------------------------

    def remember(self, memo: MatchMemo) -> None:
        """Avoid the next look-up in a tree that has not changed."""
        self.memo = memo

    def set_match(self, match: Match) -> None:
        """Set the longest match that could be restored now, or the one chosen to be restored."""
        self.match = match

    def set_line(self, is_main: bool, spared: tuple[NodeKey, ...]) -> None:
        """Set whether its turn is on the main line of its conversation; if not, the ends of that
        line."""
        self.is_main, self.spared = is_main, spared

    def set_shared(self, num_tokens: int) -> None:
        """Another prompt begins with its first `num_tokens` tokens."""
        self.num_shared = num_tokens

    def decide(self, decision: str, refused: MissReason | None = None) -> None:
        """Set why the match is restored or, with `refused`, why it is run again."""
        self.decision = decision
        self.fault = refused or self.fault

    def seek(self, files: set[tuple[NodeKey, Half]], below: Iterable[NodeKey | None]) -> None:
        """Set the files that are being looked for: rows of nodes that continue those of `below`,
        and ends."""
        self.sought = files
        self.sought_below.update(below)
        self.sought_ends.update(key for key, half in files if half is Half.END)

    def wait_for(self, keys: Iterable[NodeKey], num_bytes: int, now_s: float) -> None:
        """Nodes were ordered from the disk, `num_bytes` in all."""
        self.awaited = set(keys)
        self.num_ordered_bytes = self.num_fetched_bytes + num_bytes
        self.started_s = self.started_s or now_s

    def see(self, arrived: Arrival) -> None:
        """Note how much has arrived so far of all that was ordered."""
        self.first_arrival = self.first_arrival or (arrived if arrived.num_bytes else None)

    def receive(self, key: NodeKey, num_bytes: int) -> None:
        """A node has come from the disk, in files of so many bytes."""
        self.awaited.discard(key)
        self.fetched.add(key)
        self.num_fetched_bytes += num_bytes

    def give_up(self) -> set[NodeKey]:
        """Stop waiting for the disk: running the tokens is faster. Returns the awaited nodes."""
        awaited, self.awaited = self.awaited, set()
        self.without_disk = True
        self.decide("prefill_is_faster", MissReason.PREFILL_IS_FASTER)
        return awaited

    def miss(self, key: NodeKey, reason: MissReason) -> None:
        """A node will not arrive."""
        self.awaited.discard(key)
        self.fault = reason
        self.without_disk |= reason.is_passing

    def start(self, nodes: Sequence[Node], now_s: float) -> None:
        """The lease has a lane, into which these nodes are restored."""
        self.started_s = self.started_s or now_s
        self.lane_s = now_s
        self.used_disk = any(node.key in self.fetched for node in nodes)

    def begin_restore(self, ticket: Ticket, logits: Tensor | None) -> None:
        """The copies into the lane are queued; `logits`: those after the prompt, if they are
        held."""
        self.ticket, self.has_arrived = ticket, ticket.is_done
        self.logits = logits

    def arrive(self) -> None:
        """The copies into the lane are over."""
        self.has_arrived = True

    def end_restore(self, restore: Restore) -> None:
        """Record what was restored, to be reported with the answer."""
        self.restore = restore

    # --- what is saved ---------------------------------------------------------------------------

    def set_path(self, known: Sequence[Node]) -> None:
        """These nodes, root first, hold its first tokens."""
        self.path = [node.key for node in known]
        self.path_end = known[-1].end if known else 0
        for node in known:
            self.note_write(node, with_end="disk" in node.state_tiers)

    def note_write(self, node: Node, *, with_end: bool) -> None:
        """Record that the disk has the node, or will have it."""
        self.safe_end = node.end if with_end else self.safe_end

    def plan_prefill(
        self,
        begin: int,
        *,
        recurrent: bool,
        chunk_tokens: int,
        interval_tokens: int,
        min_fork_tokens: int,
    ) -> None:
        """Decide where the chunks of a prefill from `begin` on end, and what it will save.

        A recurrent family is cut where its state can be saved: at the ends of chunks, and where
        the opening of the answer begins, since the next turn parts there wherever the template or
        the client gives the answer back in another form. Attention is cut anywhere.
        `min_fork_tokens`: see `min_state_tokens`.

            0         begin                                    opener   num_tokens
            |--path--|--chunk--|--chunk--:--chunk--|--chunk--------x------|   answer ...
                               ^         ^         ^               ^      ^
                     a cut at a multiple, at a fork, at a turn, at the opener, at the end
        """
        num_tokens = self.num_prompt_tokens
        stops: Sequence[int] = range(num_tokens + 1)
        tools_fork = fork_behind_tools(self.rendered.tools_end, num_tokens, min_fork_tokens)
        if recurrent:
            splits = split_points(self.boundaries, num_tokens, chunk_tokens)
            self.splits = _with(splits, tools_fork)
            stops = chunk_ends(begin, num_tokens, chunk_tokens, self.splits)
            stops = _with(stops, self.opener if begin < (self.opener or 0) else None)
        self.cuts = deque(
            plan_cuts(
                max(begin, self.path_end),
                num_tokens,
                self.boundaries,
                interval_tokens=interval_tokens,
                stops=stops,
                min_tokens=MIN_LAST_TOKENS,
                firm=self.opener,
            )
        )
        # Rows that were restored as part of a node are in the lane: they can still be cut.
        known_end = max(begin, self.path_end) if recurrent else self.path_end
        self._cut_at(tools_fork, known_end)
        turns = [cut.end for cut in self.cuts if cut.is_turn_end]  # their states stay
        fork = fork_of(self.num_shared, num_tokens, known_end, turns, min_fork_tokens)
        self.splits = _with(self.splits, fork) if recurrent else ()
        self._cut_at(fork, known_end)
        if recurrent:
            ends = chunk_ends(begin, num_tokens, chunk_tokens, self.splits)
            self._place_marks(begin, ends, min_fork_tokens)

    def _place_marks(self, begin: int, ends: Sequence[int], min_tokens: int) -> None:
        """Plan states near the client's marks, in addition to the one before the opener."""
        turns = [cut.end for cut in self.cuts if cut.is_turn_end]
        marks = () if self.begun else self.rendered.marks
        places = marked_places(
            marks, begin, ends, opener=self.opener, turns=turns, min_tokens=min_tokens
        )
        for place in places:
            self._cut_at(place, begin)
        self.places = _with(places, self.opener)

    def _cut_at(self, fork: int | None, known_end: int) -> None:
        """End a node at the fork, where prompts part, so that what they share is stored once; not
        if its tokens are saved already."""
        if fork is not None and fork > known_end:
            self.forks = _with(self.forks, fork)
            ends = {cut.end: cut for cut in self.cuts} | {fork: PrefillCut(fork, is_turn_end=True)}
            self.cuts = deque(ends[end] for end in sorted(ends))

    def mark_within(self, begin: int, end: int) -> int | None:
        """Where the state is wanted within the chunk `[begin, end)`; most chunks have no such
        place."""
        return next((place for place in self.places if begin < place < end), None)

    def next_cut(self, end: int) -> PrefillCut | None:
        """The next thing to save from a lane that holds `end` tokens; each is returned once."""
        return self.cuts.popleft() if self.cuts and self.cuts[0].end <= end else None

    def extend_path(self, end: int, key: NodeKey) -> None:
        """The node `key` holds its tokens from the path's end to `end`."""
        self.path.append(key)
        self.path_end = end

    def shorten_path(self, node_of: Callable[[NodeKey], Node | None]) -> None:
        """Drop nodes from the path's end that are gone, such as files that were not read yet: the
        lane has what they held, and it is saved again."""
        while self.path and node_of(self.path[-1]) is None:
            self.path.pop()
        last = node_of(self.path[-1]) if self.path else None
        self.path_end = 0 if last is None else last.end

    def drop_opening(self, node_of: Callable[[NodeKey], Node | None]) -> None:
        """Drop the opening of the answer from the path, so that it is saved together with what
        follows it: a turn is then two files, not three."""
        last = node_of(self.path[-1]) if self.path else None
        if last is not None and self.is_opening(last):
            self.path.pop()
            self.path_end = last.begin

    def add_saved(self, key: NodeKey) -> None:
        """Record a node that its own run has saved."""
        self.saved.append(key)

    def set_prompt_node(self, key: NodeKey) -> None:
        """The node is written with its end only if no turn's end follows."""
        self.prompt_node = key


def _with(places: Sequence[int], place: int | None) -> tuple[int, ...]:
    """The places and one more, ascending."""
    return tuple(sorted({*places} if place is None else {*places, place}))
