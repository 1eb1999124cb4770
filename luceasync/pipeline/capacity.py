"""How many lanes of how many tokens fit beside the weights, whole or in pools. Pure: no torch.

Chooses what the user left open and refuses what does not fit. Knows the sizes of shards, but not
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from luceasync.errors import PlacementError
from luceasync.kv.pages import CHUNK_TOKENS, num_chunks
from luceasync.kv.residency import SINK_CHUNKS, chunks_of, min_pages
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.offer import Offer
from luceasync.pipeline.shard_plan import ShardPlan

DEFAULT_PARALLEL = 4
# Below this, fewer lanes are better than shorter ones: agents send tens of thousands of tokens.
COMFORTABLE_CTX_TOKENS = 32768
NAMED_SHARE = 0.95  # share of the free memory that may be filled if the user names the sizes
# The share of the context that stays on the devices by default: 16K of 131K.
AUTO_SHARE = 8
MIN_AUTO_TOKENS = 8192

Policy = Literal["qk", "drafter", "lru"]


@dataclass(frozen=True, slots=True)
class DraftFootprint:
    """A drafter's bytes: of its weights, of each token of a lane, and of a lane regardless of its
    context. It shares a device with the target or has its own."""

    device: Offer
    weight_bytes: int
    token_bytes: int
    lane_bytes: int


@dataclass(frozen=True, slots=True)
class LaneCapacity:
    """`parallel` lanes of `max_ctx_tokens` each. `reasons`: a line for each chosen size."""

    parallel: int
    max_ctx_tokens: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """Which chunks stay resident. `policy`: what scores chunks; `tau_tokens`: committed tokens
    between two probes of a lane; `pins`: spans of tokens `[begin, end)` that stay in every lane.
    """

    policy: Policy
    tau_tokens: int
    pins: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """A pool of `num_tokens` for each lane; None: chosen to fit. `host_bytes`: host memory, which
    holds the whole content of all lanes.
    """

    num_tokens: int | None
    pool: Pool
    host_bytes: int


def choose_lanes(
    spec: ModelSpec,
    devices: Sequence[Offer],
    shards: Sequence[ShardPlan],
    drafter: DraftFootprint | None,
    *,
    parallel: int | None,
    max_ctx_tokens: int | None,
) -> LaneCapacity:
    """Choose the sizes that are None. Raises PlacementError for what does not fit."""
    loads = loads_of(devices, shards, drafter)
    loaded = [load for _, load in loads]
    chosen_room = [room_of(device, load, device.chosen_share) for device, load in loads]
    named_room = [room_of(device, load, NAMED_SHARE) for device, load in loads]
    reasons = []
    if parallel is None:
        room = chosen_room if max_ctx_tokens is None else named_room
        parallel, reason = choose_parallel(spec, loaded, room, max_ctx_tokens)
        reasons.append(reason)
    if max_ctx_tokens is None:
        max_ctx_tokens, reason = _choose_context(spec, loaded, chosen_room, named_room, parallel)
        reasons.append(reason)
    fits = context_that_fits(loaded, named_room, parallel)
    if max_ctx_tokens == 0:
        raise PlacementError(
            f"no memory is left for a lane of {CHUNK_TOKENS} tokens beside the weights; "
            "use more devices (--target-devices) or a smaller dtype (--dtype bf16)"
        )
    if max_ctx_tokens > fits:
        raise PlacementError(
            f"--max-ctx {max_ctx_tokens} with --parallel {parallel} does not fit: "
            f"{fits} tokens per lane do; lower one of them or add devices"
        )
    return LaneCapacity(parallel, max_ctx_tokens, tuple(reasons))


def loads_of(
    devices: Sequence[Offer], shards: Sequence[ShardPlan], drafter: DraftFootprint | None
) -> list[tuple[Offer, ShardPlan]]:
    """What each device must hold: its shard and the drafter, or the drafter alone."""
    loads = list(zip(devices, shards, strict=True))
    if drafter is None:
        return loads
    # By name only: devices of one name share free memory, even if the drafter runs in its own
    # process.
    hosts = [i for i, device in enumerate(devices) if device.name == drafter.device.name]
    if not hosts:
        sizes = (
            drafter.weight_bytes,
            drafter.token_bytes,
            drafter.lane_bytes,
            0,
            0,
            drafter.token_bytes,
        )
        alone = ShardPlan(drafter.device.name, 0, 0, False, False, *sizes)
        return [*loads, (drafter.device, replace(alone, spare_state_bytes=drafter.lane_bytes))]
    [place] = hosts
    shard = shards[place]
    together = replace(
        shard,
        weight_bytes=shard.weight_bytes + drafter.weight_bytes,
        token_bytes=shard.token_bytes + drafter.token_bytes,
        lane_state_bytes=shard.lane_state_bytes + drafter.lane_bytes,
        spare_token_bytes=drafter.token_bytes,
        spare_state_bytes=shard.spare_state_bytes + drafter.lane_bytes,
    )
    loads[place] = (devices[place], together)
    return loads


def room_of(device: Offer, shard: ShardPlan, share: float) -> int:
    """Bytes left for lanes, if these may take `share` of the memory that the weights leave free.

    Raises PlacementError if the weights do not fit.
    """
    needed = shard.weight_bytes + shard.workspace_bytes
    room = int((device.free_bytes - needed) * share)
    if room <= 0:
        what = f"layers [{shard.begin}, {shard.end})" if shard.end else "the drafter's layers"
        raise PlacementError(
            f"{what} need {needed / 2**30:.2f} GiB on {device.name}, "
            f"which has {device.free_bytes / 2**30:.2f} GiB free; "
            "use more devices (--target-devices) or a smaller dtype (--dtype bf16)"
        )
    return room


def choose_parallel(
    spec: ModelSpec, shards: Sequence[ShardPlan], room: Sequence[int], max_ctx_tokens: int | None
) -> tuple[int, str]:
    """The largest number of lanes, up to the default, each of which holds a comfortable context, or
    the model's whole context if that is less; otherwise one lane with all the memory."""
    wanted = max_ctx_tokens or min(spec.max_positions, COMFORTABLE_CTX_TOKENS)
    fitting = [n for n in (DEFAULT_PARALLEL, 2, 1) if context_that_fits(shards, room, n) >= wanted]
    if not fitting:
        return (
            1,
            f"--parallel 1: not even one lane can hold {wanted} tokens, so it has all there is",
        )
    parallel = fitting[0]
    reason = (
        f"--parallel {parallel}: the most lanes, up to {DEFAULT_PARALLEL}, "
        f"that can hold {wanted} tokens each"
    )
    if parallel < DEFAULT_PARALLEL and (
        shorter := context_that_fits(shards, room, DEFAULT_PARALLEL)
    ):
        reason += f"; --parallel {DEFAULT_PARALLEL} would have {shorter} each"
    return parallel, reason


