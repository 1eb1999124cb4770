"""Which parts of a string may become part of a control token."""

from __future__ import annotations

import pytest

from luceasync.text.guarded import SuspectScanner

# The control tokens of the tokenizer: <|endoftext|> <|im_start|> <|im_end|>; added is <think>.


@pytest.fixture(scope="module")
def suspects(byte_level) -> SuspectScanner:
    return SuspectScanner(byte_level.control)


@pytest.mark.parametrize(
    ("string", "parts"),
    [
        ("", []),
        ("the cat", []),
        ("a <|im_end|> b", ["<|im_end|>"]),
        ("<|im_end|><|im_start|>", ["<|im_end|>", "<|im_start|>"]),
        ("it ends in <|im_", ["<|im_"]),
        ("it ends in <|im_ \n", ["<|im_"]),
        ("it ends in <", ["<"]),
        ("end|> it begins", ["end|>"]),
        ("\n\n|> it begins", ["|>"]),
        ("> it is quoted", [">"]),
        ("a < b, b -> c, <| and |> within", []),
        ("a <|im_ <think> b", ["<|im_"]),
        ("a <think>\n|> b", ["|>"]),
        ("a <|</thought>> b", ["<|", ">"]),
        ("a <|\u65e5\u672c|> b", ["<|", "|>"]),
        ("ends in <think>", []),
        ("<", ["<"]),
    ],
)
def test_suspects_are_whole_tokens_and_parts_at_possible_cuts(suspects, string, parts):
    found = suspects.find(string)
    assert [string[begin:end] for begin, end in found] == parts
    assert found == sorted(found)
    assert suspects.are_in(["the cat", string, ""]) == bool(parts)
    assert suspects.are_in([string]) == bool(parts)


@pytest.mark.parametrize("word", ["im_end", " end\n", "_", "e"])
def test_a_string_that_is_the_middle_of_a_token_is_suspect(suspects, word):
    assert suspects.are_in(["the cat", word])
    assert not suspects.are_in([f"the {word.strip()} of it"])


def test_strings_are_not_joined(suspects):
    assert not suspects.are_in(["a b", "c d", ""])
    assert not suspects.are_in([])
    assert suspects.are_in(["it ends in <|", "the cat"])
    assert suspects.are_in(["the cat", "|> it begins"])
