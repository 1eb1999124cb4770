"""4- and 8-bit integers in 32-bit words, with scales and zero points of groups: AWQ (Lin et al.,
2023), GPTQ (Frantar et al., 2022), and pack-quantized of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from luceasync.errors import ModelError
from luceasync.models.quant.checkpoints.module import (
    REALS,
    QuantMatrix,
    TensorInfos,
    check_shape,
    require_matrix,
    require_tensor,
)
from luceasync.models.quant.encoding import QuantEncoding

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.quant.packed import Packed

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of outputs in a word, lowest bits first
Bits = Literal[4, 8]
NO_GROUPS = -1


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """A Scheme: transposed, with words along the outputs."""

    group: int
    name: str = "AWQ"

    def find(self, module: str, infos: TensorInfos) -> QuantMatrix | None:
        name = f"{module}.qweight"
        if name not in infos:
            return None
        columns, num_words = require_matrix(infos, name, ("I32",))
        return _transposed(self, module, infos, 4, (num_words * 8, columns), self._pack)

    def _pack(self, encoding: QuantEncoding, tensors: Mapping[str, Tensor]) -> Packed:
        import torch

        order = torch.tensor(AWQ_ORDER, device=tensors["codes"].device).argsort()
        codes, zeros = (
            _numbers(tensors[name], 4).unflatten(-1, (-1, 8))[..., order].flatten(-2).t()
            for name in ("codes", "zeros")
        )
        return _packed(encoding, codes, tensors["scales"].t(), zeros)


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """A Scheme: transposed, with words along the inputs. `added`: what is added to stored zero
    points, 1 in the format's first version; None: the config does not specify it, and it follows
    from the zero points, as those of symmetric matrices are all the middle value."""

    group: int
    bits: Bits
    added: int | None
    is_symmetric: bool = False
    name: str = "GPTQ"

    def find(self, module: str, infos: TensorInfos) -> QuantMatrix | None:
        name = f"{module}.qweight"
        if name not in infos:
            return None
        num_words, rows = require_matrix(infos, name, ("I32",))
        shape = (rows, num_words * (32 // self.bits))
        found = _transposed(self, module, infos, self.bits, shape, self._pack)
        if (order := f"{module}.g_idx") in infos:
            check_shape(order, infos[order], (shape[1],))
            found.names["order"] = order
        return found

    def _pack(self, encoding: QuantEncoding, tensors: Mapping[str, Tensor]) -> Packed:
        import torch

        codes = _numbers(tensors["codes"].t(), self.bits)
        order = tensors.get("order")
        columns = torch.arange(codes.shape[1], device=codes.device)
        groups = columns // (encoding.group or codes.shape[1])
        if order is not None and not torch.equal(order.long(), groups):
            raise ModelError("g_idx: columns in the order of their activations are not supported")
        zeros = _numbers(tensors["zeros"], self.bits)
        zeros = zeros + self._added(int(zeros.min()), int(zeros.max()))
        return _packed(encoding, codes, tensors["scales"].t(), zeros.t())

    def _added(self, least: int, most: int) -> int:
        """The number to add to zero points that range from `least` to `most`. Raises ModelError if
        a symmetric matrix has others than the middle value."""
        middle = 1 << (self.bits - 1)
        if self.added is None and least == most == middle:
            return 0
        added = 1 if self.added is None else self.added
        if self.is_symmetric and not least + added == most + added == middle:
            raise ModelError(
                f"qzeros: stored zero points from {least} to {most}; expected {middle - added} "
                "in all groups, as the checkpoint is symmetric"
            )
        return added


@dataclass(frozen=True, slots=True)
class PackQuantizedScheme:
    """A Scheme: words along the inputs. `is_symmetric`: there are no zero points."""

    group: int
    bits: Bits
    is_symmetric: bool
    name: str = "pack-quantized"

    def find(self, module: str, infos: TensorInfos) -> QuantMatrix | None:
        name = f"{module}.weight_packed"
        if name not in infos:
            return None
        rows, num_words = require_matrix(infos, name, ("I32",))
        columns = num_words * (32 // self.bits)
        if (order := f"{module}.weight_g_idx") in infos:
            raise ModelError(f"{order!r}: columns in the order of activations are not supported")
        scale, group = f"{module}.weight_scale", self.group if self.group > 0 else columns
        scales = require_tensor(infos, scale, tuple(REALS))
        num_groups = -(-columns // group)
        if scales.shape != (rows,) or num_groups > 1:
            check_shape(scale, scales, (rows, num_groups))
        names = {"codes": name, "scales": scale}
        if not self.is_symmetric:
            zero = f"{module}.weight_zero_point"
            num_rows = -(-rows // (32 // self.bits))
            check_shape(zero, require_tensor(infos, zero, ("I32",)), (num_rows, num_groups))
            names["zeros"] = zero
        encoding = _encoding(
            self.name, self.bits, self.group, scales.dtype, has_zeros=not self.is_symmetric
        )
        return QuantMatrix(_fitting(encoding, name, columns), (rows, columns), names, self._pack)

    def _pack(self, encoding: QuantEncoding, tensors: Mapping[str, Tensor]) -> Packed:
        codes = _numbers(tensors["codes"], self.bits)
        zeros = tensors.get("zeros")
        if zeros is not None:  # words along the rows
            zeros = _numbers(zeros.t(), self.bits).t()[: len(codes)]
        return _packed(encoding, codes, tensors["scales"].reshape(len(codes), -1), zeros)


def _transposed(
    scheme: AwqScheme | GptqScheme,
    module: str,
    infos: TensorInfos,
    bits: Bits,
    shape: tuple[int, int],
    pack: Callable[[QuantEncoding, Mapping[str, Tensor]], Packed],
) -> QuantMatrix:
    """A transposed matrix: scales [groups, outputs], and words of zero points along the outputs."""
    rows, columns = shape
    num_groups = -(-columns // (scheme.group if scheme.group > 0 else columns))
    scale, zero = f"{module}.scales", f"{module}.qzeros"
    scales = require_tensor(infos, scale, tuple(REALS))
    check_shape(scale, scales, (num_groups, rows))
    check_shape(zero, require_tensor(infos, zero, ("I32",)), (num_groups, rows // (32 // bits)))
    encoding = _encoding(scheme.name, bits, scheme.group, scales.dtype, has_zeros=True)
    names = {"codes": f"{module}.qweight", "scales": scale, "zeros": zero}
    return QuantMatrix(_fitting(encoding, names["codes"], columns), shape, names, pack)


def _encoding(name: str, bits: Bits, group: int, dtype: str, *, has_zeros: bool) -> QuantEncoding:
    each = group if group > 0 else None
    return QuantEncoding(
        name,
        bits,
        each,
        each,
        REALS[dtype],
        minimum="scale" if has_zeros else "none",
        has_small_minimums=has_zeros,
        zero=8 if bits == 4 and not has_zeros else 0,
        codes="int8" if bits == 8 and not has_zeros else "uint",
    )


def _fitting(encoding: QuantEncoding, name: str, columns: int) -> QuantEncoding:
    if fault := encoding.fault_of(columns):
        raise ModelError(f"{name!r}: {fault}")
    return encoding


def _numbers(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [n, words] -> uint8 [n, words * 32 / bits], lowest bits first."""
    import torch

    mask = (1 << bits) - 1
    parts = [words >> shift & mask for shift in range(0, 32, bits)]
    return torch.stack(parts, -1).flatten(-2).to(torch.uint8)


def _packed(encoding: QuantEncoding, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Packed:
    import torch

    from luceasync.models.quant.packed import Packed, pack_codes

    codes = codes.contiguous()
    small = None if zeros is None else zeros.contiguous()
    stored = codes if encoding.bits == 8 else pack_codes(codes)
    if encoding.codes == "int8":  # stored with an offset of 128
        stored = (stored ^ 128).view(torch.int8)
    return Packed(encoding, stored, scales.contiguous(), small_minimums=small)
