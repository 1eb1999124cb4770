"""Attention on GPUs: fused kernels, in CUDA C++ or Triton for a lane's single row, in Gluon for the
many rows of a prompt on Hopper, and torch's library for them elsewhere.

Everything except passes of many rows can be captured as a CUDA graph, and reads `rows` and `paths`
from the device only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from luceasync.kernels import attention as attention_kernels
from luceasync.kernels import attention_cuda, prefill_attention, tree_attention, tree_attention_cuda
from luceasync.kernels import rows as row_kernels
from luceasync.kernels.block_attention import attend_block, merge
from luceasync.kernels.chunk_scores import add_scores
from luceasync.kernels.commit import commit_attention, commit_recent
from luceasync.kernels.positions import rotation
from luceasync.kernels.prepared_rows import FewRows, room_for_few
from luceasync.models.mixers.attention_sizes import AttentionSizes, HeadNorms
from luceasync.models.mixers.attention_torch import Rotation, attend_one, frequencies
from luceasync.models.mixers.mixer import State
from luceasync.models.pass_rows import NO_LANE, PastBlocks, Paths, Rows
from luceasync.models.quant.gpu import TiledQuantWeight
from luceasync.models.trees import Trees
from luceasync.models.weights import Weight

# Not cuDNN: it builds a plan for each new shape first, which takes 20 ms on an H200.
LIBRARY_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
FLASH_ALIGNMENT = 8  # of its head size
# Rows times heads from which on our kernel fills a GPU. If there are fewer, the library divides
# keys among programs, and is then as fast: measured on an H200 with 32 heads after 30,000 rows.
MANY_QUERIES = 8192


class TritonAttention:
    """Attention as fused kernels; TorchAttention documents the methods."""

    def __init__(self, spec: AttentionSizes) -> None:
        self._spec = spec
        # On the device of the first pass, which is that of all passes.
        self._frequencies: Tensor | None = None
        self._arrivals: Tensor | None = None  # counters of this body's CUDA C++ launches

    def prepare(self, positions: Tensor) -> Rotation:
        if self._frequencies is None:
            self._frequencies = frequencies(self._spec, positions.device)
        return rotation(positions, self._frequencies, self._spec.rope.magnitude)

    def attend(self, projected: Tensor, norms: HeadNorms, state: State, rows: Rows) -> Tensor:
        spec = self._spec
        cos, sin = rows.prepared[spec]
        keys, values, *ring = state
        weights = (norms.query, norms.key, norms.eps)
        if projected.shape[1] == 1 and rows.past is None:
            return self._attend_one(projected[:, 0], weights, state, rows)[:, None]
        queries = row_kernels.write_heads(
            projected,
            weights,
            keys,
            values,
            rows.lanes,
            rows.row_indices,
            rows.tables,
            (cos, sin),
            num_heads=spec.num_heads,
            rotary_dim=spec.rotary_dim,
        )
        for recent in ring:
            _keep_recent(recent, queries, rows)
        if rows.past is None:
            out = _attend_entries(queries, keys, values, rows).flatten(2)
        else:
            [entry] = rows.entries
            own = keys[entry.lane, entry.write], values[entry.lane, entry.write]
            newest = ring[0][entry.lane] if ring else None
            out = attend_past(queries[0], rows.past, own, newest).flatten(1)[None]
        if spec.gated:
            out = out * torch.sigmoid(projected[..., -spec.query_dim :])
        return out

    def _attend_one(
        self,
        projected: Tensor,
        norms: tuple[Tensor | None, Tensor | None, float],
        state: State,
        rows: Rows,
        few: FewRows | None = None,
    ) -> Tensor:
        """Attend with one row of each lane: [entries, projection width] -> [entries, query_dim], or
        into `few`, if CUDA C++ attends."""
        spec = self._spec
        cos, sin = (angle[:, 0] for angle in rows.prepared[spec])
        keys, values, *ring = state
        attend = attention_kernels.attend
        if attention_cuda.can_attend(projected, keys, spec.num_heads, spec.rotary_dim):
            if self._arrivals is None:  # made when warming up, before a graph is captured
                self._arrivals = attention_cuda.new_arrivals(keys.device)
            attend = partial(attention_cuda.attend, arrivals=self._arrivals, few=few)
        return attend(
            projected,
            norms,
            keys,
            values,
            rows.lanes,
            rows.row_indices[:, 0],
            rows.tables,
            (cos, sin),
            num_heads=spec.num_heads,
            rotary_dim=spec.rotary_dim,
            gated=spec.gated,
            ring=ring[0] if ring else None,
        )

    def add(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        output: Weight,
        x: Tensor,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        spec = self._spec
        is_row = projected.shape[1] == 1 and rows.past is None
        if (
            is_row
            and isinstance(output, TiledQuantWeight)
            and output.wants_few(flat)
            and attention_cuda.can_attend(
                projected[:, 0], state[0], spec.num_heads, spec.rotary_dim
            )
        ):
            weights = (norms.query, norms.key, norms.eps)
            few = room_for_few(projected, len(flat), spec.query_dim)
            self._attend_one(projected[:, 0], weights, state, rows, few)
            return output.add_few(few, flat).view_as(x)
        return output.linear_add(self.attend(projected, norms, state, rows), x)

    def attend_tree(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        trees: Trees,
        scratch: State,
    ) -> Tensor:
        given, sizes = self._tree(projected, norms, state, rows, trees, scratch)
        if self._is_small(projected, state):
            return tree_attention_cuda.attend_tree(*given, **sizes).rows()
        return tree_attention.attend_tree(*given, **sizes)

    def add_tree(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        trees: Trees,
        scratch: State,
        output: Weight,
        x: Tensor,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        is_small = self._is_small(projected, state)
        if is_small and isinstance(output, TiledQuantWeight) and output.wants_arranged(flat):
            given, sizes = self._tree(projected, norms, state, rows, trees, scratch)
            parts = tree_attention_cuda.attend_tree(*given, **sizes)
            return output.add_few(parts.arranged([output.coding]), flat).view_as(x)
        mixed = self.attend_tree(projected, norms, state, rows, trees, scratch)
        return output.linear_add(mixed, x)

    def _is_small(self, projected: Tensor, state: State) -> bool:
        """Whether CUDA C++ attends with the trees."""
        spec = self._spec
        return tree_attention_cuda.can_attend(projected, state[0], spec.num_heads, spec.rotary_dim)

    def _tree(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        trees: Trees,
        scratch: State,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of both kernels of trees."""
        spec = self._spec
        keys, values, *_ = state
        new_keys, new_values, *new_queries = scratch
        given = (
            projected,
            (norms.query, norms.key, norms.eps),
            keys,
            values,
            rows.lanes,
            rows.row_indices,
            rows.tables,
            rows.prepared[spec],
            trees.ancestors,
            (new_keys, new_values),
        )
        sizes = {
            "num_heads": spec.num_heads,
            "rotary_dim": spec.rotary_dim,
            "gated": spec.gated,
            "queries": new_queries[0] if new_queries else None,
        }
        return given, sizes

    def commit(self, scratch: State, state: State, paths: Paths) -> None:
        (new_keys, new_values, *queries), (keys, values, *ring) = scratch, state
        path = (paths.lanes, paths.begins, paths.rows, paths.counts)
        commit_attention((new_keys, new_values), keys, values, *path, paths.tables)
        for new, recent in zip(queries, ring, strict=True):
            commit_recent(new, recent, *path)


