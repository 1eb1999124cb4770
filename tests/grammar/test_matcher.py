"""Tokens allowed in one go are those allowed one by one; what a drafter lacks is counted."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest

import luceasync.grammar.matcher as matcher_module
from luceasync.grammar.matcher import LOW_LEVEL, MAX_LEVEL, DraftGap

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "at": {"type": "string", "format": "date"},
            "n": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
            "kind": {"enum": ["to be", "to", "not"]},
        },
        "required": ["name", "at", "n", "kind"],
        "additionalProperties": False,
    }
)
PROGRAMS = {
    "schema": ("json_schema", SCHEMA),
    "object": ("json_object", ""),
    "regex": ("regex", r"([a-f]{2,5}(, |-))*[0-9]{3}"),
    "choice": ("choice", json.dumps(["to be", "to be or", "not to be", "to"])),
    "recursion": ("grammar", 'root ::= "(" root ")" | [a-c]{1,4}'),
    "limited": ("grammar", 'start: word ("." word)*\nword[max_tokens=3]: /[a-z]+/'),
    "lazy": ("grammar", 'start: word "z"\nword[lazy]: /[a-z]+/'),
    "stop": ("grammar", 'start: word "." word\nword[ stop = "be"]: /[a-z]+/'),
    "suffix": ("grammar", 'start: word /[a-c]+/\nword[suffix="be"]: /(?s:.*)/'),
}


def mostly_allowed(matcher, num_tokens: int, rng: random.Random) -> list[int]:
    """Tokens each of which its mask allows, but for one now and then."""
    copied, tokens = matcher.copy(), []
    for _ in range(num_tokens):
        bits = np.unpackbits(copied.mask().view(np.uint8), bitorder="little")
        known = np.flatnonzero(bits).tolist()
        token = rng.choice(known) if known and rng.random() < 0.95 else rng.randrange(len(bits))
        tokens.append(token)
        if not copied.advance(token):
            tokens += [rng.randrange(len(bits)) for _ in range(rng.randint(0, 2))]
            break
    return tokens


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_many_may_come_in_one_go_as_one_by_one(new_matcher, name):
    """Of a program whose tokens llguidance has to be given, the first one."""
    rng = random.Random(name)
    first = new_matcher(*PROGRAMS[name])
    for _ in range(12):
        one, all_at_once = first.copy(), first.copy()
        for _ in range(6):
            tokens = mostly_allowed(one, rng.randint(0, 12), rng)
            num_allowed = all_at_once.num_allowed(tokens)
            if name in ("limited", "stop"):
                assert num_allowed <= 1
                tokens = tokens[:1]
            assert num_allowed == sum(_until_refused(one, tokens))
            if num_allowed:
                all_at_once.take(tokens[:num_allowed])
                one.end(tokens[num_allowed - 1])
            assert all_at_once.failure is None
            assert np.array_equal(all_at_once.mask(), one.mask())
            assert all_at_once.is_over == one.is_over
            if one.is_over:
                break


def _until_refused(matcher, tokens: list[int]):
    """True for each that may come, up to the first that may not, or an end."""
    for token in tokens:
        if not matcher.allows(token):
            return
        yield True
        if not matcher.advance(token):
            return


def test_what_a_matcher_was_only_asked_of_changes_nothing(new_matcher, tokenizer):
    matcher, text = new_matcher(*PROGRAMS["regex"]), tokenizer.encode("abc, de-123")
    before = matcher.mask()
    assert [matcher.num_allowed(text) for _ in range(3)] == [len(text)] * 3
    assert np.array_equal(matcher.mask(), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_taken_back_has_not_come(new_matcher, name):
    """Also in a program of which llguidance takes nothing back itself."""
    rng = random.Random(name)
    for _ in range(8):
        matcher = new_matcher(*PROGRAMS[name])
        matcher.advance_all(mostly_allowed(matcher, rng.randint(0, 4), rng))
        matcher.settle()
        before = matcher.mask()
        num_entered = matcher.advance_all(mostly_allowed(matcher, rng.randint(1, 8), rng))
        matcher.roll_back(num_entered)
        assert matcher.failure is None
        assert np.array_equal(matcher.mask(), before)


# --- what following an answer may cost ---------------------------------------------------------


def costly(monkeypatch, matcher) -> None:
    """Make what `matcher` did so far cost more than it may."""
    matcher._cost._left_s = -1e-9
    monkeypatch.setattr(matcher_module, "TOKEN_S", 1.0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_beyond_its_cost_nothing_may_come_and_that_is_no_end(new_matcher, monkeypatch, name):
    rng = random.Random(name)
    matcher = new_matcher(*PROGRAMS[name])
    num_entered = matcher.advance_all(mostly_allowed(matcher, 4, rng))
    next_tokens = mostly_allowed(matcher, 4, rng)
    costly(monkeypatch, matcher)
    assert matcher.failure == matcher_module.TOO_COSTLY
    assert not matcher.mask().any() and matcher.num_allowed(next_tokens) == 0
    assert not any(map(matcher.allows, [*next_tokens, *matcher._end_ids]))
    assert matcher.forced() == [] and not matcher.must_write(next_tokens[0])
    assert matcher.advance_all(next_tokens) == 0 and not matcher.is_over
    matcher.roll_back(num_entered)
    matcher.take(next_tokens[:1])
    assert matcher.failure == matcher_module.TOO_COSTLY, "tokens make up for nothing afterwards"


def test_a_copy_pays_for_itself(new_matcher, monkeypatch):
    matcher = new_matcher(*PROGRAMS["regex"])
    costly(monkeypatch, matcher)
    assert matcher.copy().failure is None


def test_each_token_pays_for_some_time_and_what_is_left_over_has_a_limit():
    cost = matcher_module.CostLimit()
    cost.add(10**6)
    cost._left_s -= matcher_module.STOCK_S
    assert not cost.is_exceeded
    with cost:
        sum(range(10_000))
    assert cost.is_exceeded


def test_an_ambiguous_grammar_costs_as_much_as_it_may_and_no_more(
    new_matcher, tokenizer, monkeypatch
):
    """In processor time of this thread; without a limit 200 tokens take seconds."""
    monkeypatch.setattr(matcher_module, "STOCK_S", 0.02)
    monkeypatch.setattr(matcher_module, "TOKEN_S", 0.0002)
    matcher = new_matcher("grammar", 'start: e\ne: e e e | e e | "a" | "b"')
    token = tokenizer.encode("a")
    begin, num_tokens, most_s = time.thread_time(), 0, 0.0
    while matcher.failure is None:
        before = time.thread_time()
        matcher.mask()
        matcher.take(token)
        most_s = max(most_s, time.thread_time() - before)
        num_tokens += 1
    assert 4 < num_tokens < 200
    seconds = time.thread_time() - begin
    assert seconds < 1.5 * (0.02 + num_tokens * 0.0002 + most_s), "the last one exceeds it"


# --- what a drafter lacks -----------------------------------------------------------------------


def gap_after(rounds: str) -> DraftGap:
    """After the first round, and `x` for each round that has shown a gap, `.` for others."""
    gap = DraftGap()
    for sign in f".{rounds}":
        gap.end_round()
        if sign == "x":
            gap.show()
    return gap


def test_a_gap_is_large_before_the_first_round_and_not_before_the_second():
    assert DraftGap().is_large
    assert not gap_after("").is_large


def test_a_gap_is_large_after_two_rounds_of_three():
    assert gap_after("...xx").is_large
    assert gap_after("...x.x").is_large
    assert not gap_after("...x..").is_large
    assert not gap_after("...x...x").is_large


def test_a_gap_is_forgotten_some_rounds_after_the_last():
    shown = "x" * 9
    assert gap_after(shown).is_large
    num_rounds = MAX_LEVEL - LOW_LEVEL
    assert gap_after(shown + "." * (num_rounds - 1)).is_large
    assert not gap_after(shown + "." * num_rounds).is_large


def test_another_format_is_checked_once():
    gap = gap_after("......")
    gap.begin()
    assert gap.is_large
    gap.end_round()
    assert not gap.is_large
