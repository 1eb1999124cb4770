"""Random inputs for kernel tests, and the error of a result against the reference."""

import random as random_module
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_sizes import HeadNorms
from luceasync.models.mixers.attention_torch import TorchAttention
from luceasync.models.mixers.delta import DeltaSpec
from luceasync.models.mixers.delta_sizes import DeltaParameters
from luceasync.models.pass_rows import Entry, Rows
from luceasync.models.trees import ROOT, torch_trees

PAGE = 64
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def distance(found: Tensor, truth: Tensor) -> float:
    """||found - truth|| / ||truth||; NaN stays NaN and fails every comparison."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def random(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(device=device, dtype=dtype)


def rows_at(
    lanes: list[int],
    begins: list[int],
    num_rows: int,
    spec: AttentionSpec,
    num_lanes: int,
    num_pages: int,
    device: torch.device,
) -> Rows:
    """Rows whose pages are shuffled, each lane its own way. `begins` are row indices: lane n has n
    absent chunks before them, which only the rotation shows.
    """
    generator = torch.Generator().manual_seed(7)
    pages = [torch.randperm(num_pages, generator=generator) for _ in range(num_lanes)]
    tables = torch.stack(pages).int()

    def places(lane: int, begin: int, end: int) -> Tensor:
        tokens = torch.arange(begin, end)
        return (tables[lane, tokens // PAGE].long() * PAGE + tokens % PAGE).to(device)

    entries = tuple(
        Entry(
            lane,
            begin,
            begin + num_rows,
            places(lane, begin, begin + num_rows),
            places(lane, 0, begin + num_rows),
        )
        for lane, begin in zip(lanes, begins, strict=True)
    )
    row_indices = torch.tensor(begins, dtype=torch.int32)[:, None]
    row_indices = (row_indices + torch.arange(num_rows, dtype=torch.int32)).to(device)
    lane_tensor = torch.tensor(lanes, dtype=torch.int32, device=device)
    prepared = {spec: TorchAttention(spec).prepare(row_indices + num_absent(lane_tensor))}
    return Rows(entries, lane_tensor, row_indices, tables.to(device), prepared)


def num_absent(lanes: Tensor) -> Tensor:
    """Absent tokens of each lane: [entries, 1]."""
    return lanes.clamp(min=0)[:, None] * PAGE


@dataclass(frozen=True)
class AttentionCase:
    """Inputs of `attend`; the caches are written in place, so take a copy for each run."""

    projected: Tensor
    spec: AttentionSpec
    norms: HeadNorms
    keys: Tensor
    values: Tensor
    rows: Rows

    def copy(self) -> "AttentionCase":
        return replace(self, keys=self.keys.clone(), values=self.values.clone())

    def run(self, body) -> Tensor:
        """`body`: TorchAttention or TritonAttention."""
        state = (self.keys, self.values)
        return body(self.spec).attend(self.projected, self.norms, state, self.rows)


def attention_case(
    spec: AttentionSpec,
    lanes: list[int],
    begins: list[int],
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionCase:
    num_pages = max(begins) // PAGE + num_rows // PAGE + 2
    num_lanes = max(lanes) + 1
    width = spec.query_dim * (2 if spec.gated else 1) + 2 * spec.kv_dim
    shape = (num_lanes, num_pages * PAGE, spec.num_kv_heads, spec.head_dim)
    place = {"dtype": dtype, "device": device}
    small = {"dtype": torch.float32, "device": device}
    weights = [1 + random(spec.head_dim, scale=0.1, **small) for _ in range(2)]
    return AttentionCase(
        random(len(lanes), num_rows, width, **place),
        spec,
        HeadNorms(*(weights if spec.has_head_norms else (None, None)), 1e-6),
        random(*shape, **place),
        random(*shape, **place),
        rows_at(lanes, begins, num_rows, spec, num_lanes, num_pages, device),
    )


@dataclass(frozen=True)
class DeltaCase:
    """Inputs of `delta`; the states advance in place, so take a copy for each run."""

    projected: Tensor
    spec: DeltaSpec
    parameters: DeltaParameters
    conv_state: Tensor
    delta_state: Tensor
    rows: Rows

    def copy(self) -> "DeltaCase":
        state = self.conv_state.clone(), self.delta_state.clone()
        return replace(self, conv_state=state[0], delta_state=state[1])

    def run(self, body) -> Tensor:
        """`body`: TorchDelta or TritonDelta."""
        state = (self.conv_state, self.delta_state)
        return body(self.spec).delta(self.projected, self.parameters, *state, self.rows)


def delta_case(
    spec: DeltaSpec, lanes: list[int], num_rows: int, dtype: torch.dtype, device: torch.device
) -> DeltaCase:
    heads, num_lanes = spec.num_value_heads, max(lanes) + 1
    width = spec.conv_channels + spec.output_dim + 2 * heads
    place = {"dtype": dtype, "device": device}
    small = {"dtype": torch.float32, "device": device}
    parameters = DeltaParameters(
        conv=random(spec.conv_channels, spec.conv_kernel, scale=0.5, **small),
        decay_rate=-random(heads, scale=0.5, **small).exp(),
        dt_bias=random(heads, **small),
        norm=1 + random(spec.value_dim, scale=0.1, **small),
        eps=1e-6,
    )
    state = (num_lanes + 1, heads, spec.key_dim, spec.value_dim)
    attention = AttentionSpec(1, 1, 16, 16, 10000.0, False)
    num_pages = num_rows // PAGE + 1
    return DeltaCase(
        random(len(lanes), num_rows, width, **place),
        spec,
        parameters,
        random(num_lanes + 1, spec.conv_kernel - 1, spec.conv_channels, **place),
        random(*state, scale=0.3, **small),
        rows_at(lanes, [0] * len(lanes), num_rows, attention, num_lanes, num_pages, device),
    )


# --- trees --------------------------------------------------------------------------------------


def random_parents(num_entries: int, num_rows: int) -> Tensor:
    """A random tree for each entry, int32 [entries, rows]."""
    choose = random_module.Random(num_rows)
    trees = [
        [ROOT, *(choose.randrange(row) for row in range(1, num_rows))] for _ in range(num_entries)
    ]
    return torch.tensor(trees, dtype=torch.int32)


def tree_rows(rows: Rows, spec: AttentionSpec, parents: Tensor) -> Rows:
    """`rows` as a verify pass has them: row indices by depth, and only committed places are
    read.
    """
    begins = rows.row_indices[:, :1]
    row_indices = begins + torch_trees(parents.to(begins.device), 1).depths
    entries = tuple(
        replace(e, end=e.begin, read=e.read[: e.begin] if e.begin else slice(0, 0))
        for e in rows.entries
    )
    prepared = {spec: TorchAttention(spec).prepare(row_indices + num_absent(rows.lanes))}
    return replace(rows, entries=entries, row_indices=row_indices, prepared=prepared)


def attention_scratch(case: AttentionCase) -> tuple[Tensor, Tensor]:
    shape = (*case.projected.shape[:2], case.spec.num_kv_heads, case.spec.head_dim)
    return case.keys.new_full(shape, 9.0), case.keys.new_full(shape, 9.0)


def delta_scratch(case: DeltaCase) -> tuple[Tensor, ...]:
    spec, shape = case.spec, case.projected.shape[:2]
    small = [(spec.num_key_heads, spec.key_dim), (spec.num_value_heads, spec.value_dim)]
    small += [(spec.num_value_heads,)]
    return (
        case.projected.new_full((*shape, spec.conv_channels), 9.0),
        *(case.delta_state.new_full((*shape, *dims), 9.0) for dims in small),
    )
