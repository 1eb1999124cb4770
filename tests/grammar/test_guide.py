"""A guide masks each row of a proposal as if the row's tokens had come."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from luceasync.grammar.guide import Guide, MinTokens, ReasoningBudget, ReasoningLimit
from tests import tiny

CLOSE = b"\n</think>"
NUM_WORDS = tiny.VOCAB_SIZE // 32
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"question": {"enum": ["to be", "not"]}, "n": {"type": "integer"}},
        "required": ["question", "n"],
        "additionalProperties": False,
    }
)


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def said(tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.fixture
def guide(new_matcher) -> Guide:
    return Guide(new_matcher("json_schema", SCHEMA), None, NUM_WORDS)


def random_tree(num_rows: int, rng: random.Random) -> list[int]:
    return [-1, *(rng.randrange(row) for row in range(1, num_rows))]


def after(new_matcher, tokens: list[int]) -> Guide:
    guide = Guide(new_matcher("json_schema", SCHEMA), None, NUM_WORDS)
    for token in tokens:
        guide.consume(token)
    return guide


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_masks_of_a_tree_are_those_of_its_paths(guide, new_matcher, tokenizer, seed):
    rng = random.Random(seed)
    come = tokenizer.encode('{"question": "')
    for token in come:
        guide.consume(token)
    words = tokenizer.encode('to be", "n": 12}') + tokenizer.encode('not", "n": 7')
    tokens = [come[-1], *(rng.choice(words) for _ in range(15))]
    parents = random_tree(16, rng)
    found = guide.masks(tokens, parents)
    for row in range(16):
        line, above = [], row
        while above:
            line.insert(0, tokens[above])
            above = parents[above]
        reached = after(new_matcher, come)
        for token in line:
            if token not in allowed(reached.mask()):
                assert row not in found  # unreachable
                break
            reached.consume(token)
        else:
            assert np.array_equal(found[row], reached.mask())
    assert np.array_equal(guide.mask(), found[0])  # nothing has come of it


def test_what_must_come_takes_the_place_of_what_a_drafter_thought(guide, tokenizer):
    forced = tokenizer.encode('{"question": "')
    tokens, _ = guide.fit([0] + [3] * 20, None, 21)
    assert said(tokenizer, tokens[1:]).startswith('{"question":')
    right = tokenizer.encode('{"question": "to')
    tokens, _ = guide.fit([0, *right, *[3] * 12], None, 40)
    assert said(tokenizer, tokens[1:]).startswith('{"question": "to be", "n":')
    assert len(tokens) == 13 + len(right) and forced[0] in allowed(guide.mask())


def test_in_a_tree_the_least_probable_rows_make_room(guide, tokenizer):
    num_rows = 24
    tokens, parents = guide.fit([0] + [3] * 23, [-1] + [0] * 23, 16)
    line, row = [], num_rows - 1
    while row > 0:
        line.insert(0, tokens[row])
        assert parents[row] < row
        row = parents[row]
    assert len(line) <= 15
    assert '{"question": "'.startswith(said(tokenizer, line)) and line
    assert tokens[1 : num_rows - len(line)] == [3] * (num_rows - 1 - len(line))


@pytest.mark.parametrize("parents", [None, [-1, *range(40)]])
def test_an_end_is_what_must_come_last(guide, tokenizer, parents):
    end = min(tokenizer.eos_ids)
    right = tokenizer.encode('{"question": "not", "n": 5}')
    rows = [0, *right, *[3] * (40 - len(right))]
    tokens, _ = guide.fit(rows, parents, 41)
    if parents is None:
        assert tokens[: len(right) + 2] == [0, *right, end]
    else:
        assert tokens[1:40] == rows[1:40] and tokens[-1] == end
    assert guide.fit([0, *right, end], None, 41)[0] == [0, *right, end]


def test_no_path_gets_longer_than_may_be(guide):
    for most in (2, 3, 5):
        tokens, parents = guide.fit([0] + [3] * 9, [-1] + [0] * 9, most)
        depths = [0]
        for row in range(1, len(tokens)):
            depths.append(depths[parents[row]] + 1)
        assert max(depths) < most


def test_a_guide_ends_where_nothing_may_follow(guide, tokenizer):
    text = '{"question": "not", "n": 5}'
    for token in tokenizer.encode(text):
        assert token in allowed(guide.mask()) and not guide.is_over
        guide.consume(token)
    assert guide.is_over and allowed(guide.mask()) == sorted(tokenizer.eos_ids)
    guide.consume(min(tokenizer.eos_ids))
    assert guide.is_over and guide.failure is None


@pytest.mark.parametrize("come", ["", '{"question": ', '{"question": "to be", "n": 1', "all"])
def test_a_token_alone_is_allowed_where_its_mask_says_so(new_matcher, tokenizer, come):
    text = '{"question": "not", "n": 5}' if come == "all" else come
    guide = after(new_matcher, tokenizer.encode(text))
    ids = range(-1, NUM_WORDS * 32)
    assert [token for token in ids if guide.allows(token)] == allowed(guide.mask())


def say(guide: Guide, tokens: list[int], *, is_missed: bool) -> None:
    """A round says them, and the next one has begun."""
    guide.foresee(tokens, is_missed=is_missed)
    for token in tokens:
        guide.consume(token)
    guide.catch_up()


def test_proposals_are_fitted_as_long_as_a_drafter_lacks_what_must_come(new_matcher, tokenizer):
    first, right, wrong = new_matcher("json_schema", SCHEMA), tokenizer.encode('{"'), [0, 3, 3, 3]

    def fitting(*, missed: bool) -> bool:
        """Whether the next round's proposal is fitted."""
        guide = Guide(first.copy(), None, NUM_WORDS)
        if guide.is_fitting:
            guide.fit(wrong if missed else [0, *right], None, 20)
        say(guide, right, is_missed=missed)
        return guide.is_fitting

    assert first.gap.is_large  # the first one
    assert not any(fitting(missed=False) for _ in range(3))
    assert not any(fitting(missed=missed) for missed in (True, False, False, True))
    assert fitting(missed=True)  # the second round of two
    assert all(fitting(missed=True) for _ in range(5))
    assert not [fitting(missed=False) for _ in range(5)][-1]


