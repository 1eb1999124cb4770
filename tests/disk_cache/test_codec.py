"""A node's file is plain safetensors, and its header is trusted only if all of it fits."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from luceasync.disk_cache import codec
from luceasync.disk_cache.codec import (
    ITEM_BYTES,
    NodePart,
    SealedTensor,
    decode_header,
    encode_header,
    file_order,
    header_bytes_at_most,
    part_of,
)
from luceasync.errors import CorruptNode, ForeignNode
from tests.disk_cache.node_files import (
    END_KINDS,
    KEY,
    METADATA,
    NAMESPACE,
    SHAPES,
    contents_of,
    entries_of,
    file_of,
)

NUMPY = {"F32": np.float32, "I32": np.int32, "U8": np.uint8, "F16": np.float16}
TABLE_OF_ONE = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
NAMES = {  # in the span, then at the end: dtype and items of a row; the span's are 64 bytes
    "ls0_attn_k.": ("BF16", 32),
    "more": ("U8", 64),
    "ls0_conv.": ("BF16", 3),
    "ls0_delta.": ("F32", 1),
    "dflash_feature_": ("F64", 1),
}
TOKENS_ROW = {"dtype": "I32", "shape": [17], "data_offsets": [2, 70]}


OURS = {"namespace": NAMESPACE, "key": KEY, "end_kinds": END_KINDS}


def decode(content: bytes, **expected: str) -> codec.NodeHeader:
    return decode_header(
        content,
        len(content),
        **{"namespace": NAMESPACE, "key": KEY, "end_kinds": END_KINDS, **expected},
    )


def raw_file(text: str, content: bytes = b"") -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode() + content


def sealed_file(rows: dict, strings: dict | None = None) -> bytes:
    """A file with tokens, rows and strings that a writer of nonsense has sealed correctly."""
    content = b"ab" + contents_of()["tokens"]
    rows = {"tokens": TOKENS_ROW, **rows}
    entries = [
        SealedTensor("t", "U8", (2,), codec.checksum(content[:2])),
        SealedTensor("tokens", "I32", (17,), codec.checksum(content[2:])),
    ]
    sealed = codec.metadata_strings(entries, METADATA) | (strings or {})
    del sealed[codec.SEAL]
    columns = {name: codec._column(row) for name, row in rows.items()}
    sealed[codec.SEAL] = codec._seal(sealed, columns)
    return raw_file(json.dumps({"__metadata__": sealed, **rows}), content)


def test_what_is_encoded_is_decoded() -> None:
    content = file_of(contents_of())
    header = decode(content)
    assert header.metadata == METADATA
    assert {s.name: content[s.begin : s.end] for s in header.slots} == contents_of()
    assert header.slots[0].name == "tokens"
    assert header.slots[1].begin % codec.PAGE_BYTES == 0


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_any_safetensors_reader_opens_a_node(tmp_path: Path, framework: str) -> None:
    contents = contents_of()
    del contents["ls0_attn_k.0"]  # numpy has no bfloat16
    (tmp_path / "node").write_bytes(file_of(contents))
    with safe_open(tmp_path / "node", framework) as file:
        assert set(file.keys()) == set(contents)
        assert file.metadata()["key"] == KEY
        for name, content in contents.items():
            tensor = np.asarray(file.get_tensor(name))
            assert (tensor.dtype, tensor.shape) == (NUMPY[SHAPES[name][0]], SHAPES[name][1])
            assert tensor.tobytes() == content


def test_bfloat16_goes_both_ways() -> None:
    tensors = safetensors.torch.load(file_of(contents_of()))
    found = tensors["ls0_attn_k.0"]
    assert (found.dtype, found.shape) == (torch.bfloat16, SHAPES["ls0_attn_k.0"][1])
    assert found.view(torch.uint8).numpy().tobytes() == contents_of()["ls0_attn_k.0"]


def test_a_file_that_safetensors_itself_has_saved_is_taken(tmp_path: Path) -> None:
    contents = contents_of()
    del contents["ls0_attn_k.0"]
    arrays = {
        name: np.frombuffer(content, NUMPY[SHAPES[name][0]]).reshape(SHAPES[name][1])
        for name, content in contents.items()
    }
    strings = codec.metadata_strings(entries_of(contents), METADATA)
    save_file(arrays, tmp_path / "node", strings)
    content = (tmp_path / "node").read_bytes()
    header = decode(content)
    for slot in header.slots:
        codec.verify(slot, content[slot.begin : slot.end])
    assert {s.name: content[s.begin : s.end] for s in header.slots} == contents


@given(st.integers(1, 99), st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.integers(0, 300))))
def test_tensors_in_file_order_are_aligned_as_well_as_their_sizes_allow(num_tokens, found) -> None:
    named = {f"{prefix}{i}": (*NAMES[prefix], n) for i, (prefix, n) in enumerate(found)}
    entries = [SealedTensor(name, d, (n, i), "0" * 32) for name, (d, i, n) in named.items()]
    entries.append(SealedTensor("tokens", "I32", (num_tokens,), "0" * 32))
    header = encode_header(file_order(entries, END_KINDS), replace(METADATA, end=64 + num_tokens))
    for slot in decode(header + bytes(sum(entry.num_bytes for entry in entries))).slots[1:]:
        size = slot.end - slot.begin
        assert slot.begin % (min(64, size & -size) if size else ITEM_BYTES[slot.dtype]) == 0


def test_an_order_that_would_break_alignment_is_refused() -> None:
    entries = [SealedTensor("a", "U8", (3,), "0" * 32), SealedTensor("b", "F32", (1,), "0" * 32)]
    with pytest.raises(ValueError, match="b: F32 would begin 3 bytes after a page"):
        encode_header(entries, METADATA)


@pytest.mark.parametrize(
    "row",
    [
        {**TOKENS_ROW, "dtype": "U32"},
        {**TOKENS_ROW, "shape": [17, 1]},
        {"dtype": "U8", "shape": [68], "data_offsets": [2, 70]},
    ],
)
def test_tokens_that_are_not_one_for_each_position_are_damage(row) -> None:
    with pytest.raises(CorruptNode, match=r"tokens: expected I32 \[17\]"):
        decode(sealed_file({"t": TABLE_OF_ONE, "tokens": row}))


def test_a_node_without_tokens_is_damage() -> None:
    entries = entries_of({"t": b"ab"}, {"t": ("U8", (2,))})
    content = encode_header(entries, METADATA) + b"ab"
    with pytest.raises(CorruptNode, match="tokens: expected"):
        decode(content)


def test_another_namespace_is_foreign_and_another_key_is_damage() -> None:
    with pytest.raises(ForeignNode, match="expected beef"):
        decode(file_of(contents_of()), namespace="beef")
    with pytest.raises(CorruptNode, match="in the file of node"):
        decode(file_of(contents_of()), key="ef" * 32)


def test_another_schema_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SCHEMA", "luceasync.node.3")
    content = file_of(contents_of())
    monkeypatch.undo()
    with pytest.raises(ForeignNode, match=r"luceasync\.node\.3"):
        decode(content)


def test_weights_of_some_model_are_foreign() -> None:
    with pytest.raises(ForeignNode, match="schema None"):
        decode(safetensors.torch.save({"weight": torch.ones(4)}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected JSON"),
        ("[]", "JSON object"),
        ("[" * 100_000, "expected JSON"),
        ("9" * 5000, "expected JSON"),
        ('{"a":1,"a":1}', "twice"),
        ('{"a":{"dtype":1,"dtype":2}}', "twice"),
        ('{"__metadata__":{"schema":1}}', "expected strings"),
        ('{"__metadata__":{"schema":"luceasync.node.2"}}', "expected header_xxh3_128"),
        ('{"__metadata__":{"header_xxh3_128":"0"}}', "does not match the header"),
    ],
)
def test_an_invalid_header_is_damage(text: str, words: str) -> None:
    with pytest.raises(CorruptNode, match=words):
        decode(raw_file(text))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (7, "expected dtype, shape"),
        ({"dtype": "U8", "shape": [2]}, "expected dtype, shape"),
        ({**TABLE_OF_ONE, "more": 1}, "expected dtype, shape"),
        ({**TABLE_OF_ONE, "dtype": "U9"}, "dtype 'U9'"),
        ({**TABLE_OF_ONE, "dtype": ["U8"]}, "dtype"),
        ({**TABLE_OF_ONE, "shape": [True, 2]}, "counts"),
        ({**TABLE_OF_ONE, "shape": [-1, -2]}, "counts"),
        ({**TABLE_OF_ONE, "shape": [1] * 8 + [2]}, "at most 8"),
        ({**TABLE_OF_ONE, "shape": [1 << 62, 1 << 62]}, "2 bytes"),
        ({**TABLE_OF_ONE, "shape": [1 << 64]}, "counts"),
        ({**TABLE_OF_ONE, "data_offsets": [0]}, "data_offsets"),
        ({**TABLE_OF_ONE, "data_offsets": [-2, 0]}, "data_offsets"),
        ({**TABLE_OF_ONE, "data_offsets": [2, 0]}, "-2 bytes"),
        ({**TABLE_OF_ONE, "data_offsets": [1, 3]}, "ends at byte"),
    ],
)
def test_a_row_that_describes_no_tensor_is_damage_even_if_sealed(row, words: str) -> None:
    with pytest.raises(CorruptNode, match=words):
        decode(sealed_file({"t": row}))


@pytest.mark.parametrize(
    ("strings", "words"),
    [
        ({"begin": "81"}, "begin < end"),
        ({"begin": "-1"}, "expected a number"),
        ({"begin": "064"}, "expected a number"),
        ({"end": str(1 << 41)}, "begin < end"),
        ({"created": "1e3"}, "expected a number"),
        ({"begin": "0"}, "parent"),
        ({"parent": ""}, "parent"),
        ({"parent": "../../etc"}, "parent"),
        ({"parent": KEY}, "expected another node as its parent"),
        ({"end": str((1 << 24) + 65)}, "begin < end"),
        ({"split": ""}, "first layers"),
        ({"split": "1,2"}, "rising"),
        ({"split": "0,2,2"}, "rising"),
        ({"xxh3_128": "\ud800"}, "expected JSON"),
        ({"xxh3_128": "{}"}, "different names"),
        ({"xxh3_128": '{"t":"0","tokens":"0"}'}, "32 hex digits"),
        ({"generated": "true"}, "generated 'true': expected yes or no"),
        ({"turn_end": ""}, "turn_end '': expected yes or no"),
        ({"more": ""}, "unexpected: more"),
    ],
)
def test_metadata_that_makes_no_sense_is_damage_even_if_sealed(strings, words: str) -> None:
    with pytest.raises(CorruptNode, match=words):
        decode(sealed_file({"t": TABLE_OF_ONE}, strings))


def test_the_sound_one_among_those_is_taken() -> None:
    assert decode(sealed_file({"t": TABLE_OF_ONE})).metadata == METADATA


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\xff" * 4000])
def test_no_room_for_a_header_is_damage(content: bytes) -> None:
    with pytest.raises(CorruptNode, match="header of"):
        decode(content)


def test_a_header_that_was_not_read_whole_is_damage() -> None:
    content = file_of(contents_of())
    with pytest.raises(CorruptNode, match="found 100"):
        decode_header(
            content[:100], len(content), namespace=NAMESPACE, key=KEY, end_kinds=END_KINDS
        )


def test_a_header_longer_than_allowed_is_not_read() -> None:
    length = (codec.MAX_HEADER_BYTES - 7).to_bytes(8, "little")
    with pytest.raises(CorruptNode, match="are allowed"):
        codec.header_extent(length, 1 << 30)


def test_a_file_larger_than_any_node_is_damage() -> None:
    with pytest.raises(CorruptNode, match="a node has 17179869184 at most"):
        codec.header_extent(bytes(8), (16 << 30) + 1)


@pytest.mark.slow
@given(st.data())
def test_no_change_of_the_header_goes_unseen(data: st.DataObject) -> None:
    content = bytearray(file_of(contents_of()))
    extent = codec.header_extent(content, len(content))
    at = data.draw(st.integers(0, extent - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptNode):
        decode(bytes(content))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_node_or_one_of_two_errors(text: bytes) -> None:
    with pytest.raises((CorruptNode, ForeignNode)):
        decode(len(text).to_bytes(8, "little") + text)


def test_each_field_is_sealed() -> None:
    entries = entries_of(contents_of())
    sealed = codec.metadata_strings(entries, METADATA)[codec.SEAL]
    changes = ({"end": 82}, {"split": (0, 3)}, {"generated": False}, {"turn_end": True})
    others = [replace(METADATA, **change) for change in changes]
    assert all(codec.metadata_strings(entries, m)[codec.SEAL] != sealed for m in others)


@pytest.mark.parametrize("num_tensors", [1, 7, 400])
def test_a_header_is_no_larger_than_was_counted_on(num_tensors: int) -> None:
    shapes = {f"ls63_conv_state.{i}": ("BF16", (1 << 20, 128, 256)) for i in range(num_tensors)}
    entries = [SealedTensor(name, *shape, "f" * 32) for name, shape in shapes.items()]
    assert len(encode_header(entries, METADATA)) <= header_bytes_at_most(num_tensors)


PARTS_BY_NAME = {
    "tokens": "span",
    "ls0_attn_k.3": "span",
    "ls12_attn_v.63": "span",
    "ls0_conv.x": "span",
    "ls0_conv.0": "state",
    "ls1_delta.62": "state",
    "snap_prefill_logits": "logits",
    "kvflash_ledger": "ledger",
    "dflash_feature_meta": "features",
    "dflash_feature_data": "features",
}


@pytest.mark.parametrize(("name", "part"), PARTS_BY_NAME.items())
def test_the_name_of_a_tensor_tells_its_part(name: str, part: str) -> None:
    assert part_of(name, END_KINDS) is NodePart(part)


def test_tokens_come_first_and_the_end_last() -> None:
    sizes = {"ls0_delta.0": 64, "ls0_attn_k.1": 2, "snap_prefill_logits": 128, "tokens": 1, "x": 64}
    entries = [SealedTensor(name, "U8", (size,), "") for name, size in sizes.items()]
    names = [entry.name for entry in file_order(entries, END_KINDS)]
    assert names == ["tokens", "x", "ls0_attn_k.1", "ls0_delta.0", "snap_prefill_logits"]
