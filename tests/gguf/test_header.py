"""Reading a header never leaves the file: a fault is one line, and nothing is allocated for what a
header only claims to have.
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


def test_tensors_are_where_the_header_says(file: Path):
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
        (b"GGUF", "truncated header: its version needs 4 bytes, 0 are left"),
        (b"GGUF" + struct.pack("<I", 1), "GGUF version 1; expected 2 or 3"),
        (b"GGUF" + struct.pack(">I", 3), "its byte order is big-endian"),
        (header({}, {}, num_tensors=HUGE), f"truncated header: {HUGE} tensors need"),
        (header({}, {}, num_keys=HUGE), f"truncated header: {HUGE} keys need"),
        (header({"a": b"\x63\0\0\0"}, {}), "a is of the unknown type 99"),
        (header({"a": struct.pack("<IIQ", ARRAY, ARRAY, 1)}, {}), "a is an array of arrays"),
        (header({"a": struct.pack("<IIQ", ARRAY, U32, HUGE)}, {}), f"{HUGE} entries of a need"),
        (header({"a": struct.pack("<IIQ", ARRAY, STRING, HUGE)}, {}), f"{HUGE} strings of a"),
        (
            header({"a": struct.pack("<IIQQ", ARRAY, STRING, 1, HUGE)}, {}),
            "truncated header: 1 strings of a need more than",
        ),
        (header({"a": struct.pack("<IQ", STRING, HUGE)}, {}), f"a needs {HUGE} bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + bytes(40), "general.architecture' is missing"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1025) + bytes(2000), "key 0 has 1025 bytes"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("a") + struct.pack("<II", U32, 1)),
            "the key 'a' appears twice",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"\xff") + struct.pack("<II", U32, 1),
            "key 0 is not UTF-8 text",
        ),
    ],
)
def test_an_invalid_header_is_refused(file: Path, begin: bytes, words: str):
    refused(save(file, begin), words)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (((8, 64), 97, 0), "has the unknown type 97; supported: " + ", ".join(SUPPORTED)),
        (((8, 64), 16, 0), "and rows of a multiple of 256"),
        (((8, 256), 16, 8 * 66), "is stored as IQ2_XXS, which is not supported; supported: F32"),
        (
            ((8, 65), 2, 0),
            "has shape (8, 65) in Q4_0; expected at least one row, and rows of a multiple of 32",
        ),
        (((0, 64), 2, 0), "expected at least one row"),
        (((1, 1, 1, 1, 1), 0, 4), "has 5 dimensions; expected 1 to 4"),
        (((HUGE, 64), 0, 0), "truncated data: "),
        (((9, 32), 2, 9 * 18), "has shape (9, 32); expected (8, 64)"),
    ],
)
def test_an_impossible_tensor_is_refused(file: Path, tensor, words: str):
    tensors = {"output.weight": tensor, **qwen3_tensors()}
    refused(save(file, header(qwen3_keys(), tensors), tensors), words)


def test_a_truncated_file_is_refused_with_both_sizes(file: Path):
    whole(file)
    num_bytes = file.stat().st_size
    with file.open("r+b") as open_file:
        open_file.truncate(num_bytes - 100)
    refused(file, f"truncated data: the file has {num_bytes - 100} bytes, ")


def test_tensors_neither_overlap_nor_repeat(file: Path):
    tensors = qwen3_tensors()
    begin = bytearray(header(qwen3_keys(), tensors))
    at = begin.index(text("output_norm.weight")) + 8 + len("output_norm.weight") + 4 + 8 + 4
    begin[at : at + 8] = struct.pack("<Q", 32)
    refused(save(file, bytes(begin), tensors), "'token_embd.weight' and 'output_norm.weight' over")
    begin[at : at + 8] = struct.pack("<Q", 33)
    refused(save(file, bytes(begin), tensors), "begins at 33; expected a multiple of 32")
    name = text("blk.0.attn_q.weight")
    twice = header(qwen3_keys(), tensors).replace(text("blk.0.attn_k.weight"), name)
    refused(save(file, twice, tensors), "the tensor 'blk.0.attn_q.weight' appears twice")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"general__architecture": "gemma9"}, "general.architecture 'gemma9' is not supported"),
        ({"general__architecture": 3}, "general.architecture is an integer; expected a string"),
        ({"qwen3__block_count": 1 << 31}, "expected 1 to 24 layers, as there are 24 tensors"),
        ({"qwen3__nextn_predict_layers": 2}, "expected 1 to 24 layers"),
        ({"qwen3__block_count": 3}, "there is no tensor 'blk.2."),
        ({"qwen3__block_count": 3.0}, "block_count is a float; expected an integer"),
        ({"qwen3__attention__head_count": 6}, "attn_q.weight' has shape (128, 64); expected (192,"),
        ({"qwen3__attention__head_count": [4, 4]}, ""),
        ({"qwen3__attention__head_count": [4, 8]}, "= [4, 8]: expected the same in all layers"),
        ({"qwen3__attention__head_count": [4]}, "has 1 entries; expected one for each of 2 layers"),
        ({"qwen3__attention__head_count": 0}, "num_attention_heads = 0: expected a positive"),
        ({"qwen3__attention__value_length": 16}, "value_length = 16: expected 32"),
        ({"qwen3__attention__layer_norm_rms_epsilon": "x"}, "expected a number"),
        ({"qwen3__rope__scaling__type": "longrope"}, "'longrope' with factor 1 is not supported"),
        ({"qwen3__rope__scaling__type": "none", "qwen3__rope__scaling__factor": 4.0}, "factor 4"),
        ({"qwen3__rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier = 0.1 is not"),
        ({"qwen3__rope__dimension_count": 16}, "expected the whole head"),
        ({"qwen3__expert_count": 64}, "qwen3.expert_count = 64 is not supported"),
        ({"tokenizer__ggml__pre": "klingon"}, "tokenizer.ggml.pre 'klingon' is not supported"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"general__alignment": 24}, "general.alignment = 24: expected a power of two"),
    ],
)
def test_unsupported_metadata_is_refused(file: Path, keys, words: str):
    path = whole(file, **keys)
    if words:
        refused(path, words)
    else:
        read_spec(path)


def test_a_llama_rotates_whole_heads_too(tmp_path: Path):
    keys = {key.replace("qwen3.", "llama."): value for key, value in qwen3_keys().items()}
    keys |= {"general.architecture": "llama", "llama.rope.dimension_count": 16}
    tensors = qwen3_tensors()
    path = save(tmp_path / "m.gguf", header(keys, tensors), tensors)
    refused(path, "llama.rope.dimension_count: expected the whole head")


@pytest.mark.parametrize("key", [*qwen3_keys()])
def test_a_required_key_that_is_missing_is_named(file: Path, key: str):
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
        ("blk.0.attn_q.bias", "no layer uses the tensor 'blk.0.attn_q.bias'"),
        ("rope_freqs.weight", "'rope_freqs.weight' has a number that is not positive and finite"),
        ("rope_factors_long.weight", "'rope_factors_long.weight' scales rope, which is not"),
    ],
)
def test_a_tensor_that_no_layer_uses_is_refused(file: Path, name: str, words: str):
    tensors = qwen3_tensors() | {name: ((16,), 0, 64)}
    refused(save(file, header(qwen3_keys(), tensors), tensors), words)


@pytest.mark.parametrize("name", ["blk.2.nextn.eh_proj.weight", "v.blk.0.x", "mm.0.weight"])
def test_draft_layers_and_vision_towers_are_ignored(file: Path, name: str):
    tensors = qwen3_tensors() | {name: ((256,), 16, 66)}
    keys = qwen3_keys(qwen3__block_count=3, qwen3__nextn_predict_layers=1)
    assert read_spec(save(file, header(keys, tensors), tensors)).num_layers == 2


def test_a_file_with_another_suffix_is_recognised_by_its_first_bytes(tmp_path: Path):
    assert read_spec(whole(tmp_path / "sha256-0a1b")).num_layers == 2
