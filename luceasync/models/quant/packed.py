"""The tensors of a quantised matrix, and their dequantisation to float32: the slow reference for
every kernel that multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from luceasync.models.quant.layout import BLOCK, QuantLayout

HALF = BLOCK // 2
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "e8m0": torch.uint8,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of a matrix in `layout`, with the tensors that QuantLayout.components lists.

    codes: uint8 [rows, columns / 2], 16 bytes for each 32 columns: byte j has the low four bits of
    column j, and above them those of column 16 + j; codes of 8 bits are [rows, columns]. planes:
    [rows, bits - 4, columns / 8]: bit i of byte j is the fifth (sixth) bit of column 8 j + i.
    """

    layout: QuantLayout
    codes: Tensor
    scales: Tensor
    planes: Tensor | None = None
    small_scales: Tensor | None = None
    minimums: Tensor | None = None
    small_minimums: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that exist, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self)[1:])
        return {name: tensor for name, tensor in named if tensor is not None}

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        num_rows, width = self.codes.shape
        return num_rows, width * (1 if self.layout.bits == 8 else 2)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def rows(self, begin: int, end: int) -> Packed:
        """Rows [begin, end), as views."""
        return self._each(lambda tensor: tensor[begin:end])

    def select(self, ids: Tensor) -> Packed:
        """The rows of int64 ids [n]."""
        # Indexing does not support 8-bit floats: index their bytes.
        return self._each(
            lambda t: t.view(torch.uint8)[ids].view(t.dtype) if t.itemsize == 1 else t[ids]
        )

    def contiguous(self) -> Packed:
        """The same matrix; only tensors that are not contiguous are copied."""
        return self._each(lambda tensor: tensor.contiguous())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Packed:
        return Packed(self.layout, **{name: change(t) for name, t in self.tensors.items()})


def empty(layout: QuantLayout, num_rows: int, num_columns: int, device: torch.device) -> Packed:
    """An uninitialised matrix."""
    tensors = {
        part.name: torch.empty((num_rows, *part.shape), dtype=DTYPES[part.kind], device=device)
        for part in layout.components(num_columns)
    }
    return Packed(layout, **tensors)


def dequantise(packed: Packed, table: Tensor | None = None) -> Tensor:
    """The numbers in float32 [rows, columns]; each product and the difference is rounded once.
    `table`: the result of `table_of`, which cannot be created within a CUDA graph."""
    layout, num_columns = packed.layout, packed.shape[1]
    codes = _codes(packed, table_of(packed) if table is None else table)
    group = layout.group or num_columns
    num_groups = layout.num_groups(num_columns)
    if missing := num_groups * group - num_columns:
        codes = torch.nn.functional.pad(codes, (0, missing))
    each = codes.view(-1, num_groups, group)
    scales = _of_groups(real(packed.scales, layout), layout, num_groups)
    each = each * _scales(packed, scales)[..., None]
    minimums = _minimums(packed, scales, num_groups)
    if minimums is not None:
        each = each - minimums[..., None]
    return each.flatten(1)[:, :num_columns]


def table_of(packed: Packed) -> Tensor | None:
    """The value of each code, float32 [16] on the codes' device; None if there is no table."""
    table = packed.layout.table
    return torch.tensor(table, dtype=torch.float32, device=packed.codes.device) if table else None


def real(tensor: Tensor, layout: QuantLayout) -> Tensor:
    """D or M in float32. An e8m0 number e is 2^(e - 128), half its usual value, as the tables of
    4-bit floats hold twice the numbers to keep them whole.
    """
    if layout.scale != "e8m0":
        return tensor.float()
    bits = tensor.int()
    small = torch.full_like(bits, 0x00200000) << bits.clamp(max=1)
    return torch.where(bits < 2, small, (bits - 1).clamp(min=0) << 23).view(torch.float32)


def _codes(packed: Packed, table: Tensor | None) -> Tensor:
    """float32 [rows, columns]."""
    layout = packed.layout
    if layout.bits == 8:
        return packed.codes.float()
    low = packed.codes.unflatten(1, (-1, HALF))
    codes = torch.stack([low & 15, low >> 4], 2).flatten(1)
    if packed.planes is not None:
        shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
        bits = (packed.planes[..., None] >> shifts & 1).flatten(2)  # [rows, planes, columns]
        for number in range(bits.shape[1]):
            codes = codes | bits[:, number] << (4 + number)
    if table is not None:
        return table[codes.int()]
    return codes.float() - layout.zero


def _of_groups(supers: Tensor, layout: QuantLayout, num_groups: int) -> Tensor:
    """Expand values of super-groups to their groups."""
    if layout.supergroup is None or layout.group is None:
        return supers.expand(-1, num_groups)
    return supers.repeat_interleave(layout.supergroup // layout.group, 1)[:, :num_groups]


def _scales(packed: Packed, scales: Tensor) -> Tensor:
    small = packed.small_scales
    if small is None:
        return scales
    return small.float() / scales if packed.layout.divides else scales * small.float()


def _minimums(packed: Packed, scales: Tensor, num_groups: int) -> Tensor | None:
    layout = packed.layout
    if layout.minimum == "none":
        return None
    found = scales
    if packed.minimums is not None:
        found = _of_groups(real(packed.minimums, layout), layout, num_groups)
    small = packed.small_minimums
    return found if small is None else found * small.float()


def pack_codes(codes: Tensor) -> Tensor:
    """Pack the low four bits of codes: uint8 [rows, columns] -> [rows, columns / 2]."""
    halves = codes.unflatten(1, (-1, 2, HALF))
    packed: Tensor = (halves[:, :, 0] & 15 | halves[:, :, 1] << 4).flatten(1)
    return packed
