"""What each chunk of keys weighs for the newest queries of a lane, as a logarithm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import dot_precision

KEY_BYTES = 64 << 10  # of keys in a program


def add_scores(
    recent: Tensor, keys: Tensor, begin: int, num_tokens: int, chunk_tokens: int, scores: Tensor
) -> None:
    """Add log(sum over t of exp(q . k_t / sqrt(head_dim))) over the tokens t of each chunk that are
    among `keys` to its place in `scores`: the log of both sums together.

    recent: queries [newest, heads, head_dim] contiguous, that of position p at p % newest, the last
    of them at `num_tokens` - 1; keys: [tokens, kv_heads, head_dim] contiguous, of tokens from
    `begin` on. A query sees no key behind its own. scores: float32 [heads, newest, chunks]
    contiguous, -inf where nothing is seen.
    """
    num_recent, num_heads, head_dim = recent.shape
    num_keys, num_kv_heads, _ = keys.shape
    first = begin // chunk_tokens
    num_chunks = triton.cdiv(begin + num_keys, chunk_tokens) - first
    block_dim = max(16, triton.next_power_of_2(head_dim))
    # Queries are loaded once for several chunks, as many as fit beside them.
    chunks_each = max(1, min(4, KEY_BYTES // (chunk_tokens * block_dim * keys.element_size())))
    _chunk_scores_kernel[(triton.cdiv(num_chunks, chunks_each), num_kv_heads)](
        recent,
        keys,
        scores,
        begin,
        begin + num_keys,
        num_tokens,
        num_recent,
        scores.shape[2],
        head_dim**-0.5 * 1.4426950408889634,  # scores in base 2
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK_RECENT=max(16, triton.next_power_of_2(num_recent)),
        CHUNK=chunk_tokens,
        CHUNKS=chunks_each,
        PRECISION=dot_precision(keys.dtype),
        num_warps=8,
    )


@kernel(do_not_specialize=["begin", "end", "num_tokens", "num_chunks"])
def _chunk_scores_kernel(
    recent,
    keys,
    scores,
    begin,
    end,
    num_tokens,
    num_recent,
    num_chunks,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_RECENT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = begin // CHUNK + tl.program_id(0) * CHUNKS
    kv_head = tl.program_id(1)
    d = tl.arange(0, BLOCK_DIM)
    d_ok = d[None, :] < HEAD_DIM
    t = first * CHUNK + tl.arange(0, CHUNKS * CHUNK)
    t_ok = (t >= begin) & (t < end)
    at = ((t - begin).to(tl.int64) * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    k = tl.load(keys + at, mask=t_ok[:, None] & d_ok, other=0.0)
    r = tl.arange(0, BLOCK_RECENT)
    r_ok = r < num_recent
    # How far behind the last query the one in place r is: not negative, as remainders in C are not.
    behind = (num_tokens - 1 + num_recent - r) % num_recent
    seen = t_ok[None, :] & (t[None, :] <= (num_tokens - 1 - behind)[:, None])
    c = first + tl.arange(0, CHUNKS)[None, :]
    ok = r_ok[:, None] & (c * CHUNK < end)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        at_query = (r * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + d[None, :]
        q = tl.load(recent + at_query, mask=r_ok[:, None] & d_ok, other=0.0)
        at_score = scores + (head * num_recent + r).to(tl.int64)[:, None] * num_chunks + c
        before = tl.load(at_score, mask=ok, other=float("-inf")) * 1.4426950408889634
        products = tl.dot(q, tl.trans(k).to(q.dtype), input_precision=PRECISION) * scale
        products = tl.where(seen, products, float("-inf"))
        products = tl.reshape(products, [BLOCK_RECENT, CHUNKS, CHUNK])
        best = tl.maximum(tl.max(products, 2), before)
        finite = tl.where(best == float("-inf"), 0.0, best)
        total = tl.sum(tl.exp2(products - finite[:, :, None]), 2) + tl.exp2(before - finite)
        log_sum = (finite + tl.log2(total)) * 0.6931471805599453
        tl.store(at_score, tl.where(total > 0, log_sum, float("-inf")), mask=ok)
