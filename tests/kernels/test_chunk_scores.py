"""The weights of chunks for the newest queries equal those of plain loops, for any blocks of
keys.
"""

from types import SimpleNamespace

import pytest
import torch

from luceasync.kernels import chunk_scores
from luceasync.kv.state import StateTensor
from luceasync.models.mixers.attention_torch import TorchProbe
from luceasync.models.mixers.attention_triton import TritonProbe
from luceasync.models.recent import LayerProbe, ring_positions
from tests.kernels.cases import TOLERANCE, distance, random
from tests.reference import chunk_masses as truth

CHUNK = 16
SHAPES = {"groups": (6, 2, 32), "one head": (1, 1, 16), "odd heads": (3, 3, 20)}
BODIES = {"torch": TorchProbe, "triton": TritonProbe}


@pytest.fixture(params=BODIES.values(), ids=BODIES)
def body(request: pytest.FixtureRequest):
    return request.param()


def looked(body, ring, keys, filled: range, sizes: list[int]) -> torch.Tensor:
    kind = SimpleNamespace(num_heads=ring.shape[1], ring=StateTensor("q", ring.shape, "kv"))
    probe = LayerProbe(kind, body, filled, len(keys), CHUNK)
    begin = 0
    for block in keys.split(sizes):
        probe.probe(ring, block.clone(), begin)
        begin += len(block)
    return probe.mass()


@pytest.mark.covered(2)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sizes", [[75], [32, 43], [32, 5, 11, 27]], ids=str)
def test_masses_are_those_of_the_loops(body, shape, sizes, dtype, device) -> None:
    num_heads, num_kv_heads, head_dim = shape
    num_tokens, num_newest = sum(sizes), 10
    keys = random(num_tokens, num_kv_heads, head_dim, dtype=dtype, device=device)
    ring = random(num_newest, num_heads, head_dim, dtype=dtype, device=device)
    positions = ring_positions(num_newest, num_tokens, device).tolist()
    assert sorted(positions) == [*range(num_tokens - num_newest, num_tokens)]
    assert all(position % num_newest == place for place, position in enumerate(positions))
    found = looked(body, ring, keys, range(num_tokens), sizes)
    expected = truth.masses(ring.cpu(), keys.cpu(), positions, CHUNK)
    assert distance(found.cpu(), expected) < 4 * TOLERANCE[dtype]


def test_queries_and_chunks_of_several_programs_are_those_of_one(device, monkeypatch) -> None:
    keys = random(150, 2, 16, dtype=torch.float32, device=device)
    ring = random(12, 6, 16, dtype=torch.float32, device=device)
    whole = looked(TritonProbe(), ring, keys, range(150), [100, 50])
    monkeypatch.setattr(chunk_scores, "CHUNKS", 2)
    monkeypatch.setattr(chunk_scores, "QUERY_BYTES", 16 * 16 * 4)
    assert distance(looked(TritonProbe(), ring, keys, range(150), [100, 50]), whole) < 1e-6


def test_whole_chunks_weigh_what_the_loops_say(dtype, device) -> None:
    """More tokens than a program takes at a time, and partial chunks."""
    keys = random(700, 2, 20, dtype=dtype, device=device)
    ring = random(10, 4, 20, dtype=dtype, device=device)
    positions = ring_positions(10, 700, device).tolist()
    found = looked(TritonProbe(), ring, keys, range(700), [328, 372])
    expected = truth.masses(ring.cpu(), keys.cpu(), positions, CHUNK)
    assert distance(found.cpu(), expected) < 4 * TOLERANCE[dtype]


def test_rows_that_were_never_run_look_at_nothing(body, device) -> None:
    """A lane that continues from a node, and has run two of its newest rows."""
    keys = random(40, 2, 16, dtype=torch.float32, device=device)
    ring = random(8, 4, 16, dtype=torch.float32, device=device)
    found = looked(body, ring, keys, range(38, 40), [40])
    kept = [38 % 8, 39 % 8]
    expected = truth.masses(ring[kept].cpu(), keys.cpu(), [38, 39], CHUNK)
    assert distance(found.cpu(), expected) < TOLERANCE[torch.float32]
    ring[[place for place in range(8) if place not in kept]] = torch.nan
    assert torch.equal(looked(body, ring, keys, range(38, 40), [40]), found)


def test_a_lane_shorter_than_its_ring_has_few_rows(body, device) -> None:
    keys = random(5, 1, 16, dtype=torch.float32, device=device)
    ring = random(8, 1, 16, dtype=torch.float32, device=device)
    found = looked(body, ring, keys, range(5), [5])
    assert found.tolist() == pytest.approx([1.0])