def attend_past(
    q: Tensor, past: PastBlocks, own: tuple[Tensor, Tensor], recent: Tensor | None
) -> Tensor:
    """attention_torch.attend_past in kernels."""
    total = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    whole: tuple[Tensor, Tensor] | None = None
    end = 0
    for begin, (keys, values) in past.blocks():
        if recent is not None:
            past.probe(recent, keys, begin)
        out, log_sum = attend_block(q, keys, values, is_causal=False)
        if whole is None:
            whole = total.copy_(out), log_sum
        else:
            merge(whole, (out, log_sum), total)
        end = begin + len(keys)
    if recent is not None:
        past.probe(recent, own[0], end)
    part = attend_block(q, *own, is_causal=True)
    if whole is None:
        return part[0]
    merge(whole, part, found := torch.empty_like(q))
    return found


def _keep_recent(ring: Tensor, queries: Tensor, rows: Rows) -> None:
    """Write each lane's newest queries to its ring [lanes, newest, heads, head_dim], as
    attention_torch.keep_recent does, with row indices that only the device knows.
    """
    kept = queries[:, -ring.shape[1] :]
    places = rows.row_indices[:, -ring.shape[1] :] % ring.shape[1]
    ring[rows.lanes.long()[:, None], places.long()] = kept


def _attend_entries(queries: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """Attend with written rows: queries [entries, rows, heads, head_dim] -> the same shape."""
    outputs = [
        torch.zeros_like(queries[i])
        if entry.lane == NO_LANE
        else attend_rows(queries[i], keys[entry.lane, entry.read], values[entry.lane, entry.read])
        for i, entry in enumerate(rows.entries)
    ]
    return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)


def attend_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """attention_torch.attention on GPUs; shapes as there."""
    if q.shape[0] == 1:
        return attend_one(q, k, v, k.shape[0])
    if q.shape[0] * q.shape[1] >= MANY_QUERIES and prefill_attention.can_attend(q):
        out: Tensor = prefill_attention.attend_rows(q, k, v)
        return out
    return attend_causally(q, k, v)


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`attend_rows` by the library's kernels for causal attention: the ones that
    torch.nn.attention.bias.causal_lower_right selects. Importing that module would load torch's
    compiler, which takes seconds of a start."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(LIBRARY_KERNELS):
        return _by_library(q, k, v)[0].transpose(0, 1)


def _by_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1, heads, rows, head_dim] each; the last query sees all keys."""
    head_dim = q.shape[3]
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    params = SDPAParams(q, k, v, None, 0.0, False, True)  # no dropout, not causal, grouped heads
    if head_dim % FLASH_ALIGNMENT == 0 and can_use_flash_attention(params):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        causal: Tensor = flash(q, k, v, 0.0, True, False, scale=head_dim**-0.5)[0]  # lower right
        return causal
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class TritonProbe:
    """A probe as a kernel."""

    def probe(
        self,
        recent: Tensor,
        rows: Tensor,
        begin: int,
        num_tokens: int,
        chunk_tokens: int,
        scores: Tensor,
    ) -> None:
        add_scores(recent, rows, begin, num_tokens, chunk_tokens, scores)
