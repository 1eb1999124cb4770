"""Ids, bytes and end tokens, compared with transformers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers

from luceasync.errors import ModelError, RequestError
from luceasync.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "the cat",
    " the  cat\n",
    "caf\u00e9 \u4f60\u597d \U0001f680 e\u0301",
    "<|im_start|>user\nHello<|im_end|>\n",
]


def write(path, content) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(model_dir, text):
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    tokenizer = Tokenizer.load(model_dir)
    ids = tokenizer.encode(text)
    assert ids == peer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == peer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_special_tokens_in_text_are_parsed_unless_told_otherwise(byte_level):
    start = byte_level.token_id("<|im_start|>")
    assert byte_level.encode("<|im_start|>")[0] == start
    plain = byte_level.encode("<|im_start|>", special=False)
    assert start not in plain
    assert byte_level.decode(plain) == "<|im_start|>"


def test_nothing_is_added_truncated_or_padded(model_dir):
    content = json.loads((model_dir / "tokenizer.json").read_text())
    content["truncation"] = {
        "max_length": 2,
        "strategy": "LongestFirst",
        "direction": "Right",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    write(model_dir / "tokenizer.json", content)
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"
    assert 0 not in tokenizer.encode("the cat sat")


def test_the_bytes_of_tokens_spell_the_text(byte_level):
    for text in TEXTS:
        ids = byte_level.encode(text)
        assert b"".join(byte_level.token_bytes(i) for i in ids).decode() == text
        assert [byte_level.spell(ids).decode() for _ in range(2)] == [text, text]


def test_the_bytes_of_pieces_and_byte_tokens_spell_the_text(fallback):
    ids = fallback.encode("the cat \u4f60\U0001f680")
    joined = b"".join(fallback.token_bytes(i) for i in ids)
    assert joined.decode() == " the cat \u4f60\U0001f680"


def test_an_incomplete_character_is_replaced(byte_level):
    first = byte_level.encode("\U0001f680")[0]
    assert b"\xf0" in byte_level.token_bytes(first)
    assert byte_level.token_text(first) == "\ufffd"


def test_added_tokens_are_the_special_ones_and_the_others(byte_level):
    special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert byte_level.added_texts == special | {"<think>", "\u65e5\u672c"}


def test_ids_outside_the_vocabulary_are_empty(byte_level):
    outside = byte_level.vocab_size
    assert byte_level.token_bytes(outside) == b""
    assert byte_level.token_bytes(-1) == b""
    assert byte_level.token_bytes(outside - 1) != b""


def test_end_tokens_of_all_files_are_united(model_dir):
    assert Tokenizer.load(model_dir).eos_ids == frozenset()
    write(model_dir / "generation_config.json", {"eos_token_id": [7, 8]})
    write(model_dir / "config.json", {"eos_token_id": 9, "text_config": {"eos_token_id": 10}})
    write(model_dir / "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    assert Tokenizer.load(model_dir).eos_ids == {7, 8, 9, 10, 2}
    write(model_dir / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    assert Tokenizer.load(model_dir).eos_ids == {7, 8, 9, 10, 0}


@pytest.mark.slow
def test_encoding_in_threads_gives_the_same(byte_level):
    expected = [byte_level.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(byte_level.encode, TEXTS * 20)) == expected * 20


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "not a tokenizer definition"),
        ("generation_config.json", "{", "generation_config.json is not JSON"),
        ("config.json", "[]", "is a JSON list; expected an object"),
        ("config.json", '{"eos_token_id": "2"}', "expected an int or a list of ints"),
        (
            "tokenizer_config.json",
            '{"eos_token": "<end>"}',
            "'<end>', which is not in tokenizer.json",
        ),
    ],
)
def test_a_broken_file_is_refused_with_a_reason(model_dir, name, content, words):
    write(model_dir / name, content)
    with pytest.raises(ModelError, match=words):
        Tokenizer.load(model_dir)


def test_a_file_that_is_not_text_is_refused(model_dir):
    (model_dir / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read as UTF-8"):
        Tokenizer.load(model_dir)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_decoder_that_cannot_be_streamed_is_refused(model_dir, decoder):
    content = json.loads((model_dir / "tokenizer.json").read_text())
    write(model_dir / "tokenizer.json", content | {"decoder": decoder})
    with pytest.raises(ModelError, match="supported are ByteLevel"):
        Tokenizer.load(model_dir)


def test_text_that_is_not_unicode_is_refused(byte_level):
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_level.encode("a\ud800b")


def test_long_texts_have_the_ids_of_transformers_too(model_dir):
    """Long texts are encoded by another call than short ones."""
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    for text in TEXTS:
        long = (text + " ") * 3000
        expected = peer.encode(long, add_special_tokens=False)
        assert Tokenizer.load(model_dir).encode(long) == expected


@pytest.mark.parametrize("most", [0, 1, 50, 5000])
def test_min_tokens_exceeds_the_limit_only_if_the_text_does(byte_level, most):
    for text in (*TEXTS, "the cat sat " * 3000, "x" * 20_000, "<|im_start|>" * 4000, " " * 9000):
        least = byte_level.min_tokens(text, most)
        assert least <= max(most, len(byte_level.encode(text)))


def test_min_tokens_encodes_only_the_beginning_of_a_long_text(byte_level, monkeypatch):
    seen: list[int] = []
    encode = byte_level.encode
    monkeypatch.setattr(byte_level, "encode", lambda text: seen.append(len(text)) or encode(text))
    assert byte_level.min_tokens("xyz " * 10**6, 100) > 100
    assert sum(seen) < 20_000
    assert byte_level.min_tokens("xyz " * 10, 100) == 0  # too short to be checked
