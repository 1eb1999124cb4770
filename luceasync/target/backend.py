"""The target model as the engine sees it: lanes that tokens are run on, whatever the split.

Owns the page map and the shape of each pass. Knows no requests, no sampling and no text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from luceasync.errors import SnapshotMismatch
from luceasync.kv.node import Span, renamed, shares_of
from luceasync.kv.pages import PageMap
from luceasync.models.loader import TensorSource, open_checkpoint
from luceasync.models.rows import NO_LANE
from luceasync.models.spec import ModelSpec
from luceasync.target.adapter import adapter_of
from luceasync.target.group import Group, LocalGroup
from luceasync.target.plan import Plan
from luceasync.target.shard import Batch, Proposal


class LayerSplitBackend:
    """A chain of groups. One device is a chain of one. Synchronous; engine thread only."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        groups: Sequence[Group],
        page_order: Sequence[int] | None = None,
    ) -> None:
        self.plan = plan
        self._adapter = adapter_of(spec)
        self._groups = list(groups)
        self._proposal: Proposal | None = None
        self._pages = PageMap(plan.parallel, plan.num_pages, page_order)

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        plan: Plan,
        source: TensorSource,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> LayerSplitBackend:
        """Load the model as planned; `advance` hears the bytes of each tensor. Raises
        ModelError.
        """
        with torch.inference_mode():
            return cls(spec, plan, [LocalGroup(spec, plan, source, advance)])

    @classmethod
    def open(
        cls,
        model_dir: Path,
        spec: ModelSpec,
        plan: Plan,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> LayerSplitBackend:
        """Load the model in `model_dir`; see `load`."""
        with open_checkpoint(model_dir) as checkpoint:
            return cls.load(spec, plan, checkpoint, advance)

    @torch.inference_mode()
    def prefill(
        self, lane: int, begin: int, tokens: Sequence[int], *, project: bool
    ) -> Tensor | None:
        """Run `tokens` at positions `[begin, begin + len(tokens))` of the lane.

        Returns logits float32 [vocab] after the last token if `project`.
        """
        self._make_room(lane, begin + len(tokens))
        batch = Batch((lane,), (begin,), len(tokens))
        x: Tensor | None = torch.tensor([list(tokens)], dtype=torch.int64)
        for group in self._groups:
            assert x is not None
            x = group.prefill(batch, x, project=project)
        return None if x is None else x[0, 0]

    @torch.inference_mode()
    def decode(
        self, lanes: Sequence[int], positions: Sequence[int], tokens: Sequence[int]
    ) -> Tensor:
        """Run one token on each of several lanes; logits float32 [lanes, vocab], valid until the
        next call."""
        for lane, position in zip(lanes, positions, strict=True):
            self._make_room(lane, position + 1)
        sizes = self.plan.decode_sizes
        missing = sizes[bisect_left(sizes, len(lanes))] - len(lanes)
        batch = Batch((*lanes, *[NO_LANE] * missing), (*positions, *[0] * missing), 1)
        x = torch.tensor([*tokens, *[0] * missing], dtype=torch.int64)[:, None]
        for group in self._groups:
            x = group.decode(batch, x)
        return x[: len(lanes), 0]

    @torch.inference_mode()
    def verify(self, proposal: Proposal, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run trees of tokens after what their lanes have committed, and write nothing.

        `tokens[i]` are those of entry i, as many for each. Returns logits float32 [entries, rows,
        vocab]: row r predicts what follows on the path to r. `commit` then takes a path.
        """
        x = torch.tensor([list(entry) for entry in tokens], dtype=torch.int64)
        for group in self._groups:
            x = group.verify(proposal, x)
        self._proposal = proposal
        return x

    @torch.inference_mode()
    def commit(self, entry: int, path: Sequence[int]) -> None:
        """Keep the rows of `path`, from row 0 on, of entry `entry` of the last `verify`: the lane
        then stands after them. Each entry may be committed once; one that is not costs nothing.
        """
        assert self._proposal is not None, "commit follows verify"
        lane, begin = self._proposal.lanes[entry], self._proposal.begins[entry]
        self._make_room(lane, begin + len(path))
        for group in self._groups:
            group.commit(entry, lane, begin, path)

    @torch.inference_mode()
    def reset(self, lane: int) -> None:
        """Make the lane as if no token had ever run on it."""
        self._pages.release(lane)
        for group in self._groups:
            group.reset(lane)

    @torch.inference_mode()
    def save(self, lane: int, node: str, span: Span) -> None:
        """Keep what the tokens of `span` left behind in the lane, as `node`. The recurrent state is
        that of now: `span.end` must be where the lane stands if it is wanted.
        """
        for group in self._groups:
            group.save(lane, node, span)

    @torch.inference_mode()
    def restore(self, lane: int, nodes: Sequence[str], num_tokens: int) -> None:
        """Make the lane stand after `num_tokens` tokens: a chain of nodes that begins at 0 and ends
        there, the last one with its state.
        """
        self.reset(lane)
        self._make_room(lane, num_tokens)
        for node in nodes:
            for group in self._groups:
                group.restore(lane, node)

    def drop(self, node: str) -> None:
        """Forget a node."""
        for group in self._groups:
            group.drop(node)

    def export(self, node: str) -> dict[str, Tensor]:
        """The node's tensors in host memory, named for this split. They belong to the node."""
        return {name: t for group in self._groups for name, t in group.export(node).items()}

    def adopt(self, node: str, span: Span, tensors: Mapping[str, Tensor]) -> None:
        """Own tensors that any split of this model has exported: all of them, or none.

        Raises SnapshotMismatch; the caller still owns its tensors then.
        """
        named = renamed(tensors, [shard.begin for shard in self.plan.shards])
        shares = shares_of(named, [group.layers for group in self._groups])
        try:
            for group, share in zip(self._groups, shares, strict=True):
                group.adopt(node, span, share)
        except SnapshotMismatch:
            self.drop(node)
            raise

    def compress(self, tokens: Sequence[int], keep_ratio: float) -> list[int]:
        """A shorter prompt that keeps about `keep_ratio` of the tokens.

        Raises ValueError for a ratio that is none, Unsupported where the family cannot.
        """
        if not (math.isfinite(keep_ratio) and 0 < keep_ratio <= 1):
            raise ValueError(f"keep_ratio {keep_ratio}: a number above 0 and up to 1 is expected")
        return self._adapter.compress(tokens, keep_ratio)

    def close(self) -> None:
        """Free everything. May be called twice."""
        for group in self._groups:
            group.close()
        self._groups.clear()

    def _make_room(self, lane: int, num_tokens: int) -> None:
        assert num_tokens <= self.plan.max_ctx_tokens, "the engine keeps lanes within the context"
        events = self._pages.extend(lane, num_tokens)
        if events:
            for group in self._groups:
                group.place(events)
