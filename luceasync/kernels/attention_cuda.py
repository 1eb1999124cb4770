"""Attention of one new row per lane on NVIDIA GPUs, in one launch of attend_row.cu, which starts to
copy keys and values before the preceding kernel has ended.

Decides how a context is divided. Computes the same as luceasync.kernels.attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from luceasync.kernels.attention import PAGE_TOKENS
from luceasync.kernels.cuda_program import CudaProgram, LaunchShape, can_compile
from luceasync.kernels.overlap import can_overlap, shared_bytes
from luceasync.kernels.prepared_rows import FewRows

UNIT_TOKENS = 16  # that a warp processes at a time
MAX_GROUP = 16  # query heads of a kv head, which are the rows of a product
HEAD_DIMS = (16, 32, 64, 128)  # for heads of 256 the two Triton launches are faster
NUM_ARRIVALS = 4096  # limit of entries times kv heads in a launch
STATIC_BYTES = 1024  # of shared memory besides those of a split
NUM_PROGRAMS = 128  # for an entry with a long context: an H200 has 132 multiprocessors
# Units of a warp in flight. With a single entry, each program has its own multiprocessor; the
# programs of several entries take turns, and several of them fit on one.
ALONE_STAGES, STAGES = 4, 1

SOURCE = Path(__file__).with_name("attend_row.cu")
_PROGRAM = CudaProgram(SOURCE, "attend_row")


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of a layer: `group` query heads for each kv head; `half` the number of rotated
    dimensions; the `newest` queries are kept, 0 for none.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    half: int
    gated: bool
    newest: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSplit:
    """How a context is divided: among up to `splits` programs of `warps` each. A warp has `stages`
    of 16 tokens in shared memory, including the current one.
    """

    warps: int
    stages: int
    splits: int


def can_attend(projected: Tensor, keys: Tensor, num_heads: int, rotary_dim: int) -> bool:
    """Whether the program supports these dtypes, heads and entries on this device."""
    if not keys.is_cuda or not projected.dtype == keys.dtype == torch.bfloat16:
        return False
    num_kv_heads, head_dim = keys.shape[2:]
    fits = (
        num_heads // num_kv_heads <= MAX_GROUP
        and head_dim in HEAD_DIMS
        and rotary_dim % 4 == 0
        and len(projected) * num_kv_heads <= NUM_ARRIVALS
    )
    return fits and can_compile(keys.device.index or 0)


def new_arrivals(device: torch.device) -> Tensor:
    """Counters of finished programs, int32: zero before and after every launch.

    Launches that may run concurrently need their own; a captured launch keeps its own.
    """
    return torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=device)


def attend(
    projected: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float],
    keys: Tensor,
    values: Tensor,
    lanes: Tensor,
    row_indices: Tensor,
    tables: Tensor,
    rotation: tuple[Tensor, Tensor],
    *,
    arrivals: Tensor,
    num_heads: int,
    rotary_dim: int,
    gated: bool,
    ring: Tensor | None = None,
    few: FewRows | None = None,
    chosen: AttentionSplit | None = None,
) -> Tensor:
    """Same as luceasync.kernels.attention.attend, in bfloat16. `arrivals`: from `new_arrivals`;
    `few`: where the result goes, arranged for a product; `chosen` replaces `choose_split`."""
    num_entries = len(projected)
    num_kv_heads, head_dim = keys.shape[2:]
    kv_dim = num_kv_heads * head_dim
    assert projected.stride(0) % 4 == 0 and projected.stride(1) == 1, "rows are read by 8 bytes"
    assert keys.stride() == values.stride() and keys.stride(1) == kv_dim, "pages of whole rows"
    assert keys.stride(0) % kv_dim == 0 and num_entries * num_kv_heads <= len(arrivals)
    newest = 0 if ring is None else ring.shape[1]
    group = num_heads // num_kv_heads
    heads = AttentionHeads(num_kv_heads, group, head_dim, rotary_dim // 2, gated, newest)
    chosen = chosen or choose_split(heads, num_entries, shared_bytes(keys) - STATIC_BYTES)
    parts = (num_entries, num_kv_heads, chosen.splits, group)
    new = partial(torch.empty, dtype=torch.float32, device=keys.device)
    query_norm, key_norm, eps = norms
    cos, sin = rotation
    width = num_heads * head_dim
    out = projected.new_empty(num_entries, width) if few is None else few.columns
    arguments = (
        projected,
        query_norm,
        key_norm,
        keys,
        values,
        lanes,
        row_indices,
        tables,
        cos,
        sin,
        ring,
        new((*parts, head_dim)),
        new((*parts, 2)),
        arrivals,
        out,
        eps,
        head_dim**-0.5 * 1.4426950408889634,  # scores in base 2
        projected.stride(0),
        keys.stride(0) // kv_dim,
        tables.stride(0),
    )
    overlaps = can_overlap(keys.device.index or 0)
    constants = constants_of(heads, chosen, overlaps=overlaps, few=few is not None)
    num_programs = num_entries * num_kv_heads * chosen.splits
    launch = LaunchShape(num_programs, chosen.warps * 32, constants["SHARED_BYTES"])
    _PROGRAM.launch(keys.device, constants, launch, arguments)
    return out


def choose_split(heads: AttentionHeads, num_entries: int, most_bytes: int) -> AttentionSplit:
    """How a context is divided on a device whose programs may have `most_bytes` of shared memory.
    `warps` and `splits`, and so a row's bits, depend on the layer only."""
    splits = min(max(NUM_PROGRAMS // heads.num_kv_heads, 8), 64)
    stages = ALONE_STAGES if num_entries == 1 else STAGES
    return next(
        each
        for each in _smaller(AttentionSplit(4, stages, splits))
        if shared_of(heads, each) <= most_bytes
    )


def _smaller(split: AttentionSplit) -> Iterator[AttentionSplit]:
    """The split, then smaller ones for GPUs with less memory than an H200."""
    yield split
    while split.stages > 1:
        yield (split := replace(split, stages=split.stages - 1))
    while split.warps > 1:
        yield (split := replace(split, warps=split.warps // 2))


def shared_of(heads: AttentionHeads, split: AttentionSplit) -> int:
    """Bytes of shared memory of a program, as attend_layout.cuh divides them."""
    row_bytes = heads.head_dim * 2 + 16
    ring_bytes = split.stages * 2 * UNIT_TOKENS * row_bytes
    query_rows = 8 if heads.group <= 8 else 16
    new_bytes = 2 * heads.head_dim * 2
    weight_bytes = split.warps * heads.group * 8
    return split.warps * ring_bytes + query_rows * row_bytes + new_bytes + weight_bytes


def constants_of(
    heads: AttentionHeads, split: AttentionSplit, *, overlaps: bool, few: bool = False
) -> dict[str, int]:
    """The constants that a program is compiled with; `few`: whether results are FewRows."""
    return {
        "GROUP": heads.group,
        "KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
        "HALF": heads.half,
        "GATED": int(heads.gated),
        "NEWEST": heads.newest,
        "WARPS": split.warps,
        "STAGES": split.stages,
        "SPLITS": split.splits,
        "PAGE": PAGE_TOKENS,
        "FEW": int(few),
        "OVERLAP": int(overlaps),
        "SHARED_BYTES": shared_of(heads, split),
    }
