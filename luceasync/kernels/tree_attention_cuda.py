"""Attention of trees of up to 16 rows on NVIDIA GPUs, in two launches: attend_tree.cu, which starts
to copy keys and values before the preceding kernel has ended, and merge_tree.cu.

Decides how queries and a context are divided. Computes the same as
luceasync.kernels.tree_attention.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from luceasync.kernels.attention import PAGE_TOKENS
from luceasync.kernels.cuda_program import CudaProgram, LaunchShape, can_compile
from luceasync.kernels.overlap import can_overlap, shared_bytes
from luceasync.kernels.prepared_rows import UNIT_COLUMNS, ArrangedRows, room_for_rows
from luceasync.kernels.quant_decode import Coding
from luceasync.kernels.tree_attention import NUM_SPLITS

MAX_ROWS = 16  # of a tree: a unit of new keys
HEAD_DIMS = (16, 32, 64, 128)
MAX_WARPS, MAX_QUERY_WARPS = 8, 4  # of a program: all, and those that have different queries
QUERIES_OF_WARP = 16
TILE_TOKENS = 64
KEY_GROUPS = 4  # at most: units of a tile
MERGE_WARPS = 4
NUM_PROGRAMS = 128  # for an entry with a long context: an H200 has 132 multiprocessors
STATIC_BYTES = 1024  # of shared memory besides those of a split

SOURCE = Path(__file__).with_name("attend_tree.cu")
MERGE_SOURCE = Path(__file__).with_name("merge_tree.cu")
_ATTEND = CudaProgram(SOURCE, "attend_tree")
_MERGE = CudaProgram(MERGE_SOURCE, "merge_tree")


@dataclass(frozen=True, slots=True)
class TreeHeads:
    """The heads of a layer: `group` query heads for each kv head; `half` the number of rotated
    dimensions.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    half: int
    gated: bool

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass(frozen=True, slots=True)
class TreeSplit:
    """How attention of a tree is divided: a context among up to `splits` programs of `warps` each,
    of which `query_warps` have different queries, 16 each; `stages` of 64 tokens are in shared
    memory.
    """

    warps: int
    query_warps: int
    stages: int
    splits: int