def _choose_context(
    spec: ModelSpec,
    shards: Sequence[ShardPlan],
    chosen_room: Sequence[int],
    named_room: Sequence[int],
    parallel: int,
) -> tuple[int, str]:
    """The model's whole context, or all that fits, and advice on how to get more."""
    fits = context_that_fits(shards, chosen_room, parallel)
    if fits >= spec.max_positions:
        return spec.max_positions, f"--max-ctx {spec.max_positions}: all that the model can use"
    named, alone = (
        min(spec.max_positions, context_that_fits(shards, named_room, n)) for n in (parallel, 1)
    )
    more = (
        f"{alone} with --parallel 1"
        if parallel > 1
        else "more with more devices (--target-devices) or bf16 instead of fp32 (--dtype)"
    )
    return fits, (
        f"--max-ctx {fits}: what fits beside the weights in the memory that is taken unasked; "
        f"up to {named} if it is named, {more}"
    )


def context_that_fits(shards: Sequence[ShardPlan], room: Sequence[int], parallel: int) -> int:
    """Tokens per lane that fit the tightest device, in whole chunks."""
    fits = []
    for shard, room_bytes in zip(shards, room, strict=True):
        left = room_bytes - parallel * shard.lane_state_bytes - shard.spare_state_bytes
        left -= (parallel + 1) * shard.lane_ring_bytes
        left -= parallel * shard.lane_scratch_bytes + shard.spare_scratch_bytes(parallel)
        chunk_bytes = CHUNK_TOKENS * (parallel * shard.token_bytes + shard.spare_token_bytes)
        fits.append(left // chunk_bytes * CHUNK_TOKENS if chunk_bytes else (left > 0) * 2**31)
    return max(0, min(fits))


def choose_pool(
    spec: ModelSpec,
    devices: Sequence[Offer],
    shards: Sequence[ShardPlan],
    drafter: DraftFootprint | None,
    asked: PoolRequest,
    *,
    parallel: int | None,
    max_ctx_tokens: int | None,
    chunk_tokens: int,
    num_verify_rows: int,
) -> tuple[LaneCapacity, int]:
    """How many lanes of which context there are, and the pages of each. Raises PlacementError."""
    loads = loads_of(devices, shards, drafter)
    loaded = [load for _, load in loads]
    named_room = [room_of(device, load, NAMED_SHARE) for device, load in loads]
    reasons: list[str] = []
    if parallel is None:
        wanted = asked.num_tokens or MIN_AUTO_TOKENS
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
            f"--prefix-cache-memory {asked.host_bytes}: with --kvflash it must hold the content of "
            f"all lanes, at least {needed} bytes for {parallel} lanes of {least_tokens} tokens"
        )
    if drafter is not None and asked.pool.policy == "drafter":
        # The drafter scores the whole context, so its own lanes hold all of it.
        whole = drafter.lane_bytes + drafter.token_bytes * max_ctx_tokens
        drafter = replace(drafter, token_bytes=0, lane_bytes=whole)
        loaded = [load for _, load in loads_of(devices, shards, drafter)]
    fits = context_that_fits(loaded, named_room, parallel)
    num_tokens = asked.num_tokens
    if num_tokens is None:
        suits = max(MIN_AUTO_TOKENS, max_ctx_tokens // AUTO_SHARE)
        num_tokens = min(suits, fits)
        reasons.append(f"--kvflash {num_tokens}: an eighth of the context, as far as it fits")
    if num_tokens > fits:
        raise PlacementError(
            f"--kvflash {num_tokens} with --parallel {parallel} does not fit: "
            f"{fits} tokens per lane do; lower one of them or add devices"
        )
    num_pages = _pages(num_tokens, max_ctx_tokens, num_verify_rows)
    batch_tokens = max(chunk_that_fits(num_pages, chunk_tokens), num_verify_rows)
    _check_pins(asked.pool.pins, num_pages, batch_tokens)
    return LaneCapacity(parallel, max_ctx_tokens, tuple(reasons)), num_pages


def chunk_that_fits(num_pages: int, chunk_tokens: int) -> int:
    """Tokens of a prefill chunk that leaves half of the lane's pages to earlier tokens."""
    return min(chunk_tokens, max(num_pages // 2, 1) * CHUNK_TOKENS)


def num_pinnable(num_pages: int, batch_tokens: int) -> int:
    """Chunks of a lane that may be pinned, besides its sink."""
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
        spans = ",".join(f"{begin}:{end}" for begin, end in pins)
        raise PlacementError(
            f"--kvflash-pin-spans {spans}: {pinned} chunks of {CHUNK_TOKENS} tokens would be "
            f"pinned; at most {most} of {num_pages} may be, besides the first"
        )
