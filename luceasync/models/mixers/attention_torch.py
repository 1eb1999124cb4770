"""Attention in torch, for any device: the reference of the kernels, and prefill on CPUs.

Addresses keys and values as tensors, and rows by their places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.mixers.attention_sizes import AttentionBody, AttentionSizes, HeadNorms
from luceasync.models.mixers.mixer import State
from luceasync.models.ops import rms_norm
from luceasync.models.pass_rows import Entry, PastBlocks, Paths, Rows, with_padding
from luceasync.models.recent import ring_positions
from luceasync.models.trees import Trees

BLOCK_ROWS = 2048  # keys or values in one product of a decode step

Rotation = tuple[Tensor, Tensor]  # cos and sin, float32 [entries, rows, rotary_dim / 2]
# Attention over one block: the output, float32 [rows, heads, head_dim], and the logarithm of the
# sum of exponentials, float32 [heads, rows], with which blocks are merged into one softmax.
BlockAttention = tuple[Tensor, Tensor]


class TorchAttention(AttentionBody):
    """Attention as plain torch."""

    def __init__(self, spec: AttentionSizes) -> None:
        self._spec = spec
        # On the device of the first pass, which is that of all passes.
        self._frequencies: Tensor | None = None

    def prepare(self, positions: Tensor) -> Rotation:
        if self._frequencies is None:
            self._frequencies = frequencies(self._spec, positions.device)
        return rotation(positions, self._frequencies, self._spec.rope.magnitude)

    def attend(self, projected: Tensor, norms: HeadNorms, state: State, rows: Rows) -> Tensor:
        """Write the rows' keys and values, then let each row attend to positions up to its own.

        projected: [entries, rows, query_dim + 2 kv_dim (+ query_dim of gates)], in this order.
        state: keys and values [lanes, places, kv_heads, head_dim], and the newest queries [lanes,
        RECENT_ROWS, heads, head_dim] if they are kept; all updated in place.
        Returns [entries, rows, query_dim], multiplied by sigmoid(gate) if the family is gated.
        """
        keys, values, *ring = state
        q, k, v, gates = self.heads(projected, norms, rows.prepared[self._spec])
        out = []  # of each entry [rows, heads, head_dim]
        for i, entry in enumerate(rows.entries[: rows.num_lanes]):
            own_keys, own_values = keys[entry.lane], values[entry.lane]
            own_keys[entry.write], own_values[entry.write] = k[i], v[i]
            for recent in ring:
                keep_recent(recent[entry.lane], q[i], entry.begin)
            if rows.past is not None:
                newest = ring[0][entry.lane] if ring else None
                out.append(attend_past(q[i], rows.past, (k[i], v[i]), newest))
                continue
            out.append(self.attend_entry(q[i], own_keys, own_values, entry))
        return gated(of_all(out, q).flatten(2), gates)

    def heads(
        self, projected: Tensor, norms: HeadNorms, turn: Rotation
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return heads_of(projected, self._spec, norms, turn)

    def attend_entry(self, q: Tensor, keys: Tensor, values: Tensor, entry: Entry) -> Tensor:
        """Attention of an entry's rows to its lane's keys and values up to each row.

        q: [rows, heads, head_dim]; keys, values: [places, kv_heads, head_dim], already written.
        Returns [rows, heads, head_dim].
        """
        k_seen, v_seen = keys[entry.read], values[entry.read]
        if len(q) == 1:
            return attend_one(q, k_seen, v_seen, entry.end)
        return attention(q, k_seen, v_seen)

    def attend_tree(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        trees: Trees,
        scratch: State,
    ) -> Tensor:
        """`attend` for trees: each row attends to the committed rows (its entry's `read`) and its
        ancestors. Writes to the scratch only.
        """
        keys, values, *_ = state
        q, k, v, gates = self.heads(projected, norms, rows.prepared[self._spec])
        new_keys, new_values, *new_queries = scratch
        for queries in new_queries:
            queries.copy_(q)
        new_keys.copy_(k)
        new_values.copy_(v)
        out = []
        for i, entry in enumerate(rows.entries[: rows.num_lanes]):
            committed = keys[entry.lane, entry.read], values[entry.lane, entry.read]
            new = new_keys[i], new_values[i]
            out.append(attend_tree(q[i], committed, entry.begin, new, trees.ancestors[i]))
        return gated(of_all(out, q).flatten(2), gates)

    def commit(self, scratch: State, state: State, paths: Paths) -> None:
        """Write the accepted rows of all layers to their places: [layers, lanes, places, ...]."""
        (keys, values, *ring), (new_keys, new_values, *queries) = state, scratch
        for kept in paths.kept:
            for stack, rows in ((keys, new_keys), (values, new_values)):
                stack[:, kept.lane, kept.places] = rows[:, kept.entry, kept.rows]
            for stack, rows in zip(ring, queries, strict=True):
                chosen = rows[:, kept.entry, kept.rows].transpose(0, 1)
                keep_recent(stack[:, kept.lane].transpose(0, 1), chosen, kept.begin)


def of_all(of_lanes: list[Tensor], q: Tensor) -> Tensor:
    """Stack the outputs of lanes, with zeros for padding, in the shape of `q`; a single output is
    not copied."""
    if not of_lanes:
        return torch.zeros_like(q)
    stacked = of_lanes[0][None] if len(of_lanes) == 1 else torch.stack(of_lanes)
    return with_padding(stacked, q.shape[0])


def keep_recent(ring: Tensor, queries: Tensor, begin: int) -> None:
    """Write the newest of `queries` [rows, ...], whose row indices begin at `begin`, to a lane's
    ring [RECENT_ROWS, ...]. Row indices and positions have the same place in it, because absent
    chunks are a multiple of its size."""
    num_kept = min(len(queries), len(ring))
    first = begin + len(queries) - num_kept
    places = torch.arange(first, first + num_kept, device=ring.device) % len(ring)
    ring[places] = queries[len(queries) - num_kept :]


def heads_of(
    projected: Tensor, spec: AttentionSizes, norms: HeadNorms, turn: Rotation
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key and value heads [entries, rows, heads, head_dim], normed and rotated, and the
    gates [entries, rows, query_dim] if the family has them.
    """
    q, k, v, *gates = projected.split_with_sizes(attention_widths(spec), -1)
    q = rotate(heads_norm(q, spec.head_dim, norms.query, norms.eps), spec, turn)
    k = rotate(heads_norm(k, spec.head_dim, norms.key, norms.eps), spec, turn)
    return q, k, v.unflatten(-1, (-1, spec.head_dim)), gates[0] if gates else None


def gated(out: Tensor, gates: Tensor | None) -> Tensor:
    """`out` [entries, rows, query_dim] times sigmoid(gates), if there are any."""
    return out if gates is None else out * torch.sigmoid(gates)


def rotation(positions: Tensor, frequencies: Tensor, magnitude: float = 1.0) -> Rotation:
    """`magnitude` times cos and sin of the angles at `positions`, int32 [entries, rows]."""
    angles = positions.float()[..., None] * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def frequencies(spec: AttentionSizes, device: torch.device) -> Tensor:
    """The angle by which each pair of dimensions turns per position: float32 [half], the same on
    all devices.
    """
    return spec.rope.frequencies(spec.rope_theta, spec.rotary_dim).to(device)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last rows of one sequence.

    q: [rows, heads, head_dim], the queries of the last `rows` positions; k, v: [span, kv_heads,
    head_dim], in order of position. Returns [rows, heads, head_dim]. Query heads that share a kv
    head are folded into rows of one product: no copy of K/V, and on CPUs an order of magnitude
    faster than plain SDPA.
    """
    if q.shape[0] == 1:
        return attend_one(q, k, v, k.shape[0])
    num_rows, span = q.shape[0], k.shape[0]
    place = torch.arange(span, device=q.device)
    return masked_attention(q, k, v, place[None, :] <= place[span - num_rows :, None])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of rows to the places that `mask` [rows, span] allows; shapes as in `attention`."""
    num_rows, group = q.shape[0], q.shape[1] // k.shape[1]
    folded = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
    out = F.scaled_dot_product_attention(
        folded[None],  # [1, kv_heads, group * rows, head_dim]
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask.repeat(group, 1),
    )[0]
    by_head: Tensor = out.unflatten(1, (group, num_rows))
    return by_head.permute(2, 0, 1, 3).flatten(1, 2)


def attend_one(q: Tensor, k: Tensor, v: Tensor, num_seen: int) -> Tensor:
    """Attention of one query row to the first `num_seen` rows of k and v; rows after those may hold
    any finite number. Shapes as in `attention`.

    CPU libraries compile and cache a product for every shape. So rows are processed in blocks and
    in whole chunks of 64, which bounds the number of shapes however long a sequence grows. The
    products are written so that neither K nor V is copied.
    """
    num_kv_heads, head_dim = k.shape[1:]
    folded = q.view(num_kv_heads, -1, head_dim) * head_dim**-0.5  # [kv_heads, group, head_dim]
    scores = torch.cat(
        [
            (block.transpose(0, 1) @ folded.transpose(1, 2)).transpose(1, 2)
            for block in k.split(BLOCK_ROWS)
        ],
        -1,
    )
    scores[..., num_seen:] = -torch.inf
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    blocks = zip(weights.split(BLOCK_ROWS, -1), v.split(BLOCK_ROWS), strict=True)
    products = [share @ block.transpose(0, 1) for share, block in blocks]
    return _sum(products).view_as(q)


def attend_tree(
    q: Tensor,
    committed: tuple[Tensor, Tensor],
    num_committed: int,
    new: tuple[Tensor, Tensor],
    ancestors: Tensor,
) -> Tensor:
    """Attention of a tree's rows to the committed rows and to their ancestors.

    q: [rows, heads, head_dim]; committed: keys and values [span, kv_heads, head_dim], of which the
    first `num_committed` count, and the others hold anything finite; new: keys and values [rows,
    kv_heads, head_dim]; ancestors: bool [rows, rows]. Returns [rows, heads, head_dim]. Blocks and
    whole chunks for the same reason as in `attend_one`.
    """
    keys, values = committed
    num_rows, num_kv_heads, head_dim = new[0].shape
    # [kv_heads, group, rows, head_dim]: query heads that share a kv head are rows of one product.
    folded = (q * head_dim**-0.5).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    folded = folded.flatten(1, 2).transpose(1, 2)
    blocks = [k.transpose(0, 1) @ folded for k in (*keys.split(BLOCK_ROWS), new[0])]
    scores = torch.cat(blocks, 1).transpose(1, 2)  # [kv_heads, group * rows, span + rows]
    span = keys.shape[0]
    scores[..., num_committed:span] = -torch.inf
    within = scores[..., span:].unflatten(1, (-1, num_rows))
    within.masked_fill_(~ancestors, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    shares = [*weights[..., :span].split(BLOCK_ROWS, -1), weights[..., span:]]
    pairs = zip(shares, (*values.split(BLOCK_ROWS), new[1]), strict=True)
    out = _sum([share @ v.transpose(0, 1) for share, v in pairs])
    by_head: Tensor = out.unflatten(1, (-1, num_rows))
    return by_head.permute(2, 0, 1, 3).flatten(1, 2)


def attend_past(
    q: Tensor, past: PastBlocks, own: tuple[Tensor, Tensor], recent: Tensor | None
) -> Tensor:
    """Attention of rows to all of `past`, and causally to themselves.

    q: [rows, heads, head_dim]; own: keys and values [rows, kv_heads, head_dim]; recent: the lane's
    newest queries, which probe the keys that stream by. Returns [rows, heads, head_dim].
    """
    merged: BlockAttention | None = None
    end = 0
    for begin, (keys, values) in past.blocks():
        if recent is not None:
            past.probe(recent, keys, begin)
        part = attend_block(q, keys, values, is_causal=False)
        merged = part if merged is None else merge(merged, part)
        end = begin + len(keys)
    if recent is not None:
        past.probe(recent, own[0], end)
    part = attend_block(q, *own, is_causal=True)
    out, _ = part if merged is None else merge(merged, part)
    return out.to(q.dtype)


def attend_block(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> BlockAttention:
    """Attention of rows to a block, or causally to themselves. Shapes as in `attend_past`; k, v:
    [span, kv_heads, head_dim]. Query heads that share a kv head are rows of one product.
    """
    num_rows, group = q.shape[0], q.shape[1] // k.shape[1]
    folded = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
    mask = None
    if is_causal:
        hidden = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).triu(1)
        mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded[None],  # [1, kv_heads, group * rows, head_dim]
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=None if mask is None else mask.repeat(group, 1),
    )
    by_head = out[0].unflatten(1, (group, num_rows)).permute(2, 0, 1, 3).flatten(1, 2)
    return by_head.float(), log_sum[0].unflatten(1, (group, num_rows)).flatten(0, 1)


def merge(one: BlockAttention, other: BlockAttention) -> BlockAttention:
    """Merge two blocks into one softmax (Milakov & Gimelshein, 2018; Dao, 2022): with
    l = logaddexp(l1, l2), the output is o1 e^(l1 - l) + o2 e^(l2 - l).
    """
    log_sum = torch.logaddexp(one[1], other[1])
    shares = [(part[1] - log_sum).exp().transpose(0, 1)[..., None] for part in (one, other)]
    return one[0] * shares[0] + other[0] * shares[1], log_sum


def attention_widths(spec: AttentionSizes) -> list[int]:
    """Widths of query, key, value (and gate) in the stacked projection."""
    gates = [spec.query_dim] if spec.gated else []
    return [spec.query_dim, spec.kv_dim, spec.kv_dim, *gates]


def heads_norm(x: Tensor, head_dim: int, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm of each head, if any: [..., heads * head_dim] -> [..., heads, head_dim]."""
    heads: Tensor = x.unflatten(-1, (-1, head_dim))
    return heads if weight is None else rms_norm(heads, weight, eps)


def rotate(x: Tensor, spec: AttentionSizes, turn: Rotation) -> Tensor:
    """Apply rotary embedding, halves paired (NeoX). x: [entries, rows, heads, head_dim]."""
    half = spec.rotary_dim // 2
    first, second, rest = x.split_with_sizes((half, half, spec.head_dim - 2 * half), -1)
    first, second = first.float(), second.float()
    cos, sin = (angle[:, :, None] for angle in turn)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class TorchProbe:
    """A probe as plain torch."""

    def probe(
        self,
        recent: Tensor,
        rows: Tensor,
        begin: int,
        num_tokens: int,
        chunk_tokens: int,
        scores: Tensor,
    ) -> None:
        """See ProbeBody. recent: queries [newest, heads, head_dim]; rows: keys [tokens, kv_heads,
        head_dim]. A query scores no key after its own.
        """
        num_recent, num_heads, head_dim = recent.shape
        group = num_heads // rows.shape[1]
        scaled = recent.float() * head_dim**-0.5
        folded = scaled.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
        products = folded @ rows.float().permute(1, 2, 0)
        products = products.view(num_heads, num_recent, -1)  # [heads, newest, tokens]
        end = begin + len(rows)
        if end > num_tokens - num_recent + 1:  # all queries may see keys before that
            tokens = torch.arange(begin, end, device=rows.device)
            hidden = tokens > ring_positions(num_recent, num_tokens, rows.device)[:, None]
            products.masked_fill_(hidden, -torch.inf)
        if begin % chunk_tokens or end % chunk_tokens:
            missing = begin % chunk_tokens, -end % chunk_tokens
            products = F.pad(products, missing, value=-torch.inf)
        found = _log_sums(products.unflatten(-1, (-1, chunk_tokens)))
        part = scores[..., begin // chunk_tokens : begin // chunk_tokens + found.shape[2]]
        part.copy_(torch.logaddexp(part, found))  # a chunk may arrive in two parts


def _log_sums(x: Tensor) -> Tensor:
    """Like logsumexp over the last dimension, but overwrites x, which takes a third of the time."""
    # If nothing is seen, -inf minus a finite number stays -inf.
    best = x.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
    return x.sub_(best).exp_().sum(-1).log_().add_(best[..., 0])