def can_attend(projected: Tensor, keys: Tensor, num_heads: int, rotary_dim: int) -> bool:
    """Whether the programs support these dtypes, heads and rows on this device."""
    if not keys.is_cuda or not projected.dtype == keys.dtype == torch.bfloat16:
        return False
    num_kv_heads, head_dim = keys.shape[2:]
    fits = projected.shape[1] <= MAX_ROWS and head_dim in HEAD_DIMS and rotary_dim % 4 == 0
    if not fits or not can_compile(keys.device.index or 0):
        return False
    group, num_rows = num_heads // num_kv_heads, projected.shape[1]
    heads = TreeHeads(num_kv_heads, group, head_dim, rotary_dim // 2, gated=False)
    chosen = choose_split(heads, num_rows)
    return shared_of(heads, chosen) <= shared_bytes(keys) - STATIC_BYTES


@dataclass(frozen=True, slots=True)
class TreeParts:
    """The results of programs for parts of a context, to be merged: `sums` of values, float32
    [entries, kv heads, splits, rows of an entry * group, head_dim], and `weights`, [.., 2]."""

    heads: TreeHeads
    split: TreeSplit
    sums: Tensor
    weights: Tensor
    projected: Tensor  # [entries, rows, width], with the gates
    lanes: Tensor
    row_indices: Tensor

    @property
    def num_rows(self) -> int:
        """Of all entries."""
        return self.row_indices.numel()

    def rows(self) -> Tensor:
        """The parts merged and gated: [entries, rows, query_dim]."""
        width = self.heads.num_heads * self.heads.head_dim
        out = self.projected.new_empty(*self.row_indices.shape, width)
        self._merge(self.num_rows, out, None, ())
        return out

    def arranged(self, codings: Collection[Coding]) -> ArrangedRows:
        """9 to 16 `rows`, arranged for products with matrices of these codings."""
        width = self.heads.num_heads * self.heads.head_dim
        out = room_for_rows(self.projected, self.num_rows, width, codings)
        self._merge(MAX_ROWS, out.columns, out.group_sums, out.lifts)
        return out

    def _merge(
        self, num_written: int, out: Tensor, out_sums: Tensor | None, lifts: Sequence[int]
    ) -> None:
        heads, device = self.heads, self.projected.device
        constants = merge_constants_of(
            heads,
            self.row_indices.shape[1],
            self.split,
            overlaps=can_overlap(device.index or 0),
            lifts=lifts,
            has_sums=out_sums is not None,
        )
        parts = (self.sums, self.weights, self.projected, self.lanes, self.row_indices)
        arguments = (*parts, out, out_sums, self.num_rows, self.projected.shape[2])
        num_units = -(-heads.num_heads * heads.head_dim // UNIT_COLUMNS)
        launch = LaunchShape(num_written * num_units, MERGE_WARPS * 32)
        _MERGE.launch(device, constants, launch, arguments)


def attend_tree(
    projected: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float],
    keys: Tensor,
    values: Tensor,
    lanes: Tensor,
    row_indices: Tensor,
    tables: Tensor,
    rotation: tuple[Tensor, Tensor],
    ancestors: Tensor,
    new: tuple[Tensor, Tensor],
    *,
    num_heads: int,
    rotary_dim: int,
    gated: bool,
    queries: Tensor | None = None,
    chosen: TreeSplit | None = None,
) -> TreeParts:
    """Same as luceasync.kernels.tree_attention.attend_tree, in bfloat16; the parts are still to be
    merged. `chosen` replaces `choose_split`."""
    num_entries, num_rows = row_indices.shape
    num_kv_heads, head_dim = keys.shape[2:]
    kv_dim, group = num_kv_heads * head_dim, num_heads // num_kv_heads
    assert projected.is_contiguous() and row_indices.is_contiguous() and ancestors.is_contiguous()
    assert projected.shape[2] % 8 == 0, "rows are read by 16 bytes"
    assert keys.stride() == values.stride() and keys.stride(1) == kv_dim, "pages of whole rows"
    assert keys.stride(0) % kv_dim == 0 and num_rows <= MAX_ROWS
    heads = TreeHeads(num_kv_heads, group, head_dim, rotary_dim // 2, gated)
    chosen = chosen or choose_split(heads, num_rows)
    of_float = partial(torch.empty, dtype=torch.float32, device=keys.device)
    parts = (num_entries, num_kv_heads, chosen.splits, num_rows * group)
    sums, weights = of_float((*parts, head_dim)), of_float((*parts, 2))
    query_norm, key_norm, eps = norms
    cos, sin = rotation
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
        ancestors,
        *new,
        queries,
        sums,
        weights,
        eps,
        head_dim**-0.5 * 1.4426950408889634,  # scores in base 2
        projected.shape[2],
        keys.stride(0) // kv_dim,
        tables.stride(0),
    )
    overlaps = can_overlap(keys.device.index or 0)
    constants = constants_of(heads, num_rows, chosen, overlaps=overlaps)
    num_programs = num_entries * num_kv_heads * num_blocks(heads, num_rows, chosen) * chosen.splits
    launch = LaunchShape(num_programs, chosen.warps * 32, constants["SHARED_BYTES"])
    _ATTEND.launch(keys.device, constants, launch, arguments)
    return TreeParts(heads, chosen, sums, weights, projected, lanes, row_indices)


def choose_split(heads: TreeHeads, num_rows: int) -> TreeSplit:
    """How queries are divided among warps, and a context among as many programs as a GPU runs at
    once, or as in Triton.
    """
    splits = min(max(NUM_PROGRAMS // heads.num_kv_heads, 8), NUM_SPLITS)
    num_sixteens = -(-num_rows * heads.group // QUERIES_OF_WARP)
    query_warps = min(1 << (num_sixteens - 1).bit_length(), MAX_QUERY_WARPS)
    return TreeSplit(min(MAX_WARPS, KEY_GROUPS * query_warps), query_warps, 2, splits)


def num_blocks(heads: TreeHeads, num_rows: int, split: TreeSplit) -> int:
    """Programs that share the queries of a kv head."""
    return -(-num_rows * heads.group // (split.query_warps * QUERIES_OF_WARP))


def shared_of(heads: TreeHeads, split: TreeSplit) -> int:
    """Bytes of shared memory of a program, as attend_tree.cuh divides them."""
    row_bytes = heads.head_dim * 2 + 16
    num_queries = split.query_warps * QUERIES_OF_WARP
    num_tokens = split.stages * 2 * TILE_TOKENS + num_queries + 2 * MAX_ROWS
    return num_tokens * row_bytes + split.warps * QUERIES_OF_WARP * 8


def constants_of(
    heads: TreeHeads, num_rows: int, split: TreeSplit, *, overlaps: bool
) -> dict[str, int]:
    """The constants that attend_tree.cu is compiled with."""
    return {
        "GROUP": heads.group,
        "KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
        "HALF": heads.half,
        "GATED": int(heads.gated),
        "ROWS": num_rows,
        "WARPS": split.warps,
        "M_WARPS": split.query_warps,
        "STAGES": split.stages,
        "SPLITS": split.splits,
        "PAGE": PAGE_TOKENS,
        "OVERLAP": int(overlaps),
        "SHARED_BYTES": shared_of(heads, split),
    }


def merge_constants_of(
    heads: TreeHeads,
    num_rows: int,
    split: TreeSplit,
    *,
    overlaps: bool,
    lifts: Sequence[int] = (),
    has_sums: bool = False,
) -> dict[str, int]:
    """The constants that merge_tree.cu is compiled with; without lifts results are plain rows."""
    both = constants_of(heads, num_rows, split, overlaps=overlaps)
    del both["SHARED_BYTES"]
    return both | {
        "MERGE_WARPS": MERGE_WARPS,
        "ARRANGED": int(bool(lifts)),
        "LIFTS": sum(1 << lift for lift in lifts),
        "SUMS": int(has_sums),
    }
