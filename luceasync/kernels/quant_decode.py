"""Decoding of quantised codes within a kernel, exactly, to numbers that tensor cores multiply.

On NVIDIA GPUs inline PTX converts two codes at a time to bfloat16: a code becomes the low bits of a
number whose high bits are constant. Elsewhere, and for other dtypes, by plain conversions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import triton
import triton.language as tl

# A stored code: an integer; an integer plus 128; an 8-bit float; an e2m1 number, doubled; or an
# index into a table of integers.
Codes = Literal["uint", "biased", "e4m3", "e2m1", "table"]


@dataclass(frozen=True, slots=True)
class Coding:
    """How a tiled matrix is coded: the part of a QuantLayout that kernels are compiled for. Unlike
    a layout it has no name and no dtypes, so that equal ones share a kernel; int8 codes are biased,
    as tiling stores them. `group` and `supergroup` are 0 for a whole row. `table`: four signed
    words of four entries, each plus 128.
    """

    bits: int
    codes: Codes
    zero: int
    group: int
    supergroup: int
    is_e8m0: bool
    small: Literal["none", "uint8", "int8", "e4m3"]
    minimum: Literal["none", "own", "scale"]
    has_small_minimums: bool
    divides: bool
    table: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.group in (0, 16, 32) or self.group % 64 == 0, "64 columns are whole groups"

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that a kernel is compiled with."""
        return {
            "BITS": self.bits,
            "CODES": self.codes,
            "ZERO": self.zero,
            "GROUP": self.group,
            "SUPERGROUP": self.supergroup,
            "E8M0": self.is_e8m0,
            "SMALL": self.small,
            "MINIMUM": self.minimum,
            "SMALL_MINIMUMS": self.has_small_minimums,
            "DIVIDES": self.divides,
            "TABLE": self.table,
        }


@triton.constexpr_function
def num_parts(group: int) -> int:
    """The number of scales for 64 columns of a row."""
    return 64 // group if group in (16, 32) else 1


@triton.constexpr_function
def bias_of(bits: int, codes: str, zero: int, is_folded: bool) -> int:
    """The offset of the numbers that `numbers` returns."""
    return 128 + zero if is_folded and bits < 8 and codes == "uint" else 0


@triton.constexpr_function
def _low_asm(
    bits: int, codes: str, zero: int, table: tuple[int, ...], part: int, fold: bool
) -> str:
    """PTX: two bfloat16 numbers $0 from two 16-bit words $1. $2: words with their high bits,
    rotated left by $3 into place.
    """
    less = f"mov.b32 b, 0x3f803f80; mov.b32 c, 0x{0xC300C300 | zero << 16 | zero:x};"
    less += " fma.rn.bf16x2 $0, a, b, c;"
    move = "mov.b32 $0, a;"
    if codes == "e4m3":
        return f"""{{ .reg .b32 a, b, c; shr.b32 a, $1, {8 * (part % 2)};
            and.b32 b, a, 0x00800080; shl.b32 b, b, 8;
            and.b32 a, a, 0x007f007f; shl.b32 a, a, 4; or.b32 a, a, b;
            mov.b32 b, 0x7b807b80; mov.b32 c, 0x80008000; fma.rn.bf16x2 $0, a, b, c; }}"""
    if codes == "e2m1":
        return f"""{{ .reg .b32 a, b, c; shr.b32 a, $1, {4 * part};
            and.b32 b, a, 0x00080008; shl.b32 b, b, 12;
            and.b32 a, a, 0x00070007; shl.b32 a, a, 6; or.b32 a, a, b;
            mov.b32 b, 0x7f007f00; mov.b32 c, 0x80008000; fma.rn.bf16x2 $0, a, b, c; }}"""
    if bits == 8 or codes == "table":
        # The upper half of a small integer in float32 is the same number in bfloat16.
        less = f"{float(-8388608 - (128 if codes in ('biased', 'table') else zero))}"
        first, second, find = part % 2, 2 + part % 2, "mov.b32 a, $1; mov.b32 b, $1;"
        if codes == "table":
            first, second = part, part
            first_4, next_4, more_4, last_4 = table
            find = "".join(
                f"""and.b32 n, {word}, 0x7777; and.b32 s, {word}, 0x8888; shr.b32 s, s, 1;
                or.b32 s, s, 0x3210; prmt.b32 c, {first_4}, {next_4}, n;
                prmt.b32 d, {more_4}, {last_4}, n;
                prmt.b32 {found}, c, d, s;"""
                for word, found in (("$1", "a"), ("w", "b"))
            )
            find = f"shr.b32 w, $1, 16; {find}"
        return f"""{{ .reg .b32 a, b, c, d, n, s, w; .reg .f32 x, y; {find}
            prmt.b32 a, a, 0x4b000000, 0x765{first}; prmt.b32 b, b, 0x4b000000, 0x765{second};
            mov.b32 x, a; mov.b32 y, b;
            add.rn.f32 x, x, {less}; add.rn.f32 y, y, {less};
            mov.b32 a, x; mov.b32 b, y; prmt.b32 $0, a, b, 0x7632; }}"""
    low = f"shr.b32 a, $1, {4 * part}; lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;"
    if bits > 4:
        mask = 0x00100010 if bits == 5 else 0x00300030
        low += f" shf.l.wrap.b32 b, $2, $2, $3; lop3.b32 a, b, 0x{mask:x}, a, 0xea;"
    return f"{{ .reg .b32 a, b, c; {low} {move if fold else less} }}"


