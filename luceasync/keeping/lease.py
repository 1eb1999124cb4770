"""What one generation wants of the kept prefixes, and how far its own tokens are kept.

Values and choices: knows no tree, no lane and no files.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from luceasync.hoststore.tickets import Ticket
from luceasync.keeping.chunks import MIN_LAST_TOKENS, chunk_ends, split_points
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.node_words import MissReason, NodeKey
from luceasync.prefix.node import Match, common_prefix
from luceasync.prefix.policy import Cut, plan_cuts
from luceasync.request import Restore


@dataclass(slots=True, eq=False)
class Lease:
    """A generation's side of the prefix cache.

    `sequence` are its prompt, and after that what was generated; `path` the keys of the nodes, root
    first, that hold its tokens `[0, path_end)`; `cuts` what its prefill will still keep,
    `splits` where its chunks end besides the fixed positions. `awaited` are nodes on their way from
    the disk; `logits` those after the prompt, float32 [vocab], where nothing of it has to be run.
    """

    tenant: bytes = field(repr=False)
    sequence: array[int]
    num_prompt_tokens: int
    boundaries: tuple[int, ...]
    keep_prompt: bool
    match: Match | None = None
    logits: Tensor | None = None
    path: list[NodeKey] = field(default_factory=list)
    path_end: int = 0
    splits: tuple[int, ...] = ()
    cuts: deque[Cut] = field(default_factory=deque)
    kept: list[NodeKey] = field(default_factory=list)  # the nodes that its own run has made
    awaited: set[NodeKey] = field(default_factory=set)
    fetched: set[NodeKey] = field(default_factory=set)  # nodes that have come from there
    num_fetched_bytes: int = 0
    without_disk: bool = False  # it could not give a node just now
    used_disk: bool = False
    prompt_node: NodeKey | None = None  # its end is written only if no turn's end follows
    decision: str | None = None
    fault: MissReason | None = None
    started_s: float | None = None  # when the first node was asked for
    ticket: Ticket | None = None  # of what is put into the lane
    has_arrived: bool = False  # it is there, and the engine's thread was told
    restore: Restore = field(default_factory=Restore)

    def arrived(self) -> None:
        """What is put into the lane is there."""
        self.has_arrived = True

    @property
    def prompt(self) -> array[int]:
        """The prompt's token ids."""
        return self.sequence[: self.num_prompt_tokens]


def plan_prefill(
    lease: Lease, begin: int, *, recurrent: bool, chunk_tokens: int, interval_tokens: int
) -> None:
    """Fix where the chunks of a prefill from `begin` on end and what it will keep. A recurrent
    family is cut where its state can be saved, at the ends of chunks; attention anywhere.
    """
    num_tokens = lease.num_prompt_tokens
    stops: Sequence[int] = range(num_tokens + 1)
    if recurrent:
        lease.splits = split_points(lease.boundaries, num_tokens, chunk_tokens)
        stops = chunk_ends(begin, num_tokens, chunk_tokens, lease.splits)
    lease.cuts = deque(
        plan_cuts(
            max(begin, lease.path_end),
            num_tokens,
            lease.boundaries,
            interval_tokens=interval_tokens,
            stops=stops,
            min_tokens=MIN_LAST_TOKENS,
        )
    )


def tokens_to_come(lease: Lease, running: Lease, *, recurrent: bool) -> int:
    """How many tokens of the lease's prompt the prefill of `running` will have kept when it is
    through.
    """
    if lease.tenant != running.tenant or not running.cuts:
        return 0
    prompt = lease.prompt
    shared = common_prefix(prompt, running.prompt)
    if shared == len(prompt) == running.num_prompt_tokens:
        return shared  # with the logits after it: nothing is left to run
    usable = min(shared, len(prompt) - 1)
    ends = [cut.end for cut in running.cuts]
    whole = max((end for end in ends if end <= usable), default=0)
    if recurrent or ends[-1] < usable:
        return whole
    return max(whole, usable // CHUNK_TOKENS * CHUNK_TOKENS)
