"""Plans which shard holds which layers, and how many lanes of which context there are. Pure: no
torch.

Refuses what does not fit or is not possible. Knows sizes in bytes, not how they are allocated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from luceasync.errors import PlacementError
from luceasync.kv.pages import CHUNK_TOKENS, num_chunks
from luceasync.kv.residency import SINK_CHUNKS, chunks_of
from luceasync.models.encodings import DenseEncoding, Encoding
from luceasync.models.precision import Precision
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.capacity import (
    COMFORTABLE_CTX_TOKENS,
    DEFAULT_PARALLEL,
    DraftFootprint,
    Pool,
    PoolRequest,
    choose_lanes,
    choose_pool,
    chunk_that_fits,
)
from luceasync.pipeline.expert_plan import (
    ExpertRequest,
    check_slots,
    expert_layers,
    first_slots,
    lanes_of_slots,
    reasons_of,
    slots_beside,
    with_slots,
)
from luceasync.pipeline.offer import Offer, decode_sizes
from luceasync.pipeline.shard_plan import ShardPlan, check_weights, plan_shard, split_layers

MIN_NODE_TOKENS = 2048  # for a prompt that continues; a node costs a restart half a millisecond


@dataclass(frozen=True, slots=True)
class Plan:
    """What to build. `reasons`: a line for each choice that the user left open."""

    shards: tuple[ShardPlan, ...]
    devices: tuple[Offer, ...]  # one for each shard
    stages: tuple[tuple[int, int], ...]  # shards [begin, end) that one process runs
    precision: Precision
    parallel: int
    max_ctx_tokens: int
    num_pages: int  # of a lane; one for each chunk of its context: exact attention
    pool: Pool | None  # the policy for fewer pages than chunks; None: there are enough
    prefill_chunk_tokens: int
    decode_sizes: tuple[int, ...]
    verify_rows: tuple[int, ...]  # possible numbers of rows of a verify pass's entries
    peer_access: str  # "auto", "on" or "off"
    reasons: tuple[str, ...]

    @property
    def batch_tokens(self) -> int:
        """Most tokens that a lane grows by at once."""
        return max(self.prefill_chunk_tokens, *self.verify_rows, 1)

    def num_scratch_rows(self, shard: ShardPlan) -> int:
        """Scratch rows of the largest pass that commits, all entries together."""
        verified = self.parallel * max(self.verify_rows, default=0)
        return max([verified, *shard.short_rows])

    def decode_size(self, num_entries: int) -> int:
        """Number of entries, padding included, of a decode step."""
        return self.decode_sizes[bisect_left(self.decode_sizes, num_entries)]

    def verify_size(self, num_entries: int, num_rows: int) -> int:
        """Number of entries, padding included, of a verify pass. `decode_sizes` bounds its rows
        where an entry has many.
        """
        smallest = self.decode_sizes[0]
        fewest = max(num_entries, -(-smallest // num_rows))
        return fewest if fewest < smallest else self.decode_size(fewest)

    def verify_sizes(self, num_rows: int) -> tuple[int, ...]:
        """All numbers of entries of verify passes, ascending."""
        lanes = range(1, self.parallel + 1)
        return tuple(sorted({self.verify_size(n, num_rows) for n in lanes}))

    @property
    def most_uncut_tokens(self) -> int:
        """Most tokens of a prompt without a node's end. A node then holds a chunk before the chunk
        must leave its page; otherwise it is copied twice. Small pools accept that, since many small
        files would cost a restart more."""
        if self.pool is None:
            return self.max_ctx_tokens  # no limit
        pinned = chunks_of(self.pool.pins, CHUNK_TOKENS) | set(range(SINK_CHUNKS))
        others = (self.num_pages - len(pinned) - 1) * CHUNK_TOKENS
        return max(MIN_NODE_TOKENS, others - 2 * self.prefill_chunk_tokens)

    @property
    def host_bytes(self) -> int:
        """Host memory that the keys and values of all lanes may need; 0 if they stay on their
        devices."""
        token_bytes = sum(shard.token_bytes for shard in self.shards)
        return 0 if self.pool is None else self.parallel * self.max_ctx_tokens * token_bytes

    @property
    def runs_async(self) -> bool:
        """Whether all work is queued on devices, which leaves the host free."""
        return all(device.runs_async for device in self.devices)

    @property
    def here(self) -> tuple[ShardPlan, ...]:
        """The shards of this process; only their devices may be opened by name."""
        pairs = zip(self.devices, self.shards, strict=True)
        return tuple(shard for device, shard in pairs if device.is_here)

    def is_all_on(self, device: Offer) -> bool:
        """Whether the whole model is on this one device."""
        return all(device.is_same(own) for own in self.devices)

    @property
    def suits_one_thread(self) -> bool:
        """Whether the host computes so little beside GPUs, or for CPU shards so small, that threads
        would wait longer than they compute. Does not apply to reading weights."""
        pairs = zip(self.devices, self.shards, strict=True)
        on_host = [(d, shard) for d, shard in pairs if d.is_here and not d.runs_async]
        weight_bytes = sum(shard.weight_bytes for _, shard in on_host)
        return not on_host or weight_bytes < min(d.one_thread_bytes for d, _ in on_host)

    def lane_bytes(self, shard: ShardPlan) -> int:
        """Bytes of one lane: pages, state, ring of newest rows, scratch."""
        return (
            self.num_pages * CHUNK_TOKENS * shard.token_bytes
            + shard.lane_state_bytes
            + shard.lane_ring_bytes
            + shard.lane_scratch_bytes
        )

    def device_bytes(self, shard: ShardPlan) -> int:
        """Weights and state of the shard, without workspace."""
        extra_lane = shard.spare_state_bytes + shard.lane_ring_bytes  # what padding entries write
        lanes = self.parallel * self.lane_bytes(shard) + extra_lane
        return shard.weight_bytes + lanes + shard.spare_scratch_bytes(self.parallel)


def make_plan(
    spec: ModelSpec,
    devices: Sequence[Offer],
    *,
    precision: Precision,
    weights: Sequence[float] | None,
    parallel: int | None,
    max_ctx_tokens: int | None,
    prefill_chunk_tokens: int | None,
    peer_access: str = "auto",
    verify_rows: Sequence[int] = (),
    drafter: DraftFootprint | None = None,
    encoding_of: Callable[[str], Encoding] = lambda name: DenseEncoding(),
    pool: PoolRequest | None = None,
    experts: ExpertRequest | None = None,
) -> Plan:
    """Decide everything that is still open. Raises PlacementError if it does not fit.

    `verify_rows`: the numbers of rows that verify passes will have, none without speculation.
    `drafter`: the drafter that must fit too. `encoding_of`: how each tensor is stored, by its name.
    `pool`: how much of each lane stays on the devices; None: all of it. `experts`: which experts
    stay in host memory; None: none.
    """
    chunk = prefill_chunk_tokens or max(device.prefill_chunk_tokens for device in devices)
    if chunk % CHUNK_TOKENS:
        raise PlacementError(
            f"--prefill-chunk {chunk}: a positive multiple of {CHUNK_TOKENS} is expected"
        )
    shards = tuple(
        plan_shard(
            spec,
            device,
            begin,
            end,
            precision,
            chunk_tokens=chunk,
            num_verify_rows=max(verify_rows, default=0),
            num_lanes=parallel or DEFAULT_PARALLEL,
            pages=pool is not None,
            probes=pool is not None and pool.pool.policy == "qk",
            encoding_of=encoding_of,
        )
        for device, (begin, end) in zip(devices, _ranges(spec, devices, weights), strict=True)
    )
    layers = [
        [] if experts is None else expert_layers(spec, s.begin, s.end, precision, encoding_of)
        for s in shards
    ]
    whole, slots = shards, [0] * len(shards)
    if experts is not None:
        slots = first_slots(experts, devices, layers, parallel or DEFAULT_PARALLEL)
        shards = tuple(map(with_slots, whole, layers, slots))
        parallel = parallel or lanes_of_slots(layers, slots, DEFAULT_PARALLEL)
        if experts.num_bytes is None and max_ctx_tokens is None:
            max_ctx_tokens = min(spec.max_positions, COMFORTABLE_CTX_TOKENS)  # slots get the rest
    if pool is None:
        lanes = choose_lanes(
            spec, devices, shards, drafter, parallel=parallel, max_ctx_tokens=max_ctx_tokens
        )
        num_pages = num_chunks(lanes.max_ctx_tokens)
    else:
        lanes, num_pages = choose_pool(
            spec,
            devices,
            shards,
            drafter,
            pool,
            parallel=parallel,
            max_ctx_tokens=max_ctx_tokens,
            chunk_tokens=chunk,
            num_verify_rows=max(verify_rows, default=0),
        )
        chunk = chunk_that_fits(num_pages, chunk)
    by_memory = ["layers are split by the free memory of each device"]
    is_by_memory = weights is None and len(devices) > 1
    plan = Plan(
        shards=shards,
        devices=tuple(devices),
        stages=stages_of([device.process for device in devices]),
        precision=precision,
        parallel=lanes.parallel,
        max_ctx_tokens=lanes.max_ctx_tokens,
        num_pages=num_pages,
        pool=None if pool is None else pool.pool,
        prefill_chunk_tokens=chunk,
        decode_sizes=decode_sizes(devices, precision.compute, lanes.parallel),
        verify_rows=tuple(sorted(set(verify_rows))),
        peer_access=peer_access,
        reasons=(*(by_memory if is_by_memory else ()), *lanes.reasons),
    )
    if experts is None:
        return plan
    if experts.num_bytes is None:
        free = [_free_bytes(plan, i, drafter) for i in range(len(shards))]
        slots = list(map(slots_beside, layers, slots, free))
    check_slots(experts, layers, slots, plan.parallel)
    return replace(
        plan,
        shards=tuple(map(with_slots, whole, layers, slots)),
        reasons=(*plan.reasons, *reasons_of(layers, slots)),
    )


def _free_bytes(plan: Plan, index: int, drafter: DraftFootprint | None) -> int:
    """The bytes that a shard, and a drafter on its device, leave free there."""
    device, shard = plan.devices[index], plan.shards[index]
    taken = plan.device_bytes(shard) + shard.workspace_bytes
    if drafter is not None and drafter.device.name == device.name:
        lane_bytes = drafter.lane_bytes + plan.max_ctx_tokens * drafter.token_bytes
        taken += drafter.weight_bytes + (plan.parallel + 1) * lane_bytes
    return device.free_bytes - taken


def stages_of(processes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ranges of shards `[begin, end)` that run in one process: adjacent shards only. `processes`:
    the process of each shard."""
    counts = [len(list(neighbours)) for _, neighbours in groupby(processes)]
    ends = list(accumulate(counts))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _ranges(
    spec: ModelSpec, devices: Sequence[Offer], weights: Sequence[float] | None
) -> tuple[tuple[int, int], ...]:
    """Layer ranges by weight, or by free memory if there are no weights."""
    if weights is None:
        return split_layers(spec.num_layers, [max(device.free_bytes, 1) for device in devices])
    check_weights(weights, len(devices))
    return split_layers(spec.num_layers, weights)
