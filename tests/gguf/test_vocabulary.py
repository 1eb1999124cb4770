"""The tokenizer of a GGUF file gives the ids of the tokenizer that it was made from."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from luceasync.errors import ModelError
from luceasync.gguf.model import read_model
from luceasync.gguf.vocabulary import LLAMA3, QWEN2, QWEN35, TEKKEN, vocabulary_of
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer
from tests.gguf.files import header, qwen3_keys, qwen3_tensors, save
from tests.gguf.tiny_files import Tiny, write
from tests.reference.pieces import SPACE, pieces_of

ALPHABET = "aeiou tbn TBQ 0123 .,'!?\n\r\t  éüß नमस्ते हिन्दी 中文字 ñ ﬁ ỗ́ 👩‍👩‍👧 <|im_end|>"


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def files(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Path, Path]:
    return write(Tiny(request.param), tmp_path_factory.mktemp("tokenizer"))


def test_the_splits_are_those_of_the_families():
    from transformers.integrations.gguf import gguf_tokenizer_mapping
    from transformers.models.qwen2 import tokenization_qwen2
    from transformers.models.qwen3_5 import tokenization_qwen3_5

    splits = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
    assert {name: splits[name] for name in ("llama-bpe", "tekken")} == {
        "llama-bpe": LLAMA3,
        "tekken": TEKKEN,
    }
    assert QWEN2 == tokenization_qwen2.PRETOKENIZE_REGEX
    assert QWEN35 == tokenization_qwen3_5.PRETOKENIZE_REGEX


@pytest.mark.slow
def test_ids_of_any_text_are_the_same(files: tuple[Path, Path]):
    ours, theirs = Tokenizer.load(files[0]), Backend.from_file(str(files[1] / "tokenizer.json"))
    chance = random.Random(0)
    for _ in range(2000):
        text = "".join(chance.choices(ALPHABET, k=chance.randrange(1, 60)))
        text = unicodedata.normalize("NFC", text)
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_special_tokens_and_end_tokens_are_the_same(files: tuple[Path, Path]):
    ours, theirs = (Tokenizer.load(path) for path in files)
    end, im_end = (ours.token_id(token) for token in ("<|endoftext|>", "<|im_end|>"))
    assert ours.eos_ids == {end, im_end}
    assert ours.added_texts == theirs.added_texts
    for token_id in range(theirs.vocab_size):
        assert ours.is_special(token_id) == theirs.is_special(token_id)
        assert ours.token_text(token_id) == theirs.token_text(token_id)
    assert ours.vocab_size == theirs.vocab_size, "padding is not a token"


def test_ends_of_turns_and_messages_end_a_text(tmp_path: Path):
    tensors = qwen3_tensors()
    ends = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    path = save(tmp_path / "m.gguf", header(qwen3_keys() | ends, tensors), tensors)
    assert vocabulary_of(read_model(path)).eos_ids == {3, 4, 5, 6}


def test_the_chat_template_is_the_files(files: tuple[Path, Path]):
    messages = [{"role": "user", "content": "to be"}]
    ours, theirs = (ChatTemplate.load(path).render(messages) for path in files)
    assert ours == theirs == "<|im_start|>user\nto be<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries for 8 tokens"),
        ({"tokenizer.ggml.merges": ["a x"]}, "has 'a x', which does not merge two tokens"),
        ({"tokenizer.ggml.eos_token_id": 8}, "eos_token_id = 8: there are only 8 tokens"),
        ({"tokenizer.ggml.eot_token_id": 9}, "eot_token_id = 9: there are only 8 tokens"),
        ({"tokenizer.ggml.eom_token_id": 8}, "eom_token_id = 8: there are only 8 tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 8}, "tokenizer.ggml.tokens has a duplicate token"),
        ({"tokenizer.ggml.tokens": 4}, "tokens is an integer; expected an array of strings"),
    ],
)
def test_an_invalid_tokenizer_is_refused(tmp_path: Path, keys, words: str):
    tensors = qwen3_tensors()
    path = save(tmp_path / "m.gguf", header(qwen3_keys() | keys, tensors), tensors)
    with pytest.raises(ModelError, match=words):
        vocabulary_of(read_model(path))


def test_a_file_without_a_template_says_so(tmp_path: Path):
    keys, tensors = qwen3_keys(), qwen3_tensors()
    del keys["tokenizer.chat_template"]
    path = save(tmp_path / "m.gguf", header(keys, tensors), tensors)
    with pytest.raises(ModelError, match=r"m.gguf has no chat template; put a .* beside it"):
        ChatTemplate.load(path)


def test_a_file_without_a_template_takes_the_one_beside_it(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("beside {{ messages | length }}")
    keys, tensors = qwen3_keys(), qwen3_tensors()
    own = save(tmp_path / "own.gguf", header(keys, tensors), tensors)
    del keys["tokenizer.chat_template"]
    bare = save(tmp_path / "bare.gguf", header(keys, tensors), tensors)
    assert ChatTemplate.load(bare).render([]) == "beside 0"
    assert ChatTemplate.load(own).source != ChatTemplate.load(bare).source
    (tmp_path / "chat_template.jinja").unlink()
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not a regular file"):
        ChatTemplate.load(bare)


def test_the_template_named_tool_use_is_that_for_tools(tmp_path: Path):
    tensors = qwen3_tensors()
    keys = qwen3_keys() | {"tokenizer.chat_template.tool_use": "with {{ tools | length }}"}
    path = save(tmp_path / "m.gguf", header(keys, tensors), tensors)
    tools = [json.loads('{"type": "function"}')]
    assert ChatTemplate.load(path).render([], tools) == "with 1"


# --- SentencePiece ------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PIECES = ["a", "b", "n", "e", "é", "中", "文", SPACE, "an", "ban", "ana", "aa", SPACE + "a"]
PIECES += [SPACE + "b", "ba", "na", "nana", "ee", SPACE + "ban", "anan", "中文", "\U0001f389"]
SPOKEN = "aaabbnnee é中文 \U0001f389ñ  \n0x"


def pieces_file(folder: Path, **other: object) -> Path:
    """A file with a tokenizer of pieces, whose scores fall as they do in real ones."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "\n", "  "]
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, USER_DEFINED, USER_DEFINED]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds += [BYTE] * 256 + [NORMAL] * len(PIECES)
    scores = struct.pack(f"<{len(tokens)}f", *(-float(i) for i in range(len(tokens))))
    keys = {name: each for name, each in qwen3_keys().items() if "tokenizer" not in name}
    keys |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": struct.pack("<IIQ", 9, 6, len(tokens)) + scores,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        **other,
    }
    return save(folder / "pieces.gguf", header(keys, qwen3_tensors()), qwen3_tensors())


