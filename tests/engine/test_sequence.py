"""A choice from its first token to its end: what is shown, held back, counted and timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from luceasync.engine import sequence as generation
from luceasync.engine.sampling.row import RowLogprobs, TokenCounts
from luceasync.engine.sequence import Generation
from luceasync.request import Delta, TextPiece
from luceasync.text.tokenizer import Tokenizer
from tests import tiny
from tests.deltas import text_delta
from tests.engine.choices import make_choice

EOS = 2
PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, with the end token 2."""
    folder = tiny.save(tiny.build("qwen3", 1), tmp_path_factory.mktemp("tiny"))
    return Tokenizer.load(folder)


def make(tokenizer: Tokenizer, *, stop: tuple[str, ...] = (), **fields: Any) -> Generation:
    fields = {"index": 3, "stop_ids": frozenset({EOS}), **fields}
    prepared = make_choice(PROMPT, tokenizer=tokenizer, stop=stop, **fields)
    return Generation(prepared, submitted_at=generation.time.monotonic())


def accept(choice: Generation, token: int, logprobs: RowLogprobs | None = None) -> Delta | None:
    choice.append(token, logprobs)
    return choice.shown()


def ended(choice: Generation, *why: str) -> Delta:
    choice.end(*why)
    return choice.shown()


