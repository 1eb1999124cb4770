"""The index of saved nodes, and the longest prefix of a prompt among them.

Owns the nodes of one namespace and tenant; nothing else changes them. Used from one thread. Does
not know tensors, files or clocks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from luceasync.nodes import MissReason, NodeKey
from luceasync.prefix_tree.node import TIERS, Match, Node, Tier, common_prefix, pack_tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chain that a prompt could restore: whole nodes up to the key `last`, then `part`;
    `in_memory` of its tokens need no disk.
    """

    num_tokens: int = 0
    in_memory: int = 0
    last: NodeKey | None = None
    part: NodeKey | None = None

    def rank(self) -> tuple[int, int]:
        return self.num_tokens, self.in_memory


@dataclass(frozen=True, slots=True)
class PromptNeed:
    """A prompt, and what its model can restore."""

    prompt: array[int]
    recurrent: bool
    chunk_tokens: int

    def whole(self, node: Node, in_memory: int, tiers: AbstractSet[Tier]) -> Candidate:
        """The chain that ends with `node`, if the model can continue from there."""
        if self.recurrent and not node.state_tiers & tiers:
            return Candidate()
        if node.end == len(self.prompt) and not node.logits_tiers & tiers:
            return Candidate()
        return Candidate(node.end, in_memory, node.key)

    def part(self, node: Node, shared_end: int, in_memory: int) -> Candidate:
        """The chain before `node`, and the node's own tokens up to a multiple of the chunk."""
        end = min(shared_end, len(self.prompt) - 1) // self.chunk_tokens * self.chunk_tokens
        if self.recurrent or end <= node.begin:
            return Candidate()
        held = in_memory + ("memory" in node.tiers) * (end - node.begin)
        return Candidate(end, held, node.parent, node.key)


class Siblings:
    """The children of one node, sorted by their tokens. The child that shares most with a prompt is
    next to where the prompt would be inserted, and a few comparisons find it, however many prompts
    start with the same words."""

    __slots__ = ("_lengths", "_spans", "keys", "longest")

    def __init__(self) -> None:
        self._spans: list[array[int]] = []
        self._lengths: Counter[int] = Counter()
        self.keys: list[NodeKey] = []
        self.longest = 0

    def add(self, span: array[int], key: NodeKey) -> None:
        """Raises ValueError if the tokens are here under another key."""
        index = bisect_left(self._spans, span)
        if index < len(self._spans) and self._spans[index] == span:
            raise ValueError(f"node {key.hex()}: {self.keys[index].hex()} has the same tokens")
        self._spans.insert(index, span)
        self.keys.insert(index, key)
        self._lengths[len(span)] += 1
        self.longest = max(self.longest, len(span))

    def discard(self, span: array[int]) -> None:
        index = bisect_left(self._spans, span)
        del self._spans[index], self.keys[index]
        self._lengths[len(span)] -= 1
        if not self._lengths[len(span)]:
            del self._lengths[len(span)]
            self.longest = max(self._lengths, default=0)

    def whole(self, rest: array[int]) -> list[NodeKey]:
        """Keys of the children that are prefixes of `rest`, longest first."""
        keys = []
        while rest:
            index = bisect_right(self._spans, rest) - 1
            if index < 0:
                break
            shared = common_prefix(self._spans[index], rest)
            if shared == len(self._spans[index]):
                keys.append(self.keys[index])
                shared -= 1
            rest = rest[:shared]  # any other prefix of `rest` is no longer than this
        return keys

    def longest_part(
        self, rest: array[int], is_usable: Callable[[NodeKey], bool]
    ) -> tuple[NodeKey | None, int]:
        """The usable child that shares most tokens with `rest`, and how many; or (None, 0)."""
        index = bisect_right(self._spans, rest)
        best: tuple[NodeKey | None, int] = (None, 0)
        for side in (range(index - 1, -1, -1), range(index, len(self.keys))):
            near = next((i for i in side if is_usable(self.keys[i])), None)
            shared = 0 if near is None else common_prefix(self._spans[near], rest)
            if near is not None and shared > best[1]:
                best = self.keys[near], shared
        return best


