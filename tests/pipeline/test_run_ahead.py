"""Decode steps that run ahead give what steps give that wait for the host, whatever comes instead;
captured passes on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from luceasync.host_cache.nodes import Span
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.capacity import Pool, PoolRequest
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.ranking.logits import BEST
from tests import tiny
from tests.pipeline.recaptured import recaptured

NUM_LANES, MAX_CTX_TOKENS = 3, 600
VERIFY_ROWS = 3

Load = Callable[..., LayerSplitBackend]


@pytest.fixture
def replayed() -> Iterator[list[object]]:
    """All replays of backends loaded in the test."""
    with recaptured() as found:
        yield found


@pytest.fixture
def load(tiny_dir: Path) -> Iterator[Load]:
    """A backend, which captures where `replayed` is asked for before; closed after the test."""
    loaded = []

    def load_one(num_shards: int = 1, pool: PoolRequest | None = None) -> LayerSplitBackend:
        spec = read_spec(tiny_dir)
        plan = make_plan(
            spec,
            [offer_of(f"cpu:{i}", 2**33) for i in range(num_shards)],
            precision=Precision.of("fp32"),
            weights=[1.0] * num_shards,
            parallel=NUM_LANES,
            max_ctx_tokens=MAX_CTX_TOKENS,
            prefill_chunk_tokens=None,
            verify_rows=[VERIFY_ROWS],
            pool=pool,
        )
        plan = replace(plan, decode_sizes=(1, 2, NUM_LANES))
        loaded.append(LayerSplitBackend.open(ModelFiles(tiny_dir), plan))
        return loaded[-1]

    yield load_one
    for backend in loaded:
        backend.close()


@dataclass
class Walk:
    """Greedy lanes, and what may come between their steps; `runs_ahead`: the next step is started
    to be likely, whatever then comes. `seen`: all that comes of it.
    """

    backend: LayerSplitBackend
    runs_ahead: bool
    seen: list[object] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    num_nodes: int = 0

    def begin(self, lane: int, num_tokens: int, seed: int) -> None:
        """Prefill a prompt on the lane."""
        self.backend.reset(lane)
        logits = self.backend.prefill(lane, 0, prompt(num_tokens, seed), project=True)
        self.positions[lane], self.tokens[lane] = num_tokens, int(logits.argmax())
        self.seen.append(self.tokens[lane])

    def step(self, lanes: list[int], *, is_likely: bool = True) -> None:
        """A token for each lane. Reads the logits where no step is likely to follow."""
        positions = [self.positions[lane] for lane in lanes]
        logits = self.backend.decode(lanes, positions, [self.tokens[lane] for lane in lanes])
        ranking = logits.rank(BEST)
        if is_likely and self.runs_ahead:
            self.backend.run_ahead()
        best = ranking.candidates().best.tolist()
        assert is_likely or best == logits.whole().argmax(-1).tolist()
        for lane, token in zip(lanes, best, strict=True):
            self.positions[lane] += 1
            self.tokens[lane] = token
        self.seen.append(best)

    def round(self, lanes: list[int]) -> None:
        """Keep two rows of a proposal."""
        rows = torch.tensor([[self.tokens[lane], 7, 8] for lane in lanes])
        self.backend.verify(lanes, [self.positions[lane] for lane in lanes], rows)
        self.backend.commit([[0, 1]] * len(lanes))
        for lane in lanes:
            self.positions[lane] += 2
            self.tokens[lane] = 11

    def move(self, lane: int, other: int) -> None:
        """Save the lane and restore it to another one."""
        end, self.num_nodes = self.positions[lane], self.num_nodes + 1
        node = f"n{self.num_nodes}"
        with_state = self.backend.nodes.sizes.state_bytes > 0
        self.backend.nodes.save(lane, node, Span(0, end, with_state))
        self.backend.nodes.restore(other, [node], end).wait()
        self.positions[other], self.tokens[other] = end, self.tokens[lane]

    def at_random(self, seed: int, num_turns: int) -> None:
        """At random."""
        dice = random.Random(seed)
        for lane in range(NUM_LANES):
            self.begin(lane, dice.randint(1, 70), lane)
        for _ in range(num_turns):
            lanes = dice.sample(range(NUM_LANES), dice.randint(1, NUM_LANES))
            for _ in range(dice.randint(1, 4)):
                self.step(lanes, is_likely=dice.random() < 0.8)
            what = dice.randrange(6)
            if what == 0:
                self.begin(dice.randrange(NUM_LANES), dice.randint(1, 70), dice.randrange(9))
            elif what == 1:
                self.round(lanes)
            elif what == 2:
                self.move(*dice.sample(range(NUM_LANES), 2))
            elif what == 3:
                self.tokens[lanes[0]] = dice.randrange(3, tiny.VOCAB_SIZE)


def prompt(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_instead_tokens_are_those_of_plain_steps(load: Load, seed: int):
    walks = [Walk(load(), runs_ahead=False)]
    with recaptured():
        walks.append(Walk(load(), runs_ahead=True))
    for walk in walks:
        walk.at_random(seed, num_turns=12)
    assert walks[0].seen == walks[1].seen


def test_each_step_runs_once_and_before_it_is_asked_for_unless_it_changes_a_state(
    replayed, load: Load, tiny_dir: Path
):
    walk = Walk(load(), runs_ahead=True)
    walk.begin(0, 5, 0)
    replayed.clear()
    ahead = 0 if read_spec(tiny_dir).has_end_state else 1
    for number in range(1, 5):
        walk.step([0])
        assert len(replayed) == number + ahead
    walk.step([0], is_likely=False)
    assert len(replayed) == 5


def other_token(walk: Walk) -> None:
    walk.tokens[0] += 1


def again(walk: Walk) -> None:
    walk.positions[0] -= 1


def begun(walk: Walk) -> None:
    walk.begin(1, 5, 1)


def read(walk: Walk) -> None:
    walk.backend.prefill(1, 5, [3], project=False)


def verified(walk: Walk) -> None:
    walk.round([1])


def left(walk: Walk) -> None:
    walk.backend.reset(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "comes", [other_token, again, begun, read, verified, left], ids=lambda comes: comes.__name__
)
def test_what_has_run_ahead_is_forgotten_when_something_else_comes(
    replayed, load: Load, comes: Callable[[Walk], None]
):
    walk = Walk(load(), runs_ahead=True)
    for lane in (0, 1):
        walk.begin(lane, 5, lane)
    walk.step([0])
    comes(walk)
    replayed.clear()
    walk.step([0], is_likely=False)
    assert len(replayed) == 1


def test_a_lane_that_stands_there_with_that_token_but_holds_another_text_is_run(
    replayed, load: Load
):
    backend = load()
    walk, others = Walk(backend, runs_ahead=True), Walk(backend, runs_ahead=False)
    others.begin(1, 6, seed=1)
    walk.begin(0, 5, seed=0)
    walk.step([0])
    others.tokens[1] = walk.tokens[0]
    others.move(1, 0)  # without a prefill
    others.step([0], is_likely=False)
    others.step([1], is_likely=False)
    assert others.seen[-1] == others.seen[-2]


@pytest.mark.parametrize("last", [CHUNK_TOKENS - 1, MAX_CTX_TOKENS - 1])
def test_no_page_is_placed_for_a_step_that_may_not_come(replayed, load: Load, last: int):
    walk = Walk(load(), runs_ahead=True)
    walk.begin(0, last - 1, 0)
    replayed.clear()
    walk.step([0])
    walk.step([0])
    assert walk.positions[0] == last + 1 and len(replayed) == 2


@pytest.mark.parametrize(
    "asked", [{"num_shards": 2}, {"pool": PoolRequest(448, Pool("qk", 64), 2**40)}]
)
def test_several_shards_and_lanes_with_a_pool_wait_for_the_host(replayed, load: Load, asked):
    walk = Walk(load(**asked), runs_ahead=True)
    walk.begin(0, 5, 0)
    replayed.clear()
    walk.step([0])
    num_run = len(replayed)
    walk.step([0])
    assert len(replayed) == 2 * num_run


def test_best_tokens_of_a_step_outlast_the_step_that_runs_ahead(replayed, load: Load):
    walk = Walk(load(), runs_ahead=False)
    walk.begin(0, 5, 0)
    expected = []
    for _ in range(3):
        walk.step([0])
        expected.append(walk.seen[-1])
    walk.begin(0, 5, 0)
    token, found = walk.tokens[0], []
    for position in range(5, 8):
        ranking = walk.backend.decode([0], [position], [token]).rank(BEST)
        walk.backend.run_ahead()
        walk.backend.run_ahead()  # twice: still one step
        found.append(ranking.candidates().best.tolist())
        [token] = found[-1]
    assert found == expected
