"""Features in a snapshot: two tensors that say themselves what they are, checked before use.

Knows the ring's rows, not the ring: what one ring exported another of any capacity takes up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.dflash.feature_spec import FLOATS, FeatureSpec
from luceasync.errors import SnapshotMismatch

META = "dflash_feature_meta"
DATA = "dflash_feature_data"
SCHEMA = 1
NUM_FIELDS = 4  # schema, begin, end, hidden size; the taps follow


@dataclass(frozen=True, slots=True)
class Features:
    """Rows of positions `[begin, begin + tokens)`: [tokens, taps * hidden] in host memory."""

    begin: int
    rows: Tensor


def encode(spec: FeatureSpec, features: Features) -> dict[str, Tensor]:
    """The tensors of a node: `dflash_feature_meta` int64 [4 + taps] = schema, begin, end, hidden
    size, taps; `dflash_feature_data` [end - begin, taps * hidden], the rows themselves.
    Raises ValueError for rows that are not of `spec`, or none.
    """
    rows, begin = features.rows, features.begin
    if rows.ndim != 2 or rows.shape[1] != spec.width or not len(rows) or rows.dtype not in FLOATS:
        raise ValueError(
            f"rows {rows.dtype} {tuple(rows.shape)}: [1 or more, {spec.width}] is expected"
        )
    meta = (SCHEMA, begin, begin + len(rows), spec.hidden_size, *spec.taps)
    return {META: torch.tensor(meta, dtype=torch.int64), DATA: rows}


def decode(
    spec: FeatureSpec, tensors: Mapping[str, Tensor], *, begin: int, end: int
) -> Features | None:
    """The features among the tensors of a node of tokens `[begin, end)`; None where it has none.

    Raises SnapshotMismatch for features of another drafter or another span, or tensors that do
    not agree with each other: such a node is to be treated as one without features.
    """
    present = tensors.keys() & {META, DATA}
    if not present:
        return None
    if len(present) == 1:
        raise SnapshotMismatch(f"{present.pop()} came alone; {META} and {DATA} go together")
    first, last = _checked_span(spec, tensors[META])
    if not begin <= first < last == end:
        raise SnapshotMismatch(
            f"features of positions [{first}, {last}) in a node of [{begin}, {end}): "
            "they must lie in it and reach its end"
        )
    rows = tensors[DATA]
    if rows.shape != (last - first, spec.width) or rows.dtype not in FLOATS:
        raise SnapshotMismatch(
            f"{DATA}: {rows.dtype} {tuple(rows.shape)}, "
            f"expected a float tensor {(last - first, spec.width)}"
        )
    return Features(first, rows)


def _checked_span(spec: FeatureSpec, meta: Tensor) -> tuple[int, int]:
    """begin and end of what `meta` describes; it must be of this schema and this drafter."""
    if meta.dtype != torch.int64 or meta.ndim != 1 or len(meta) <= NUM_FIELDS:
        raise SnapshotMismatch(
            f"{META}: {meta.dtype} {tuple(meta.shape)}, "
            f"expected int64 of {NUM_FIELDS} fields and the taps"
        )
    schema, begin, end, hidden_size, *taps = meta.tolist()
    if schema != SCHEMA:
        raise SnapshotMismatch(f"{META}: schema {schema}, expected {SCHEMA}")
    if (tuple(taps), hidden_size) != (spec.taps, spec.hidden_size):
        raise SnapshotMismatch(
            f"features of layers {taps} of {hidden_size} numbers each; this drafter reads "
            f"layers {list(spec.taps)} of {spec.hidden_size}"
        )
    return begin, end