def feed(choice: Generation, ids: list[int]) -> list[Delta | None]:
    """Accept tokens until one of them ends the choice."""
    deltas: list[Delta | None] = []
    for token in ids:
        deltas.append(accept(choice, token))
        if deltas[-1] is not None and deltas[-1].finish is not None:
            break
    return deltas


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each byte."""
    by_bytes = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def shown(deltas: list[Delta | None]) -> str:
    return "".join(delta.text for delta in deltas if delta is not None)


def told_ids(deltas: list[Delta | None]) -> list[int]:
    return [token for delta in deltas if delta is not None for token in delta.token_ids]


# --- text ---------------------------------------------------------------------------------------


def test_every_token_is_a_delta_of_its_choice(tokenizer: Tokenizer):
    ids = letters(tokenizer, "abc")
    deltas = feed(make(tokenizer), ids)
    assert deltas == [text_delta(3, c, (i,)) for c, i in zip("abc", ids, strict=True)]


def test_tokens_that_come_together_are_one_delta(tokenizer: Tokenizer):
    choice, ids = make(tokenizer), letters(tokenizer, "abc")
    assert all(choice.append(token, None) for token in ids)
    assert choice.shown() == text_delta(3, "abc", tuple(ids))
    assert choice.shown() is None


@pytest.mark.parametrize("stop", [(), ("ne",)])
@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset({EOS})])
@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("counted", [False, True])
def test_tokens_that_are_known_together_do_what_each_does(
    tokenizer, stop, stop_ids, max_tokens, counted
):
    spelled = letters(tokenizer, "yesnever")
    for rounds in ([spelled], [spelled[:1], spelled[1:5], [*spelled[5:], EOS, *spelled]]):
        fields = {"stop": stop, "stop_ids": stop_ids, "max_tokens": max_tokens}
        one, other = (
            make(tokenizer, counts=TokenCounts(PROMPT) if counted else None, **fields)
            for _ in range(2)
        )
        for tokens in rounds:
            if not one.has_ended:
                taken = [one.append(token, None) for token in tokens if not one.has_ended]
                assert other.extend(tokens) == len(taken)
            assert (other.has_ended, other.position) == (one.has_ended, one.position)
            assert other.lease.sequence == one.lease.sequence
            assert other.last_token == one.last_token and other.first_token_at is not None
        deltas = one.shown(), other.shown()
        assert len({(d.pieces, d.token_ids, d.finish and d.finish.reason) for d in deltas}) == 1
        if counted:
            assert all(
                one.next_row.counts.count(t) == other.next_row.counts.count(t) for t in spelled
            )


def test_half_a_character_is_held_back_with_its_tokens(tokenizer: Tokenizer):
    ids = letters(tokenizer, "\u20ac")
    assert feed(make(tokenizer), ids) == [None, None, text_delta(3, "\u20ac", tuple(ids))]


def test_what_may_be_a_stop_string_is_held_back_with_its_tokens(tokenizer: Tokenizer):
    ids = letters(tokenizer, "a<>x")
    deltas = feed(make(tokenizer, stop=("<>!",)), ids)
    assert deltas == [
        text_delta(3, "a", (ids[0],)),
        None,
        None,
        text_delta(3, "<>x", tuple(ids[1:])),
    ]


def test_a_stop_string_ends_the_choice_and_is_not_shown(tokenizer: Tokenizer):
    ids = letters(tokenizer, "ab<>!cd")
    deltas = feed(make(tokenizer, stop=("<>!",)), ids)
    assert shown(deltas) == "ab"
    assert told_ids(deltas) == ids[:5]
    assert deltas[-1].finish.reason == "stop"
    assert deltas[-1].finish.usage.completion_tokens == 5


# --- ends ---------------------------------------------------------------------------------------


def test_the_end_token_stops_is_counted_and_has_no_text(tokenizer: Tokenizer):
    deltas = feed(make(tokenizer), [*letters(tokenizer, "ab"), EOS, 9])
    finish = deltas[-1].finish
    assert (shown(deltas), finish.reason) == ("ab", "stop")
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 3)
    assert deltas[-1].token_ids == (EOS,)


def test_the_end_token_shows_what_was_held_back(tokenizer: Tokenizer):
    deltas = feed(make(tokenizer, stop=("<>!",)), [*letters(tokenizer, "<>"), EOS])
    assert deltas[:2] == [None, None]
    assert (deltas[2].text, deltas[2].finish.reason) == ("<>", "stop")


def test_without_end_tokens_generation_goes_on(tokenizer: Tokenizer):
    choice = make(tokenizer, stop_ids=frozenset(), max_tokens=4)
    deltas = feed(choice, [*letters(tokenizer, "a"), EOS, *letters(tokenizer, "bcd")])
    assert (shown(deltas), deltas[-1].finish.reason) == ("abc", "length")
    assert deltas[-1].finish.usage.completion_tokens == 4


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_the_limit_ends_the_choice_at_its_token(tokenizer: Tokenizer, max_tokens: int):
    deltas = feed(make(tokenizer, max_tokens=max_tokens), letters(tokenizer, "abcdefg"))
    assert len(deltas) == max_tokens == deltas[-1].finish.usage.completion_tokens
    assert (shown(deltas), deltas[-1].finish.reason) == ("abcdefg"[:max_tokens], "length")


def test_the_limit_shows_what_was_held_back(tokenizer: Tokenizer):
    choice = make(tokenizer, stop=("<>!",), max_tokens=3)
    deltas = feed(choice, letters(tokenizer, "a<>!"))
    assert (shown(deltas), deltas[-1].finish.reason) == ("a<>", "length")


@pytest.mark.parametrize(
    ("max_tokens", "text", "reason"), [(3, "a<>", "length"), (4, "a", "stop"), (5, "a", "stop")]
)
def test_a_stop_string_wins_over_the_limit_at_the_same_token(tokenizer, max_tokens, text, reason):
    choice = make(tokenizer, stop=("<>!",), max_tokens=max_tokens)
    deltas = feed(choice, letters(tokenizer, "a<>!bc"))
    assert (shown(deltas), deltas[-1].finish.reason) == (text, reason)


def test_the_end_token_wins_over_the_limit_at_the_same_token(tokenizer: Tokenizer):
    deltas = feed(make(tokenizer, max_tokens=2), [*letters(tokenizer, "a"), EOS])
    assert deltas[-1].finish.reason == "stop"


def test_a_stop_string_that_only_the_last_flush_completes_counts(tokenizer: Tokenizer):
    """The first byte of a longer character becomes U+FFFD when nothing follows."""
    first_byte = letters(tokenizer, "\u20ac")[0]
    choice = make(tokenizer, stop=("\ufffd",), max_tokens=2)
    deltas = feed(choice, [*letters(tokenizer, "a"), first_byte])
    assert (shown(deltas), deltas[-1].finish.reason) == ("a", "stop")


@pytest.mark.parametrize("reason", ["cancelled", "error", "length"])
def test_an_end_from_outside_shows_what_was_held_back(tokenizer: Tokenizer, reason):
    choice = make(tokenizer, stop=("<>!",))
    ids = letters(tokenizer, "<>")
    assert feed(choice, ids) == [None, None]
    delta = ended(choice, reason, "words")
    assert (delta.text, delta.token_ids) == ("<>", tuple(ids))
    assert (delta.finish.reason, delta.finish.error) == (reason, "words")


def test_a_failed_piece_maker_does_not_prevent_the_end(tokenizer):
    class Broken:
        def make(self, text: str, *, is_last: bool, is_cut: bool = False):
            raise ZeroDivisionError("no pieces")

    choice = make(tokenizer, piece_maker=Broken())
    choice.append(letters(tokenizer, "a")[0], None)
    with pytest.raises(ZeroDivisionError):
        choice.shown()
    assert ended(choice, "error", "words").finish.error == "words"


# --- log-probabilities --------------------------------------------------------------------------


def test_log_probabilities_travel_with_their_tokens(tokenizer: Tokenizer):
    choice, ids = make(tokenizer, stop=("<>!",)), letters(tokenizer, "a<>x")
    deltas = [accept(choice, token, RowLogprobs(-float(token), ())) for token in ids]
    for delta in deltas:
        if delta is not None:
            assert [entry.logprob for entry in delta.logprobs] == [-t for t in delta.token_ids]
    assert told_ids(deltas) == ids and shown(deltas) == "a<>x"


def test_the_finish_carries_the_log_probability_of_the_end_token(tokenizer: Tokenizer):
    delta = accept(make(tokenizer), EOS, RowLogprobs(-0.5, ()))
    assert [(e.token, e.logprob) for e in delta.logprobs] == [("<|im_end|>", -0.5)]


def test_log_probabilities_name_tokens_and_bytes(tokenizer: Tokenizer):
    a, euro = letters(tokenizer, "a\u20ac")[:2]
    delta = accept(make(tokenizer), a, RowLogprobs(-0.5, ((a, -0.5), (euro, -2.0))))
    (entry,) = delta.logprobs
    assert (entry.token, entry.token_bytes, entry.logprob) == ("a", b"a", -0.5)
    top = [(e.token, e.token_bytes, e.logprob) for e in entry.top]
    assert top == [("a", b"a", -0.5), ("\ufffd", b"\xe2", -2.0)]


# --- places and counts --------------------------------------------------------------------------


def test_positions_follow_the_prompt(tokenizer: Tokenizer):
    choice = make(tokenizer, seed=11, top_logprobs=2)
    assert not choice.is_decoding and choice.next_row.position == len(PROMPT)
    feed(choice, [9, 10])
    assert choice.is_decoding and choice.last_token == 10
    assert (choice.position, choice.next_row.position) == (4, 5)
    assert (choice.next_row.seed, choice.next_row.top_logprobs) == (11, 2)


def test_every_token_is_counted_for_penalties(tokenizer: Tokenizer):
    counts = TokenCounts(PROMPT)
    feed(make(tokenizer, counts=counts), [9, 9, 5, EOS])
    told = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert told == {5: 1, 6: 0, 7: 0, 9: 2, EOS: 1}


# --- time ---------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the monotonic clock, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_times_are_those_of_queue_prefill_and_decode(tokenizer: Tokenizer, clock: list[float]):
    choice = make(tokenizer, max_tokens=3)
    clock[0] += 2.0
    choice.start(1)
    clock[0] += 5.0
    choice.prefill_s, choice.num_prefilled = 4.0, 3
    for _ in range(3):
        delta = accept(choice, 9)
        clock[0] += 1.0
    timings = delta.finish.timings
    assert (timings.queued_s, timings.prefill_s, timings.decode_s) == (2.0, 4.0, 2.0)
    assert (timings.num_prefilled, timings.num_decoded, choice.lane) == (3, 2, 1)


def test_a_choice_that_never_got_a_lane_only_queued(tokenizer: Tokenizer, clock: list[float]):
    choice = make(tokenizer)
    clock[0] += 2.0
    timings = ended(choice, "cancelled").finish.timings
    assert (timings.queued_s, timings.prefill_s, timings.decode_s) == (2.0, 0.0, 0.0)
    assert (timings.num_prefilled, timings.num_decoded) == (0, 0)


def test_a_choice_cancelled_in_prefill_has_not_decoded(tokenizer: Tokenizer, clock: list[float]):
    choice = make(tokenizer)
    choice.start(0)
    clock[0] += 2.0
    timings = ended(choice, "cancelled").finish.timings
    assert (timings.queued_s, timings.decode_s, timings.num_decoded) == (0.0, 0.0, 0)


# --- pieces -------------------------------------------------------------------------------------


class WholeOnly:
    """A maker that is certain of nothing before the last text has come."""

    def __init__(self) -> None:
        self._held = ""

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[TextPiece, ...]:
        self._held += text
        return tuple(TextPiece(word) for word in self._held.split()) if is_last else ()


def test_what_the_piece_maker_holds_back_comes_with_the_last_text(tokenizer: Tokenizer):
    choice = make(tokenizer, piece_maker=WholeOnly())
    ids = letters(tokenizer, "a bc")
    deltas = feed(choice, [*ids, EOS])
    assert deltas[:-1] == [None] * 4
    assert deltas[-1].pieces == (TextPiece("a"), TextPiece("bc"))
    assert deltas[-1].token_ids == (*ids, EOS)