class Tree:
    """Nodes by key. A node is never split: branches that part inside one are siblings with a common
    beginning, and the match takes the better one."""

    def __init__(self) -> None:
        self._nodes: dict[NodeKey, Node] = {}
        self._children: dict[NodeKey | None, Siblings] = {}
        self._num_bytes: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self._num_nodes: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self.num_changes = 0  # a match is valid as long as this is unchanged

    def __repr__(self) -> str:
        leaves = sum(key not in self._children for key in self._nodes)
        held = ", ".join(
            f"{tier}: {self._num_nodes[tier]} nodes {self._num_bytes[tier]} bytes"
            for tier in sorted(TIERS, reverse=True)
        )
        return f"Tree({len(self)} nodes, {leaves} leaves; {held})"

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, key: NodeKey) -> bool:
        return key in self._nodes

    def __getitem__(self, key: NodeKey) -> Node:
        return self._nodes[key]

    def num_bytes(self, tier: Tier) -> int:
        """Bytes that all nodes take in `tier`."""
        return self._num_bytes[tier]

    def num_nodes(self, tier: Tier) -> int:
        """How many nodes `tier` holds."""
        return self._num_nodes[tier]

    def chain(self, key: NodeKey | None) -> tuple[Node, ...]:
        """The nodes from the root to `key`, inclusive."""
        nodes = []
        while key is not None:
            nodes.append(self._nodes[key])
            key = nodes[-1].parent
        return tuple(reversed(nodes))

    def children(self, key: NodeKey | None) -> list[Node]:
        """The children of `key`; of the root for None."""
        return [self._nodes[child] for child in self._keys_below(key)]

    def match(
        self,
        tokens: Sequence[int],
        *,
        recurrent: bool,
        chunk_tokens: int = 64,
        tiers: AbstractSet[Tier] = TIERS,
    ) -> Match:
        """The longest prefix of `tokens` that can be restored from nodes in `tiers`.

        Attention can use whole nodes and, of one more, the tokens up to a multiple of
        `chunk_tokens`. A recurrent model can only continue where a state is held. Unless the match
        is exact, the last token is left over: running it gives the logits. Tokens are compared, so
        no collision of keys can give a wrong prefix.
        """
        need = PromptNeed(pack_tokens(tokens), recurrent, chunk_tokens)
        best, num_shared = self._search(need, tiers)
        if best.num_tokens == 0:
            return Match((), None, 0, False, num_shared, self._why_nothing(num_shared, recurrent))
        part = None if best.part is None else self._nodes[best.part]
        nodes = self.chain(best.last)
        exact = best.num_tokens == len(tokens)
        return Match(nodes, part, best.num_tokens, exact, num_shared, None)

    def whole_nodes(self, tokens: array[int]) -> list[Node]:
        """The nodes that lie entirely within `tokens`, on every path, parents first."""
        found: list[Node] = []
        walk: list[tuple[NodeKey | None, int]] = [(None, 0)]
        while walk:
            parent, begin = walk.pop()
            if (siblings := self._children.get(parent)) is not None:
                rest = tokens[begin : begin + siblings.longest]
                below = [self._nodes[key] for key in siblings.whole(rest)]
                walk += [(node.key, node.end) for node in below]
                found += below
        return found

    def insert(self, node: Node) -> Node:
        """Add a node whose parent is here, or add tiers, hits and a later last use to the node with
        the same key. Returns the node as it is now.

        Raises ValueError for a node that is inconsistent in itself, with its parent, or with the
        node that has its key or its tokens; the tree is unchanged then.
        """
        _check(node)
        known = self._nodes.get(node.key)
        if known is not None:
            node = _merged(known, node)
        else:
            self._check_parent(node)
            siblings = self._children.get(node.parent, Siblings())
            siblings.add(node.tokens, node.key)
            self._children[node.parent] = siblings
        return self._put(node)

    def touch(self, keys: Iterable[NodeKey], now_s: float) -> None:
        """Count a hit on each of the nodes."""
        for key in keys:
            node = self._nodes[key]
            used_s = max(node.last_used_s, now_s)
            self._put(replace(node, hits=node.hits + 1, last_used_s=used_s))

    def drop_state(self, key: NodeKey, tier: Tier) -> Node:
        """Forget what `tier` holds for the end of the node: the state and the logits."""
        node = self._nodes[key]
        gone = frozenset((tier,))
        return self._put(
            replace(
                node, state_tiers=node.state_tiers - gone, logits_tiers=node.logits_tiers - gone
            )
        )

    def remove(self, key: NodeKey, tier: Tier) -> list[Node]:
        """Forget that `tier` holds the node. Once no tier does, the node is removed, and with it
        all of its descendants, in any tier: no prompt could reach them again.

        Returns the removed nodes as they were before: the caller frees what other tiers hold of
        them.
        """
        node = self._nodes[key]
        if node.tiers - {tier}:
            self.drop_state(key, tier)
            self._put(replace(self._nodes[key], tiers=node.tiers - {tier}))
            return []
        gone = [node]
        for above in gone:  # grows during the loop
            gone.extend(self.children(above.key))
        for node in gone:
            self._forget(node)
        return gone

    def _search(self, need: PromptNeed, tiers: AbstractSet[Tier]) -> tuple[Candidate, int]:
        """The best candidate, and the most tokens that a path shares with the prompt."""
        best, num_shared = Candidate(), 0
        walk: list[tuple[NodeKey | None, int, int]] = [(None, 0, 0)]
        while walk:
            parent, begin, in_memory = walk.pop()
            siblings = self._children.get(parent)
            if siblings is None:
                continue
            rest = need.prompt[begin : begin + siblings.longest]
            for node in map(self._nodes.__getitem__, siblings.whole(rest)):
                if node.tiers & tiers:
                    held = in_memory + ("memory" in node.tiers) * len(node.tokens)
                    walk.append((node.key, node.end, held))
                    best = max(best, need.whole(node, held, tiers), key=Candidate.rank)
            key, shared = siblings.longest_part(rest, lambda k: bool(self._nodes[k].tiers & tiers))
            num_shared = max(num_shared, begin + shared)
            if key is not None:
                part = need.part(self._nodes[key], begin + shared, in_memory)
                best = max(best, part, key=Candidate.rank)
        return best, num_shared

    def _why_nothing(self, num_shared: int, recurrent: bool) -> MissReason:
        if not self._nodes:
            return MissReason.EMPTY
        if num_shared == 0:
            return MissReason.NO_COMMON_PREFIX
        return MissReason.NO_STATE if recurrent else MissReason.TOO_SHORT

    def _keys_below(self, key: NodeKey | None) -> list[NodeKey]:
        siblings = self._children.get(key)
        return [] if siblings is None else siblings.keys

    def _check_parent(self, node: Node) -> None:
        if node.parent is None:
            expected = 0
        elif node.parent in self._nodes:
            expected = self._nodes[node.parent].end
        else:
            raise ValueError(f"node {node.key.hex()}: its parent {node.parent.hex()} is not here")
        if node.begin != expected:
            raise ValueError(
                f"node {node.key.hex()}: begins at {node.begin}, its parent ends at {expected}"
            )

    def _put(self, node: Node) -> Node:
        known = self._nodes.get(node.key)
        if known is not None:
            self._count(known, -1)
        self._count(node, 1)
        self._nodes[node.key] = node
        self.num_changes += 1
        return node

    def _count(self, node: Node, sign: int) -> None:
        for tier in node.tiers:
            self._num_bytes[tier] += sign * node.bytes_in(tier)
            self._num_nodes[tier] += sign

    def _forget(self, node: Node) -> None:
        del self._nodes[node.key]
        self.num_changes += 1
        self._count(node, -1)
        siblings = self._children[node.parent]
        siblings.discard(node.tokens)
        if not siblings.keys:
            del self._children[node.parent]


