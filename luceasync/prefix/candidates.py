"""What a prompt could take up: chains of whole nodes, and perhaps a part of one more.

Pure values; which nodes there are is for the tree to know.
"""

from __future__ import annotations

from array import array
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from luceasync.node_words import NodeKey
from luceasync.prefix.node import Node, Tier


@dataclass(frozen=True, slots=True)
class Candidate:
    """Whole nodes up to the key `last`, then `part`; `in_memory` of the tokens need no disk."""

    num_tokens: int = 0
    in_memory: int = 0
    last: NodeKey | None = None
    part: NodeKey | None = None

    def rank(self) -> tuple[int, int]:
        return self.num_tokens, self.in_memory


@dataclass(frozen=True, slots=True)
class Need:
    """A prompt, and what its model can take up."""

    prompt: array[int]
    recurrent: bool
    chunk_tokens: int

    def whole(self, node: Node, in_memory: int, tiers: AbstractSet[Tier]) -> Candidate:
        """The chain that ends with `node`, if the model can go on from there."""
        if self.recurrent and not node.state_tiers & tiers:
            return Candidate()
        if node.end == len(self.prompt) and not node.logits_tiers & tiers:
            return Candidate()
        return Candidate(node.end, in_memory, node.key)

    def part(self, node: Node, shared_end: int, in_memory: int) -> Candidate:
        """The chain before `node`, and its tokens up to a multiple of the chunk."""
        end = min(shared_end, len(self.prompt) - 1) // self.chunk_tokens * self.chunk_tokens
        if self.recurrent or end <= node.begin:
            return Candidate()
        held = in_memory + ("memory" in node.tiers) * (end - node.begin)
        return Candidate(end, held, node.parent, node.key)
