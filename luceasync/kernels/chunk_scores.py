"""The log attention weight of each chunk of keys for the newest queries of a lane."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import dot_precision, shared_bytes

CHUNKS = 16  # that a program processes at a time
TOGETHER, KEY_BYTES = 2, 32 << 10  # multiplied at once, if they are that small
QUERY_BYTES = 32 << 10  # per program
# Programs take chunks in turns, one on each multiprocessor of a large device: concurrent steps
# still find room, and keys arrive no faster than the bus delivers them.
MOST_PROGRAMS = 132


def add_scores(
    recent: Tensor, keys: Tensor, begin: int, num_tokens: int, chunk_tokens: int, scores: Tensor
) -> None:
    """For each chunk, log-add log(sum over t of exp(q . k_t / sqrt(head_dim))), over its tokens t
    that are among `keys`, to `scores`.

    recent: queries [newest, heads, head_dim] contiguous, that of position p at p % newest, the last
    at position `num_tokens` - 1; keys: [tokens, kv_heads, head_dim] contiguous, of tokens from
    `begin` on. A query sees no later key. scores: float32 [heads, newest, chunks]
    contiguous, -inf if nothing is seen.
    """
    num_recent, num_heads, head_dim = recent.shape
    num_keys, num_kv_heads, _ = keys.shape
    num_chunks = triton.cdiv(begin + num_keys, chunk_tokens) - begin // chunk_tokens
    # All query heads that share a kv head are rows of one product.
    num_rows = num_heads // num_kv_heads * num_recent
    block_dim = max(16, triton.next_power_of_2(head_dim))
    row_bytes = block_dim * recent.element_size()
    block_rows = max(16, min(256, QUERY_BYTES // row_bytes, triton.next_power_of_2(num_rows)))
    # a float32 product is made of three, whose operands need room, too
    parts = 2 if keys.element_size() == 4 else 1
    together = max(1, min(TOGETHER, KEY_BYTES // (parts * row_bytes * chunk_tokens)))
    room = shared_bytes(keys) // (parts * row_bytes) - 3 * together * chunk_tokens
    if room < block_rows:
        room, together = room + 3 * (together - 1) * chunk_tokens, 1
    while block_rows > max(16, room):
        block_rows //= 2
    num_columns = num_kv_heads * triton.cdiv(num_rows, block_rows)
    num_turns = triton.cdiv(num_chunks, CHUNKS)
    _chunk_scores_kernel[(min(num_turns, max(1, MOST_PROGRAMS // num_columns)), num_columns)](
        recent,
        keys,
        scores,
        begin,
        begin + num_keys,
        num_tokens,
        num_recent,
        scores.shape[2],
        num_turns,
        head_dim**-0.5 * 1.4426950408889634,  # scores in base 2
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK_ROWS=block_rows,
        CHUNK=chunk_tokens,
        CHUNKS=CHUNKS,
        TOGETHER=together,
        PRECISION=dot_precision(keys.dtype),
        num_warps=8 if block_rows >= 128 else 4,
        num_stages=2,
    )


@triton.jit
def log2_of(best, total):
    """best + log2(total); -inf if total is 0."""
    return tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


@kernel(do_not_specialize=["begin", "end", "num_tokens", "num_chunks", "num_turns"])
def _chunk_scores_kernel(
    recent,
    keys,
    scores,
    begin,
    end,
    num_tokens,
    num_recent,
    num_chunks,
    num_turns,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    m = tl.program_id(1) // NUM_KV_HEADS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = kv_head * GROUP + m // num_recent
    r = m % num_recent
    m_ok = m < GROUP * num_recent
    # The distance of the query in place r from the last one; made positive, as C remainders are
    # not.
    behind = (num_tokens - 1 + num_recent - r) % num_recent
    position = num_tokens - 1 - behind
    d = tl.arange(0, BLOCK_DIM)
    d_ok = d[None, :] < HEAD_DIM
    at_query = (r * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(recent + at_query, mask=m_ok[:, None] & d_ok, other=0.0)
    c = tl.arange(0, CHUNKS)
    row = (head * num_recent + r).to(tl.int64)[:, None] * num_chunks
    for turn in range(tl.program_id(0), num_turns, tl.num_programs(0)):
        first = begin // CHUNK + turn * CHUNKS
        last = (first + CHUNKS) * CHUNK
        # Most chunks are whole, precede every query, and have no score yet.
        if (first * CHUNK >= begin) & (last <= end) & (last <= num_tokens - num_recent + 1):
            for i in range(0, CHUNKS, TOGETHER):
                t = (first + i) * CHUNK + tl.arange(0, TOGETHER * CHUNK) - begin
                at = (t.to(tl.int64) * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
                if HEAD_DIM == BLOCK_DIM:
                    k = tl.load(keys + at)
                else:
                    k = tl.load(keys + at, mask=d_ok, other=0.0)
                products = tl.dot(q, tl.trans(k).to(q.dtype), input_precision=PRECISION)
                products = tl.reshape(products, [BLOCK_ROWS, TOGETHER, CHUNK])
                best = tl.max(products, 2) * scale
                total = tl.sum(tl.exp2(products * scale - best[:, :, None]), 2)
                found = (best + tl.log2(total)) * 0.6931471805599453
                at_score = scores + row + first + i + tl.arange(0, TOGETHER)[None, :]
                tl.store(at_score, found, mask=m_ok[:, None])
        else:
            found = tl.full([BLOCK_ROWS, CHUNKS], float("-inf"), tl.float32)
            for i in range(CHUNKS):
                t = (first + i) * CHUNK + tl.arange(0, CHUNK)
                t_ok = (t >= begin) & (t < end)
                at = (t - begin).to(tl.int64) * NUM_KV_HEADS + kv_head
                at = at[:, None] * HEAD_DIM + d[None, :]
                k = tl.load(keys + at, mask=t_ok[:, None] & d_ok, other=0.0)
                products = tl.dot(q, tl.trans(k).to(q.dtype), input_precision=PRECISION) * scale
                seen = t_ok[None, :] & (t[None, :] <= position[:, None])
                products = tl.where(seen, products, float("-inf"))
                best = tl.max(products, 1)
                best = tl.where(best == float("-inf"), 0.0, best)
                total = tl.sum(tl.exp2(products - best[:, None]), 1)
                found = tl.where(c[None, :] == i, log2_of(best, total)[:, None], found)
            ok = m_ok[:, None] & ((first + c) * CHUNK < end)[None, :]
            before = tl.load(scores + row + first + c, mask=ok, other=float("-inf"))
            before *= 1.4426950408889634
            best = tl.maximum(found, before)
            best = tl.where(best == float("-inf"), 0.0, best)
            both = log2_of(best, tl.exp2(found - best) + tl.exp2(before - best))
            tl.store(scores + row + first + c, both * 0.6931471805599453, mask=ok)
