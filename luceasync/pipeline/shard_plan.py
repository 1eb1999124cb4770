"""The layers of one device and the bytes they take, and how layers are split. Pure: no torch.

Does not know how much memory is free, or how much of it lanes get.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luceasync.errors import PlacementError
from luceasync.kv.state import num_bytes
from luceasync.models.encodings import DenseEncoding, Encoding, Shape
from luceasync.models.precision import Precision
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.offer import BACKENDS, Offer


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Layers `[begin, end)` on `device`, and what they take."""

    device: str
    begin: int
    end: int
    is_first: bool
    is_last: bool
    weight_bytes: int
    token_bytes: int  # keys and values of one token, all layers of the shard
    lane_state_bytes: int  # state at the end of one lane: recurrent state, windows
    lane_scratch_bytes: int  # for the rows that verify one lane's proposal
    workspace_bytes: int
    spare_token_bytes: int = 0  # like token_bytes, of the drafter's padding lane
    short_rows: tuple[int, ...] = ()  # see Offer
    short_scratch_bytes: int = 0  # scratch of the largest of short_rows
    lane_ring_bytes: int = 0  # one lane's newest queries, which probe its chunks
    spare_state_bytes: int = 0  # part of lane_state_bytes that exists once more beside the lanes
    expert_slots: int = 0  # of each layer with experts, if these stay in host memory; 0: none do
    expert_bytes: int = 0  # of those experts

    def spare_scratch_bytes(self, num_lanes: int) -> int:
        """Scratch that a short prefill chunk needs beyond that of `num_lanes` lanes."""
        return max(0, self.short_scratch_bytes - num_lanes * self.lane_scratch_bytes)


def plan_shard(
    spec: ModelSpec,
    device: Offer,
    begin: int,
    end: int,
    precision: Precision,
    *,
    chunk_tokens: int,
    num_verify_rows: int,
    num_lanes: int,
    pages: bool = False,
    probes: bool = False,
    encoding_of: Callable[[str], Encoding] = lambda name: DenseEncoding(),
) -> ShardPlan:
    """The bytes of layers `[begin, end)` on `device`, which verifies up to `num_verify_rows` rows
    for each of `num_lanes` lanes. `pages`: lanes exceed their pages, and the rest is in host
    memory. `probes`: lanes' newest rows score chunks. `encoding_of`: how each tensor is stored, by
    name. Raises PlacementError for a cut where layers need each other."""
    _refuse_cuts(spec, begin, end)
    is_first, is_last = begin == 0, end == spec.num_layers
    mixers = spec.mixers[begin:end]
    ends = [tensor for mixer in mixers for tensor in mixer.end]
    state_bytes = num_bytes(ends, precision)
    scratch_row_bytes = sum(num_bytes(mixer.scratch, precision) for mixer in mixers)
    rings = [mixer.recent for mixer in mixers if probes and mixer.recent is not None]
    scratch_row_bytes += sum(num_bytes([recent.scratch], precision) for recent in rings)
    num_rows = num_lanes * num_verify_rows
    # During a verify pass: what mixers take, and logits in the model's dtype and float32.
    verified_row_bytes = max(mixer.verified_row_bytes for mixer in spec.mixers)
    verified_bytes = max(num_rows, *device.short_rows, 0) * verified_row_bytes
    verified_bytes += is_last * num_rows * spec.vocab_size * (4 + 4)
    spare_bytes = num_bytes([end for end in ends if end.has_spare], precision)
    staged_bytes = device.num_staged_states * spare_bytes
    if pages:
        widest = max(num_bytes(mixer.rows, precision) for mixer in mixers)
        staged_bytes += device.num_staged_tokens * widest
    return ShardPlan(
        device=device.name,
        begin=begin,
        end=end,
        is_first=is_first,
        is_last=is_last,
        weight_bytes=_weight_bytes(spec, begin, end, precision, encoding_of),
        token_bytes=sum(num_bytes(mixer.rows, precision) for mixer in mixers),
        lane_state_bytes=state_bytes,
        lane_scratch_bytes=num_verify_rows * scratch_row_bytes,
        workspace_bytes=chunk_tokens * _width(spec) * 16
        + 256 * 2**20
        + staged_bytes
        + verified_bytes,
        short_rows=device.short_rows,
        short_scratch_bytes=max(device.short_rows, default=0) * scratch_row_bytes,
        lane_ring_bytes=sum(num_bytes([recent.ring], precision) for recent in rings),
        spare_state_bytes=spare_bytes,
    )


