"""Two and three stages in one process give what one stage gives, bit by bit.

A part of what `pytest --groups 3` runs over, always on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from luceasync.host_cache.nodes import Span
from luceasync.models.encodings import Encoding
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.models.loader import TensorSource
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import Plan, make_plan
from luceasync.pipeline.stage import LocalStage
from tests import tiny
from tests.engine.test_speculation import ask_all, started
from tests.engines import ask, running
from tests.pipeline.heard import taps_of
from tests.stages import even_stages, in_stages

NUM_PROMPT = 100
MARK = 90
SPAN = Span(0, NUM_PROMPT, with_state=True)
LONG = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 6


@pytest.fixture(params=[2, 3])
def num_stages(request: pytest.FixtureRequest) -> int:
    return request.param


def planned(model_dir: Path, num_stages: int, num_shards: int) -> Plan:
    with in_stages(num_stages):
        return make_plan(
            read_spec(model_dir),
            [offer_of(f"cpu:{i}", 2**33) for i in range(num_shards)],
            precision=Precision.of("fp32"),
            weights=None,
            parallel=4,
            max_ctx_tokens=256,
            prefill_chunk_tokens=None,
            verify_rows=[6],
        )


@pytest.fixture
def open_stages() -> Iterator:
    opened = []

    def open_backend(model_dir: Path, num_stages: int, num_shards: int = 3) -> LayerSplitBackend:
        plan = planned(model_dir, num_stages, num_shards)
        opened.append(LayerSplitBackend.open(ModelFiles(model_dir), plan, taps=(0, 3)))
        return opened[-1]

    yield open_backend
    for backend in opened:
        backend.close()


def life(backend: LayerSplitBackend, node: str | None = None) -> Tensor:
    """Numbers of a prompt, of steps, of a verified and committed path, of taps and both ends; a
    lane that takes up `node` stands after the prompt.
    """
    tokens = torch.randint(3, 512, (NUM_PROMPT,), generator=torch.Generator().manual_seed(1))
    backend.reset(1)
    if node is None:
        seen = [backend.prefill(1, 0, tokens[:64].tolist(), project=True).clone()]
        seen.append(backend.prefill(1, 64, tokens[64:].tolist(), project=True).clone())
        backend.nodes.save(1, "n", SPAN)
    else:
        backend.nodes.restore(1, [node], NUM_PROMPT)
        seen = []
    seen.append(backend.decode([1], [NUM_PROMPT], [7]).whole()[0].clone())
    seen += backend.verify([1], [NUM_PROMPT + 1], tokens[None, :6]).whole().clone()[0]
    backend.commit([[0, 1, 2]])
    seen.append(backend.decode([1], [NUM_PROMPT + 4], [9]).whole()[0].clone())
    ends = [tap.flatten() for tap in taps_of(backend, [[0]])]
    ends.append(backend.embed(torch.tensor([5])).flatten())
    rows = torch.stack([ends[-1], ends[0][: len(ends[-1])]])[None]
    ends.append(backend.propose_from(rows, torch.tensor([5]), 4).tokens.flatten())
    return torch.cat([*seen, *ends])


def turn(backend: LayerSplitBackend, *, mark: int | None = MARK) -> Tensor:
    """Numbers of a prompt, then of steps from the state at MARK, within it, and from its end. That
    state is saved from within the pass, or between two.
    """
    tokens = torch.randint(3, 512, (NUM_PROMPT,), generator=torch.Generator().manual_seed(2))
    parts = [(0, NUM_PROMPT)] if mark else [(0, MARK), (MARK, NUM_PROMPT)]
    backend.reset(1)
    seen = []
    for begin, end in parts:
        logits = backend.prefill(1, begin, tokens[begin:end].tolist(), project=True, mark=mark)
        assert logits is not None
        seen[:] = [logits.clone()]
        if mark or end == MARK:
            backend.nodes.save(1, "mark", Span(0, MARK, with_state=True))
    backend.nodes.save(1, "end", Span(MARK, NUM_PROMPT, with_state=True))
    backend.decode([1], [NUM_PROMPT], [7])
    for nodes, at in ((["mark"], MARK), (["mark", "end"], NUM_PROMPT)):
        backend.nodes.restore(2, nodes, at)
        seen.append(backend.decode([2], [at], [7]).whole()[0].clone())
    return torch.cat(seen)


def test_the_state_within_a_chunk_is_that_between_two(tiny_dir: Path, open_stages):
    backend = open_stages(tiny_dir, 1, 1)
    torch.testing.assert_close(turn(backend), turn(backend, mark=None), rtol=1e-5, atol=1e-5)


def test_the_state_within_a_chunk_is_that_of_one_stage(
    tiny_dir: Path, open_stages, num_stages: int
):
    assert torch.equal(turn(open_stages(tiny_dir, num_stages)), turn(open_stages(tiny_dir, 1)))


def test_the_numbers_are_those_of_one_stage(tiny_dir: Path, open_stages, num_stages: int):
    backend = open_stages(tiny_dir, num_stages)
    assert torch.equal(life(backend), life(open_stages(tiny_dir, 1)))
    assert backend.num_shards == (3, 0)
    ends = even_stages(3, num_stages)
    assert [stage.num_shards for stage in backend._stages] == [(e - b, 0) for b, e in ends]


def test_a_tied_head_may_be_in_another_stage_than_the_embedding(
    family: str, tmp_path: Path, open_stages
):
    folder = tiny.save(tiny.build(family, tied=True), tmp_path)
    assert torch.equal(life(open_stages(folder, 2, 2)), life(open_stages(folder, 1, 1)))


@pytest.mark.slow
def test_nodes_go_between_one_stage_and_several(tiny_dir: Path, open_stages, num_stages: int):
    one, several = open_stages(tiny_dir, 1, 1), open_stages(tiny_dir, num_stages)
    life(one)
    life(several)
    for source, target in ((one, several), (several, one)):
        target.nodes.adopt("other", SPAN, source.nodes.export("n"))
        assert torch.equal(life(target, "other"), life(target, "n"))


class NotingSource:
    """Notes which tensors are read."""

    def __init__(self, source: TensorSource) -> None:
        self.names: set[str] = set()
        self._source = source

    def encoding(self, name: str) -> Encoding:
        return self._source.encoding(name)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.names.add(name)
        return self._source.read(name, shape)

    def stored(self, name: str, shape: tuple[int, ...]) -> Any:
        self.names.add(name)
        return self._source.stored(name, shape)


def test_a_stage_reads_its_own_shards_only(tiny_dir: Path):
    spec, plan = read_spec(tiny_dir), planned(tiny_dir, 3, 3)
    read: list[set[str]] = []
    for number in range(3):
        with open_checkpoint(tiny_dir) as checkpoint:
            source = NotingSource(checkpoint)
            stage = LocalStage(spec, plan, source, number=number)
        read.append(source.names)
        [nodes] = stage.nodes
        assert all(name.startswith(f"ls{number}_") for name in nodes.shapes(SPAN))
        stage.close()
    assert read[0].isdisjoint(read[1]) and read[2].isdisjoint(read[0] | read[1])


def test_stages_are_even_and_none_is_empty():
    assert even_stages(5, 2) == ((0, 2), (2, 5))
    assert even_stages(2, 3) == ((0, 1), (1, 2))


@pytest.mark.covered(1)
@pytest.mark.slow
async def test_what_one_stage_has_kept_is_taken_up_by_several(
    tiny_dir: Path, tmp_path: Path, num_stages: int
):
    async with running(tiny_dir, tmp_path) as engine:
        cold = await ask(engine, LONG, 24, keep_prefix=True)
    with in_stages(num_stages):
        async with running(tiny_dir, tmp_path) as engine:
            from_disk = await ask(engine, LONG, 24)
            again = await ask(engine, LONG, 24)
    assert [a.finish.restore.tier for a in (cold, from_disk, again)] == [None, "disk", "memory"]
    assert cold.ids == from_disk.ids == again.ids


@pytest.mark.any_family
@pytest.mark.covered(0)
@pytest.mark.slow
async def test_speculation_over_several_stages_says_the_same(
    tiny_dir: Path, tmp_path: Path, num_stages: int
):
    async with started(tiny_dir) as engine:
        plain = await ask_all(engine)
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config())
    with in_stages(num_stages):
        async with started(tiny_dir, draft_dir=draft_dir) as engine:
            assert await ask_all(engine) == plain
