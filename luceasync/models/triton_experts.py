"""Routed experts on GPUs: up to 64 rows in tiles of one expert, listed on the device; more rows by
the library's grouped product, or by tiles of many rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import experts_product, experts_quant, experts_routing, quant_dequantize
from luceasync.kernels.experts_product import MANY_ROWS
from luceasync.kernels.experts_routing import MAX_ROWS, NO_MATRIX
from luceasync.kernels.quant_tiles import BLOCK_ROWS, TiledMatrix
from luceasync.models import torch_experts
from luceasync.models.ops import Ops, TorchTable
from luceasync.models.quant.packed import Packed
from luceasync.models.quant.tiles import can_tile, tile
from luceasync.models.torch_experts import RoutedExperts
from luceasync.models.weights import Choice, ExpertWeights, Router, Routing, SwiGLU

SLICE_BYTES = 128 << 20  # of experts that are dequantised at once: a plan counts them as workspace


@dataclass(frozen=True, slots=True)
class TiledChoice(Choice):
    """A Choice of up to MAX_ROWS rows with its tiles, see experts_routing.choose."""

    tiles: Tensor


def choose(logits: Tensor, bias: Tensor | None, routing: Routing) -> Choice:
    """See torch_experts.choose."""
    if len(logits) > MAX_ROWS:
        return torch_experts.choose(logits, bias, routing)
    arrivals = torch.zeros(1, dtype=torch.int32, device=logits.device)
    return _tiled_choice(logits, bias, routing, arrivals, has_shared=False)


def _tiled_choice(
    logits: Tensor, bias: Tensor | None, routing: Routing, arrivals: Tensor, *, has_shared: bool
) -> TiledChoice:
    found = experts_routing.choose(
        logits,
        bias,
        arrivals,
        num_chosen=routing.num_chosen,
        is_sigmoid=routing.scores == "sigmoid",
        is_normalised=routing.is_normalised,
        scale=routing.scale,
        softcap=routing.softcap,
        has_shared=has_shared,
    )
    return TiledChoice(*found)


def add_weighted(results: Tensor, choice: Choice, base: Tensor) -> Tensor:
    """See torch_experts.add_weighted."""
    return experts_routing.add_weighted(results, choice.weights, choice.places, base)


def tiles_of_many(choice: Choice) -> Tensor:
    """Tiles of MANY_ROWS rows, in the form of experts_routing.choose: as many as there could be."""
    num_places, num_experts = len(choice.rows), len(choice.bounds) - 1
    most = min(num_places, num_places // MANY_ROWS + num_experts)
    begins, ends = choice.bounds[:-1], choice.bounds[1:].contiguous()
    last = ((ends - begins + MANY_ROWS - 1) // MANY_ROWS).cumsum(0)  # tile of each expert, plus one
    number = torch.arange(most, device=ends.device)
    expert = torch.searchsorted(last, number, right=True)
    own = expert.clamp(max=num_experts - 1)
    first = torch.where(own > 0, last[own - 1], 0)
    begin = begins[own] + (number - first) * MANY_ROWS
    end = torch.minimum(begin + MANY_ROWS, ends[own])
    matrix = torch.where(expert < num_experts, expert, NO_MATRIX)
    return torch.stack([matrix, begin, end], 1).int()


class PlainExperts:
    """ExpertWeights of plain rows [parts * experts * out, dim]: all gates, then all ups, or one
    part alone.
    """

    def __init__(self, rows: Tensor, num_experts: int, num_parts: int) -> None:
        self.each = rows.view(num_parts, num_experts, -1, rows.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.each.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the matrices of an expert, and columns."""
        num_parts, _, height, num_columns = self.each.shape
        return num_parts * height, num_columns

    def linear(self, x: Tensor, choice: Choice, shared: Tensor | None = None) -> Tensor:
        """See ExpertWeights. `shared`: the matrix of a choice that has a shared expert."""
        if isinstance(choice, TiledChoice):
            return experts_product.linear(x, self.each[0], choice.tiles, len(x), shared=shared)
        if _can_group(x):
            return _grouped(x, self.each[0], choice)
        out = x.new_empty(len(x), self.each.shape[2])
        experts_product.many(x, self.each[0], tiles_of_many(choice), out)
        return out

    def swiglu(self, x: Tensor, choice: Choice, shared: Tensor | None = None) -> Tensor:
        """See ExpertWeights. `shared`: as of `linear`, the gate's rows first."""
        if isinstance(choice, TiledChoice):
            return experts_product.swiglu(x, self.each, choice.tiles, choice.rows, shared=shared)
        if _can_group(x):
            own = x[choice.rows]
            gate, up = (_grouped(own, part, choice) for part in self.each)
            return F.silu(gate).mul_(up)
        out = x.new_empty(len(choice.rows), self.each.shape[2])
        experts_product.many(x, self.each, tiles_of_many(choice), out, rows=choice.rows)
        return out


def _can_group(x: Tensor) -> bool:
    """Whether the library multiplies by groups whose ends stay on the device."""
    is_half = x.dtype == torch.bfloat16 and x.is_cuda and torch.version.hip is None
    return is_half and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _grouped(x: Tensor, matrices: Tensor, choice: Choice) -> Tensor:
    return F.grouped_mm(x, matrices.transpose(1, 2), offs=choice.bounds[1:].int())


