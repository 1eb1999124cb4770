"""How lanes live with fewer pages than their context has chunks: as asked for, and as planned.

Chooses the pages of a lane and refuses pools that cannot work. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from luceasync.errors import PlacementError
from luceasync.kv.pages import CHUNK_TOKENS, num_chunks
from luceasync.kv.residency import SINK_CHUNKS, chunks_of, min_pages
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.lanes import (
    NAMED_SHARE,
    Guest,
    Lanes,
    choose_parallel,
    context_that_fits,
    loads_of,
    room_of,
)
from luceasync.pipeline.offer import Offer
from luceasync.pipeline.shard_plan import ShardPlan

Policy = Literal["qk", "drafter", "lru"]

# Of the context, where nobody says how much of it is to stay: 16K of 131K.
AUTO_SHARE = 8
LEAST_AUTO_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Pool:
    """`policy`: by what chunks are chosen that stay, `tau_tokens`: after how many tokens that a
    lane has committed it is asked again; `pins`: tokens `[begin, end)` of every lane that stay.
    """

    policy: Policy
    tau_tokens: int
    pins: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class AskedPool:
    """A pool of `num_tokens` a lane, None: of what suits it. `host_bytes` of memory hold what lanes
    hold, all of it.
    """

    num_tokens: int | None
    pool: Pool
    host_bytes: int


def choose_pool(
    spec: ModelSpec,
    devices: Sequence[Offer],
    shards: Sequence[ShardPlan],
    guest: Guest | None,
    asked: AskedPool,
    *,
    parallel: int | None,
    max_ctx_tokens: int | None,
    chunk_tokens: int,
    num_verify_rows: int,
) -> tuple[Lanes, int]:
    """How many lanes of which context there are, and the pages of each. Raises PlacementError."""
    loads = loads_of(devices, shards, guest)
    loaded = [load for _, load in loads]
    named_room = [room_of(device, load, NAMED_SHARE) for device, load in loads]
    reasons: list[str] = []
    if parallel is None:
        wanted = asked.num_tokens or LEAST_AUTO_TOKENS
        parallel, reason = choose_parallel(spec, loaded, named_room, wanted)
        reasons.append(reason)
    token_bytes = sum(shard.token_bytes for shard in shards)
    held = asked.host_bytes // max(parallel * token_bytes, 1) // CHUNK_TOKENS * CHUNK_TOKENS
    if max_ctx_tokens is None:
        max_ctx_tokens = min(spec.max_positions, held)
        why = "all that the model can use" if held > max_ctx_tokens else "what host memory holds"
        reasons.append(f"--max-ctx {max_ctx_tokens}: {why}")
    if max_ctx_tokens > held or not held:
        least_tokens = max(max_ctx_tokens, CHUNK_TOKENS)
        needed = parallel * least_tokens * token_bytes
        raise PlacementError(
            f"--prefix-cache-memory {asked.host_bytes}: with --kvflash it holds what all lanes "
            f"hold, {needed} bytes of {parallel} lanes of {least_tokens} tokens at least"
        )
    if guest is not None and asked.pool.policy == "drafter":
        # It says of the whole context what is to stay, and so it holds all of it.
        whole = guest.lane_bytes + guest.token_bytes * max_ctx_tokens
        guest = replace(guest, token_bytes=0, lane_bytes=whole)
        loaded = [load for _, load in loads_of(devices, shards, guest)]
    fits = context_that_fits(loaded, named_room, parallel)
    num_tokens = asked.num_tokens
    if num_tokens is None:
        suits = max(LEAST_AUTO_TOKENS, max_ctx_tokens // AUTO_SHARE)
        num_tokens = min(suits, fits)
        reasons.append(f"--kvflash {num_tokens}: an eighth of the context, as far as it fits")
    if num_tokens > fits:
        raise PlacementError(
            f"--kvflash {num_tokens} with --parallel {parallel} does not fit: "
            f"{fits} tokens a lane do; lower one of them or add devices"
        )
    num_pages = _pages(num_tokens, max_ctx_tokens, num_verify_rows)
    batch_tokens = max(chunk_that_fits(num_pages, chunk_tokens), num_verify_rows)
    _check_pins(asked.pool.pins, num_pages, batch_tokens)
    return Lanes(parallel, max_ctx_tokens, tuple(reasons)), num_pages


def chunk_that_fits(num_pages: int, chunk_tokens: int) -> int:
    """Tokens of a prompt's chunk, so that it leaves half of a lane's pages to what is before it."""
    return min(chunk_tokens, max(num_pages // 2, 1) * CHUNK_TOKENS)


def num_pinnable(num_pages: int, batch_tokens: int) -> int:
    """Chunks of a lane, besides its sink, that may be pinned."""
    return num_pages - min_pages(num_chunks(batch_tokens))


def _pages(num_tokens: int, max_ctx_tokens: int, num_verify_rows: int) -> int:
    num_pages = num_chunks(min(num_tokens, max_ctx_tokens))
    least = min_pages(num_chunks(max(num_verify_rows, 1)))
    if num_tokens < least * CHUNK_TOKENS:
        raise PlacementError(
            f"--kvflash {num_tokens}: at least {least * CHUNK_TOKENS} tokens are expected"
        )
    return max(num_pages, least)


def _check_pins(pins: Sequence[tuple[int, int]], num_pages: int, batch_tokens: int) -> None:
    most = num_pinnable(num_pages, batch_tokens)
    pinned = len(chunks_of(pins, CHUNK_TOKENS) - set(range(SINK_CHUNKS)))
    if pinned > most:
        told = ",".join(f"{begin}:{end}" for begin, end in pins)
        raise PlacementError(
            f"--kvflash-pin-spans {told}: {pinned} chunks of {CHUNK_TOKENS} tokens would stay; "
            f"of {num_pages} at most {most} may, the first one besides"
        )
