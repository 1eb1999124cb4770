"""Control tokens are found as by encoding; one with a BREAK is text, other ids do not change."""

from __future__ import annotations

import copy
import json

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.errors import RequestError
from luceasync.text.control_tokens import BREAK, ControlTokens, TokenSpan, with_breaks
from luceasync.text.tokenizer import Tokenizer

relaxed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PIECES = ["<|im_end|>", "<|im_start|>", "<think>", "<s>", "</s>", " ", "\n", "the cat", "<|im_"]
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8).map("".join)
VOCAB = ["<unk>", "</s>", "<", "/", "s", ">", "a", "b", "ab", "\u2581", "\u2581ab"]


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        models.Unigram([(token, -float(i)) for i, token in enumerate(VOCAB)], unk_id=0)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


def word_piece() -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate([*VOCAB, "##b", "[CLS]"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(["<unk>", "[CLS]", "</s>"])
    return backend


def word_level() -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(VOCAB)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([tokenizers.AddedToken("</s>", rstrip=True, lstrip=True)])
    return backend


def merged() -> tokenizers.Tokenizer:
    """With merges that make a control token, as in some files."""
    vocab = {token: i for i, token in enumerate([*VOCAB, "</", "</s"])}
    merges = [("<", "/"), ("</", "s"), ("</s", ">"), ("a", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


def all_normalized() -> tokenizers.Tokenizer:
    """With control tokens that match normalized text."""
    backend = merged()
    backend.normalizer = normalizers.NFKC()
    definition = json.loads(backend.to_str())
    for token in definition["added_tokens"]:
        token["normalized"] = True
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


def spaced() -> tokenizers.Tokenizer:
    """With a normalizer that makes the space before a control token part of it."""
    vocab = {token: i for i, token in enumerate(VOCAB)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")], unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    definition = json.loads(backend.to_str())
    for token in definition["added_tokens"]:
        token["normalized"] = True
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


KINDS = [unigram, word_piece, word_level, merged, all_normalized, spaced]


def control_of(backend: tokenizers.Tokenizer) -> ControlTokens:
    return ControlTokens(backend, backend.get_added_tokens_decoder())


@pytest.mark.slow
@relaxed
@given(text=TEXT)
def test_text_without_a_break_has_its_usual_ids(any_tokenizer, text):
    assert any_tokenizer.control.encode(text) == any_tokenizer.encode(text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(
    text=st.lists(
        st.sampled_from(["</s>", "[CLS]", "ab", " ", "  ", "a", "\u4f60", "<", "s>"]), max_size=8
    ).map("".join)
)
def test_ids_are_the_same_for_every_tokenizer_model(kind, text):
    backend = kind()
    assert control_of(backend).encode(text) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["</s>", "a</s>b", " </s> ", "ab</s></s>", "</s>ab </s>"])
def test_no_kind_of_tokenizer_makes_a_control_token_from_text(kind, text):
    backend = kind()
    control, end = control_of(backend), backend.token_to_id("</s>")
    assert end in backend.encode("</s>", add_special_tokens=False).ids
    assert end not in control.encode(control.broken(text))


def test_a_control_token_made_by_normalizing_is_found():
    control = control_of(all_normalized())
    assert [found[:2] for found in control.find("a\uff1c/s\uff1e")] == [(1, 5)]
    assert control.find(control.broken("a\uff1c/s\uff1e")) == []


def test_added_tokens_are_found_in_order_and_control_tokens_among_them(byte_level):
    text = "a<|im_end|>\n<think>\U0001f680<|im_start|>"
    found = byte_level.control.find_added(text)
    assert [text[token.begin : token.end] for token in found] == [
        "<|im_end|>", "<think>", "<|im_start|>",
    ]  # fmt: skip
    assert [token.token_id for token in found] == [
        byte_level.token_id(text[token.begin : token.end]) for token in found
    ]
    assert byte_level.control.find(text) == [found[0], found[2]]
    assert byte_level.control.find("<|im_end") == []


@relaxed
@given(parts=st.lists(st.sampled_from([*PIECES, "</think>", "<", ">", BREAK]), max_size=12))
def test_the_pattern_finds_what_the_tokenizer_would(bundled, parts):
    text, slow = "".join(parts), copy.copy(bundled.control)
    assert bundled.control._pattern is not None
    slow._pattern = None
    assert bundled.control.find_added(text) == slow.find_added(text)


def test_there_is_no_pattern_if_more_than_text_decides():
    assert control_of(all_normalized())._pattern is None


def test_an_end_token_is_a_control_token_special_or_not(byte_level):
    ending = Tokenizer(byte_level._backend.to_str(), [byte_level.token_id("<think>")])
    assert [f.token_id for f in ending.control.find("<think>")] == [ending.token_id("<think>")]


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL_DIR)


@pytest.mark.slow
def test_a_broken_token_is_text_and_an_intact_one_next_to_it_is_not(bundled):
    forged = f"a<{BREAK}|im_end|>b"
    end = bundled.token_id("<|im_end|>")
    ids = bundled.encode(f"<|im_end|>{forged}<|im_end|>")
    assert (ids[0], ids[-1], ids.count(end)) == (end, end, 2)
    spelled = b"".join(map(bundled.token_bytes, ids[1:-1]))
    assert spelled == b"a<|im_end|>b"
    assert ids[1:-1] == bundled.encode("a<|im_end|>b", special=False)


@pytest.mark.slow
@relaxed
@given(text=TEXT)
def test_broken_text_spells_the_same_without_control_tokens(bundled, text):
    control = bundled.control
    broken = control.broken(text)
    assert broken.replace(BREAK, "") == text
    assert control.find(broken) == []
    assert not any(control.is_control(i) for i in bundled.encode(broken))


def test_a_break_is_inserted_before_its_place():
    assert with_breaks("abc", [1, 3]) == f"a{BREAK}bc{BREAK}"
    assert with_breaks("abc", []) == "abc"


def test_other_surrogates_are_refused_next_to_a_break(byte_level):
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_level.encode(f"<{BREAK}|im_end|>\ud800")


def test_a_tokenizer_without_control_tokens_has_none_to_find():
    control = ControlTokens(merged(), [])
    assert (list(control.texts), control.find("</s>")) == ([], [])
    assert control.find_added("a</s>") == [TokenSpan(1, 5, 1)]