def parents_first(nodes: Iterable[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes in an order in which a tree can insert them, and those without a chain to the
    root.
    """
    rooted, orphans = [], []
    ends: dict[NodeKey | None, int] = {None: 0}
    for node in sorted(nodes, key=lambda node: node.begin):
        if ends.get(node.parent) == node.begin:
            ends[node.key] = node.end
            rooted.append(node)
        else:
            orphans.append(node)
    return rooted, orphans


def _check(node: Node) -> None:
    """Raise ValueError for a node that is inconsistent in itself."""
    name = f"node {node.key.hex()}"
    if (node.parent is None) != (node.begin == 0) or node.begin < 0 or not node.tokens:
        raise ValueError(
            f"{name}: {len(node.tokens)} tokens from {node.begin} on below {node.parent!r}; "
            "a span begins at 0 without a parent and later with one, and is not empty"
        )
    if not node.tiers or not node.state_tiers | node.logits_tiers <= node.tiers <= TIERS:
        raise ValueError(
            f"{name}: tiers {set(node.tiers)}, state in {set(node.state_tiers)}, "
            f"logits in {set(node.logits_tiers)}; the first must hold the others"
        )


def _merged(known: Node, node: Node) -> Node:
    """`known`, with the tiers of `node` added. Raises ValueError if their tokens differ."""
    if (known.parent, known.begin, known.tokens) != (node.parent, node.begin, node.tokens):
        raise ValueError(
            f"node {node.key.hex()}: {node.begin} to {node.end} are not the tokens that have this "
            f"key, {known.begin} to {known.end}"
        )
    return replace(
        known,
        tiers=known.tiers | node.tiers,
        state_tiers=known.state_tiers | node.state_tiers,
        logits_tiers=known.logits_tiers | node.logits_tiers,
        state_bytes=max(known.state_bytes, node.state_bytes),
        file_bytes=known.file_bytes if node.file_bytes is None else node.file_bytes,
        end_file_bytes=known.end_file_bytes if node.end_file_bytes is None else node.end_file_bytes,
        is_turn_end=known.is_turn_end or node.is_turn_end,
        hits=max(known.hits, node.hits),
        last_used_s=max(known.last_used_s, node.last_used_s),
        saved_at_s=max(known.saved_at_s, node.saved_at_s),
    )