@triton.jit
def few_numbers(
    words,
    high,
    shift,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
    PART: tl.constexpr,
    FOLD: tl.constexpr,
    ASM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Decode code `PART` of 16-bit words, whose high bits begin at bit `shift` of `high`."""
    if ASM:
        asm: tl.constexpr = _low_asm(BITS, CODES, ZERO, TABLE, PART, FOLD)
        if BITS == 5 or BITS == 6:
            turn = 4 - shift & 31
            found = tl.inline_asm_elementwise(
                asm, "=r,r,r,r,r", [words, high, turn], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            found = tl.inline_asm_elementwise(
                asm, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        return found
    else:
        if BITS == 8:
            code = words.to(tl.int32) >> (8 * (PART % 2)) & 255
        else:
            code = words.to(tl.int32) >> (4 * PART) & 15
            if BITS == 5:
                code |= (high.to(tl.int32) >> shift & 1) << 4
            if BITS == 6:
                code |= (high.to(tl.int32) >> shift & 3) << 4
        if CODES == "e4m3":
            number = e4m3(code)
        elif CODES == "e2m1":
            size = code & 7
            size = tl.where(size < 2, size, (2 | size & 1) << ((size >> 1) - 1 & 3))
            number = tl.where(code > 7, -size, size).to(tl.float32)
        elif CODES == "table":
            low = tl.where((code & 4) != 0, TABLE[1], TABLE[0])
            high = tl.where((code & 4) != 0, TABLE[3], TABLE[2])
            four = tl.where((code & 8) != 0, high, low)
            number = ((four >> (8 * (code & 3)) & 255) - 128).to(tl.float32)
        elif CODES == "biased":
            number = (code - 128).to(tl.float32)
        elif FOLD and BITS < 8:
            number = (code + 128).to(tl.float32)
        else:
            number = (code - ZERO).to(tl.float32)
        return number.to(DTYPE)


@triton.jit
def e4m3(byte):
    """The float32 value of an e4m3 byte: its bits have an exponent that is too small by 120."""
    bits = (byte & 127) << 20 | (byte & 128) << 24
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def large(byte):
    """2^23 + byte, in float32."""
    return (byte | 0x4B000000).to(tl.float32, bitcast=True)


@triton.constexpr_function
def _large_asm(part: int, bits: int) -> str:
    """PTX: byte `part` of two 16- or 32-bit words, each in the low bits of 2^23."""
    if bits == 16:
        first, second = "$2", f"0x765{2 + part}"
    else:
        first, second = "$3", f"0x765{part}"
    return f"prmt.b32 $0, $2, 0x4b000000, 0x765{part}; prmt.b32 $1, {first}, 0x4b000000, {second};"


@triton.jit
def large_bytes(words, PART: tl.constexpr, ASM: tl.constexpr):
    """2^23 + byte `PART` of each 8-, 16- or 32-bit word, in float32."""
    BITS: tl.constexpr = words.dtype.primitive_bitwidth
    if ASM and BITS > 8:
        asm: tl.constexpr = _large_asm(PART, BITS)
        inputs: tl.constexpr = "=r,=r,r" if BITS == 16 else "=r,=r,r,r"
        return tl.inline_asm_elementwise(
            asm, inputs, [words], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return large(words.to(tl.int32) >> (8 * PART) & 255)


@triton.jit
def numbers(
    words,
    high,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
    PART: tl.constexpr,
    FOLD: tl.constexpr,
    ASM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Decode columns [16 PART, 16 PART + 16) of 64: [BLOCKS, 16 rows, 16 columns].

    words: int16 [BLOCKS, 256] in memory order; high: int16 [BLOCKS, 64] for 5 bits, [BLOCKS, 128]
    for 6 bits, else None.
    """
    split = tl.reshape(words, [BLOCKS, 8, 4, 2, 2, 2])  # row, columns by 2, by 8, row by 8, column
    shift = 0
    if BITS == 5 or BITS == 6:
        eight = tl.arange(0, 2)[None, None, None, :, None, None]
        far = tl.arange(0, 2)[None, None, None, None, :, None]
        if BITS == 5:
            shift = 4 * (2 * eight + far) + PART
            high = tl.reshape(high, [BLOCKS, 8, 4, 1, 1, 2])
        else:
            shift = 8 * eight + 2 * PART + 0 * far
            high = tl.reshape(high, [BLOCKS, 8, 4, 1, 2, 2])
        shift = tl.broadcast_to(shift, split.shape)
        high = tl.broadcast_to(high, split.shape)
    made = few_numbers(split, high, shift, BITS, CODES, ZERO, TABLE, PART, FOLD, ASM, DTYPE)
    # A lane feeds an NVIDIA tensor core what it loaded itself: nothing moves.
    return tl.reshape(tl.permute(made, (0, 4, 1, 3, 2, 5)), [BLOCKS, 16, 16])


@triton.jit
def real(number, E8M0: tl.constexpr):
    """D or M in float32; for e8m0 see luceasync.models.quant.packed.real."""
    if E8M0:
        bits = number.to(tl.int32)
        low = tl.where(bits == 0, 0x00200000, 0x00400000)
        return tl.where(bits < 2, low, (bits - 1) << 23).to(tl.float32, bitcast=True)
    else:
        return number.to(tl.float32)


@triton.jit
def small_number(words, PART: tl.constexpr, SMALL: tl.constexpr):
    """s or m in float32; words: 8, 16 or 32 bits, a byte for each part of a block."""
    byte = words.to(tl.int32) >> (8 * PART) & 255
    if SMALL == "e4m3":
        return e4m3(byte)
    elif SMALL == "int8":
        return large(byte ^ 128) - 8388736.0
    else:
        return large(byte) - 8388608.0