def _refuse_cuts(spec: ModelSpec, begin: int, end: int) -> None:
    """Raise PlacementError if layers `[begin, end)` depend on layers outside the range."""
    if spec.layer_inputs is not None and end - begin < spec.num_layers:
        raise PlacementError(
            f"layers {begin} to {end - 1} on a device of their own: each of the {spec.num_layers} "
            "layers has an input of its own, made of the tokens, so one device must have them all"
        )
    for first, beyond in spec.uncut:
        if first < begin < beyond or first < end < beyond:
            raise PlacementError(
                f"layers {begin} to {end - 1} on a device of their own: later layers take the keys "
                f"of layer {first}, so one device must have layers {first} to {beyond - 1}"
            )


def _width(spec: ModelSpec) -> int:
    """The widest activation of a row, in numbers."""
    halves = [half for kinds in spec.layers for half in (kinds.mixer, kinds.feed_forward)]
    inputs = 0 if spec.layer_inputs is None else spec.num_layers * spec.layer_inputs.size
    return max(4 * spec.hidden_size, inputs, *(half.width for half in halves))


def weight_types(
    spec: ModelSpec,
    begin: int,
    end: int,
    precision: Precision,
    encoding_of: Callable[[str], Encoding],
) -> dict[str, int]:
    """Bytes of layers `[begin, end)` by the name of their number type."""
    found: dict[str, int] = {}
    for name, shape in _shapes(spec, begin, end).items():
        encoding = encoding_of(name)
        name_of_type = encoding.type_name(shape, precision)
        found[name_of_type] = found.get(name_of_type, 0) + encoding.num_bytes(shape, precision)
    return found


def _weight_bytes(
    spec: ModelSpec,
    begin: int,
    end: int,
    precision: Precision,
    encoding_of: Callable[[str], Encoding],
) -> int:
    shapes = _shapes(spec, begin, end)
    return sum(encoding_of(name).num_bytes(shape, precision) for name, shape in shapes.items())


def _shapes(spec: ModelSpec, begin: int, end: int) -> dict[str, Shape]:
    """Shapes of the layers and of the ends that belong to them; tied weights count once."""
    of_layers = {
        f"{spec.prefix}layers.{layer}.{name}": shape
        for layer in range(begin, end)
        for name, shape in spec.layer_shapes(layer).items()
    }
    return of_layers | spec.end_shapes(is_first=begin == 0, is_last=end == spec.num_layers)


def named_devices(device: str | None, devices: Sequence[str]) -> tuple[str, ...]:
    """The devices of `--target-device` or `--target-devices`, in full; empty if neither is given.

    Raises PlacementError.
    """
    if device is None:
        return check_devices(devices)
    if devices:
        raise PlacementError(
            f"--target-device {device}: not allowed together with --target-devices "
            f"{','.join(devices)}; give one of the two"
        )
    return check_devices([device], "--target-device")


def check_devices(names: Sequence[str], flag: str = "--target-devices") -> tuple[str, ...]:
    """Device names in full ("cuda" -> "cuda:0"), of this machine or another ("box2/cuda"). Raises
    PlacementError, which names `flag`.
    """
    full = []
    for name in names:
        match = re.fullmatch(r"([a-z0-9][a-z0-9-]*/)?([a-z]+)(?::(\d{1,3}))?", name)
        if match is None or match[2] not in BACKENDS:
            raise PlacementError(
                f"{flag} {','.join(names)}: {name!r} is not a device; "
                f"expected BACKEND or BACKEND:INDEX with a backend of {', '.join(BACKENDS)}"
            )
        full.append(f"{match[1] or ''}{match[2]}:{int(match[3] or 0)}")
    for name in full:
        if full.count(name) > 1:
            raise PlacementError(f"{flag} {','.join(names)}: {name} is named twice")
    return tuple(full)


def check_weights(weights: Sequence[float], num_devices: int) -> None:
    """Raise PlacementError unless there is one positive finite weight for each device."""
    text = ",".join(f"{w:g}" for w in weights)
    if len(weights) != num_devices:
        raise PlacementError(
            f"--target-layer-split {text}: {len(weights)} weights for {num_devices} devices; "
            "one for each device is expected"
        )
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise PlacementError(
                f"--target-layer-split {text}: {weight:g} is not allowed; "
                "every weight must be positive and finite"
            )


def split_layers(num_layers: int, weights: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Split layers at rounded cumulative weights, at least one layer each: half-open ranges.

    Raises PlacementError if there are more shards than layers.
    """
    num_shards = len(weights)
    if num_shards > num_layers:
        raise PlacementError(
            f"--target-devices names {num_shards} devices, but the model has {num_layers} layers; "
            "at most one device for each layer"
        )
    largest = max(weights)
    weights = [weight / largest for weight in weights]  # sums of huge weights would overflow
    total, running, cuts = math.fsum(weights), 0.0, [0]
    for i, weight in enumerate(weights):
        running += weight
        cut = round(num_layers * running / total)
        # Leave a layer for each shard on either side of this cut.
        cuts.append(min(max(cut, cuts[-1] + 1), num_layers - (num_shards - 1 - i)))
    return tuple(itertools.pairwise(cuts))
