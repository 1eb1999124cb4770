"""Speculation changes nothing but the time: the same tokens, texts and ends as plain decoding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import luceasync.speculation.speculator
from luceasync.engine.acceptance import lines, matching_child, walk
from luceasync.engine.decoding import SpeculativeDecoding
from luceasync.engine.sampling.choose import nothing
from luceasync.ranking.local import LocalLogits
from luceasync.request import Sampling
from luceasync.speculation.choice import (
    TRIAL_ROUNDS,
    RoundPlan,
    RoundShape,
    StepCosts,
    plan_step,
)
from luceasync.speculation.dflash.graph import EagerRunner
from luceasync.speculation.speculator import Speculator
from luceasync.text.tokenizer import Tokenizer
from tests.speculation.scripted import (
    BLOCK,
    TAPS,
    VERIFY_ROWS,
    Lanes,
    ScriptedDraft,
    plain_answers,
    prepare,
    random_speculator,
    speculated_answers,
    speculator_of,
)

CHAIN = RoundShape(BLOCK)
TREES = [RoundShape(BLOCK, budget) for budget in (8, 22, 60)]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    Sampling(temperature=1.0, top_p=0.95, presence_penalty=0.5, logit_bias={7: 4.0, 9: -5.0}),
]


@pytest.fixture
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


@pytest.fixture
def open_backend(tiny_dir: Path, make_backend):
    return lambda num_shards=1: make_backend(
        tiny_dir, num_shards=num_shards, verify_rows=VERIFY_ROWS, taps=TAPS
    )


def scripted(backend, prepared, answers, share_wrong: float) -> ScriptedDraft:
    scripts = {
        lane: (*p.prompt.ids, *a.token_ids)
        for lane, (p, a) in enumerate(zip(prepared, answers, strict=True))
    }
    return ScriptedDraft(
        scripts, lambda lane, p: random.Random(p * 10 + lane).random() < share_wrong
    )


def prepare_four(tokenizer: Tokenizer, **fields):
    return [
        prepare(tokenizer, sampling, seed=seed, top_logprobs=2 * seed or None, **fields)
        for seed, sampling in enumerate(SAMPLINGS)
    ]


@pytest.mark.covered(1)
@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, *TREES], ids=str)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_lanes_together_say_what_each_says_alone(open_backend, tokenizer, num_shards, shape):
    backend = open_backend(num_shards)
    plain = plain_answers(backend, prepare_four(tokenizer))
    draft = scripted(backend, prepare_four(tokenizer), plain, share_wrong=0.3)
    speculator = speculator_of(backend, draft)
    assert speculated_answers(backend, speculator, prepare_four(tokenizer), shape) == plain
    tau = speculator.speculation(0).tau
    assert tau > 2, "long paths are to be accepted here"


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("shape", [CHAIN, TREES[1]], ids=str)
def test_a_draft_of_random_weights_changes_nothing_either(
    open_backend, tokenizer, tiny_dir, tmp_path, shape
):
    backend = open_backend()
    plain = plain_answers(backend, prepare_four(tokenizer, max_tokens=12))
    speculator = random_speculator(backend, tiny_dir, tmp_path)
    prepared = prepare_four(tokenizer, max_tokens=12)
    assert speculated_answers(backend, speculator, prepared, shape) == plain


def speculate_greedily(backend, tokenizer, shape=CHAIN, share_wrong=0.0, **fields):
    """An answer, and what a plain run says; `fields` end it somewhere."""
    whole = plain_answers(backend, [prepare(tokenizer, Sampling())])
    draft = scripted(backend, [prepare(tokenizer, Sampling())], whole, share_wrong)
    plain = plain_answers(backend, [prepare(tokenizer, Sampling(), **fields)])
    lanes = Lanes(
        backend, [prepare(tokenizer, Sampling(), **fields)], speculator_of(backend, draft)
    )
    while lanes.running:
        lanes.round(list(lanes.running), RoundPlan(shape, (0,), False))
    return lanes, plain


@pytest.mark.any_family
@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("shape", [CHAIN, TREES[1]], ids=str)
@pytest.mark.parametrize("max_tokens", [2, 3, 8, 9, 10])
def test_max_tokens_end_the_text_inside_a_block(open_backend, tokenizer, shape, max_tokens):
    lanes, plain = speculate_greedily(open_backend(), tokenizer, shape, max_tokens=max_tokens)
    assert lanes.answers() == plain
    assert plain[0].num_tokens == max_tokens


@pytest.mark.any_family
@pytest.mark.covered(1)
@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREES[1]], ids=str)
@pytest.mark.parametrize("index", [1, 4, 6, 9])
def test_stop_tokens_end_the_text_inside_a_block(open_backend, tokenizer, shape, index):
    backend = open_backend()
    [whole] = plain_answers(backend, [prepare(tokenizer, Sampling())])
    stop_ids = frozenset({whole.token_ids[index]})
    lanes, plain = speculate_greedily(backend, tokenizer, shape, stop_ids=stop_ids)
    assert lanes.answers() == plain
    assert plain[0].reason == "stop"


@pytest.mark.any_family
@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("shape", [CHAIN, TREES[1]], ids=str)
@pytest.mark.parametrize("index", [4, 9])
def test_stop_strings_end_the_text_inside_a_block(open_backend, tokenizer, shape, index):
    backend = open_backend()
    [whole] = plain_answers(backend, [prepare(tokenizer, Sampling())])
    stop = whole.text[index : index + 2]
    lanes, plain = speculate_greedily(backend, tokenizer, shape, stop=(stop,))
    assert lanes.answers() == plain
    assert plain[0].reason == "stop"


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("shape", [CHAIN, TREES[2]], ids=str)
@pytest.mark.parametrize("max_tokens", [2, 5, 9])
def test_the_lane_stands_where_the_text_ends(open_backend, tokenizer, shape, max_tokens):
    """It has run every token but the last, as after plain decoding: the next turn builds on it."""
    backend = open_backend()
    plain = speculate_greedily(backend, tokenizer, shape, max_tokens=max_tokens)[1]
    prompt = prepare(tokenizer, Sampling()).prompt.ids
    position = len(prompt) + max_tokens - 1
    token = plain[0].token_ids[-1]
    found = backend.decode([0], [position], [token]).whole()[0].clone()
    backend.reset(1)
    truth = backend.prefill(1, 0, (*prompt, *plain[0].token_ids), project=True)
    assert (found - truth).abs().max() < 1e-4


@pytest.mark.slow
def test_plain_steps_and_rounds_may_alternate(open_backend, tokenizer):
    backend = open_backend()
    plain = plain_answers(backend, prepare_four(tokenizer))
    draft = scripted(backend, prepare_four(tokenizer), plain, share_wrong=0.3)
    lanes = Lanes(backend, prepare_four(tokenizer), speculator_of(backend, draft))
    choice = random.Random(0)
    while lanes.running:
        plan = RoundPlan(CHAIN, (), False)
        chosen = [g for g in lanes.running if choice.random() < 0.5]
        others = [g for g in lanes.running if g not in chosen]
        if chosen:
            lanes.round(chosen, plan)
        if others:
            lanes.decode(others, plan)
    assert lanes.answers() == plain
    for lane, positions in draft.written.items():
        assert positions == list(range(len(positions))), lane  # no gap, nothing twice


@pytest.mark.slow
def test_the_draft_knows_all_before_the_anchor_and_not_the_anchor(open_backend, tokenizer):
    backend = open_backend()
    plain = plain_answers(backend, [prepare(tokenizer, Sampling())])
    draft = scripted(backend, [prepare(tokenizer, Sampling())], plain, share_wrong=0.3)
    lanes = Lanes(backend, [prepare(tokenizer, Sampling())], speculator_of(backend, draft))
    while lanes.running:
        [generation] = lanes.running
        assert draft.written[0] == list(range(generation.position))
        lanes.round([generation], RoundPlan(CHAIN, (0,), False))


@pytest.mark.any_family
def test_a_right_draft_is_accepted_whole_and_counted(open_backend, tokenizer):
    lanes, _ = speculate_greedily(open_backend(), tokenizer, max_tokens=17)
    speculation = lanes.speculator.speculation(0)
    assert (speculation.rounds, speculation.proposed, speculation.accepted) == (2, 14, 14)
    status = lanes.speculator.status
    assert (status.rounds_total, status.accepted_by_slot) == (2, (2,) * 7)
    assert min(status.draft_s_total, status.verify_s_total, status.host_s_total) > 0


class Settling(EagerRunner):
    """As graphs are: the first passes take longer."""

    def __init__(self, num_first: int) -> None:
        self.num_unsettled = 0
        self._num_first = num_first

    def __call__(self, key, work, *inputs):
        self.num_unsettled = min(self.num_unsettled + 1, self._num_first)
        return work(*inputs)


def test_a_step_in_which_something_was_compiled_does_not_say_what_steps_cost(
    open_backend, tokenizer
):
    backend, costs = open_backend(), StepCosts()
    run = Settling(num_first=4)  # the passes of two rounds, or of four plain steps
    speculator = speculator_of(backend, ScriptedDraft({0: [5] * 500}), run=run, costs=costs)
    lanes = Lanes(backend, [prepare(tokenizer, Sampling())], speculator)
    for _ in range(2):
        lanes.round(list(lanes.running), RoundPlan(CHAIN, (0,), True))
    assert costs.num_seen(1, CHAIN) == 0
    lanes.round(list(lanes.running), RoundPlan(CHAIN, (0,), True))
    assert costs.num_seen(1, CHAIN) == 1


def test_nor_does_a_plain_step(open_backend, tokenizer):
    backend, costs, plan = open_backend(), StepCosts(), RoundPlan(None, (), True)
    run = Settling(num_first=1)
    speculator = speculator_of(backend, ScriptedDraft({}), run=run, costs=costs)
    lanes = Lanes(backend, [prepare(tokenizer, Sampling())], speculator)
    seen = []
    for _ in range(2):
        lanes.decode(list(lanes.running), plan)
        speculator.timed(1, plan, 0.1)
        seen.append(costs.num_seen(1, None))
    assert seen == [0, 1]


class Cheap(StepCosts):
    """Steps of one shape cost next to nothing; `due`: one that wants measuring."""

    cheap, due = RoundShape(4), None

    def seconds(self, num_lanes, shape):
        return 0.01 if shape == self.cheap else 1.0

    def is_due(self, num_lanes, shape):
        return self.due == shape and shape is not None


@pytest.fixture
def foreseeing(open_backend) -> tuple[Speculator, Cheap]:
    """It has foreseen a step of lanes 0 and 1; since then something else pays."""
    costs = Cheap()
    speculator = speculator_of(open_backend(), ScriptedDraft({}), costs=costs)
    speculator.foresee([0, 1], speculator.plan([0, 1], alone=True), alone=True)
    costs.cheap = RoundShape(2)
    return speculator, costs


def test_what_was_foreseen_is_planned_once(foreseeing):
    speculator, _ = foreseeing
    plans = [speculator.plan([0, 1], alone=True).shape for _ in range(2)]
    assert plans == [RoundShape(4), RoundShape(2)]


@pytest.mark.parametrize(("lanes", "alone"), [([0], True), ([1, 2], True), ([0, 1], False)])
def test_nothing_was_foreseen_for_others(foreseeing, lanes, alone):
    speculator, _ = foreseeing
    assert speculator.plan(lanes, alone=alone).shape == RoundShape(2)
    assert speculator.plan([0, 1], alone=True).shape == RoundShape(2)


def test_a_lane_with_another_text_is_planned_anew(foreseeing):
    speculator, _ = foreseeing
    speculator.start(1)
    assert speculator.plan([0, 1], alone=True).shape == RoundShape(2)


def test_so_is_one_that_was_restored(foreseeing):
    speculator, _ = foreseeing
    speculator.restored(1, 5, with_features=False)
    assert speculator.plan([0, 1], alone=True).shape == RoundShape(2)


def test_nothing_is_foreseen_while_a_step_is_measured(foreseeing):
    speculator, costs = foreseeing
    costs.cheap, costs.due = RoundShape(4), RoundShape(8)
    under_way = speculator.plan([2], alone=True)
    assert under_way.shape == RoundShape(8)
    speculator.foresee([2], under_way, alone=True)
    costs.due = None
    assert speculator.plan([2], alone=True).shape == RoundShape(4)


class Dear(StepCosts):
    """Rounds never pay."""

    def seconds(self, num_lanes, shape):
        return 1.0 if shape is None else 100.0

    def is_due(self, num_lanes, shape, num_waits=1):
        return False


@pytest.mark.any_family
def test_behind_a_plain_step_the_next_is_planned_while_devices_work(
    open_backend, tokenizer, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []

    def plan_heard(*given, **named):
        events.append("plan")
        return plan_step(*given, **named)

    monkeypatch.setattr(luceasync.speculation.speculator, "plan_step", plan_heard)
    backend = open_backend()
    speculator = speculator_of(backend, ScriptedDraft({0: [5] * 500}), costs=Dear())
    lanes = Lanes(backend, [prepare(tokenizer, Sampling(), max_tokens=60)], speculator)
    decoding = SpeculativeDecoding(backend, speculator)
    for _ in range(TRIAL_ROUNDS + 1):
        decoding.step([*lanes.running], alone=True, meanwhile=nothing)
    events.clear()
    for _ in range(3):
        decoding.step([*lanes.running], alone=True, meanwhile=lambda: events.append("work"))
    assert events == ["work", "plan"] * 3


@pytest.mark.any_family
@pytest.mark.slow
def test_each_round_shows_one_delta_at_most(open_backend, tokenizer):
    lanes, _ = speculate_greedily(open_backend(), tokenizer, max_tokens=17)
    assert len(lanes.deltas[0]) <= 1 + lanes.speculator.speculation(0).rounds


@pytest.mark.any_family
def test_the_decision_can_be_forced_to_measure_time(open_backend, tokenizer):
    backend = open_backend()
    draft = ScriptedDraft({0: [5] * 500})
    lanes = Lanes(backend, [prepare(tokenizer, Sampling())], speculator_of(backend, draft))
    pattern = iter([3, 0, 7, 5])

    def forced(tokens, parents, path, token):
        return path[-1] + 1 if len(path) <= wanted else None

    for wanted in pattern:
        [path] = lanes.round(list(lanes.running), RoundPlan(CHAIN, (0,), False), forced)
        assert len(path) == wanted + 1


@pytest.mark.slow
def test_logits_that_are_no_numbers_end_one_lane_and_not_the_others(open_backend, tokenizer):
    backend = open_backend()
    plain = plain_answers(backend, prepare_four(tokenizer))
    draft = scripted(backend, prepare_four(tokenizer), plain, share_wrong=0.3)
    lanes = Lanes(backend, prepare_four(tokenizer), speculator_of(backend, draft))
    verify = backend.verify

    def sick(*arguments):
        logits = verify(*arguments).whole().clone()
        logits[1, 0, 3] = float("nan")
        return LocalLogits(logits)

    backend.verify = sick
    lanes.round(list(lanes.running), RoundPlan(CHAIN, (0, 1, 2, 3), False))
    backend.verify = verify
    assert lanes.deltas[1][-1].finish.reason == "error"
    while lanes.running:
        lanes.round(list(lanes.running), RoundPlan(CHAIN, (), False))
    assert [lanes.answers()[i] for i in (0, 2, 3)] == [plain[i] for i in (0, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREES[2]], ids=str)
def test_the_context_may_end_inside_a_block(tiny_dir, make_backend, tokenizer, shape):
    asked = prepare(tokenizer, Sampling())
    max_ctx = len(asked.prompt.ids) + asked.max_tokens
    backend = make_backend(tiny_dir, verify_rows=VERIFY_ROWS, taps=TAPS, max_ctx_tokens=max_ctx)
    lanes, plain = speculate_greedily(backend, tokenizer, shape, 0.2)
    assert lanes.answers() == plain
    assert plain[0].num_tokens == asked.max_tokens


#            0
#          1   2
#         3 4   5
TOKENS = [9, 10, 20, 11, 12, 21]
PARENTS = [-1, 0, 0, 1, 1, 2]


def follow_from(emitted: list[int], tokens: dict[int, int | None]):
    """Emits what `tokens` has for each row."""

    def follow(row: int) -> int | None:
        emitted.append(row)
        return tokens[row]

    return follow


@pytest.mark.parametrize(
    ("after", "path"),
    [
        ({0: 7}, [0]),  # not proposed: the bonus
        ({0: 20, 2: 7}, [0, 2]),
        ({0: 10, 1: 12, 4: 10}, [0, 1, 4]),  # token 10 stands elsewhere in the tree
        ({0: 10, 1: 21}, [0, 1]),
        ({0: 20, 2: 21, 5: 10}, [0, 2, 5]),  # below a leaf is nothing
        ({0: 10, 1: None}, [0, 1]),  # the text ended with what row 1 gave
        ({0: None}, [0]),
    ],
)
def test_the_path_follows_the_chosen_tokens(after, path):
    emitted: list[int] = []
    assert walk(TOKENS, PARENTS, follow_from(emitted, after)) == path
    assert emitted == path  # each row was asked once


@pytest.mark.parametrize(
    ("after", "path"),
    [
        ({0: 11}, [0]),
        ({0: 10, 1: 20, 2: 5}, [0, 1, 2]),
        ({0: 10, 1: 20, 2: 30, 3: 10}, [0, 1, 2, 3]),
        ({0: 20}, [0]),  # the token of the row after next
        ({0: 10, 1: None}, [0, 1]),
    ],
)
def test_without_parents_each_row_follows_the_one_before(after, path):
    assert walk([9, 10, 20, 30], None, follow_from([], after)) == path


def test_of_equal_rows_the_first_stands():
    assert matching_child([9, 5, 5], [-1, 0, 0], [0], 5) == 1


def test_the_decision_can_be_replaced():
    def always_two(tokens, parents, path, token):
        return path[-1] + 1 if len(path) <= 2 else None

    assert walk([9, 1, 1, 1], None, lambda row: 77, always_two) == [0, 1, 2]


def test_lines_lead_from_below_the_anchor_to_each_row():
    assert lines(PARENTS, 6) == [[], [1], [2], [1, 3], [1, 4], [2, 5]]
    assert lines(None, 3) == [[], [1], [1, 2]]
