"""4-bit floats (e2m1): MXFP4 (OCP Microscaling 1.0), with a power of two per 32 numbers, and NVFP4,
with an e4m3 scale per 16 numbers and one scale for the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from luceasync.errors import ModelError
from luceasync.models.quant.checkpoints.module import (
    QuantMatrix,
    TensorInfos,
    check_shape,
    require_matrix,
    require_tensor,
)
from luceasync.models.quant.encoding import QuantEncoding
from luceasync.models.quant.ggml import FLOAT_4

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.quant.packed import Packed

MXFP4 = QuantEncoding("MXFP4", 4, 32, 32, "e8m0", table=FLOAT_4)
NVFP4 = QuantEncoding("NVFP4", 4, 16, None, "fp32", "e4m3", table=FLOAT_4)
DIVIDED = QuantEncoding("NVFP4", 4, 16, None, "fp32", "e4m3", table=FLOAT_4, divides=True)

PLAIN, CODES = "weight", "U8"  # a matrix of this name may be stored plainly
ONE = ((), (1,), (1, 1))  # shapes of a single number


@dataclass(frozen=True, slots=True)
class Fp4Scheme:
    """A Scheme. `weight`, `scale` and `matrix_scale` are the names of its tensors; MXFP4 has no
    scale of the matrix.
    """

    encoding: QuantEncoding
    weight: str
    scale: str = "weight_scale"
    matrix_scale: str | None = None

    @property
    def name(self) -> str:
        return self.encoding.name

    def find(self, module: str, infos: TensorInfos) -> QuantMatrix | None:
        name = f"{module}.{self.weight}"
        is_plain = self.weight == PLAIN and name in infos and infos[name].dtype != CODES
        if name not in infos or is_plain:
            return None
        rows, half = require_matrix(infos, name, (CODES,))
        shape = (rows, 2 * half)
        scale, kind = f"{module}.{self.scale}", "U8" if self.encoding is MXFP4 else "F8_E4M3"
        expected = (rows, self.encoding.num_groups(shape[1]))
        check_shape(scale, require_tensor(infos, scale, (kind,)), expected)
        names = {"codes": name, "scales": scale}
        if self.matrix_scale is not None:
            names["matrix"] = own = f"{module}.{self.matrix_scale}"
            if (given := require_tensor(infos, own, ("F32",)).shape) not in ONE:
                raise ModelError(f"{own!r} has shape {given}; expected one number")
        if fault := self.encoding.fault_of(shape[1]):
            raise ModelError(f"{name!r}: {fault}")
        return QuantMatrix(self.encoding, shape, names, self._pack)

    def _pack(self, encoding: QuantEncoding, tensors: Mapping[str, Tensor]) -> Packed:
        import torch

        from luceasync.models.quant.packed import Packed, pack_codes

        pairs, scales = tensors["codes"], tensors["scales"]
        codes = pack_codes(torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2))
        if "matrix" not in tensors:
            return Packed(encoding, codes, scales)
        # the table holds doubled numbers
        matrix = tensors["matrix"].reshape(1, 1) * (2.0 if encoding.divides else 0.5)
        return Packed(encoding, codes, matrix.expand(len(codes), 1), small_scales=scales)
