"""The numbers of every ggml type are exactly those of ggml."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from luceasync.cyext.blocks import KINDS
from luceasync.gguf.header import SUPPORTED, TENSOR_TYPES
from luceasync.models.precision import Precision
from luceasync.models.quant.ggml import (
    ENCODINGS,
    WHOLE_BYTES,
    can_unpack,
    held,
    in_bytes,
    pack,
    unpack,
)
from luceasync.models.quant.packed import dequantise, empty
from luceasync.models.quant.tiles import can_tile
from tests.gguf.blocks import random_blocks

TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 3), (33, 2), (5, 11)])
@pytest.mark.parametrize("name", ENCODINGS)
def test_the_numbers_are_those_of_ggml_bit_by_bit(name: str, rows: int, blocks: int):
    stored = random_blocks(name, rows, blocks * TYPES[name].block_items, seed=rows)
    packed = pack(ENCODINGS[name], torch.from_numpy(stored).unflatten(1, (blocks, -1)))
    expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[name])
    found = dequantise(packed).numpy()
    assert found.shape == expected.shape
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("name", sorted(KINDS))
def test_compiled_loops_fill_the_same_tensors_and_no_row_more(name: str):
    stored = torch.from_numpy(random_blocks(name, 37, 5 * TYPES[name].block_items, seed=3))
    blocks, encoding = stored.unflatten(1, (5, -1)), ENCODINGS[name]
    room = empty(encoding, 39, 5 * TYPES[name].block_items, blocks.device)
    for tensor in room.tensors.values():
        tensor.view(torch.uint8).fill_(0xA5)
    assert can_unpack(encoding)
    found, expected = unpack(encoding, blocks, room).tensors, pack(encoding, blocks).tensors
    assert found.keys() == expected.keys()
    for part, tensor in expected.items():
        assert torch.equal(found[part].view(torch.uint8), tensor.contiguous().view(torch.uint8)), (
            part
        )
    beyond = room.rows(37, 39).tensors.values()
    assert all(bool((tensor.view(torch.uint8) == 0xA5).all()) for tensor in beyond)


def test_a_block_of_another_size_is_refused():
    blocks = torch.zeros(1, 1, 17, dtype=torch.uint8)
    room = empty(ENCODINGS["Q4_0"], 1, 32, blocks.device)
    with pytest.raises(ValueError, match="a block of Q4_0 has 18 bytes, not 17"):
        unpack(ENCODINGS["Q4_0"], blocks, room)


@pytest.mark.parametrize("name", WHOLE_BYTES)
def test_codes_of_five_bits_may_be_bytes_bit_by_bit(name: str):
    stored = random_blocks(name, 32, 192, seed=1)
    packed = pack(ENCODINGS[name], torch.from_numpy(stored).unflatten(1, (6, -1)))
    wide = in_bytes(packed, WHOLE_BYTES[name])
    assert torch.equal(dequantise(wide).view(torch.int32), dequantise(packed).view(torch.int32))
    assert wide.num_bytes == WHOLE_BYTES[name].num_bytes((32, 192), Precision.of("fp32"))


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("num_columns", [512, 704, 2112, 2816])
def test_gpus_read_what_is_held_in_odd_half_blocks_too(name: str, num_columns: int):
    """704 columns have the experts of Gemma 4 26B-A4B, 2112 what stands beside them."""
    if num_columns % TYPES[name].block_items == 0:
        encoding = held(name, num_columns)
        assert encoding is not None and can_tile(encoding, 2816, num_columns)
        is_odd = num_columns % 128 != 0 and name in WHOLE_BYTES
        assert (encoding == ENCODINGS[name]) != is_odd


@pytest.mark.parametrize("name", ENCODINGS)
def test_its_bytes_are_those_that_its_form_says(name: str):
    stored = random_blocks(name, 3, 512)
    packed = pack(ENCODINGS[name], torch.from_numpy(stored).unflatten(1, (512 // _items(name), -1)))
    assert packed.shape == (3, 512)
    assert packed.num_bytes == ENCODINGS[name].num_bytes((3, 512), Precision.of("fp32"))
    parts = ENCODINGS[name].components(512)
    assert [(part.name, (3, *part.shape)) for part in parts] == [
        (name, tuple(tensor.shape)) for name, tensor in packed.tensors.items()
    ]


def test_every_type_that_is_said_to_be_supported_is():
    assert {*SUPPORTED} == {*ENCODINGS, "F32", "F16", "BF16"}


def test_types_have_the_sizes_that_ggml_gives_them():
    for number, kind in TENSOR_TYPES.items():
        own = gguf.GGMLQuantizationType(number)
        assert (own.name, gguf.GGML_QUANT_SIZES[own]) == (
            kind.name,
            (kind.block_items, kind.block_bytes),
        )


@pytest.mark.parametrize(
    ("name", "bits"),
    [("Q4_K", 4.625), ("Q5_K", 5.625), ("Q6_K", 6.5625), ("Q8_0", 8.5), ("IQ4_XS", 4.3125)],
)
def test_bits_of_a_weight(name: str, bits: float):
    assert ENCODINGS[name].num_bytes((8, 1024), Precision.of("bf16")) == 1024 * bits


def _items(name: str) -> int:
    return TYPES[name].block_items
