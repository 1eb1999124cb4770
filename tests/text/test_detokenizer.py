"""Text token by token equals the text of all tokens, and a stop string cuts it exactly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luceasync.errors import RequestError
from luceasync.text.detokenizer import (
    Detokenizer,
    IndentScanner,
    ReasoningScanner,
    SafeText,
    StopScanner,
)

relaxed = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def pieces_of(tokenizer, ids, stop=()) -> tuple[list[str], bool]:
    detokenizer, texts = Detokenizer(tokenizer, stop), []
    for token_id in ids:
        piece = detokenizer.push(token_id)
        texts.append(piece.text)
        if piece.stopped:
            break
    return [*texts, detokenizer.flush()], detokenizer.stopped


@pytest.mark.slow
@relaxed
@given(st.lists(st.integers(0, 380), max_size=40))
def test_any_tokens_give_the_text_of_decoding_them_at_once(any_tokenizer, ids):
    pieces, stopped = pieces_of(any_tokenizer, ids)
    assert "".join(pieces) == any_tokenizer.decode(ids)
    assert not stopped


@relaxed
@given(text=st.text(max_size=30))
def test_any_text_comes_back(byte_level, text):
    pieces, _ = pieces_of(byte_level, byte_level.encode(text, special=False))
    assert "".join(pieces) == text


@pytest.mark.slow
@relaxed
@given(runs=st.lists(st.binary(max_size=6), max_size=6))
def test_broken_utf8_is_replaced_as_the_tokenizer_does(byte_level, fallback, runs):
    for tokenizer in (byte_level, fallback):
        by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
        word = tokenizer.encode("cat")
        ids = [i for run in runs for i in [*(by_byte[bytes([b])] for b in run), *word]]
        assert "".join(pieces_of(tokenizer, ids)[0]) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "text", ["\U0001f9d1\u200d\U0001f680", "e\u0301", "\u4f60\u597d", "\u0e01\u0e33"]
)
def test_a_character_split_over_tokens_is_shown_whole(byte_level, text):
    ids = byte_level.encode(text)
    pieces, _ = pieces_of(byte_level, ids)
    assert len(ids) > 1
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_an_unfinished_character_is_held_and_then_replaced(byte_level):
    ids = byte_level.encode("\U0001f680")
    assert pieces_of(byte_level, ids[:-1])[0] == [""] * (len(ids) - 1) + ["\ufffd"]


def test_special_and_unknown_tokens_have_no_text(byte_level):
    ids = [byte_level.token_id("<|im_end|>"), 10**6, *byte_level.encode("cat")]
    assert "".join(pieces_of(byte_level, ids)[0]) == "cat"


def test_only_the_first_space_of_a_text_is_dropped(fallback):
    space_cat = fallback.encode("cat")
    assert fallback.token_bytes(space_cat[0]).startswith(b" ")
    assert "".join(pieces_of(fallback, [*space_cat, *space_cat])[0]) == "cat cat"


def test_text_is_shown_as_soon_as_it_is_certain(byte_level):
    ids = byte_level.encode("the cat sat")
    pieces, _ = pieces_of(byte_level, ids)
    assert pieces == [byte_level.token_text(i) for i in ids] + [""]


def test_a_stop_string_across_tokens_cuts_exactly_before_it(byte_level):
    ids = byte_level.encode("the cat sat on the mat")
    pieces, stopped = pieces_of(byte_level, ids, ("t sat o",))
    assert stopped
    assert "".join(pieces) == "the ca"


def test_a_stop_string_at_the_first_token_leaves_nothing(byte_level):
    assert pieces_of(byte_level, byte_level.encode("the cat"), ("t",)) == (["", ""], True)


def test_a_stop_string_may_begin_with_a_split_character(byte_level):
    ids = byte_level.encode("go \U0001f680!")
    pieces, stopped = pieces_of(byte_level, ids, ("\U0001f680!",))
    assert stopped
    assert "".join(pieces) == "go "


def test_the_beginning_of_a_stop_string_is_released_at_the_end(byte_level):
    ids = byte_level.encode("the cat sat")
    pieces, stopped = pieces_of(byte_level, ids, ("sat on", "the cat ran"))
    assert not stopped
    assert "".join(pieces) == "the cat sat"
    assert "".join(pieces[:-1]) == "the cat "


def test_no_tokens_have_no_text(any_tokenizer):
    assert pieces_of(any_tokenizer, [], ("x",)) == ([""], False)


def test_a_stop_string_may_be_complete_only_at_the_end(fallback):
    ids = fallback.encode("\u4f60\u597d")  # byte tokens: final once the run has ended
    pieces, stopped = pieces_of(fallback, ids, ("\u597d",))
    assert stopped
    assert "".join(pieces) == "\u4f60"


def test_an_empty_stop_string_is_refused(byte_level):
    with pytest.raises(RequestError, match="must not be empty") as refused:
        Detokenizer(byte_level, ("",))
    assert refused.value.param == "stop"


def first_stop(text: str, stop: list[str]) -> str | None:
    """The text before the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stop if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)]
    return None


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_overlapping_stops_cut_alike_however_the_text_is_split(text, stop, cuts):
    scanner, shown = StopScanner(stop), ""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in pairwise(edges):
        piece = scanner.push(text[begin:end])
        shown += piece.text
        if piece.stopped:
            break
    assert (shown if piece.stopped else None) == first_stop(text, stop)
    assert piece.stopped or shown + scanner.flush() == text