def quantised_experts(
    packed: Packed, num_experts: int, num_parts: int, dtype: torch.dtype
) -> ExpertWeights:
    """The experts of quantised rows, arranged in their own memory if kernels can multiply them."""
    num_rows, num_columns = packed.shape
    is_whole = num_rows % (num_experts * num_parts * BLOCK_ROWS) == 0
    # Kernels multiply codes in bfloat16, which would not equal float32.
    if dtype != torch.bfloat16 or not (is_whole and can_tile(packed.layout, num_rows, num_columns)):
        return torch_experts.quantised_experts(packed, num_experts, num_parts)
    num_bytes = packed.num_bytes
    return TiledQuantExperts(tile(packed), num_bytes, num_experts)


class TiledQuantExperts:
    """ExpertWeights of quantised rows in tiles. In up to MAX_ROWS rows no weight is rounded; in
    more, each is rounded once to the dtype of x.
    """

    def __init__(self, tiled: TiledMatrix, num_bytes: int, num_experts: int) -> None:
        self.num_bytes = num_bytes
        self._tiled = tiled
        self._num_experts = num_experts

    def linear(self, x: Tensor, choice: Choice) -> Tensor:
        if isinstance(choice, TiledChoice):
            return experts_quant.linear(x, self._tiled, self._num_experts, choice.tiles, len(x))
        return self._many(x, choice, 1)

    def swiglu(self, x: Tensor, choice: Choice) -> Tensor:
        if isinstance(choice, TiledChoice):
            return experts_quant.swiglu(
                x, self._tiled, self._num_experts, choice.tiles, choice.rows
            )
        return self._many(x, choice, 2)

    def _many(self, x: Tensor, choice: Choice, num_parts: int) -> Tensor:
        """Dequantise a few experts at a time, and multiply the tiles that are theirs."""
        num_columns = self._tiled.num_columns
        height = self._tiled.num_rows // (num_parts * self._num_experts)
        expert_bytes = num_parts * height * num_columns * x.element_size()
        count = min(self._num_experts, max(1, SLICE_BYTES // expert_bytes))
        scratch = x.new_empty(num_parts, count, height, num_columns)
        out, tiles = x.new_empty(len(choice.rows), height), tiles_of_many(choice)
        rows = choice.rows if num_parts == 2 else None
        for first in range(0, self._num_experts, count):
            end = min(first + count, self._num_experts)
            for part in range(num_parts):
                begin = (part * self._num_experts + first) * height
                numbers = scratch[part, : end - first].view(-1, num_columns)
                quant_dequantize.numbers(self._tiled, begin, begin + len(numbers), numbers)
            own = scratch[:, : end - first]
            experts_product.many(
                x, own if num_parts == 2 else own[0], tiles, out, rows=rows, first=first
            )
        return out


class TritonRoutedExperts(RoutedExperts):
    """RoutedExperts in few launches: norm, scores and the shared expert's gate; choice and tiles;
    gates and ups; downs; sums. A shared expert that is stored as the experts are is one of them.
    """

    def __init__(
        self,
        ops: Ops,
        router: Router,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        shared: SwiGLU | None,
    ) -> None:
        super().__init__(ops, router, gate_up, down, shared)
        self._shared_rows = None if shared is None else _alike(gate_up, down, shared)

    def add_to(self, x: Tensor) -> Tensor:
        weight, gate = self.router.weight, self.router.shared_gate
        if len(x) > MAX_ROWS or not isinstance(weight, TorchTable):
            return super().add_to(x)
        norm, routing, beside = self.router.norm, self.router.routing, self._shared_rows
        gate_rows = gate.rows if isinstance(gate, TorchTable) else None
        normed, logits, arrivals, gates = experts_routing.scores(
            x, (norm.weight, norm.eps), weight.rows, gate_rows
        )
        bias, has_shared = self.router.bias, beside is not None
        choice = _tiled_choice(logits, bias, routing, arrivals, has_shared=has_shared)
        shared = None
        if beside is not None:
            gate_up, down = self.gate_up, self.down
            assert isinstance(gate_up, PlainExperts) and isinstance(down, PlainExperts)
            inner = gate_up.swiglu(normed, choice, beside[0])
            results = down.linear(inner, choice, beside[1])
            shared = results[choice.places.numel() :]
        else:
            results = self.down.linear(self.gate_up.swiglu(normed, choice), choice)
            if self.shared is not None:
                shared = self.shared.down.linear(self.shared.gate_up.swiglu(normed))
        return experts_routing.add_weighted(
            results, choice.weights, choice.places, x, shared, gates
        )


def _alike(
    gate_up: ExpertWeights, down: ExpertWeights, shared: SwiGLU
) -> tuple[Tensor, Tensor] | None:
    """The rows of a shared expert that kernels can take for one of the experts, else None."""
    found = []
    for experts, own in ((gate_up, shared.gate_up), (down, shared.down)):
        if not (isinstance(experts, PlainExperts) and isinstance(own, TorchTable)):
            return None
        if own.rows.shape != experts.shape:
            return None
        found.append(own.rows)
    return found[0], found[1]
