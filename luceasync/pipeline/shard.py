"""Layers [begin, end) on one device: their weights, their lanes' state, one forward pass.

The first shard also embeds tokens, the last one projects to logits. Knows no other shard and no
request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.hoststore.memory import HostMemory
from luceasync.hoststore.node_store import NodeStore
from luceasync.kv.pages import CHUNK_TOKENS, PageEvent, num_chunks
from luceasync.models.layers import Norm, VerifyPass, rotation
from luceasync.models.loader import TensorReader, TensorSource
from luceasync.models.pass_rows import NO_LANE, Entry, Kept, Paths, Rows
from luceasync.models.scratch import VerifyScratch
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.adapter import adapter_of
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import Platform
from luceasync.pipeline.shard_plan import ShardPlan

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Shard:
    """One shard. Synchronous; used from the engine thread only."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        shard: ShardPlan,
        platform: Platform,
        source: TensorSource,
        advance: Callable[[int], None],
        memory: HostMemory,
        tapped: Sequence[int] = (),
    ) -> None:
        """Read the shard's weights and allocate its state; the rows after each layer of `tapped`
        that is here are kept in `taps`. Raises ModelError.
        """
        self.plan = shard
        self.platform = platform
        self.device = platform.device
        self._spec = spec
        dtype = DTYPES[plan.dtype]
        self._ops, self._tree_ops = platform.ops, platform.tree_ops
        reader = TensorReader(source, spec, self.device, dtype, advance, self._ops.pack)
        adapter, self.layers = adapter_of(spec), range(shard.begin, shard.end)
        self._layers = [adapter.read_layer(reader, layer) for layer in self.layers]
        self._embedding, self._norm, self._head = _read_ends(reader, shard)
        self.cache = adapter.allocate(
            spec,
            self.layers,
            num_lanes=plan.parallel,
            num_pages=plan.num_pages,
            dtype=dtype,
            device=self.device,
        )
        num_rows = plan.num_scratch_rows(shard)
        self.scratch = VerifyScratch(
            spec, self.layers, num_rows=num_rows, dtype=dtype, device=self.device
        )
        self._tapped = frozenset(tapped)
        self.taps: dict[int, Tensor] = {}  # of the last pass: layer -> [entries, rows, hidden]
        number, copies = plan.shards.index(shard), platform.copies(self.cache)
        self.nodes = NodeStore(self.cache, number, memory, copies)

    def on_device(self) -> AbstractContextManager[object]:
        """Inside it kernels are launched on this shard's device."""
        return self.platform.on_device()

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [entries, rows] on this device -> [entries, rows, hidden]. First shard
        only.
        """
        assert self._embedding is not None, "only the first shard embeds"
        return F.embedding(tokens, self._embedding)

    def rows(self, batch: Batch) -> Rows:
        """The batch in this device's terms; its pages must be placed."""
        entries = tuple(
            self._entry(lane, begin, batch.num_rows)
            for lane, begin in zip(batch.lanes, batch.begins, strict=True)
        )
        positions = torch.tensor(batch.begins, dtype=torch.int32)[:, None]
        positions = (positions + torch.arange(batch.num_rows, dtype=torch.int32)).to(self.device)
        lanes = torch.tensor(batch.lanes, dtype=torch.int32).to(self.device)
        return self.rows_from(entries, lanes, positions)

    def rows_from(self, entries: tuple[Entry, ...], lanes: Tensor, positions: Tensor) -> Rows:
        """Rows from tensors that are on this device already."""
        cos, sin = rotation(self._spec.attention, positions)
        return Rows(entries, lanes, positions, self.cache.tables, cos, sin)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Run the layers. x: [entries, rows, hidden] on this device; state moves on in place."""
        self.taps = {}
        of_layers = zip(self.layers, self._layers, self.cache.layers, strict=True)
        for index, layer, state in of_layers:
            x = layer.forward(self._ops, x, state, rows)
            self._tap(index, x)
        return x

    def tree_rows(self, batch: Batch, depths: Tensor) -> Rows:
        """Rows of a verify pass: `depths` int32 [entries, rows] below each lane's committed end."""
        entries = tuple(
            Entry(lane, begin, begin, slice(0, 0), self._committed(lane, begin))
            for lane, begin in zip(batch.lanes, batch.begins, strict=True)
        )
        begins = torch.tensor(batch.begins, dtype=torch.int32).to(self.device)
        lanes = torch.tensor(batch.lanes, dtype=torch.int32).to(self.device)
        return self.rows_from(entries, lanes, begins[:, None] + depths)

    def trees(self, parents: Tensor) -> VerifyPass:
        """parents: int32 [entries, rows] on this device; see TorchTrees.trees."""
        reach = self._spec.delta.conv_kernel if self._spec.delta else 1
        return VerifyPass(self._tree_ops, self._tree_ops.trees(parents, reach))

    def verify(self, x: Tensor, rows: Rows, step: VerifyPass) -> Tensor:
        """Run the layers over trees of rows and write nothing but the scratch; `commit` then takes
        paths. x: [entries, rows, hidden] on this device.
        """
        self.taps = {}
        scratch = self.scratch.shaped(*x.shape[:2])
        of_layers = zip(self.layers, self._layers, self.cache.layers, scratch.layers, strict=True)
        for index, layer, state, kept in of_layers:
            x = layer.verify(self._ops, x, state, rows, step, kept)
            self._tap(index, x)
        return x

    def paths(self, batch: Batch, paths: Sequence[Sequence[int]]) -> Paths:
        """What to keep of the verify pass of `batch`: of each entry the rows of its path; their
        pages must be placed.
        """
        kept = []
        for i, (lane, begin, path) in enumerate(zip(batch.lanes, batch.begins, paths, strict=True)):
            if path:
                places = self.cache.places(lane, begin, begin + len(path))
                kept.append(Kept(i, lane, places, torch.tensor(path, device=self.device)))
        counts = [len(path) for path in paths]
        filled = [[*path, *[0] * (batch.num_rows - len(path))] for path in paths]
        numbers = (batch.lanes, batch.begins, filled, counts)
        tensors = (torch.tensor(n, dtype=torch.int32).to(self.device) for n in numbers)
        return Paths(tuple(kept), *tensors, self.cache.tables)

    def commit(self, paths: Paths) -> None:
        """Keep the rows of `paths` of the last `verify`: they become their lanes' next tokens."""
        commit = {
            "attention": self._tree_ops.commit_attention,
            "delta": self._tree_ops.commit_delta,
        }
        for kind, scratch in self.scratch.shaped(*paths.rows.shape).stacked.items():
            commit[kind](scratch, *self.cache.stacked[kind], paths)

    def project_rows(self, x: Tensor) -> Tensor:
        """The head alone, without the final norm. x: [..., hidden] -> logits float32 [..., vocab].
        Last shard only.
        """
        assert self._head is not None, "only the last shard projects"
        return self._ops.linear(x, self._head).float()

    def project(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [..., hidden] -> logits float32 [..., vocab], in `out` if it is given. Last shard
        only.
        """
        assert self._norm is not None and self._head is not None, "only the last shard projects"
        logits = self._ops.norm_linear(x, self._norm.weight, self._norm.eps, self._head)
        return logits.float() if out is None else out.copy_(logits)

    def place(self, events: Sequence[PageEvent]) -> None:
        """Follow the page map."""
        self.cache.place(events)

    def reset(self, lane: int) -> None:
        """Make the lane as if no token had ever run on it."""
        self.nodes.reset(lane)

    def close(self) -> None:
        """Let weights and state go. May be called twice."""
        self._layers.clear()
        self._embedding = self._norm = self._head = None
        self.taps = {}
        self.scratch.close()
        self.nodes.close()
        self.cache.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and state that are held."""
        tensors = list(_tensors([self._layers, self._norm]))
        ends = {id(t): t for t in (self._embedding, self._head) if t is not None}
        weights = sum(t.numel() * t.element_size() for t in [*tensors, *ends.values()])
        return weights + self.cache.num_bytes + self.scratch.num_bytes

    def _tap(self, layer: int, x: Tensor) -> None:
        if layer in self._tapped:
            self.taps[layer] = x.clone()  # the next layer may overwrite it

    def _committed(self, lane: int, num_tokens: int) -> slice | Tensor:
        """Places of the lane's first tokens in whole chunks: see models.trees.attend_tree."""
        if lane == NO_LANE:
            return slice(0, 0)
        return self.cache.places(lane, 0, num_chunks(num_tokens) * CHUNK_TOKENS)

    def _entry(self, lane: int, begin: int, num_rows: int) -> Entry:
        if lane == NO_LANE:
            return Entry(NO_LANE, 0, 0, slice(0, 0), slice(0, 0))
        end = begin + num_rows
        places = self.cache.places
        # A decode step reads whole chunks: see models.ops.attend_one.
        read_end = end if num_rows > 1 else num_chunks(end) * CHUNK_TOKENS
        return Entry(lane, begin, end, places(lane, begin, end), places(lane, 0, read_end))


def _read_ends(
    reader: TensorReader, shard: ShardPlan
) -> tuple[Tensor | None, Norm | None, Tensor | None]:
    """Embedding, final norm and head, as far as this shard has them; tied ones are one tensor."""
    spec = reader.spec
    shape = (spec.vocab_size, spec.hidden_size)
    embedding_name, norm_name = f"{spec.prefix}embed_tokens.weight", f"{spec.prefix}norm.weight"
    embedding = norm = head = None
    if shard.is_first:
        embedding = reader.table(embedding_name, shape)
    if shard.is_last:
        weight = reader.vector(norm_name, {norm_name: (spec.hidden_size,)}, spec.norm_offset)
        norm = Norm(weight, spec.norm_eps)
        if not spec.tied_embeddings:
            head = reader.matrix(["lm_head.weight"], {"lm_head.weight": shape})
        else:  # never packed, so that it gives the same bits where the embedding is elsewhere
            head = reader.table(embedding_name, shape) if embedding is None else embedding
    return embedding, norm, head


def _tensors(tree: object) -> list[Tensor]:
    """Every tensor inside nested lists and frozen dataclasses."""
    match tree:
        case Tensor():
            return [tree]
        case list() | tuple():
            return [t for item in tree for t in _tensors(item)]
    names = getattr(type(tree), "__dataclass_fields__", ())
    return [t for name in names for t in _tensors(getattr(tree, name))]