def test_what_one_answer_has_shown_is_known_in_the_next(new_matcher, tokenizer):
    first = new_matcher("json_schema", SCHEMA)
    right = tokenizer.encode('{"question": "')

    def answer() -> Guide:
        return Guide(first.copy(), None, NUM_WORDS)

    assert answer().is_fitting
    say(answer(), right[:1], is_missed=False)
    assert not answer().is_fitting
    for _ in range(2):
        say(answer(), right[:1], is_missed=True)
    assert answer().is_fitting


def test_no_proposal_is_fitted_for_a_token_that_another_may_stand_for(new_matcher, tokenizer):
    first = new_matcher("json_schema", SCHEMA)
    for _ in range(6):
        guide = Guide(first.copy(), None, NUM_WORDS)
        for token in tokenizer.encode('{"question": "'):
            guide.consume(token)
        say(guide, tokenizer.encode("t"), is_missed=True)
    assert not guide.is_fitting


def test_tokens_that_did_not_come_show_nothing(guide, tokenizer):
    guide.foresee(tokenizer.encode('{"'), is_missed=False)
    for _ in range(3):
        guide.foresee(tokenizer.encode('{"'), is_missed=True)
        guide.catch_up()
    assert not guide.is_fitting


def num_at_once(guide: Guide, tokens: list[int], end: int) -> int:
    """How many may come one after the other: all up to an end, or none."""
    masks = guide.masks([0, *tokens], None)
    num_said = tokens.index(end) + 1 if end in tokens else len(tokens)
    rows = range(num_said)
    may_come = all(row in masks and tokens[row] in allowed(masks[row]) for row in rows)
    return num_said if may_come else 0


RIGHT = '{"question": "to be", "n": 12}'


