"""A quantised matrix as GPU kernels read it: in blocks, as required by tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from luceasync.kernels.quant_decode import Coding

BLOCK_ROWS, BLOCK_COLUMNS = 16, 64  # of a weight that are stored together
UNIT = 4  # blocks of columns that a warp of a CUDA C++ program processes at a time


@dataclass(frozen=True, slots=True)
class TiledMatrix:
    """A quantised matrix [num_rows, num_columns] in blocks of 16 x 64, [row blocks, column blocks],
    as luceasync.models.quant.tiles lays it out. Tensors that the coding does not have are None.

    codes: 16-bit words [.., 256], for 8 bits [.., 2, 256]; planes: 16-bit words [.., 64] for the
    fifth bits, [.., 128] for the fifth and sixth; scales, minimums: [row blocks, super-groups, 16];
    small_scales, small_minimums: bytes [.., 16, parts], or [row blocks, groups, 16] if a group is
    wider than a block. Of 16 rows, row 8 i + g is at 2 g + i.
    """

    coding: Coding
    num_rows: int
    num_columns: int
    codes: Tensor
    scales: Tensor
    planes: Tensor | None
    small_scales: Tensor | None
    minimums: Tensor | None
    small_minimums: Tensor | None

    @property
    def num_blocks(self) -> int:
        """Blocks of a row, BLOCK_COLUMNS wide each."""
        return self.num_columns // BLOCK_COLUMNS

    @property
    def num_supergroups(self) -> int:
        """Super-groups of a row; the last may be partial."""
        return -(-self.num_columns // (self.coding.supergroup or self.num_columns))

    @property
    def num_groups(self) -> int:
        """Groups of a row; the last may be partial."""
        return -(-self.num_columns // (self.coding.group or self.num_columns))