def spelled(text: str) -> list[str]:
    """What `text` is spelled by; tokens of the user are found first."""
    scores = {piece: -float(i) for i, piece in enumerate(PIECES)}
    parts = re.split("(\n|  )", text)
    return [
        p for part in parts for p in ([part] if part in ("\n", "  ") else pieces_of(part, scores))
    ]


MERGES = [
    f"{piece[:cut]} {piece[cut:]}"
    for piece in PIECES
    for cut in range(1, len(piece))
    if piece[:cut] in PIECES and piece[cut:] in PIECES
]
MERGED = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": MERGES}


@pytest.mark.parametrize("keys", [{}, MERGED], ids=["scores", "merges"])
def test_texts_are_spelled_by_the_pieces_of_the_highest_scores(tmp_path: Path, keys):
    """Whether the file has merges or scores alone, from which they follow."""
    tokenizer, chance = Tokenizer.load(pieces_file(tmp_path, **keys)), random.Random(0)
    for _ in range(1000):
        text = "".join(chance.choices(SPOKEN, k=chance.randrange(1, 40)))
        ids = tokenizer.encode(text)
        assert [tokenizer._backend.id_to_token(i) for i in ids] == spelled(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.spell(ids) == text.encode()


def test_the_turns_of_gemma_end_a_text(tmp_path: Path):
    assert Tokenizer.load(pieces_file(tmp_path)).eos_ids == {1, 4}


def test_calls_and_turns_of_gemma_4_end_a_text(tmp_path: Path):
    """A call ends where its result would begin, which the file says is text to be shown."""
    path = pieces_file(tmp_path, **MERGED)
    tokens = read_model(path).metadata.strings("tokenizer.ggml.tokens")
    tokens[4], tokens[6] = "<turn|>", "<|tool_response>"
    ending = pieces_file(tmp_path, **MERGED, **{"tokenizer.ggml.tokens": tokens})
    assert Tokenizer.load(ending).eos_ids == {1, 4, 6}


def test_a_merge_that_looks_like_a_comment_is_one(tmp_path: Path):
    tokens = read_model(pieces_file(tmp_path)).metadata.strings("tokenizer.ggml.tokens")
    tokens[-2:] = ["#version", "#version" + SPACE + "a"]
    path = pieces_file(tmp_path, **{"tokenizer.ggml.tokens": tokens})
    definition = json.loads(vocabulary_of(read_model(path)).definition)
    assert ["#version", SPACE + "a"] in definition["model"]["merges"]


def test_texts_begin_with_what_the_file_puts_before_them(tmp_path: Path):
    assert Tokenizer.load(pieces_file(tmp_path)).lead == "<bos>"
    none = {"tokenizer.ggml.add_bos_token": False}
    assert Tokenizer.load(pieces_file(tmp_path, **none)).lead == ""


def test_a_space_before_a_text_is_the_tokenizers_own(tmp_path: Path):
    """Llama 2's; a text is decoded without it."""
    spaced = {"tokenizer.ggml.add_space_prefix": True}
    tokenizer = Tokenizer.load(pieces_file(tmp_path, **spaced))
    ids = tokenizer.encode("an ban")
    assert tokenizer.token_text(ids[0]).startswith(" ") and tokenizer.decode(ids) == "an ban"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tokenizer.ggml.scores": [1, 2]}, "scores is an array, each entry an integer; expected"),
        ({"tokenizer.ggml.scores": struct.pack("<IIQf", 9, 6, 1, 0.0)}, "scores has 1 entries for"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "bos_token_id = 9999: there are only"),
        (
            {"tokenizer.ggml.model": "t5"},
            "'t5' is not supported; expected gemma4 or gpt2 or",
        ),
    ],
)
def test_invalid_pieces_are_refused(tmp_path: Path, keys, words: str):
    with pytest.raises(ModelError, match=words):
        vocabulary_of(read_model(pieces_file(tmp_path, **keys)))
