"""From what the user asked and what the devices have to layer ranges and sizes. Pure: no torch.

A plan says which shard holds which layers, how many lanes of which context there are, and why. It
refuses what cannot be honoured. Knows sizes in bytes, not how they are allocated.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from luceasync.errors import PlacementError
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.models.spec import ModelSpec
from luceasync.target.shard_plan import ShardPlan, plan_shard

BACKENDS = ("cpu", "cuda", "hip")
DEFAULT_PARALLEL = 4
COMFORTABLE_CTX_TOKENS = 8192  # below this fewer lanes are better than shorter ones
# Of the free memory, what may be filled: by our own choice of sizes, and when the user names them.
# RAM is shared with other programs, so there our choice is modest.
CHOSEN_SHARE = {"cpu": 0.5, "cuda": 0.92, "hip": 0.92}
NAMED_SHARE = 0.95
SMALL_ON_CPU_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Device:
    """A device as it was found."""

    name: str
    free_bytes: int

    @property
    def backend(self) -> str:
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Guest:
    """What is to share a device with the target, or to have one beside it: a drafter. Bytes of its
    weights, of each token of a lane, and of a lane whatever its context is.
    """

    device: Device
    weight_bytes: int
    token_bytes: int
    lane_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be built. `reasons`: a line for each choice that the user left to us."""

    shards: tuple[ShardPlan, ...]
    dtype: str
    parallel: int
    max_ctx_tokens: int
    prefill_chunk_tokens: int
    decode_sizes: tuple[int, ...]
    verify_rows: tuple[int, ...]  # the numbers of rows that a verify pass may have in each entry
    peer_access: str  # "auto", "on" or "off"
    reasons: tuple[str, ...]

    @property
    def num_pages(self) -> int:
        return -(-self.max_ctx_tokens // CHUNK_TOKENS)

    def num_scratch_rows(self, shard: ShardPlan) -> int:
        """Rows of the largest pass that leaves something to be committed, of all entries
        together.
        """
        verified = self.parallel * max(self.verify_rows, default=0)
        return max(verified, *shard.short_rows, 0)

    def verify_size(self, num_entries: int, num_rows: int) -> int:
        """Entries that a verify pass is run with: the fewest that `decode_sizes` allows, which is
        a rule for rows where these are many.
        """
        smallest = self.decode_sizes[0]
        sizes = (*range(1, smallest), *self.decode_sizes)
        return next(n for n in sizes if n >= num_entries and n * num_rows >= smallest)

    @property
    def is_small_on_cpu(self) -> bool:
        """Whether threads would wait for each other longer than they compute."""
        on_cpu = [s.weight_bytes for s in self.shards if s.device.startswith("cpu")]
        return sum(on_cpu) < SMALL_ON_CPU_BYTES

    def lane_bytes(self, shard: ShardPlan) -> int:
        return (
            self.num_pages * CHUNK_TOKENS * shard.token_bytes
            + shard.lane_state_bytes
            + shard.lane_scratch_bytes
        )

    def device_bytes(self, shard: ShardPlan) -> int:
        """Weights and state of the shard, without workspace."""
        extra_lane = shard.lane_state_bytes  # what padding entries write
        lanes = self.parallel * self.lane_bytes(shard) + extra_lane
        return shard.weight_bytes + lanes + shard.spare_scratch_bytes(self.parallel)


# --- devices and layer ranges ------------------------------------------------------------------


def named_devices(device: str | None, devices: Sequence[str]) -> tuple[str, ...]:
    """What `--target-device` or `--target-devices` names, in full; nothing if neither is given.

    Raises PlacementError.
    """
    if device is None:
        return check_devices(devices)
    if devices:
        raise PlacementError(
            f"--target-device {device}: not allowed together with --target-devices "
            f"{','.join(devices)}; give one of the two"
        )
    return check_devices([device])


def check_devices(names: Sequence[str], flag: str = "--target-devices") -> tuple[str, ...]:
    """The device names in full ("cuda" -> "cuda:0"). Raises PlacementError, which names `flag`."""
    full = []
    for name in names:
        match = re.fullmatch(r"([a-z]+)(?::(\d{1,3}))?", name)
        if match is None or match[1] not in BACKENDS:
            raise PlacementError(
                f"{flag} {','.join(names)}: {name!r} is not a device; "
                f"expected BACKEND or BACKEND:INDEX with a backend of {', '.join(BACKENDS)}"
            )
        full.append(f"{match[1]}:{int(match[2] or 0)}")
    for name in full:
        if full.count(name) > 1:
            raise PlacementError(f"{flag} {','.join(names)}: {name} is named twice")
    return tuple(full)


def check_weights(weights: Sequence[float], num_devices: int) -> None:
    """Raises PlacementError unless there is one positive finite weight a device."""
    text = ",".join(f"{w:g}" for w in weights)
    if len(weights) != num_devices:
        raise PlacementError(
            f"--target-layer-split {text}: {len(weights)} weights for {num_devices} devices; "
            "one a device is expected"
        )
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise PlacementError(
                f"--target-layer-split {text}: {weight:g} is not allowed; "
                "every weight must be positive and finite"
            )


def split_layers(num_layers: int, weights: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Half-open layer ranges by rounding the cumulative weights, at least one layer each.

    Raises PlacementError if there are more shards than layers.
    """
    num_shards = len(weights)
    if num_shards > num_layers:
        raise PlacementError(
            f"--target-devices names {num_shards} devices, but the model has {num_layers} layers; "
            "at most one device a layer"
        )
    largest = max(weights)
    weights = [weight / largest for weight in weights]  # sums of huge ones would overflow
    total, running, cuts = math.fsum(weights), 0.0, [0]
    for i, weight in enumerate(weights):
        running += weight
        cut = round(num_layers * running / total)
        # Leave a layer for each shard before and after this cut.
        cuts.append(min(max(cut, cuts[-1] + 1), num_layers - (num_shards - 1 - i)))
    return tuple(itertools.pairwise(cuts))


# --- the plan -----------------------------------------------------------------------------------


def make_plan(
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    dtype: str,
    weights: Sequence[float] | None,
    parallel: int | None,
    max_ctx_tokens: int | None,
    prefill_chunk_tokens: int | None,
    peer_access: str = "auto",
    verify_rows: Sequence[int] = (),
    guest: Guest | None = None,
) -> Plan:
    """Decide everything that is still open. Raises PlacementError if it does not fit.

    `verify_rows`: the numbers of rows that verify passes will have, none without speculation.
    `guest`: what must fit too.
    """
    reasons = []
    on_cpu = all(device.backend == "cpu" for device in devices)
    chunk = prefill_chunk_tokens or (256 if on_cpu else 2048)
    if chunk % CHUNK_TOKENS:
        raise PlacementError(
            f"--prefill-chunk {chunk}: a positive multiple of {CHUNK_TOKENS} is expected"
        )
    if weights is None:
        weights = [max(device.free_bytes, 1) for device in devices]
        if len(devices) > 1:
            reasons.append("layers are split by the free memory of each device")
    else:
        check_weights(weights, len(devices))
    ranges = split_layers(spec.num_layers, weights)
    shards = tuple(
        plan_shard(
            spec,
            device.name,
            begin,
            end,
            dtype,
            chunk_tokens=chunk,
            num_verify_rows=max(verify_rows, default=0),
            num_lanes=parallel or DEFAULT_PARALLEL,
        )
        for device, (begin, end) in zip(devices, ranges, strict=True)
    )
    loads = _loads(devices, shards, guest)
    loaded = [load for _, load in loads]
    chosen_room = [_room(device, load, CHOSEN_SHARE[device.backend]) for device, load in loads]
    named_room = [_room(device, load, NAMED_SHARE) for device, load in loads]
    if parallel is None:
        room = chosen_room if max_ctx_tokens is None else named_room
        parallel, reason = _choose_parallel(spec, loaded, room, max_ctx_tokens)
        reasons.append(reason)
    if max_ctx_tokens is None:
        max_ctx_tokens, reason = _choose_context(spec, loaded, chosen_room, parallel)
        reasons.append(reason)
    fits = _context_that_fits(loaded, named_room, parallel)
    if max_ctx_tokens == 0:
        raise PlacementError(
            f"no memory is left for a lane of {CHUNK_TOKENS} tokens beside the weights; "
            "use more devices (--target-devices) or a smaller dtype (--dtype bf16)"
        )
    if max_ctx_tokens > fits:
        raise PlacementError(
            f"--max-ctx {max_ctx_tokens} with --parallel {parallel} does not fit: "
            f"{fits} tokens a lane do; lower one of them or add devices"
        )
    return Plan(
        shards=shards,
        dtype=dtype,
        parallel=parallel,
        max_ctx_tokens=max_ctx_tokens,
        prefill_chunk_tokens=chunk,
        decode_sizes=decode_sizes(on_cpu, dtype, parallel),
        verify_rows=tuple(sorted(set(verify_rows))),
        peer_access=peer_access,
        reasons=tuple(reasons),
    )


def _loads(
    devices: Sequence[Device], shards: Sequence[ShardPlan], guest: Guest | None
) -> list[tuple[Device, ShardPlan]]:
    """What each device must hold: its shard with the guest in it, or the guest alone."""
    loads = list(zip(devices, shards, strict=True))
    if guest is None:
        return loads
    names = [device.name for device in devices]
    if guest.device.name not in names:
        sizes = (guest.weight_bytes, guest.token_bytes, guest.lane_bytes, 0, 0, guest.token_bytes)
        return [*loads, (guest.device, ShardPlan(guest.device.name, 0, 0, False, False, *sizes))]
    place = names.index(guest.device.name)
    shard = shards[place]
    together = replace(
        shard,
        weight_bytes=shard.weight_bytes + guest.weight_bytes,
        token_bytes=shard.token_bytes + guest.token_bytes,
        lane_state_bytes=shard.lane_state_bytes + guest.lane_bytes,
        spare_token_bytes=guest.token_bytes,
    )
    loads[place] = (devices[place], together)
    return loads


def _room(device: Device, shard: ShardPlan, share: float) -> int:
    """Bytes left for lanes once the weights are in, if `share` of what is free above them is taken.

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


def _choose_parallel(
    spec: ModelSpec, shards: Sequence[ShardPlan], room: Sequence[int], max_ctx_tokens: int | None
) -> tuple[int, str]:
    """The most lanes, up to the default, that hold a comfortable context each."""
    wanted = max_ctx_tokens or min(spec.max_positions, COMFORTABLE_CTX_TOKENS)
    fitting = [n for n in (4, 2, 1) if _context_that_fits(shards, room, n) >= wanted]
    parallel = fitting[0] if fitting else 1
    return parallel, (
        f"--parallel {parallel}: the most lanes, up to {DEFAULT_PARALLEL}, "
        f"that can hold {wanted} tokens each"
    )


def _choose_context(
    spec: ModelSpec, shards: Sequence[ShardPlan], room: Sequence[int], parallel: int
) -> tuple[int, str]:
    """All that the model can use, or all that fits."""
    fits = _context_that_fits(shards, room, parallel)
    if fits >= spec.max_positions:
        return spec.max_positions, f"--max-ctx {spec.max_positions}: all that the model can use"
    return fits, f"--max-ctx {fits}: what fits in memory beside the weights"


def _context_that_fits(shards: Sequence[ShardPlan], room: Sequence[int], parallel: int) -> int:
    """Tokens a lane can have on the tightest device, in whole chunks."""
    fits = []
    for shard, room_bytes in zip(shards, room, strict=True):
        left = room_bytes - (parallel + 1) * shard.lane_state_bytes
        left -= parallel * shard.lane_scratch_bytes + shard.spare_scratch_bytes(parallel)
        chunk_bytes = CHUNK_TOKENS * (parallel * shard.token_bytes + shard.spare_token_bytes)
        fits.append(left // chunk_bytes * CHUNK_TOKENS if chunk_bytes else (left > 0) * 2**31)
    return max(0, min(fits))


def decode_sizes(on_cpu: bool, dtype: str, parallel: int) -> tuple[int, ...]:
    """The batch sizes that a decode step is run with; a step is filled up to the next one.

    A row's result must not depend on how many rows run beside it. On CPUs bf16 products keep that
    by themselves, float32 ones from four rows on. On GPUs every size is a captured graph: powers of
    two.
    """
    if not on_cpu:
        powers = [2**i for i in range(parallel.bit_length()) if 2**i < parallel]
        return (*powers, parallel)
    first = min(parallel, 4) if dtype == "fp32" else 1
    return tuple(range(first, parallel + 1))
