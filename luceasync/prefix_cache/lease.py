"""What one generation wants of the kept prefixes, and how far its own tokens are kept.

Values and choices: knows no tree, no lane and no files.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from luceasync.host_cache.copy_stream import Ticket
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.nodes import MissReason, NodeKey
from luceasync.prefix_cache.conversations import Name, Talk
from luceasync.prefix_cache.memory import NodeSize
from luceasync.prefix_tree.node import Match, Node, Tier
from luceasync.prefix_tree.policy import Cut, plan_cuts
from luceasync.request import Request, Restore
from luceasync.text.prompt import RenderedPrompt

# Where the chunks of a prefill end. Pure: positions in, positions out.


MIN_LAST_TOKENS = 16  # of the last chunk of a prompt
MAX_OPENER_TOKENS = CHUNK_TOKENS  # more than that is a turn that the answer goes on with


def opener_of(boundaries: Sequence[int], num_tokens: int) -> int | None:
    """Where that begins which opens the answer: the last turn's end, shortly before the prompt's.
    None where there is no such place, or too little before it to be kept.
    """
    last = boundaries[-1] if boundaries else 0
    is_near = 0 < num_tokens - last <= MAX_OPENER_TOKENS
    return last if is_near and last >= CHUNK_TOKENS else None


def split_points(boundaries: Sequence[int], num_tokens: int, chunk_tokens: int) -> tuple[int, ...]:
    """Turn boundaries at which chunks of a prefill end besides the multiples of `chunk_tokens`.

    The first is most often where other conversations part from this one; the others leave a quarter
    of a chunk to each other, so that many short turns cost few more passes. What opens the answer
    is run with what is before it: the state between them is taken within the chunk. Chunks follow
    from the prompt alone: a run has the same, whatever is kept or found of it. (The one split that
    does not is made where a prompt parts from another one: see luceasync.prefix_cache.lease.)
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

    Cuts lie at fixed positions, so that the numbers of a run do not depend on what else is running.
    """
    end = min(num_tokens, (begin // chunk_tokens + 1) * chunk_tokens)
    after = bisect_right(splits, begin)
    return min(end, splits[after]) if after < len(splits) else end


def chunk_ends(
    begin: int, num_tokens: int, chunk_tokens: int, splits: Sequence[int] = ()
) -> list[int]:
    """Where all chunks of a prefill from `begin` on end."""
    ends = []
    while begin < num_tokens:
        begin = chunk_end(begin, num_tokens, chunk_tokens, splits)
        ends.append(begin)
    return ends


# Where a prompt parts from others within a turn, and whether a node is to end there. Pure.
# Models that can go on from within a node find what two prompts share anyway; it is kept once
# then.


LEAST_TOKENS = CHUNK_TOKENS  # that a state saves who parts there; fewer are soon run again
MAX_STATE_BYTES = 8  # for each byte of the rows that are not run again


def least_tokens(token: NodeSize) -> int:
    """How many tokens a state must save to be worth its bytes; `token`: the sizes of one and of the
    state after it. Others will part there, so that it may be larger than what it saves once.
    """
    worth_bytes = MAX_STATE_BYTES * token.span_bytes
    return max(LEAST_TOKENS, -(-token.end_bytes // worth_bytes))


def fork_of(
    num_shared: int, num_tokens: int, known_end: int, turns: Iterable[int], min_tokens: int
) -> int | None:
    """Where the prefill of a prompt of `num_tokens` tokens is to end a node, because another one
    that was run shares the first `num_shared` with it; None where nothing parts, or where an end
    is near: at `known_end`, from where on the prompt is kept, or at one of the `turns` that its
    prefill keeps anyway.

    The place is a multiple of 64 tokens: who parts a few tokens earlier, as prompts do that end
    with dates and names, most often finds it too.
    """
    if num_shared >= num_tokens:
        return None
    fork = num_shared // CHUNK_TOKENS * CHUNK_TOKENS
    before = max([known_end, *(turn for turn in turns if turn <= num_shared)])
    return fork if fork - before >= min_tokens else None


def fork_behind_tools(tools_end: int | None, num_tokens: int, min_tokens: int) -> int | None:
    """Where others part from a prompt of `num_tokens` tokens that have its tools, which end at
    `tools_end`, and another system message; None where there is no such place, or it saves little.
    It follows from the prompt alone: the first one that has these tools leaves the state.
    """
    fork = (tools_end or 0) // CHUNK_TOKENS * CHUNK_TOKENS
    return fork if min_tokens <= fork < num_tokens else None


# Where a client marks a prompt within a turn, and at which of these places a state is kept.
# Pure. A place is within a chunk of the prefill, or between two: chunks end where they would
# without marks, so that a mark changes no number of the run.


def marked_places(
    marks: Iterable[int],
    begin: int,
    ends: Sequence[int],
    *,
    opener: int | None,
    turns: Iterable[int] = (),
    min_tokens: int,
) -> tuple[int, ...]:
    """Places of a prefill from `begin` on, whose chunks end at `ends`, that are kept for the
    `marks` shortly behind them: multiples of 64 tokens of their chunk, one in each chunk, the last.
    None in the chunk in which the state before what opens the answer is taken, the `opener`; none
    that saves fewer than `min_tokens` to who parts there: since `begin`, another place, or one of
    the `turns`, which are kept anyway.
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
class Look:
    """A tree's longest match of a prompt in some tiers, when it had changed so often."""

    num_changes: int
    tiers: frozenset[Tier]
    match: Match