@pytest.mark.parametrize("seed", range(12))
def test_what_is_foreseen_changes_nothing_of_what_may_come(new_matcher, tokenizer, seed):
    """Beside a guide that foresees nothing, whatever it foresees and whatever comes."""
    rng = random.Random(seed)
    plain = Guide(new_matcher("json_schema", SCHEMA), None, NUM_WORDS)
    guide = Guide(new_matcher("json_schema", SCHEMA), None, NUM_WORDS)
    ends, everything = min(tokenizer.eos_ids), range(-1, NUM_WORDS * 32)
    rest = [*tokenizer.encode(RIGHT), ends]
    while not plain.is_over:
        thought = rest[: rng.randint(0, len(rest))]
        if thought and rng.random() < 0.3:
            thought[rng.randrange(len(thought))] = rng.choice([3, ends, rest[0]])
        if rng.random() < 0.5:
            guide.catch_up()
        num_known = guide.foresee(thought, is_missed=bool(thought) and rng.random() < 0.5)
        assert num_known == num_at_once(plain, thought, ends)
        for _ in range(rng.randint(1, 4)):
            token = rng.choice(allowed(plain.mask())) if rng.random() < 0.3 else rest[0]
            asked = rng.choice([token, rng.choice(everything)])
            assert guide.allows(asked) == plain.allows(asked)
            if rng.random() < 0.3:
                assert np.array_equal(guide.mask(), plain.mask())
                assert guide.is_over == plain.is_over and guide.failure is None
            if not plain.allows(token):
                break
            guide.consume(token)
            plain.consume(token)
            rest = rest[1:] if token == rest[0] else [ends]
            if plain.is_over:
                break
    assert guide.is_over and np.array_equal(guide.mask(), plain.mask())


def test_a_grammar_that_cannot_be_followed_below_a_row_fails_in_words(new_matcher, tokenizer):
    number = {"type": "integer", "multipleOf": 7919, "minimum": 10**15, "maximum": 10**18}
    schema = json.dumps({"type": "array", "items": number, "minItems": 1})
    guide = Guide(new_matcher("json_schema", schema), None, NUM_WORDS)
    assert guide.failure is None
    masks = guide.masks([0, *tokenizer.encode("[12345")], None)
    assert guide.failure is not None and "followed further" in guide.failure
    assert not masks[max(masks)].any()
    assert not guide.allows(tokenizer.encode("[")[0]) and not guide.mask().any()


def test_masks_below_a_row_are_those_of_the_whole_proposal(guide, tokenizer):
    tokens = [0, *tokenizer.encode('{"question": "to be", "n": 12}')]
    whole = guide.masks(tokens, None)
    for token in tokens[1:4]:
        guide.consume(token)
    below = guide.masks(tokens, None, 3)
    assert sorted(below) == [row for row in sorted(whole) if row >= 3]
    assert all(np.array_equal(mask, whole[row]) for row, mask in below.items())


def thinking(tokenizer, most: int, matcher=None) -> Guide:
    close = tuple(tokenizer.encode("\n</think>"))
    thought = ReasoningBudget(ReasoningLimit(most, close, tokenizer.token_bytes), "open")
    return Guide(matcher, thought, NUM_WORDS)


def test_reasoning_is_closed_at_its_limit(tokenizer):
    guide = thinking(tokenizer, 3)
    for token in tokenizer.encode("abc"):
        assert guide.mask() is None
        guide.consume(token)
    for token in tokenizer.encode("\n</think>"):
        assert allowed(guide.mask()) == [token]
        guide.consume(token)
    assert guide.mask() is None


def test_a_close_is_proposed_and_each_of_its_rows_has_one_candidate(tokenizer):
    guide, close = thinking(tokenizer, 2), tokenizer.encode("\n</think>")
    guide.consume(tokenizer.encode("a")[0])
    drafted = tokenizer.encode("b") + [3] * (len(close) + 2)
    tokens, _ = guide.fit([0, *drafted], None, 40)
    assert tokens[2 : 2 + len(close)] == close
    masks = guide.masks(tokens, None)
    assert [allowed(masks[1 + i]) for i in range(len(close))] == [[token] for token in close]
    assert set(masks) == set(range(1, 1 + len(close)))  # before and after it anything may come


