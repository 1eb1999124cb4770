"""Attention compared with loops in float64, and the places it may touch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_sizes import HeadNorms
from luceasync.models.mixers.attention_torch import TorchAttention, attend_one, attention
from luceasync.models.pass_rows import NO_LANE, Entry, Rows
from tests.reference import attention as truth

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
EPS = 1e-6


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(
    ("rows", "before"), [(1, 0), (1, 1), (1, 69), (2, 0), (2, 63), (17, 5), (64, 0), (70, 30)]
)
def test_attention_is_the_loop(dtype: torch.dtype, group: int, rows: int, before: int):
    q = randn(rows, 2 * group, 16, seed=1, dtype=dtype)
    k, v = (randn(rows + before, 2, 16, seed=seed, dtype=dtype) for seed in (2, 3))
    out = attention(q, k, v)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), truth.attend(q, k, v), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_seen", [1, 63, 64, 65, 2047, 2048, 2049, 5000])
def test_a_single_row_sees_what_is_written_and_not_what_stands_behind(num_seen: int):
    q = randn(1, 4, 16, seed=1)
    k, v = (randn(num_seen + 63, 2, 16, seed=seed) for seed in (2, 3))
    k[num_seen:], v[num_seen:] = float("nan"), 1e6  # keys are masked, values get no weight
    out = attend_one(q, k, v, num_seen)
    expected = truth.attend(q, k[:num_seen], v[:num_seen])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", range(1, 71, 3))
def test_a_row_does_not_see_those_after_it(rows: int):
    q, k, v = (randn(rows, 4, 8, seed=seed) for seed in (1, 2, 3))
    alone = torch.cat([attention(q[t : t + 1], k[: t + 1], v[: t + 1]) for t in range(rows)])
    torch.testing.assert_close(attention(q, k, v), alone, rtol=0, atol=1e-5)


# --- attend -------------------------------------------------------------------------------------

HEADS, KV_HEADS, DIM, PLACES = 4, 2, 8, 128


def make_spec(*, rotary_dim: int = DIM, gated: bool = False) -> AttentionSpec:
    return AttentionSpec(HEADS, KV_HEADS, DIM, rotary_dim, 10000.0, gated)


def make_norms() -> HeadNorms:
    return HeadNorms(1 + randn(DIM, seed=7) / 10, 1 + randn(DIM, seed=8) / 10, EPS)


def make_rows(spec: AttentionSpec, entries: list[Entry], num_rows: int) -> Rows:
    begins = torch.tensor([entry.begin for entry in entries], dtype=torch.int32)
    positions = begins[:, None] + torch.arange(num_rows, dtype=torch.int32)
    lanes = torch.tensor([entry.lane for entry in entries], dtype=torch.int32)
    tables = torch.arange(PLACES // 64, dtype=torch.int32).repeat(3, 1)
    prepared = {spec: TorchAttention(spec).prepare(positions)}
    return Rows(tuple(entries), lanes, positions, tables, prepared)


def entry_of(lane: int, begin: int, end: int) -> Entry:
    return Entry(lane, begin, end, slice(begin, end), slice(0, end))


PADDING = Entry(NO_LANE, 5, 6, slice(5, 6), slice(0, 6))  # places that must not be touched


def poisoned() -> tuple[Tensor, Tensor]:
    """Keys and values of three lanes in which nothing has been written."""
    return tuple(torch.full((3, PLACES, KV_HEADS, DIM), torch.nan) for _ in range(2))


def make_projected(spec: AttentionSpec, entries: int, rows: int, seed: int = 0) -> Tensor:
    width = spec.query_dim * (2 if spec.gated else 1) + 2 * spec.kv_dim
    return randn(entries, rows, width, seed=seed)


def run_attend(spec: AttentionSpec, projected: Tensor, cache, entries: list[Entry]) -> Tensor:
    rows = make_rows(spec, entries, projected.shape[1])
    return TorchAttention(spec).attend(projected, make_norms(), cache, rows)


def expected_attend(projected: Tensor, spec: AttentionSpec) -> Tensor:
    """One sequence from position 0. projected: [rows, width] -> float64 [rows, query_dim]."""
    q, k, v, *gate = projected.split([32, 16, 16] + [32] * spec.gated, -1)
    q, k, v = (x.unflatten(-1, (-1, DIM)).double() for x in (q, k, v))
    q = truth.rms_norm(q, make_norms().query, EPS)
    k = truth.rms_norm(k, make_norms().key, EPS)
    for x in (q, k):
        for position, head in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
            rotated = truth.rotate(x[position, head], position, spec.rotary_dim, spec.rope_theta)
            x[position, head] = rotated
    out = truth.attend(q, k, v).flatten(1)
    return out * torch.sigmoid(gate[0].double()) if gate else out


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 4, DIM])
def test_attend_is_norms_rotation_attention_and_gate(gated: bool, rotary_dim: int):
    spec = make_spec(rotary_dim=rotary_dim, gated=gated)
    projected = make_projected(spec, 1, 20)
    out = run_attend(spec, projected, poisoned(), [entry_of(0, 0, 20)])[0]
    expected = expected_attend(projected[0], spec)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_padding_alone_is_zeros_and_writes_nothing(num_rows: int):
    spec, cache = make_spec(gated=True), poisoned()
    padding = replace(PADDING, end=PADDING.begin + num_rows)
    out = run_attend(spec, make_projected(spec, 2, num_rows), cache, [padding] * 2)
    assert torch.equal(out, torch.zeros(2, num_rows, spec.query_dim))
    assert all(state.isnan().all() for state in cache)


@pytest.mark.parametrize("cuts", [[1], [7, 8], [1, 2, 3, 19]])
def test_rows_may_come_in_any_portions(cuts: list[int]):
    spec, cache = make_spec(), poisoned()
    projected = make_projected(spec, 1, 20)
    whole = run_attend(spec, projected, poisoned(), [entry_of(0, 0, 20)])
    bounds = list(zip([0, *cuts], [*cuts, 20], strict=True))
    parts = [run_attend(spec, projected[:, b:e], cache, [entry_of(0, b, e)]) for b, e in bounds]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)


def test_only_the_rows_places_are_written_and_nothing_unwritten_is_read():
    spec, cache = make_spec(), poisoned()
    entries = [entry_of(0, 0, 3), entry_of(2, 0, 3)]
    out = run_attend(spec, make_projected(spec, 2, 3), cache, entries)
    assert out.isfinite().all()
    for state in cache:
        written = state.isfinite().all(-1).all(-1)  # [lanes, places]
        assert torch.equal(written, ~state.isnan().any(-1).any(-1))
        assert written.nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [2, 0], [2, 1], [2, 2]]


def test_places_out_of_order_hold_the_same_rows():
    spec, cache = make_spec(), poisoned()
    projected = make_projected(spec, 1, 20)
    places = torch.randperm(PLACES, generator=torch.Generator().manual_seed(1))[:20]
    out = run_attend(spec, projected, cache, [Entry(1, 0, 20, places, places)])
    expected = run_attend(spec, projected, poisoned(), [entry_of(1, 0, 20)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert cache[0][1].isfinite().all(-1).all(-1).nonzero()[:, 0].tolist() == sorted(
        places.tolist()
    )


def test_padding_entries_change_nothing():
    spec, alone, padded = make_spec(gated=True), poisoned(), poisoned()
    projected = make_projected(spec, 3, 1)
    out = run_attend(spec, projected[:1], alone, [entry_of(1, 0, 1)])
    together = run_attend(spec, projected, padded, [entry_of(1, 0, 1), PADDING, PADDING])
    assert torch.equal(together[:1], out)
    for a, b in zip(alone, padded, strict=True):
        assert torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))


def test_a_partial_rotation_leaves_the_rest_of_the_head_alone():
    spec, cache = make_spec(rotary_dim=4), poisoned()
    projected = make_projected(spec, 1, 1).expand(1, 2, -1)
    run_attend(spec, projected, cache, [entry_of(0, 0, 2)])
    keys = cache[0][0, :2]  # the same row at positions 0 and 1
    assert torch.equal(keys[0, :, 4:], keys[1, :, 4:])
    assert not torch.isclose(keys[0, :, :4], keys[1, :, :4]).any()
