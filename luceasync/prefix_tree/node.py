"""What a node of the prefix tree says about itself, and what a match of a prompt says.

Pure values: the tensors of a node are held elsewhere, under its key.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from luceasync.cyext.chunk_hash import ROOT, span_key
from luceasync.cyext.chunk_hash import tenant_key as _tenant_key
from luceasync.nodes import MissReason, NodeKey

Tier = Literal["memory", "disk"]
TIERS: frozenset[Tier] = frozenset(("memory", "disk"))
NOWHERE: frozenset[Tier] = frozenset()


def pack_tokens(tokens: Iterable[int]) -> array[int]:
    """Token ids as int32, which compare at the speed of memory. `bytes` are taken for int32 that
    are packed already. Raises OverflowError for an id that does not fit.
    """
    return array("i", tokens)


def common_prefix(a: array[int], b: array[int]) -> int:
    """How many tokens `a` and `b` share from the start."""
    begin, end = 0, min(len(a), len(b))
    if a[:end] == b[:end]:
        return end
    while end - begin > 1:  # the first difference lies in [begin, end)
        middle = (begin + end) // 2
        if a[begin:middle] == b[begin:middle]:
            begin = middle
        else:
            end = middle
    return begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What `tokens`, from position `begin` on, add to the node `parent` (None: to nothing).

    `tiers` hold its K/V rows, `num_bytes`; of those, `state_tiers` hold the recurrent state at
    `end` and `logits_tiers` the logits after its last token. `state_bytes` is the size of all that
    belongs to `end` alone: state and logits. `file_bytes` and `end_file_bytes` are the sizes of
    the files of its rows and of its end, where they are known; 0 of the end if the rows' file holds
    that too. `is_generated`: the model wrote the tokens. Times are seconds of one clock.
    """

    key: NodeKey
    parent: NodeKey | None
    begin: int
    tokens: array[int]
    tiers: frozenset[Tier]
    state_tiers: frozenset[Tier] = NOWHERE
    logits_tiers: frozenset[Tier] = NOWHERE
    num_bytes: int
    state_bytes: int = 0
    file_bytes: int | None = None
    end_file_bytes: int | None = None
    is_turn_end: bool = False
    is_generated: bool = False
    hits: int = 0
    last_used_s: float = 0.0
    saved_at_s: float = 0.0

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.begin + len(self.tokens)

    @property
    def has_state(self) -> bool:
        """Whether any tier holds the recurrent state at `end`."""
        return bool(self.state_tiers)

    @property
    def has_logits(self) -> bool:
        """Whether any tier holds the logits after the last token."""
        return bool(self.logits_tiers)

    def bytes_in(self, tier: Tier) -> int:
        """What the node takes up in `tier`."""
        if tier not in self.tiers:
            return 0
        is_file = tier == "disk" and self.file_bytes is not None
        return (self.file_bytes or 0 if is_file else self.num_bytes) + self.end_bytes_in(tier)

    def end_bytes_in(self, tier: Tier) -> int:
        """How much less that would be without what belongs to `end` alone."""
        if tier not in self.state_tiers | self.logits_tiers:
            return 0
        is_file = tier == "disk" and self.end_file_bytes is not None
        return self.end_file_bytes or 0 if is_file else self.state_bytes


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix of a prompt: `nodes` as a whole, root first, then tokens of `part`
    up to position `num_tokens`.

    `exact`: the logits of the prompt's last token are held, nothing has to be run.
    `num_shared_tokens` >= `num_tokens` counts what the tree has in common with the prompt, usable
    or not. `miss_reason` is None where anything is usable.
    """

    nodes: tuple[Node, ...]
    part: Node | None
    num_tokens: int
    exact: bool
    num_shared_tokens: int
    miss_reason: MissReason | None

    def read_bytes(self, tier: Tier) -> int:
        """What a restore reads from `tier`: memory first, disk for what is not there. The state is
        read of the last whole node only, and not where a part follows it.
        """
        total = sum(n.num_bytes for n in self.nodes if source(n.tiers) == tier)
        if self.part is not None:
            share = (self.num_tokens - self.part.begin) / len(self.part.tokens)
            return total + (source(self.part.tiers) == tier) * int(self.part.num_bytes * share)
        if self.nodes:
            last = self.nodes[-1]
            held = last.state_tiers or (last.logits_tiers if self.exact else NOWHERE)
            total += (bool(held) and source(held) == tier) * last.state_bytes
        return total


def source(tiers: frozenset[Tier]) -> Tier:
    """The tier to read from, where several hold the same."""
    return "memory" if "memory" in tiers else "disk"


# Names of nodes: keyed hashes over the token ids from the root on, so that no tenant can hit,
# or guess, what another has kept.


KEY_BYTES = 32


def tenant_key(name: str) -> bytes:
    """The 32-byte hash key of a tenant; that of "" is shared."""
    return _tenant_key(name.encode())


def node_key(tokens: array[int], tenant: bytes, parent: NodeKey | None) -> NodeKey:
    """The 32-byte key of the node that adds `tokens`, one or more int32, to the node `parent`
    (None: to nothing), for the tenant with the hash key `tenant`.
    """
    return NodeKey(span_key(tokens, tenant, parent or ROOT))
