"""ggml's block types in our encoding, and moving their bits there.

Nothing is rounded: luceasync.models.quant.packed.dequantise returns the float32 numbers that ggml
computes. The blocks are those of ggml-quants.h. Does not import torch at its top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from luceasync.models.quant.encoding import QuantEncoding

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.quant.packed import Packed

NORMAL_4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
LOW_HALVES = 0x0F0F0F0F0F0F0F0F  # of the bytes of a word
FLOAT_4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1, doubled

ENCODINGS = {
    encoding.name: encoding
    for encoding in (
        QuantEncoding("Q4_0", 4, 32, 32, "fp16", zero=8),
        QuantEncoding("Q4_1", 4, 32, 32, "fp16", minimum="own"),
        QuantEncoding("Q5_0", 5, 32, 32, "fp16", zero=16),
        QuantEncoding("Q5_1", 5, 32, 32, "fp16", minimum="own"),
        QuantEncoding("Q8_0", 8, 32, 32, "fp16", codes="int8"),
        QuantEncoding("Q2_K", 4, 16, 256, "fp16", "uint8", "own", True),
        QuantEncoding("Q3_K", 4, 16, 256, "fp16", "int8", zero=4),
        QuantEncoding("Q4_K", 4, 32, 256, "fp16", "uint8", "own", True),
        QuantEncoding("Q5_K", 5, 32, 256, "fp16", "uint8", "own", True),
        QuantEncoding("Q6_K", 6, 16, 256, "fp16", "int8", zero=32),
        QuantEncoding("IQ4_NL", 4, 32, 32, "fp16", table=NORMAL_4),
        QuantEncoding("IQ4_XS", 4, 32, 256, "fp16", "int8", table=NORMAL_4),
        QuantEncoding("MXFP4", 4, 32, 32, "e8m0", table=FLOAT_4),
    )
}


# Five-bit codes as bytes, for rows whose high bits GPU kernels cannot read in units of 128 columns.
WHOLE_BYTES = {
    encoding.name: encoding
    for encoding in (
        QuantEncoding("Q5_0", 8, 32, 32, "fp16", codes="int8"),
        QuantEncoding("Q5_1", 8, 32, 32, "fp16", minimum="own"),
    )
}


def held(kind: str, num_columns: int) -> QuantEncoding | None:
    """How rows of a type are stored on devices; None if the type is not quantised."""
    if num_columns % 128 == 64 and kind in WHOLE_BYTES:
        return WHOLE_BYTES[kind]
    return ENCODINGS.get(kind)


def in_bytes(packed: Packed, encoding: QuantEncoding) -> Packed:
    """The same numbers with codes of 8 bits instead of 5."""
    import torch

    from luceasync.models.quant.packed import HALF, Packed

    assert packed.planes is not None
    low = packed.codes.unflatten(1, (-1, HALF))
    shifts = torch.arange(8, dtype=torch.uint8, device=low.device)
    high = (packed.planes[:, 0, :, None] >> shifts & 1).flatten(1)
    codes = torch.stack([low & 15, low >> 4], 2).flatten(1) | high << 4
    if encoding.codes == "int8":
        codes = (codes - packed.layout.zero).view(torch.int8)  # wraps to negative ones
    return Packed(encoding, codes, packed.scales, minimums=packed.minimums)


def pack(encoding: QuantEncoding, blocks: Tensor) -> Packed:
    """Convert uint8 [rows, blocks, block bytes] of the ggml type that `encoding` is named after."""
    return _PACK[encoding.name](encoding, blocks)


def can_unpack(encoding: QuantEncoding) -> bool:
    """Whether `unpack` takes blocks of this type."""
    from luceasync.cyext.blocks import KINDS

    return encoding.name in KINDS


def unpack(encoding: QuantEncoding, blocks: Tensor, room: Packed) -> Packed:
    """The same as `pack`, written by compiled loops to the first rows of `room`, in CPU memory."""
    from luceasync.cyext import blocks as compiled

    blocks, packed = blocks.contiguous(), room.rows(0, len(blocks))
    addresses = {name: tensor.data_ptr() for name, tensor in packed.tensors.items()}
    num_rows, num_blocks, num_bytes = blocks.shape
    shape = num_rows, num_blocks, num_bytes
    compiled.unpack(encoding.name, shape, blocks.data_ptr(), addresses)
    return packed


def _plain(encoding: QuantEncoding, blocks: Tensor) -> Packed:
    """Types that store D (and M) followed by low halves in our order."""
    import torch

    from luceasync.models.quant.packed import Packed

    scale_bytes = 1 if encoding.scale == "e8m0" else 2
    scales, rest = blocks[..., :scale_bytes], blocks[..., scale_bytes:]
    tensors = {"scales": scales.flatten(1) if encoding.scale == "e8m0" else _fp16(scales)}
    if encoding.minimum == "own":  # ggml adds the minimum, our encoding subtracts it
        tensors["minimums"], rest = -_fp16(rest[..., :2]), rest[..., 2:]
    if encoding.bits == 5:
        tensors["planes"], rest = rest[..., :4].flatten(1)[:, None], rest[..., 4:]
    codes = rest.flatten(1)
    return Packed(encoding, codes.view(torch.int8) if encoding.bits == 8 else codes, **tensors)


def _q2_k(encoding: QuantEncoding, blocks: Tensor) -> Packed:
    from luceasync.models.quant.packed import Packed, pack_codes

    both, twos = blocks[..., :16], blocks[..., 16:80]
    return Packed(
        encoding,
        pack_codes(_twos(twos)),
        _fp16(blocks[..., 80:82]),
        small_scales=(both & 15).flatten(1),
        minimums=_fp16(blocks[..., 82:84]),
        small_minimums=(both >> 4).flatten(1),
    )


def _q3_k(encoding: QuantEncoding, blocks: Tensor) -> Packed:
    import torch

    from luceasync.models.quant.packed import Packed, pack_codes

    high, twos, packed = blocks[..., :32], blocks[..., 32:96], blocks[..., 96:108]
    low = torch.cat([packed[..., :8] & 15, packed[..., :8] >> 4], -1)  # of 16 scales
    fours = torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    small = (low | fours << 4).view(torch.int8) - 32
    codes = _twos(twos) | _bits(high) << 2
    return Packed(
        encoding, pack_codes(codes), _fp16(blocks[..., 108:]), small_scales=small.flatten(1)
    )


def _q4_k(encoding: QuantEncoding, blocks: Tensor) -> Packed:
    from luceasync.models.quant.packed import Packed

    small_scales, small_minimums = _six_bits(blocks[..., 4:16])
    has_high = encoding.bits == 5
    return Packed(
        encoding,
        _of_64(blocks[..., 48 if has_high else 16 :]),
        _fp16(blocks[..., :2]),
        planes=_turned(blocks[..., 16:48]).flatten(1)[:, None] if has_high else None,
        small_scales=small_scales,
        minimums=_fp16(blocks[..., 2:4]),
        small_minimums=small_minimums,
    )


def _q6_k(encoding: QuantEncoding, blocks: Tensor) -> Packed:
    import torch

    from luceasync.models.quant.packed import Packed

    halves = _words(blocks[..., :128]).unflatten(-1, (2, 2, 2, 2))  # of a block, 64 columns, 32
    low, high = _paired(halves[..., 0, :], halves[..., 1, :])
    codes = torch.stack([low, high], -3).flatten(1).view(torch.uint8)
    # Bits of a byte are of four quarters, two each: [blocks, half, quarter, plane, byte].
    turned = _turned(blocks[..., 128:192].unflatten(-1, (2, 32))).unflatten(-2, (4, 2))
    planes = turned.permute(0, 4, 1, 2, 3, 5).flatten(2)
    small = blocks[..., 192:208].contiguous().view(torch.int8)
    return Packed(encoding, codes, _fp16(blocks[..., 208:]), planes, small_scales=small.flatten(1))


def _iq4_xs(encoding: QuantEncoding, blocks: Tensor) -> Packed:
    import torch

    from luceasync.models.quant.packed import Packed

    high, low = blocks[..., 2:4], blocks[..., 4:8]
    low = torch.stack([low & 15, low >> 4], -1).flatten(-2)  # of 8 scales
    high = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    small = (low | high << 4).view(torch.int8) - 32
    codes = blocks[..., 8:].flatten(1)
    return Packed(encoding, codes, _fp16(blocks[..., :2]), small_scales=small.flatten(1))


_PACK: dict[str, Callable[[QuantEncoding, Tensor], Packed]] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"), _plain),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q4_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}


def _fp16(two: Tensor) -> Tensor:
    """uint8 [rows, blocks, 2] -> [rows, blocks]."""
    import torch

    return two.contiguous().view(torch.float16).flatten(1)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums of 6 bits in 12 bytes; uint8 [rows, blocks * 8] each."""
    import torch

    scales, minimums, rest = packed.split(4, -1)
    small = torch.cat([scales & 63, rest & 15 | scales >> 2 & 48], -1)
    small_minimums = torch.cat([minimums & 63, rest >> 4 | minimums >> 2 & 48], -1)
    return small.flatten(1), small_minimums.flatten(1)