def test_a_character_is_finished_before_reasoning_is_closed(new_matcher, tokenizer):
    guide = thinking(tokenizer, 1, new_matcher("regex", "[0-9]", before="open"))
    first, second = tokenizer.encode("é")
    guide.consume(first)
    assert second in allowed(guide.mask())
    guide.consume(second)
    assert len(allowed(guide.mask())) == 1
    for token in tokenizer.encode("\n</think>\n\n7"):
        assert token in allowed(guide.mask())
        guide.consume(token)
    assert guide.is_over


END = 2


def test_no_end_comes_before_so_many_tokens_on_any_path_of_a_proposal():
    guide = Guide(None, None, NUM_WORDS, MinTokens.of(3, {END, 10**6}, NUM_WORDS))
    everything = list(range(NUM_WORDS * 32))
    assert allowed(guide.mask()) == [token for token in everything if token != END]
    assert guide.allows(7) and not guide.allows(END)
    guide.consume(7)
    found = guide.masks([7, 8, 9, 5], [-1, 0, 1, 0])  # two, and one, tokens below what has come
    assert set(found) == {0, 1, 3} and END not in allowed(found[1])
    assert guide.masks([7, 8], None).keys() == {0, 1}  # nothing of it is left
    guide.consume(8)
    guide.consume(9)
    assert guide.mask() is None and guide.allows(END)


def test_a_grammar_after_which_nothing_else_can_come_ends_it_all_the_same(new_matcher, tokenizer):
    guide = Guide(new_matcher("regex", "to"), None, NUM_WORDS, MinTokens.of(9, {END}, NUM_WORDS))
    for token in tokenizer.encode("to"):
        assert END not in allowed(guide.mask())
        guide.consume(token)
    assert allowed(guide.mask()) == [END]


def test_one_that_may_go_on_goes_on(new_matcher, tokenizer):
    guide = Guide(new_matcher("regex", "(to)+"), None, NUM_WORDS, MinTokens.of(9, {END}, NUM_WORDS))
    for token in tokenizer.encode("to"):
        guide.consume(token)
    assert END not in allowed(guide.mask()) and allowed(guide.mask())


# --- reasoning ----------------------------------------------------------------------------------


def budget(phase: str, max_tokens: int = 4) -> ReasoningBudget:
    """Tokens are bytes."""
    return ReasoningBudget(
        ReasoningLimit(max_tokens, tuple(CLOSE), lambda token: bytes([token])), phase
    )


def budget_after(start: ReasoningBudget, text: bytes) -> ReasoningBudget:
    for byte in text:
        start = start.after(byte)
    return start


@pytest.mark.parametrize(
    ("phase", "text", "then"),
    [
        ("open", b"abc", "open"),
        ("open", b"a</think>", "closed"),
        ("open", b"a</thin</think>", "closed"),
        ("perhaps", b"", "perhaps"),
        ("perhaps", b"\n <th", "perhaps"),
        ("perhaps", b"\n<think>", "open"),
        ("perhaps", b"<think>why</think>", "closed"),
        ("perhaps", b"<tool", "closed"),
        ("perhaps", b"no <think>", "closed"),
        ("closed", b"<think>", "closed"),
    ],
)
def test_phases_of_reasoning(phase, text, then):
    assert budget_after(budget(phase, 1000), text).phase == then


def test_reasoning_is_counted_from_its_opening_and_closed_at_its_limit():
    start = budget_after(budget("perhaps"), b"<think>")
    assert start.forced == () and start.num_tokens == 0
    spent = budget_after(start, b"abcd")
    assert spent.forced == tuple(CLOSE)
    for i, token in enumerate(CLOSE):
        assert spent.forced == tuple(CLOSE[i:])
        spent = spent.after(token)
    assert spent.phase == "closed" and spent.forced == ()


def test_without_a_budget_reasoning_is_closed_at_once():
    assert budget("open", 0).forced == tuple(CLOSE)