def test_no_more_is_held_back_than_may_become_a_stop():
    scanner = StopScanner(["abc", "bd"])
    assert scanner.push("xab") == SafeText("x", False)
    assert scanner.push("a") == SafeText("ab", False)
    assert scanner.push("bd") == SafeText("a", True)


@pytest.mark.parametrize(
    ("before", "text", "shown", "stopped"),
    [
        ("open", "a stop b</think>\n\nc stop d", "a stop b</think>\n\nc ", True),
        ("open", "a stop b", "a stop b", False),
        ("open", "a stop b</thi", "a stop b</thi", False),
        ("perhaps", "\n<think>stop</think>c", "\n<think>stop</think>c", False),
        ("perhaps", "a stop b", "a ", True),
        ("perhaps", " stop<think>", " ", True),
        ("perhaps", "<thi", "<thi", False),
        ("nothing", "<think>stop", "<think>", True),
        ("open", "</think>\n\n", "</think>\n\n", False),
    ],
)
def test_stops_count_in_the_answer_alone(byte_level, before, text, shown, stopped):
    detokenizer, found = Detokenizer(byte_level, ("stop", "\n\n"), before), ""
    for token in byte_level.encode(text, special=False):
        if detokenizer.stopped:
            break
        found += detokenizer.push(token).text
    assert (found + detokenizer.flush(), detokenizer.stopped) == (shown, stopped)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nothing", "open", "perhaps"])
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "\n", "a", " "])),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_reasoning_is_found_however_the_text_is_split(before, words, cuts):
    text = "".join(words)

    def separated(edges):
        scanner = ReasoningScanner(before)
        parts = [part for begin, end in pairwise(edges) for part in scanner.push(text[begin:end])]
        parts += scanner.flush()
        texts = (
            "".join(p.text for p in parts if not p.is_answer),
            "".join(p.text for p in parts if p.is_answer),
        )
        assert "".join(p.text for p in parts) == "".join(texts)
        return texts

    reasoning, answer = separated([0, len(text)])
    assert reasoning + answer == text
    assert separated([0, *sorted(min(c, len(text)) for c in cuts), len(text)]) == (
        reasoning,
        answer,
    )


def indented(text: str, least: int, stop: list[str]) -> str:
    """`text` before the first line but the first that is indented too little, or a stop string."""
    cut = first_stop(text, stop)
    whole = text if cut is None else cut
    lines = whole.split("\n")
    for number, line in enumerate(lines[1:], start=1):
        bare = line.lstrip(" \t").lstrip("\r")
        num_blanks = len(line) - len(line.lstrip(" \t"))
        if bare and num_blanks < least:
            return "\n".join(lines[:number])
    return whole


@settings(max_examples=60, deadline=None)
@given(
    st.text(alphabet=" \tab\n", max_size=24),
    st.integers(1, 4),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(0, 24), max_size=5),
)
def test_a_text_ends_before_a_line_that_is_indented_too_little(text, least, stop, cuts):
    scanner, shown = IndentScanner(least, StopScanner(stop)), ""
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for begin, end in pairwise(places):
        safe = scanner.push(text[begin:end])
        shown += safe.text
        if safe.stopped:
            break
    else:
        shown += scanner.flush()
    assert shown == indented(text, least, stop)


def test_blanks_are_held_back_until_the_line_is_known():
    scanner = IndentScanner(4, StopScanner(()))
    pushed = [scanner.push(piece).text for piece in ("a\n  ", "  ", "b\n", "\n    ")]
    assert pushed == ["a", "\n    ", "b", "\n\n    "]
    assert scanner.push("c\nd") == SafeText("c", True) and scanner.found == "\n"
