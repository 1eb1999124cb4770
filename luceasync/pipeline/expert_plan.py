"""Which experts lie in slots on their device while all of them are stored in host memory. Pure: no
torch.

Knows the sizes of layers, but not their kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from luceasync.errors import PlacementError
from luceasync.models.encodings import Encoding
from luceasync.models.feed_forward.feed_forward import RoutedFeedForward
from luceasync.models.precision import Precision
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.offer import Offer
from luceasync.pipeline.shard_plan import ShardPlan

NUM_BUFFERS = 2  # for all experts of a layer, which a long pass has copied ahead
HITS = (0.5, 0.75, 0.9)  # shares of a row's experts for which a plan states figures
BUS_BYTES_PER_S = 25e9  # of PCIe 4.0 with 16 lanes
HEADROOM_BYTES = 1 << 30  # of a device, left free by slots whose number was not requested


@dataclass(frozen=True, slots=True)
class ExpertRequest:
    """Experts stay in host memory, which has `host_bytes` free, and slots on devices take
    `num_bytes` in all; None: all that nothing else needs."""

    num_bytes: int | None
    host_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer's experts, and the bytes of all of them."""

    num_experts: int
    num_chosen: int
    num_bytes: int

    def slots_bytes(self, num_slots: int) -> int:
        """Bytes of `num_slots` slots."""
        return self.num_bytes // self.num_experts * num_slots


def expert_layers(
    spec: ModelSpec,
    begin: int,
    end: int,
    precision: Precision,
    encoding_of: Callable[[str], Encoding],
) -> list[ExpertLayer]:
    """The layers of [begin, end) whose experts may stay in host memory."""
    found = []
    for layer in range(begin, end):
        kind = spec.layers[layer].feed_forward
        if isinstance(kind, RoutedFeedForward):
            shapes = kind.expert_tensors(spec.hidden_size)
            prefix = f"{spec.prefix}layers.{layer}."
            sizes = (
                encoding_of(prefix + name).num_bytes(shape, precision)
                for name, shape in shapes.items()
            )
            found.append(ExpertLayer(kind.num_experts, kind.num_chosen, sum(sizes)))
    return found


def with_slots(shard: ShardPlan, layers: Sequence[ExpertLayer], num_slots: int) -> ShardPlan:
    """The shard with `num_slots` slots for each layer instead of all experts. A number that reaches
    a layer's number of experts means all of them."""
    if not layers:
        return shard
    all_bytes = sum(layer.num_bytes for layer in layers)
    slot_bytes = sum(layer.slots_bytes(min(num_slots, layer.num_experts)) for layer in layers)
    return replace(
        shard,
        weight_bytes=shard.weight_bytes - all_bytes + slot_bytes,
        workspace_bytes=shard.workspace_bytes
        + NUM_BUFFERS * max(layer.num_bytes for layer in layers),
        expert_slots=num_slots,
        expert_bytes=all_bytes,
    )


def first_slots(
    request: ExpertRequest,
    devices: Sequence[Offer],
    layers: Sequence[Sequence[ExpertLayer]],
    parallel: int,
) -> list[int]:
    """Slots of each shard's layers: the requested number, or the fewest for this many lanes. Raises
    PlacementError for a request that these devices or this model cannot satisfy."""
    _check_request(request, devices, layers)
    if request.num_bytes is None:
        return [least_slots(own, parallel) for own in layers]
    total = sum(layer.num_bytes for own in layers for layer in own)
    shares = [sum(layer.num_bytes for layer in own) / total for own in layers]
    return [
        slots_that_fit(own, int(request.num_bytes * share))
        for own, share in zip(layers, shares, strict=True)
    ]


