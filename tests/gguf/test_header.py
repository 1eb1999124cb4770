"""A header is read within its file: what is wrong with it is told in a line, and nothing is
allocated for what it only claims.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from luceasync.errors import ModelError
from luceasync.gguf.header import SUPPORTED, read_header
from luceasync.models.files import read_spec
from tests.gguf.files import ARRAY, STRING, U32, header, qwen3_keys, qwen3_tensors, save, text

HUGE = 1 << 62


def refused(path: Path, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_spec(path)
    told = str(caught.value)
    assert words in told
    assert told.startswith(str(path))
    assert "\n" not in told


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def whole(file: Path, tensors=None, **keys) -> Path:
    tensors = tensors or qwen3_tensors()
    return save(file, header(qwen3_keys(**keys), tensors), tensors)


def test_a_sound_header_is_a_spec(file: Path):
    spec = read_spec(whole(file))
    assert (spec.family, spec.num_layers, spec.vocab_size, spec.hidden_size) == ("qwen3", 2, 8, 64)
    assert spec.tied_embeddings
    assert spec.norm_eps == pytest.approx(1e-6)


def test_tensors_lie_where_it_says(file: Path):
    tensors = read_header(whole(file)).tensors
    first, last = tensors["token_embd.weight"], tensors["blk.1.ffn_down.weight"]
    assert first.shape == (8, 64)
    assert first.begin % 32 == 0
    assert file.stat().st_size - last.begin - last.num_bytes < 32


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (b"", "not a GGUF file: it begins with b''"),
        (b"PK\3\4", "not a GGUF file: it begins with b'PK"),
        (b"GGUF", "cut in its header: 0 bytes are there for its version, 4 are expected"),
        (b"GGUF" + struct.pack("<I", 1), "GGUF version 1; 2 or 3 is expected"),
        (b"GGUF" + struct.pack(">I", 3), "its byte order is big-endian"),
        (header({}, {}, num_tensors=HUGE), f"bytes are there for {HUGE} tensors"),
        (header({}, {}, num_keys=HUGE), f"bytes are there for {HUGE} keys"),
        (header({"a": b"\x63\0\0\0"}, {}), "a is of the unknown type 99"),
        (header({"a": struct.pack("<IIQ", ARRAY, ARRAY, 1)}, {}), "a is an array of arrays"),
        (header({"a": struct.pack("<IIQ", ARRAY, U32, HUGE)}, {}), f"for {HUGE} entries of a"),
        (header({"a": struct.pack("<IIQ", ARRAY, STRING, HUGE)}, {}), f"{HUGE} strings of a"),
        (
            header({"a": struct.pack("<IIQQ", ARRAY, STRING, 1, HUGE)}, {}),
            "bytes are there for 1 strings of a, and they go on",
        ),
        (header({"a": struct.pack("<IQ", STRING, HUGE)}, {}), f"for a, {HUGE} are expected"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + bytes(40), "general.architecture' is missing"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1025) + bytes(2000), "key 0 has 1025 bytes"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("a") + struct.pack("<II", U32, 1)),
            "the key 'a' is there twice",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"\xff") + struct.pack("<II", U32, 1),
            "key 0 is not UTF-8 text",
        ),
    ],
)
def test_what_is_no_header_is_told(file: Path, begin: bytes, words: str):
    refused(save(file, begin), words)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (((8, 64), 97, 0), "has the unknown type 97; supported: " + ", ".join(SUPPORTED)),
        (((8, 64), 16, 0), "rows of a multiple of 256 are expected"),
        (((8, 256), 16, 8 * 66), "is stored as IQ2_XXS, which is not supported; supported: F32"),
        (((8, 65), 2, 0), "has shape (8, 65) in Q4_0; rows of a multiple of 32 are expected"),
        (((0, 64), 2, 0), "and at least one"),
        (((1, 1, 1, 1, 1), 0, 4), "has 5 dimensions; 1 to 4 are expected"),
        (((HUGE, 64), 0, 0), "cut in its data: "),
        (((9, 32), 2, 9 * 18), "has shape (9, 32); (8, 64) is expected"),
    ],
)
def test_a_tensor_that_cannot_be_is_told(file: Path, tensor, words: str):
    tensors = {"output.weight": tensor, **qwen3_tensors()}
    refused(save(file, header(qwen3_keys(), tensors), tensors), words)


def test_a_file_that_was_cut_says_what_is_there_and_what_is_missing(file: Path):
    whole(file)
    num_bytes = file.stat().st_size
    with file.open("r+b") as open_file:
        open_file.truncate(num_bytes - 100)
    refused(file, f"cut in its data: {num_bytes - 100} bytes are there, ")


def test_tensors_do_not_overlap_and_are_there_once(file: Path):
    tensors = qwen3_tensors()
    begin = bytearray(header(qwen3_keys(), tensors))
    at = begin.index(text("output_norm.weight")) + 8 + len("output_norm.weight") + 4 + 8 + 4
    begin[at : at + 8] = struct.pack("<Q", 32)
    refused(save(file, bytes(begin), tensors), "'token_embd.weight' and 'output_norm.weight' over")
    begin[at : at + 8] = struct.pack("<Q", 33)
    refused(save(file, bytes(begin), tensors), "begins at 33; a multiple of 32 is expected")
    name = text("blk.0.attn_q.weight")
    twice = header(qwen3_keys(), tensors).replace(text("blk.0.attn_k.weight"), name)
    refused(save(file, twice, tensors), "the tensor 'blk.0.attn_q.weight' is there twice")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general__architecture": "gemma9"}, "general.architecture 'gemma9' is not supported"),
        ({"general__architecture": 3}, "general.architecture is an integer; a string is expected"),
        ({"qwen3__block_count": 1 << 31}, "1 to 24 layers are expected, as there are 24 tensors"),
        ({"qwen3__nextn_predict_layers": 2}, "1 to 24 layers are expected"),
        ({"qwen3__block_count": 3}, "there is no tensor 'blk.2."),
        ({"qwen3__block_count": 3.0}, "block_count is a float; an integer is expected"),
        ({"qwen3__attention__head_count": 6}, "blk.0.attn_q.weight' has shape (128, 64); (192,"),
        ({"qwen3__attention__head_count": [4, 4]}, ""),
        ({"qwen3__attention__head_count": [4, 8]}, "= [4, 8]: the same in all layers is expected"),
        ({"qwen3__attention__head_count": [4]}, "has 1 entries; one a layer, 2 is expected"),
        ({"qwen3__attention__head_count": 0}, "num_attention_heads = 0: a positive integer"),
        ({"qwen3__attention__value_length": 16}, "value_length = 16: 32 is expected"),
        ({"qwen3__attention__layer_norm_rms_epsilon": "x"}, "a number is expected"),
        ({"qwen3__rope__scaling__type": "yarn"}, "'yarn' with factor 1: rope scaling is not"),
        ({"qwen3__rope__scaling__factor": 4.0}, "'none' with factor 4: rope scaling is not"),
        ({"qwen3__rope__dimension_count": 16}, "the whole head is expected"),
        ({"qwen3__expert_count": 64}, "qwen3.expert_count = 64 is not supported"),
        ({"tokenizer__ggml__pre": "klingon"}, "tokenizer.ggml.pre 'klingon' is not supported"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model 'llama' is not supported"),
        ({"general__alignment": 24}, "general.alignment = 24: a power of two"),
    ],
)
def test_metadata_that_cannot_be_served_is_told(file: Path, keys, words: str):
    path = whole(file, **keys)
    if words:
        refused(path, words)
    else:
        read_spec(path)


@pytest.mark.parametrize("key", [*qwen3_keys()])
def test_a_key_that_is_missing_is_named_where_it_is_needed(file: Path, key: str):
    keys = qwen3_keys()
    del keys[key]
    tensors = qwen3_tensors()
    save(file, header(keys, tensors), tensors)
    optional = ("kv", "rope.freq_base", "_length", "tokens", "token_type", "merges", "template")
    if key.endswith(optional) and not key.endswith(("embedding_length", "context_length")):
        return
    refused(file, key)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blk.0.attn_q.bias", "no layer would use the tensor 'blk.0.attn_q.bias'"),
        ("rope_freqs.weight", "'rope_freqs.weight' scales rope, which is not supported"),
    ],
)
def test_a_tensor_that_no_layer_would_use(file: Path, name: str, words: str):
    tensors = qwen3_tensors() | {name: ((16,), 0, 64)}
    refused(save(file, header(qwen3_keys(), tensors), tensors), words)


@pytest.mark.parametrize("name", ["blk.2.nextn.eh_proj.weight", "v.blk.0.x", "mm.0.weight"])
def test_parts_that_only_draft_or_see_are_left_alone(file: Path, name: str):
    tensors = qwen3_tensors() | {name: ((256,), 16, 66)}
    keys = qwen3_keys(qwen3__block_count=3, qwen3__nextn_predict_layers=1)
    assert read_spec(save(file, header(keys, tensors), tensors)).num_layers == 2


def test_a_file_with_another_name_is_known_by_its_first_bytes(tmp_path: Path):
    assert read_spec(whole(tmp_path / "sha256-0a1b")).num_layers == 2
