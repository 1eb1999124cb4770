"""A node of the prefix tree, its key, and a match of a prompt.

Pure values: the tensors of a node are held elsewhere, under its key. Keys are keyed hashes of the
token ids from the root on, so no tenant can hit, or guess, nodes of another.
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
MEMORY: frozenset[Tier] = frozenset(("memory",))
DISK: frozenset[Tier] = frozenset(("disk",))
NOWHERE: frozenset[Tier] = frozenset()
KEY_BYTES = 32


def pack_tokens(tokens: Iterable[int]) -> array[int]:
    """Token ids as int32, which can be compared at memory speed. `bytes` are taken as packed int32.
    Raises OverflowError for an id that does not fit."""
    return array("i", tokens)


def common_prefix(a: array[int], b: array[int]) -> int:
    """The length of the common prefix of `a` and `b`."""
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
    """What `tokens`, from position `begin` on, add to the node `parent` (None: to the root).

    `tiers` hold its K/V rows, `num_bytes`; of those, `state_tiers` hold the recurrent state at
    `end` and `logits_tiers` the logits after its last token. `state_bytes`: the size of all that
    belongs to `end` alone, state and logits. `file_bytes`, `end_file_bytes`: the sizes of the files
    of its rows and of its end, if known; 0 for the end if the rows' file holds that too.
    `is_generated`: the model wrote the tokens. Times are seconds of one clock.
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
        """Bytes that the node takes in `tier`."""
        if tier not in self.tiers:
            return 0
        is_file = tier == "disk" and self.file_bytes is not None
        return (self.file_bytes or 0 if is_file else self.num_bytes) + self.end_bytes_in(tier)

    def end_bytes_in(self, tier: Tier) -> int:
        """Bytes in `tier` of what belongs to `end` alone."""
        if tier not in self.state_tiers | self.logits_tiers:
            return 0
        is_file = tier == "disk" and self.end_file_bytes is not None
        return self.end_file_bytes or 0 if is_file else self.state_bytes


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix of a prompt: whole `nodes`, root first, then tokens of `part` up to
    position `num_tokens`.

    `exact`: the logits of the prompt's last token are held, so nothing has to be run.
    `num_shared_tokens` >= `num_tokens`: the tokens that the tree shares with the prompt, usable or
    not. `miss_reason`: None if anything is usable.
    """

    nodes: tuple[Node, ...]
    part: Node | None
    num_tokens: int
    exact: bool
    num_shared_tokens: int
    miss_reason: MissReason | None

    def read_bytes(self, tier: Tier) -> int:
        """Bytes that a restore reads from `tier`: from memory first, and from the disk what memory
        lacks. Only the state of the last whole node is read, and not if a part follows it."""
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
    """The tier to read from if several hold the same data."""
    return "memory" if "memory" in tiers else "disk"


def tenant_key(name: str) -> bytes:
    """The 32-byte hash key of a tenant; that of "" is shared."""
    return _tenant_key(name.encode())


def node_key(tokens: array[int], tenant: bytes, parent: NodeKey | None) -> NodeKey:
    """The 32-byte key of the node that adds `tokens`, one or more int32, to the node `parent`
    (None: to the root), for the tenant with the hash key `tenant`.
    """
    return NodeKey(span_key(tokens, tenant, parent or ROOT))