def _of_64(codes: Tensor) -> Tensor:
    """Reorder low halves: those sharing a byte are 32 columns apart there, and 16 here."""
    import torch

    halves = _words(codes).unflatten(-1, (-1, 2, 2))
    low, high = _paired(halves[..., 0, :], halves[..., 1, :])
    return torch.stack([low, high], -2).flatten(1).view(torch.uint8)


def _words(some: Tensor) -> Tensor:
    """Bytes as int64, eight in each: fewer numbers take fewer CPU steps."""
    import torch

    return some.clone(memory_format=torch.contiguous_format).view(torch.int64)


def _paired(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The low halves of both, and their high halves, of int64 words of eight bytes each."""
    low, high = first & LOW_HALVES | second << 4 & ~LOW_HALVES, first >> 4 & LOW_HALVES
    return low, high | second & ~LOW_HALVES


def _turned(some: Tensor) -> Tensor:
    """Bit b of bytes [..., 8 n] becomes a separate row: [..., 8, n], where bit i of byte j comes
    from byte 8 j + i."""
    import torch

    x = _words(some)  # eight rows of eight bits each, which are transposed
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0xF0F0F0F0)):
        swapped = (x ^ x >> shift) & mask
        x = x ^ swapped ^ swapped << shift
    rows: Tensor = x.view(torch.uint8).unflatten(-1, (-1, 8)).transpose(-1, -2)
    return rows


def _twos(packed: Tensor) -> Tensor:
    """Unpack codes of 2 bits; those in a byte are 32 columns apart. uint8 [rows, columns]."""
    import torch

    by_half = packed.unflatten(-1, (2, 32))
    return torch.stack([by_half >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(1)


def _bits(packed: Tensor) -> Tensor:
    """Unpack bits of 256 columns; those in a byte are 32 columns apart. uint8 [rows, columns]."""
    import torch

    return torch.stack([packed >> shift & 1 for shift in range(8)], -2).flatten(1)