@dataclass(slots=True, eq=False)
class Lease:
    """A generation's side of the prefix cache. Others read it and call what has happened.

    `begun`: tokens that were generated on a lane that it has left; they are prefilled like the
    prompt. `sequence` are its prompt, and after that what was generated; `path` the keys of the
    nodes, root first, that hold its tokens `[0, path_end)`; `cuts` what its prefill will still
    keep, `splits` where its chunks end besides the fixed positions, `places` where the state is
    wanted even within one: at the opener, and near the client's `marks`; `forks` are the places
    within a turn where other prompts part from it: behind its tools, and where one does with which
    it shares `num_shared` tokens. `is_main`: its turn is on the main line of its conversation, else
    beside that, whose ends are `spared`. `awaited` are nodes on their way from the disk; `logits`
    those after the prompt, float32 [vocab], if none is to run.
    """

    request: Request
    rendered: RenderedPrompt
    begun: Sequence[int] = ()
    sequence: array[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    spared: tuple[NodeKey, ...] = ()
    is_main: bool = False
    last_look: Look | None = None
    match: Match | None = None
    logits: Tensor | None = None
    path: list[NodeKey] = field(default_factory=list)
    path_end: int = 0
    splits: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    num_shared: int = 0
    forks: tuple[int, ...] = ()
    cuts: deque[Cut] = field(default_factory=deque)
    kept: list[NodeKey] = field(default_factory=list)  # the nodes that its own run has made
    awaited: set[NodeKey] = field(default_factory=set)
    fetched: set[NodeKey] = field(default_factory=set)  # nodes that have come from there
    num_fetched_bytes: int = 0
    without_disk: bool = False  # it could not give a node just now
    used_disk: bool = False
    safe_end: int = 0  # where the last state of its path is that the disk has, or will have
    prompt_node: NodeKey | None = None  # its end is written only if no turn's end follows
    decision: str | None = None
    fault: MissReason | None = None
    started_s: float | None = None  # when the first node was asked for
    lane_s: float | None = None  # when it had its lane
    ticket: Ticket | None = None  # of what is put into the lane
    has_arrived: bool = False  # it is there, and the engine's thread was told
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
        """Whether the client asked to cache the prompt, answer or not."""
        return self.request.keep_prefix and not self.begun

    @property
    def is_run_whole(self) -> bool:
        """Whether nothing may be restored: log-probabilities of the prompt are wanted."""
        return self.request.prompt_top_logprobs is not None and not self.begun

    @property
    def talk(self) -> Talk | None:
        """The conversation that the client names, and how much of the prompt the next turn may
        share: what opens the answer is not part of that.
        """
        if not self.request.conversation:
            return None
        name = Name(self.tenant, self.request.client, self.request.conversation)
        num_tokens = len(self.rendered.ids)
        return Talk(name, opener_of(self.boundaries, num_tokens) or num_tokens)

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
        """Where that begins which opens the answer; a later prompt most often parts there."""
        return opener_of(self.boundaries, self.num_prompt_tokens)

    def is_opening(self, node: Node) -> bool:
        """Whether the node is what opens the answer and no more: a few tokens to be run again."""
        return (node.begin, node.end) == (self.opener, self.num_prompt_tokens)

    # --- what becomes of it: nobody else writes its fields ----------------------------------------

    def looked(self, look: Look) -> None:
        """It was looked up in its tree."""
        self.last_look = look

    def found(self, match: Match) -> None:
        """The most that could be taken up now, or what is to be."""
        self.match = match

    def stands(self, is_main: bool, spared: tuple[NodeKey, ...]) -> None:
        """On the main line of its talk, or beside it."""
        self.is_main, self.spared = is_main, spared

    def shares(self, num_tokens: int) -> None:
        """Another prompt that was run, or is, begins with its first `num_tokens` tokens."""
        self.num_shared = num_tokens

    def decided(self, decision: str, refused: MissReason | None = None) -> None:
        """Why the match is restored, or run again: then `refused` says so in one word."""
        self.decision = decision
        self.fault = refused or self.fault

    def waits_for(self, keys: Iterable[NodeKey], now_s: float) -> None:
        """Nodes were ordered from the disk."""
        self.awaited = set(keys)
        self.started_s = self.started_s or now_s

    def came(self, key: NodeKey, num_bytes: int) -> None:
        """A node has come from the disk, which took so many bytes of a file."""
        self.awaited.discard(key)
        self.fetched.add(key)
        self.num_fetched_bytes += num_bytes

    def missed(self, key: NodeKey, reason: MissReason) -> None:
        """A node does not come."""
        self.awaited.discard(key)
        self.fault = reason
        self.without_disk |= reason.is_passing

    def begins(self, nodes: Sequence[Node], now_s: float) -> None:
        """It has a lane, which takes up these nodes."""
        self.started_s = self.started_s or now_s
        self.lane_s = now_s
        self.used_disk = any(node.key in self.fetched for node in nodes)

    def restores(self, ticket: Ticket, logits: Tensor | None) -> None:
        """Copies into the lane are queued; `logits`: those after the prompt, if they are held."""
        self.ticket, self.has_arrived = ticket, ticket.is_done
        self.logits = logits

    def arrived(self) -> None:
        """What is put into the lane is there."""
        self.has_arrived = True

    def restored(self, restore: Restore) -> None:
        """What came of it, for the answer to tell."""
        self.restore = restore

    def holds(self, known: Sequence[Node]) -> None:
        """These nodes, root first, hold its first tokens."""
        self.path = [node.key for node in known]
        self.path_end = known[-1].end if known else 0
        for node in known:
            self.orders(node, with_end="disk" in node.state_tiers)

    def orders(self, node: Node, *, with_end: bool) -> None:
        """The disk is to have the node, or has it."""
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
        """Fix where the chunks of a prefill from `begin` on end and what it will keep. A recurrent
        family is cut where its state can be saved: at the ends of chunks, and where the answer's
        opening begins, since the next turn parts there wherever the template, or the client, gives
        the answer back otherwise than it was written. Attention is cut anywhere. `min_fork_tokens`:
        see forks.least_tokens.
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
        # Rows that were taken up as a part of a node are in the lane: they can still be cut.
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
        """States near the client's marks, besides that before the opener."""
        turns = [cut.end for cut in self.cuts if cut.is_turn_end]
        marks = () if self.begun else self.rendered.marks
        places = marked_places(
            marks, begin, ends, opener=self.opener, turns=turns, min_tokens=min_tokens
        )
        for place in places:
            self._cut_at(place, begin)
        self.places = _with(places, self.opener)

    def _cut_at(self, fork: int | None, known_end: int) -> None:
        """End a node at the fork, unless its tokens are known to be kept: there others part from
        it, and what they share is kept once.
        """
        if fork is not None and fork > known_end:
            self.forks = _with(self.forks, fork)
            ends = {cut.end: cut for cut in self.cuts} | {fork: Cut(fork, is_turn_end=True)}
            self.cuts = deque(ends[end] for end in sorted(ends))

    def mark_within(self, begin: int, end: int) -> int | None:
        """Where the state is wanted within the chunk `[begin, end)`; most have no such place."""
        return next((place for place in self.places if begin < place < end), None)

    def next_cut(self, end: int) -> Cut | None:
        """What is to be kept of a lane that stands after `end` tokens; each of them once."""
        return self.cuts.popleft() if self.cuts and self.cuts[0].end <= end else None

    def kept_until(self, end: int, key: NodeKey) -> None:
        """The node `key` holds its tokens from the path's end to `end`."""
        self.path.append(key)
        self.path_end = end

    def is_worth_waiting(self, num_coming: int, num_there: int) -> bool:
        """Whether `num_coming` tokens of the prompt, which will soon be kept, are worth more than
        to run on from `num_there`: a chunk, or all there is to run.
        """
        is_all = num_there < num_coming == self.num_prompt_tokens
        return is_all or num_coming >= num_there + CHUNK_TOKENS

    def leave_out_opening(self, node_of: Callable[[NodeKey], Node | None]) -> None:
        """What comes next is kept together with what opens the answer, and continues what is before
        that: a turn then is two files, not three.
        """
        last = node_of(self.path[-1]) if self.path else None
        if last is not None and self.is_opening(last):
            self.path.pop()
            self.path_end = last.begin

    def made(self, key: NodeKey) -> None:
        """Its own run has made the node."""
        self.kept.append(key)

    def prompt_ends_with(self, key: NodeKey) -> None:
        """The node is worth a file with its state only if no turn's end follows."""
        self.prompt_node = key

    def shorten(self, node_of: Callable[[NodeKey], Node | None]) -> None:
        """Files that nobody has read yet may go at any time, and with them the path's end: what
        they held is kept again, the lane has it all.
        """
        while self.path and node_of(self.path[-1]) is None:
            self.path.pop()
        last = node_of(self.path[-1]) if self.path else None
        self.path_end = 0 if last is None else last.end


def _with(places: Sequence[int], place: int | None) -> tuple[int, ...]:
    """The places and one more, rising."""
    return tuple(sorted({*places} if place is None else {*places, place}))
