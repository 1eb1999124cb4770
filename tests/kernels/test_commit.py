"""Accepted paths of every length, including none, are committed as torch does."""

import pytest
import torch
from torch import Tensor

from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_torch import TorchAttention
from luceasync.models.mixers.attention_triton import TritonAttention
from luceasync.models.mixers.delta import DeltaSpec
from luceasync.models.mixers.delta_torch import TorchDelta
from luceasync.models.mixers.delta_triton import TritonDelta
from luceasync.models.pass_rows import NO_LANE, AcceptedRows, Paths
from tests.kernels.cases import PAGE, distance, random

LAYERS, LANES, ROWS, PAGES = 2, 3, 9, 3
PATHS = ([0], [0, 2, 5, 8], list(range(ROWS)), [])


def paths_of(path: list[int], device: torch.device) -> Paths:
    """`path` on lane 2 from position 60 on, nothing on lane 0, and padding."""
    generator = torch.Generator().manual_seed(1)
    tables = torch.stack([torch.randperm(PAGES, generator=generator) for _ in range(LANES)]).int()
    tokens = torch.arange(60, 60 + len(path))
    places = tables[2, tokens // PAGE].long() * PAGE + tokens % PAGE
    accepted = torch.tensor(path, device=device)
    kept = (AcceptedRows(1, 2, 60, 60, places.to(device), accepted),) if path else ()
    filled = [[0] * ROWS, [*path, *[0] * (ROWS - len(path))], list(range(ROWS))]
    begins = [7, 60, 0]
    numbers = ([0, 2, NO_LANE], begins, begins, filled, [0, len(path), ROWS])
    tensors = (torch.tensor(n, dtype=torch.int32, device=device) for n in numbers)
    return Paths(kept, *tensors, tables.to(device))


def states(*shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [random(LAYERS, *shape, dtype=dtype, device=device) for shape in shapes]


@pytest.mark.parametrize("path", PATHS, ids=len)
def test_keys_and_values_go_to_their_places(path, dtype, device) -> None:
    rows, lanes = (3, ROWS, 2, 24), (LANES, PAGES * PAGE, 2, 24)
    scratch = tuple(states(rows, rows, dtype=dtype, device=device))
    spec = AttentionSpec(2, 2, 24, 24, 10000.0, gated=False)
    truth = states(lanes, lanes, dtype=dtype, device=device)
    found = [t.clone() for t in truth]
    TorchAttention(spec).commit(scratch, tuple(truth), paths_of(path, device))
    TritonAttention(spec).commit(scratch, tuple(found), paths_of(path, device))
    assert torch.equal(found[0], truth[0]) and torch.equal(found[1], truth[1])


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("path", PATHS, ids=len)
def test_delta_states_move_on_along_the_path(path, kernel, dtype, device) -> None:
    place = {"dtype": torch.float32, "device": device}
    heads = [(3, ROWS, 2, 16), (3, ROWS, 4, 40), (3, ROWS, 4)]
    inputs, conv = states((3, ROWS, 100), (LANES + 1, kernel - 1, 100), dtype=dtype, device=device)
    keys, updates, totals = states(*heads, **place)
    scratch = (inputs, keys, updates, -totals.abs().cumsum(2))
    spec = DeltaSpec(2, 4, 16, 40, kernel)
    (delta,) = states((LANES + 1, 4, 16, 40), **place)
    found = conv.clone(), delta.clone()
    TorchDelta(spec).commit(scratch, (conv, delta), paths_of(path, device))
    TritonDelta(spec).commit(scratch, found, paths_of(path, device))
    assert torch.equal(found[0], conv)
    assert distance(found[1], delta) < 1e-5
