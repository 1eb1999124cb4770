"""Tap rows into the ring, against the loops of tests.reference."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.speculation.dflash.features import torch_scatter
from tests.reference import feature_ring


@st.composite
def steps(draw):
    """A scatter of up to three entries, in any lanes or none, with its store."""
    capacity, rows = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    max_rows, hidden = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    lanes = draw(st.permutations([-1, 0, 2, -1, 1]))[: draw(st.integers(1, 4))]
    counts = [draw(st.integers(0, max_rows)) for _ in lanes]
    begins = [draw(st.integers(0, 1 << 40)) for _ in lanes]
    paths = [[draw(st.integers(0, rows - 1)) for _ in range(max_rows)] for _ in lanes]
    taps = [torch.randn(len(lanes), rows, hidden) for _ in range(draw(st.integers(1, 3)))]
    indices = (torch.tensor(x, dtype=torch.int32) for x in (lanes, counts, paths))
    lanes, counts, paths = indices
    store = torch.full((3 * capacity + 1, len(taps) * hidden), 7.0)
    return taps, lanes, torch.tensor(begins), counts, paths, store, capacity


@pytest.mark.slow
@given(steps(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=150, deadline=None)
def test_every_row_comes_to_the_place_of_its_position(step, dtype) -> None:
    *arguments, store, capacity = step
    found, truth = store.to(dtype), store.to(dtype)
    rows = torch_scatter(*arguments, found, capacity)
    feature_ring.scatter(*arguments, truth, capacity)
    assert torch.equal(found[:-1], truth[:-1])  # the last row is nobody's
    _, lanes, begins, counts, _ = arguments
    for entry, j in feature_ring.written(lanes, counts, capacity):
        place = lanes[entry] * capacity + (begins[entry] + j) % capacity
        assert torch.equal(rows[entry, j], found[place])


def test_slots_past_the_count_may_hold_anything() -> None:
    store = torch.zeros(5, 1)
    one = torch.ones(1, dtype=torch.int32)
    paths = torch.tensor([[0, -7, 1 << 30]], dtype=torch.int32)
    torch_scatter([torch.ones(1, 1, 1)], one * 0, one.long() * 2, one, paths, store, 4)
    assert store[:4].flatten().tolist() == [0, 0, 1, 0]


@pytest.mark.slow
def test_a_ring_on_the_cpu_loads_no_numba() -> None:
    code = """
import sys
from luceasync.speculation.dflash.features import scatter_on
from luceasync.pipeline.cpu_platform import CpuPlatform
scatter_on(CpuPlatform())
print("numba" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
