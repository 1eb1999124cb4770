"""Bodies of attention to a window, compared with loops in float64: however tokens are cut into
passes, whichever lanes run beside them, a row sees its window and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from luceasync.models.mixers.attention_sizes import AttentionBody, HeadNorms
from luceasync.models.mixers.sliding import SlidingSpec
from luceasync.models.pass_rows import NO_LANE, AcceptedRows, Entry, Paths, Rows
from luceasync.models.rope import NoRope
from luceasync.models.trees import Trees, torch_trees
from tests.reference import windows as truth

HEADS, KV_HEADS, DIM, LANES = 4, 2, 32, 3
NO_NORMS = HeadNorms(None, None, 1e-6)
ABSENT = 64  # row indices are less than positions where chunks are absent
WINDOWS = (1, 5, 24, 64)
NUM_TOKENS = 80


def spec_of(window: int) -> SlidingSpec:
    sizes = (HEADS, KV_HEADS, DIM, DIM, 10000.0, False)
    return SlidingSpec(*sizes, has_head_norms=False, rope=NoRope(), window=window)


BODIES: dict[str, Callable[[SlidingSpec], AttentionBody]] = {
    "torch": SlidingSpec.torch_body,
    "compiled": SlidingSpec.compiled_body,
    "triton": SlidingSpec.triton_body,
}


@pytest.fixture(params=BODIES)
def make_body(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[SlidingSpec], AttentionBody]:
    monkeypatch.setattr("luceasync.kernels.window_attention.NUM_SPLITS", 2)  # empty ones take time
    if request.param == "triton":
        if torch.cuda.is_available():
            pytest.skip("kernels run in the interpreter here")
        request.getfixturevalue("quick_interpreter")
    return BODIES[request.param]


class Sequences:
    """Lanes with a ring each, and all that was written to them."""

    def __init__(self, body: AttentionBody, spec: SlidingSpec, num_layers: int = 1) -> None:
        self.body, self.spec = body, spec
        ring = (num_layers, LANES, spec.window, KV_HEADS, DIM)
        self.stacks = (torch.full(ring, 3.0), torch.full(ring, -4.0))  # of other sequences
        self.lengths = [0] * LANES

    def state(self, layer: int = 0) -> tuple[Tensor, ...]:
        return tuple(stack[layer] for stack in self.stacks)

    def rows(self, lanes: Sequence[int], positions: Tensor) -> Rows:
        begins = positions[:, 0].tolist()
        nowhere, num_rows = slice(0, 0), positions.shape[1]
        entries = tuple(
            Entry(lane, max(at - ABSENT, 0), max(at - ABSENT, 0) + num_rows, nowhere, nowhere)
            for lane, at in zip(lanes, begins, strict=True)
        )
        prepared = {self.spec: self.body.prepare(positions)}
        given, tables = torch.tensor(lanes, dtype=torch.int32), torch.empty(LANES, 0)
        return Rows(entries, given, (positions - ABSENT).int(), tables, prepared)

    def run(self, given: dict[int, Tensor]) -> dict[int, Tensor]:
        """Rows of some lanes, [rows, width] each and as many of each: their outputs."""
        lanes = [*given]
        num_rows = len(given[lanes[0]])
        begins = torch.tensor([self.lengths[lane] if lane >= 0 else 0 for lane in lanes])
        positions = (begins[:, None] + torch.arange(num_rows)).int()
        rows = self.rows(lanes, positions)
        out = self.body.attend(torch.stack([*given.values()]), NO_NORMS, self.state(), rows)
        for lane in lanes:
            if lane >= 0:
                self.lengths[lane] += num_rows
        return dict(zip(lanes, out, strict=True))


def tokens(num_tokens: int, seed: int) -> Tensor:
    width = (HEADS + 2 * KV_HEADS) * DIM
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed))


def parts(projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    widths = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
    q, k, v = projected.split_with_sizes(widths, -1)
    return q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), v.unflatten(-1, (-1, DIM))


def expected(projected: Tensor, window: int) -> Tensor:
    return truth.attend(*parts(projected), window).flatten(1)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.covered(2)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk", [1, 7, 33, NUM_TOKENS])
def test_however_tokens_are_cut_each_sees_its_window(make_body, window: int, chunk: int):
    spec, given = spec_of(window), tokens(NUM_TOKENS, window)
    lane = Sequences(make_body(spec), spec)
    parts = given.split(chunk if chunk > 1 else [70] + [1] * 10)
    found = torch.cat([lane.run({1: part})[1] for part in parts])
    close(found, expected(given, window))


def test_lanes_and_padding_run_beside_each_other_as_alone(make_body):
    spec = spec_of(24)
    together, alone = (Sequences(make_body(spec), spec) for _ in range(2))
    prompts = {2: tokens(30, 1), 0: tokens(9, 2)}
    for lane, prompt in prompts.items():
        together.run({lane: prompt})
    for lane, prompt in prompts.items():
        alone.run({lane: prompt})
    for step in range(2):
        rows = {lane: tokens(1, 10 * step + lane) for lane in prompts}
        found = together.run(rows | {NO_LANE: tokens(1, 99)})
        for lane, row in rows.items():
            assert torch.equal(found[lane], alone.run({lane: row})[lane])


def test_a_pass_of_padding_alone_leaves_every_lane_as_it_was(make_body):
    spec = spec_of(5)
    lanes = Sequences(make_body(spec), spec)
    before = [stack.clone() for stack in lanes.stacks]
    for num_rows in (1, 3):
        lanes.run({NO_LANE: tokens(num_rows, 0)})
    assert all(torch.equal(a, b) for a, b in zip(before, lanes.stacks, strict=True))


def random_tree(num_rows: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [-1, *(choose.randrange(row) for row in range(1, num_rows))]


def paths_of(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


def trees_of(parents: list[list[int]]) -> Trees:
    return torch_trees(torch.tensor(parents, dtype=torch.int32), 1)


@pytest.mark.covered(2)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("committed", [0, 3, 70])
@pytest.mark.parametrize("parents", [random_tree(9, 1), [*range(-1, 11)]], ids=["tree", "chain"])
def test_a_row_of_a_tree_sees_what_is_in_the_window_of_its_path(
    make_body, window: int, committed: int, parents: list[int]
):
    spec = spec_of(window)
    lanes = Sequences(make_body(spec), spec)
    context, new = tokens(committed, 3), tokens(len(parents), 4)
    if committed:
        lanes.run({1: context})
    before = [stack.clone() for stack in lanes.stacks]
    trees = trees_of([parents])
    scratch = tuple(torch.zeros(1, len(parents), KV_HEADS, DIM) for _ in range(2))
    rows = lanes.rows([1], committed + trees.depths)
    out = lanes.body.attend_tree(new[None], NO_NORMS, lanes.state(), rows, trees, scratch)[0]
    assert all(torch.equal(a, b) for a, b in zip(before, lanes.stacks, strict=True))
    q, k, v = parts(torch.cat([context, new]))
    for row, path in enumerate(paths_of(parents)):
        seen = [*range(committed), *(committed + r for r in path)][-window:]
        wanted = truth.attend_to(q[committed + row], k, v, seen)
        close(out[row].unflatten(-1, (-1, DIM)), wanted)


@pytest.mark.covered(2)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_committed_path_leaves_the_ring_that_running_it_leaves(
    make_body, window: int, length: int
):
    spec = spec_of(window)
    committing, running = (Sequences(make_body(spec), spec, num_layers=2) for _ in range(2))
    context = tokens(41, 5)
    for lanes in (committing, running):
        for layer in (0, 1):
            lanes.lengths = [0] * LANES
            rows = lanes.rows([2], torch.arange(41)[None].int())
            lanes.body.attend(context[None] * (layer + 1), NO_NORMS, lanes.state(layer), rows)
    path = sorted(random.Random(length).sample(range(9), length))
    new = [tokens(9, 6), tokens(9, 7)]  # of each layer
    scratch = tuple(torch.stack([parts(x)[1 + i] for x in new])[:, None] for i in range(2))
    scratch = tuple(torch.cat([x, x + 9], 1) for x in scratch)  # the second entry keeps nothing
    committing.body.commit(scratch, committing.stacks, paths_to([2, NO_LANE], 41, [path, []], 9))
    for layer, x in enumerate(new):
        rows = running.rows([2], (41 + torch.arange(length))[None].int())
        running.body.attend(x[None, path], NO_NORMS, running.state(layer), rows)
    for a, b in zip(committing.stacks, running.stacks, strict=True):
        assert torch.equal(a, b)


def paths_to(lanes: list[int], begin: int, paths: list[list[int]], num_rows: int) -> Paths:
    kept = tuple(
        AcceptedRows(i, lane, begin - ABSENT, begin, slice(0, 0), torch.tensor(path))
        for i, (lane, path) in enumerate(zip(lanes, paths, strict=True))
        if path
    )
    numbers = (lanes, [begin - ABSENT] * len(lanes), [begin] * len(lanes))
    filled = [[*path, *[0] * (num_rows - len(path))] for path in paths]
    given = (*numbers, filled, [len(path) for path in paths])
    on_device = (torch.tensor(each, dtype=torch.int32) for each in given)
    return Paths(kept, *on_device, torch.empty(LANES, 0, dtype=torch.int32))
