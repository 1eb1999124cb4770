"""8-bit weights: e4m3 numbers with scales of blocks, rows or a whole matrix, and int8 rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from luceasync.errors import ModelError
from luceasync.models.quant.checkpoints.module import (
    REALS,
    QuantMatrix,
    TensorInfo,
    TensorInfos,
    require_tensor,
)
from luceasync.models.quant.encoding import QuantEncoding
from luceasync.models.quant.layout import Codes

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.quant.packed import Packed

STORED: dict[str, Codes] = {"F8_E4M3": "e4m3", "I8": "int8"}
SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True, slots=True)
class ByteScheme:
    """A Scheme. `block`: (rows, columns) that share a scale; None: a row or a matrix does."""

    name: str
    block: tuple[int, int] | None = None

    def find(self, module: str, infos: TensorInfos) -> QuantMatrix | None:
        weight = f"{module}.weight"
        info = infos.get(weight)
        codes = STORED.get(info.dtype) if info else None
        if info is None or codes is None or len(info.shape) != 2:
            return None
        scale = next((f"{module}.{name}" for name in SCALES if f"{module}.{name}" in infos), None)
        if scale is None:
            raise ModelError(f"{weight!r} is stored as {info.dtype}, and has no scale")
        scales = require_tensor(infos, scale, tuple(REALS))
        group = self._group(scale, scales, info)
        encoding = QuantEncoding(self.name, 8, group, group, REALS[scales.dtype], codes=codes)
        return QuantMatrix(encoding, info.shape, {"codes": weight, "scales": scale}, self._pack)

    def _group(self, name: str, scales: TensorInfo, weight: TensorInfo) -> int | None:
        """Columns that share a scale; None: a whole row."""
        rows, columns = weight.shape
        if scales.shape in ((), (1,), (1, 1), (rows,), (rows, 1)):
            return None
        expected = None
        if self.block is not None:
            expected = (-(-rows // self.block[0]), -(-columns // self.block[1]))
            if scales.shape == expected:
                return self.block[1]
        raise ModelError(
            f"{name!r} has shape {scales.shape} for a matrix of {weight.shape}; expected one "
            f"scale, one for each row{f', or {expected}' if expected else ''}"
        )

    def _pack(self, encoding: QuantEncoding, tensors: Mapping[str, Tensor]) -> Packed:
        from luceasync.models.quant.packed import Packed

        codes, scales = tensors["codes"], tensors["scales"]
        num_rows = len(codes)
        if encoding.group is not None and self.block is not None:
            scales = scales.repeat_interleave(self.block[0], 0)[:num_rows]
        elif scales.numel() == 1:
            scales = scales.reshape(1, 1).expand(num_rows, 1)
        else:
            scales = scales.reshape(num_rows, 1)
        return Packed(encoding, codes, scales)
