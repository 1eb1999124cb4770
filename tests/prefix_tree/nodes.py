"""Nodes for tests, and a server that saves what it would have run."""

import hashlib
from collections.abc import Sequence

from luceasync.prefix_tree.node import Match, Node, pack_tokens
from luceasync.prefix_tree.policy import plan_cuts
from luceasync.prefix_tree.tree import Tree

MEMORY = frozenset({"memory"})
DISK = frozenset({"disk"})
BOTH = MEMORY | DISK


def make(parent: Node | None, tokens: Sequence[int], **fields) -> Node:
    """A node in memory of 10 bytes a token; its key follows from its tokens."""
    packed = pack_tokens(tokens)
    above = b"" if parent is None else parent.key
    return Node(
        key=hashlib.blake2b(above + packed.tobytes(), digest_size=8).digest(),
        parent=None if parent is None else parent.key,
        begin=0 if parent is None else parent.end,
        tokens=packed,
        num_bytes=10 * len(packed),
        **{"tiers": MEMORY, "state_bytes": 100, **fields},
    )


def grow(tree: Tree, *spans: Sequence[int], **fields) -> list[Node]:
    """A chain of nodes from the root, inserted."""
    chain: list[Node] = []
    for span in spans:
        chain.append(tree.insert(make(chain[-1] if chain else None, span, **fields)))
    return chain


def serve(
    tree: Tree, tokens: Sequence[int], boundaries: Sequence[int], *, chunk_tokens: int | None
) -> Match:
    """Match the tokens, run the rest of them, save what was run. Recurrent, with states at chunk
    ends, where `chunk_tokens` is given.
    """
    recurrent = chunk_tokens is not None
    match = tree.match(tokens, recurrent=recurrent)
    parent = match.nodes[-1] if match.nodes else None
    begin = parent.end if parent else 0
    step = chunk_tokens or 1
    stops = range(begin // step * step + step, len(tokens) + 1, step)
    for cut in plan_cuts(begin, len(tokens), boundaries, interval_tokens=2048, stops=stops):
        parent = make(
            parent,
            tokens[begin : cut.end],
            is_turn_end=cut.is_turn_end,
            state_tiers=MEMORY if recurrent else frozenset(),
            logits_tiers=MEMORY if cut.end == len(tokens) else frozenset(),
        )
        parent, begin = tree.insert(parent), cut.end
    return match