def _check_request(
    request: ExpertRequest,
    devices: Sequence[Offer],
    layers: Sequence[Sequence[ExpertLayer]],
) -> None:
    flag = f"--expert-memory {'auto' if request.num_bytes is None else request.num_bytes}"
    for device in devices:
        if not device.runs_async:
            raise PlacementError(
                f"{flag}: {device.name} computes from host memory already; leave the flag out, or "
                "name GPUs alone (--target-devices)"
            )
    every = [layer for of_shard in layers for layer in of_shard]
    if not every:
        raise PlacementError(
            f"{flag}: this model has no experts that can wait in host memory; leave the flag out"
        )
    needed = sum(layer.num_bytes for layer in every)
    if needed > request.host_bytes:
        raise PlacementError(
            f"{flag}: all experts take {needed} bytes of host memory, which has "
            f"{request.host_bytes} free; leave the flag out, or use more devices"
        )


def least_slots(layers: Sequence[ExpertLayer], parallel: int) -> int:
    """Slots of a layer that a decode step of all lanes may need."""
    least = (min(layer.num_chosen * parallel, layer.num_experts) for layer in layers)
    return max(least, default=0)


def lanes_of_slots(
    layers: Sequence[Sequence[ExpertLayer]], slots: Sequence[int], most: int
) -> int | None:
    """The number of lanes for which the slots suffice, if that is less than `most`; None: any
    number."""
    pairs = list(zip(layers, slots, strict=True))
    for parallel in range(most, 0, -1):
        if all(num_slots >= least_slots(own, parallel) for own, num_slots in pairs):
            return None if parallel == most else parallel
    return 1


def slots_that_fit(layers: Sequence[ExpertLayer], num_bytes: int) -> int:
    """The most slots of each layer that fit into `num_bytes`, at most all experts."""
    most = max((layer.num_experts for layer in layers), default=0)
    each = sum(layer.slots_bytes(1) for layer in layers)
    return min(most, num_bytes // each) if each else 0


def slots_beside(layers: Sequence[ExpertLayer], num_slots: int, free_bytes: int) -> int:
    """Slots of each layer if the free memory, except for some headroom, is added to `num_slots`."""
    taken = sum(layer.slots_bytes(num_slots) for layer in layers)
    return max(num_slots, slots_that_fit(layers, taken + free_bytes - HEADROOM_BYTES))


def check_slots(
    request: ExpertRequest,
    layers: Sequence[Sequence[ExpertLayer]],
    slots: Sequence[int],
    parallel: int,
) -> None:
    """Raise PlacementError for fewer slots than a decode step of all lanes may need."""
    for own, num_slots in zip(layers, slots, strict=True):
        if own and num_slots < (least := least_slots(own, parallel)):
            needed = sum(layer.slots_bytes(least) for of_shard in layers for layer in of_shard)
            raise PlacementError(
                f"--expert-memory {request.num_bytes}: {num_slots} slots a layer, but {parallel} "
                f"lanes may choose {least} experts; at least {needed} bytes, or fewer lanes "
                "(--parallel), are expected"
            )


def reasons_of(layers: Sequence[Sequence[ExpertLayer]], slots: Sequence[int]) -> tuple[str, ...]:
    """What the slots mean for a step of one lane, one line each."""
    every = [layer for of_shard in layers for layer in of_shard]
    row_bytes = sum(layer.slots_bytes(layer.num_chosen) for layer in every)
    host_bytes = sum(layer.num_bytes for layer in every)
    rates = ", ".join(
        f"{BUS_BYTES_PER_S / ((1 - hits) * row_bytes):.0f} tokens/s at {hits:.0%} hits"
        for hits in HITS
    )
    most = max(layer.num_experts for layer in every)
    counts = " and ".join(str(min(count, most)) for count in dict.fromkeys(slots) if count)
    return (
        f"--expert-memory: {counts} slots for the {most} experts of a layer; all wait in "
        f"{host_bytes / 2**30:.2f} GiB of host memory",
        f"a token reads {row_bytes / 2**20:.0f} MiB of experts; what is missed crosses the bus: at "
        f"{BUS_BYTES_PER_S / 1e9:.0f} GB/s no more than {rates}",
    )
