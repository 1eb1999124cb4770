"""The newest queries of every lane are in its ring, after any kind of pass."""

import pytest
import torch

from luceasync.kernels import attention, tree_attention
from luceasync.models.mixers.attention import RECENT_ROWS, AttentionSpec
from luceasync.models.mixers.attention_torch import TorchAttention, heads_of
from luceasync.models.mixers.attention_triton import TritonAttention
from luceasync.models.pass_rows import NO_LANE, AcceptedRows, Paths
from luceasync.models.trees import torch_trees
from tests.kernels.cases import (
    TOLERANCE,
    AttentionCase,
    attention_case,
    attention_scratch,
    distance,
    random_parents,
    tree_rows,
)

SPEC = AttentionSpec(6, 2, 24, 16, 10000.0, gated=True)
BODIES = {"torch": TorchAttention, "triton": TritonAttention}


@pytest.fixture(params=BODIES.values(), ids=BODIES)
def body(request: pytest.FixtureRequest):
    return request.param(SPEC)


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "NUM_SPLITS", 4)
    monkeypatch.setattr(tree_attention, "NUM_SPLITS", 4)


def new_ring(case: AttentionCase, num_layers: int | None = None) -> torch.Tensor:
    """Rings of three lanes and an unused one, all NaN."""
    layers = () if num_layers is None else (num_layers,)
    shape = (*layers, 4, RECENT_ROWS, SPEC.num_heads, SPEC.head_dim)
    return case.keys.new_full(shape, torch.nan)


def queries_of(case: AttentionCase) -> torch.Tensor:
    """[entries, rows, heads, head_dim], as used for attention."""
    return heads_of(case.projected, SPEC, case.norms, case.rows.prepared[SPEC])[0]


def assert_kept(ring: torch.Tensor, rows: torch.Tensor, row_indices: list[int]) -> None:
    """A lane's ring holds `rows` at these row indices and nothing else."""
    places = [row_index % RECENT_ROWS for row_index in row_indices]
    assert distance(ring[places], rows) < TOLERANCE[ring.dtype]
    rest = [place for place in range(RECENT_ROWS) if place not in places]
    assert ring[rest].isnan().all()


def test_a_decode_step_keeps_the_row_of_every_lane(body, dtype, device) -> None:
    case = attention_case(SPEC, [2, 0], [130, 5], 1, dtype, device)
    plain = body.attend(case.projected, case.norms, (case.keys, case.values), case.rows)
    ring = new_ring(case)
    out = body.attend(case.projected, case.norms, (case.keys, case.values, ring), case.rows)
    assert out.equal(plain)
    for entry, (lane, row_index) in enumerate([(2, 130), (0, 5)]):
        assert_kept(ring[lane], queries_of(case)[entry], [row_index])
    assert ring[1].isnan().all()


@pytest.mark.parametrize("num_rows", [3, 64, 71])
def test_a_chunk_keeps_its_last_rows(body, num_rows, dtype, device) -> None:
    case = attention_case(SPEC, [1], [50], num_rows, dtype, device)
    ring = new_ring(case)
    body.attend(case.projected, case.norms, (case.keys, case.values, ring), case.rows)
    num_kept = min(num_rows, RECENT_ROWS)
    row_indices = [*range(50 + num_rows - num_kept, 50 + num_rows)]
    assert_kept(ring[1], queries_of(case)[0, -num_kept:], row_indices)
    assert ring[[0, 2]].isnan().all()


def test_padding_keeps_nothing(body, dtype, device) -> None:
    case = attention_case(SPEC, [0], [9], 1, dtype, device)
    case.rows.lanes[0] = NO_LANE
    ring = new_ring(case)
    body.attend(case.projected, case.norms, (case.keys, case.values, ring), case.rows)
    if not isinstance(body, TorchAttention):  # the mixer's body knows the entries of the host
        assert ring[:3].isnan().all()


@pytest.mark.parametrize("path", [[0], [0, 2, 5], [*range(9)]], ids=len)
def test_a_verify_pass_keeps_what_is_committed(body, path, dtype, device) -> None:
    num_rows, row_index = 9, 60
    case = attention_case(SPEC, [2], [row_index], num_rows, dtype, device)
    parents = random_parents(1, num_rows)
    rows = tree_rows(case.rows, SPEC, parents)
    trees = torch_trees(parents.to(device), 1)
    shape = (1, num_rows, SPEC.num_heads, SPEC.head_dim)
    scratch = (*attention_scratch(case), case.keys.new_full(shape, 9.0))
    state = (case.keys, case.values, new_ring(case))
    body.attend_tree(case.projected, case.norms, state, rows, trees, scratch)
    assert state[2].isnan().all()
    filled = [*path, *[0] * (num_rows - len(path))]
    numbers = ([2], [row_index], [filled], [len(path)])
    lanes, begins, chosen, counts = (
        torch.tensor(n, dtype=torch.int32, device=device) for n in numbers
    )
    index = torch.tensor(path, device=device)
    places = rows.entries[0].write[: len(path)]
    kept = (AcceptedRows(0, 2, row_index, row_index, places, index),)
    paths = Paths(kept, lanes, begins, begins, chosen, counts, rows.tables)
    stacked = tuple(t[None] for t in state)
    body.commit(tuple(t[None] for t in scratch), stacked, paths)
    queries = heads_of(case.projected, SPEC, case.norms, rows.prepared[SPEC])[0]
    assert_kept(stacked[2][0, 2], queries[0, path], [row_index + step for step in range(len(path))])
    assert stacked[2][0, [0, 1, 3]].isnan().all()
