"""Routed experts on GPUs: up to 64 rows in tiles of one expert, listed on the device; more rows by
the library's grouped product, or by tiles of many rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import (
    experts_order,
    experts_product,
    experts_prompt,
    experts_prompt_quant,
    experts_quant,
    experts_routing,
    experts_rows,
    quant_dequantize,
)
from luceasync.kernels.experts_order import ExpertTiles
from luceasync.kernels.experts_routing import MAX_ROWS, TILE_ROWS
from luceasync.kernels.experts_slots import SlotTable
from luceasync.kernels.quant_tiles import BLOCK_ROWS, TiledMatrix
from luceasync.models import torch_experts
from luceasync.models.ops import Ops, RoutedExperts, TorchTable
from luceasync.models.quant.gpu import TiledQuantWeight
from luceasync.models.quant.packed import Packed
from luceasync.models.quant.tiles import can_tile, tile
from luceasync.models.weights import Choice, ExpertWeights, Router, Routing, SwiGLU, Weight

SLICE_BYTES = 128 << 20  # of experts that are dequantised at once: a plan counts them as workspace
# Rows of an expert, on average, up to which tiles of few rows multiply codes, where more are
# dequantised (measured on an H200), and where they are decoded within the product (on an H100).
MOST_OF_CODES = {"dequantised": 16, "decoded": 10}


@dataclass(frozen=True, slots=True)
class TiledChoice(Choice):
    """A Choice of up to MAX_ROWS rows with its tiles, see experts_routing.choose."""

    tiles: Tensor
    fills: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ManyChoice(Choice):
    """A Choice of more rows with its tiles of experts_prompt.tile_rows."""

    tiles: ExpertTiles


def choose(
    logits: Tensor, bias: Tensor | None, routing: Routing, table: SlotTable | None = None
) -> Choice:
    """See torch_experts.choose. `table`: of few rows' experts, which are in host memory."""
    if len(logits) > MAX_ROWS:
        weights, experts = experts_routing.choose_alone(logits, bias, **_constants(routing))
        tile_rows = experts_prompt.tile_rows(logits)
        return ManyChoice(weights, *experts_order.order(experts, logits.shape[1], tile_rows))
    arrivals = torch.zeros(1, dtype=torch.int32, device=logits.device)
    return _tiled_choice(logits, bias, routing, arrivals, has_shared=False, table=table)


def _tiled_choice(
    logits: Tensor,
    bias: Tensor | None,
    routing: Routing,
    arrivals: Tensor,
    *,
    has_shared: bool,
    table: SlotTable | None = None,
) -> TiledChoice:
    options = _constants(routing) | {"has_shared": has_shared, "table": table}
    return TiledChoice(*experts_routing.choose(logits, bias, arrivals, **options))


def _constants(routing: Routing) -> dict[str, Any]:
    """A routing as kernels take it."""
    return {
        "num_chosen": routing.num_chosen,
        "is_sigmoid": routing.scores == "sigmoid",
        "is_normalised": routing.is_normalised,
        "scale": routing.scale,
        "softcap": routing.softcap,
    }


def add_weighted(results: Tensor, choice: Choice, base: Tensor) -> Tensor:
    """See torch_experts.add_weighted."""
    return experts_rows.add_weighted(results, choice.weights, choice.places, base)


Shared = Tensor | TiledMatrix  # a shared expert's matrix, stored as those of experts are


@runtime_checkable
class SharingExperts(ExpertWeights, Protocol):
    """ExpertWeights beside which a shared expert may be one more."""

    def alike(self, weight: Weight) -> Shared | None:
        """The matrix of a shared expert if it is stored as those of experts are."""
        ...

    def linear(self, x: Tensor, choice: Choice, shared: Shared | None = None) -> Tensor:
        """See ExpertWeights; x is a result of this choice. `shared`: the matrix of a choice that
        has a shared expert.
        """
        ...

    def swiglu(self, x: Tensor, choice: Choice, shared: Shared | None = None) -> Tensor:
        """See ExpertWeights; `shared` has the gate's rows first."""
        ...


class KernelExperts(SharingExperts, Protocol):
    """Experts made of tensors. Those of `far`, in host memory, are all if these are the slots that
    the tiles of a choice name.
    """

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What the experts consist of, each [parts, experts, ..] contiguous."""
        ...

    def made_of(self, tensors: Mapping[str, Tensor]) -> KernelExperts:
        """Experts like these, any number, of such tensors."""
        ...

    def linear(
        self,
        x: Tensor,
        choice: Choice,
        shared: Shared | None = None,
        far: KernelExperts | None = None,
    ) -> Tensor: ...

    def swiglu(
        self,
        x: Tensor,
        choice: Choice,
        shared: Shared | None = None,
        far: KernelExperts | None = None,
    ) -> Tensor: ...


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
    def tensors(self) -> dict[str, Tensor]:
        return {"rows": self.each}

    def made_of(self, tensors: Mapping[str, Tensor]) -> PlainExperts:
        rows = tensors["rows"]
        num_parts, num_experts, _, dim = rows.shape
        return PlainExperts(rows.view(-1, dim), num_experts, num_parts)

    def alike(self, weight: Weight) -> Tensor | None:
        """See SharingExperts."""
        if not isinstance(weight, TorchTable):
            return None
        num_parts, _, height, num_columns = self.each.shape
        is_alike = weight.rows.shape == (num_parts * height, num_columns)
        return weight.rows if is_alike else None

    def linear(
        self,
        x: Tensor,
        choice: Choice,
        shared: Shared | None = None,
        far: KernelExperts | None = None,
    ) -> Tensor:
        if isinstance(choice, TiledChoice):
            others = None if far is None else far.tensors["rows"][0]
            return experts_product.linear(
                x,
                self.each[0],
                choice.tiles,
                len(x),
                shared=_plain(shared),
                far=others,
                is_listed=True,
            )
        is_ours = experts_prompt.can_multiply(x, self.each)
        if experts_product.can_group(x, self.each) and not is_ours:
            return _grouped(x, self.each[0], choice)
        out = x.new_empty(len(x), self.each.shape[2])
        _multiply_many(x, self.each, choice, out)
        return out

    def swiglu(
        self,
        x: Tensor,
        choice: Choice,
        shared: Shared | None = None,
        far: KernelExperts | None = None,
    ) -> Tensor:
        if isinstance(choice, TiledChoice):
            others = None if far is None else far.tensors["rows"]
            return experts_product.swiglu(
                x,
                self.each,
                choice.tiles,
                choice.rows,
                shared=_plain(shared),
                far=others,
                fills=choice.fills,
            )
        out = x.new_empty(len(choice.rows), self.each.shape[2])
        _multiply_many(x, self.each, choice, out)
        return out


def _grouped(x: Tensor, matrices: Tensor, choice: Choice) -> Tensor:
    return F.grouped_mm(x, matrices.transpose(1, 2), offs=choice.bounds[1:])


def _tiles_of_few(choice: Choice) -> Tensor:
    return experts_order.tiles_of(choice.bounds, len(choice.rows), TILE_ROWS).listed


def _multiply_many(
    x: Tensor, matrices: Tensor, choice: Choice, out: Tensor, first: int = 0
) -> None:
    """Multiply rows by matrices [parts, experts, outputs, dim] of experts number `first` and those
    after it. Results of others stay.
    """
    assert isinstance(choice, ManyChoice)
    rows = choice.rows if len(matrices) == 2 else None
    if experts_prompt.can_multiply(x, matrices):
        experts_prompt.multiply(x, matrices, choice.tiles, out, rows=rows, first=first)
    else:
        tile_rows = experts_prompt.tile_rows(x)
        experts_product.many(
            x, matrices, choice.tiles.listed, out, tile_rows=tile_rows, rows=rows, first=first
        )


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
    return TiledQuantExperts(tile(packed), num_bytes, num_experts, num_parts)


class TiledQuantExperts:
    """ExpertWeights of quantised rows in tiles. In passes of few rows of an expert, on average, no
    weight is rounded; in others, each is rounded once to the dtype of x.
    """

    def __init__(
        self, tiled: TiledMatrix, num_bytes: int, num_experts: int, num_parts: int
    ) -> None:
        self.num_bytes = num_bytes
        self.num_experts = num_experts
        self.num_parts = num_parts
        self.tiled = tiled

    def alike(self, weight: Weight) -> TiledMatrix | None:
        """See SharingExperts."""
        if not isinstance(weight, TiledQuantWeight):
            return None
        own, found = self.tiled, weight.tiled
        shape = (own.num_rows // self.num_experts, own.num_columns)
        is_alike = (found.coding, found.num_rows, found.num_columns) == (own.coding, *shape)
        return found if is_alike else None

    @property
    def tensors(self) -> dict[str, Tensor]:
        fields = ("codes", "planes", "scales", "small_scales", "minimums", "small_minimums")
        found = ((name, getattr(self.tiled, name)) for name in fields)
        shape = (self.num_parts, self.num_experts, -1)
        return {name: tensor.view(shape) for name, tensor in found if tensor is not None}

    def made_of(self, tensors: Mapping[str, Tensor]) -> TiledQuantExperts:
        num_experts = tensors["codes"].shape[1]
        num_rows = self.tiled.num_rows // self.num_experts * num_experts
        num_bytes = self.num_bytes // self.num_experts * num_experts
        changes: dict[str, Any] = dict(tensors)
        tiled = replace(self.tiled, num_rows=num_rows, **changes)
        return TiledQuantExperts(tiled, num_bytes, num_experts, self.num_parts)

    def linear(
        self,
        x: Tensor,
        choice: Choice,
        shared: Shared | None = None,
        far: KernelExperts | None = None,
    ) -> Tensor:
        if isinstance(choice, TiledChoice):
            others = None if far is None else _quantised(far)
            tiles, num_experts, own = choice.tiles, self.num_experts, _tiled(shared)
            return experts_quant.linear(
                x, self.tiled, num_experts, tiles, len(x), shared=own, far=others, is_listed=True
            )
        if self._is_of_codes(x, choice):
            tiles = _tiles_of_few(choice)
            return experts_quant.linear(x, self.tiled, self.num_experts, tiles, len(x))
        return self._many(x, choice)

    def swiglu(
        self,
        x: Tensor,
        choice: Choice,
        shared: Shared | None = None,
        far: KernelExperts | None = None,
    ) -> Tensor:
        if isinstance(choice, TiledChoice):
            others = None if far is None else _quantised(far)
            tiles, num_experts, own = choice.tiles, self.num_experts, _tiled(shared)
            return experts_quant.swiglu(
                x,
                self.tiled,
                num_experts,
                tiles,
                choice.rows,
                shared=own,
                far=others,
                fills=choice.fills,
            )
        if self._is_of_codes(x, choice):
            tiles = _tiles_of_few(choice)
            return experts_quant.swiglu(x, self.tiled, self.num_experts, tiles, choice.rows)
        return self._many(x, choice)

    def _is_of_codes(self, x: Tensor, choice: Choice) -> bool:
        is_decoded = experts_prompt_quant.can_multiply(x, self.tiled)
        most = MOST_OF_CODES["decoded" if is_decoded else "dequantised"]
        return len(choice.rows) <= most * self.num_experts

    def _many(self, x: Tensor, choice: Choice) -> Tensor:
        if not experts_prompt_quant.can_multiply(x, self.tiled):
            return self._many_sliced(x, choice)
        assert isinstance(choice, ManyChoice)
        rows = choice.rows if self.num_parts == 2 else None
        height = self.tiled.num_rows // (self.num_parts * self.num_experts)
        out = x.new_empty(len(choice.rows), height)
        experts_prompt_quant.multiply(x, self.tiled, self.num_experts, choice.tiles, out, rows=rows)
        return out

    def _many_sliced(self, x: Tensor, choice: Choice) -> Tensor:
        """Dequantise a few experts at a time, and multiply the tiles that are theirs."""
        num_columns, num_parts = self.tiled.num_columns, self.num_parts
        height = self.tiled.num_rows // (num_parts * self.num_experts)
        expert_bytes = num_parts * height * num_columns * x.element_size()
        count = min(self.num_experts, max(1, SLICE_BYTES // expert_bytes))
        scratch = x.new_empty(num_parts, count, height, num_columns)
        out = x.new_empty(len(choice.rows), height)
        for first in range(0, self.num_experts, count):
            end = min(first + count, self.num_experts)
            own = scratch.view(-1)[: num_parts * (end - first) * height * num_columns]
            own = own.view(num_parts, end - first, height, num_columns)
            for part in range(num_parts):
                begin = (part * self.num_experts + first) * height
                numbers = own[part].view(-1, num_columns)
                quant_dequantize.numbers(self.tiled, begin, begin + len(numbers), numbers)
            _multiply_many(x, own, choice, out, first)
        return out


def _plain(shared: Shared | None) -> Tensor | None:
    assert shared is None or isinstance(shared, Tensor)
    return shared


def _tiled(shared: Shared | None) -> TiledMatrix | None:
    assert shared is None or isinstance(shared, TiledMatrix)
    return shared


def _quantised(far: KernelExperts) -> TiledMatrix:
    assert isinstance(far, TiledQuantExperts)
    return far.tiled


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
        self.table: SlotTable | None = None  # of experts in host memory
        self._alike: list[Shared] = []  # the shared expert's matrices, if it can be one of them
        if shared is None:
            return
        if isinstance(gate_up, SharingExperts) and isinstance(down, SharingExperts):
            both = gate_up.alike(shared.gate_up), down.alike(shared.down)
            found = [matrix for matrix in both if matrix is not None]
            self._alike = found if len(found) == len(both) else []

    def add_to(self, x: Tensor) -> Tensor:
        weight, gate = self.router.weight, self.router.shared_gate
        if len(x) > MAX_ROWS or not isinstance(weight, TorchTable):
            return super().add_to(x)
        norm, bias = self.router.norm, self.router.bias
        gate_rows = gate.rows if isinstance(gate, TorchTable) else None
        normed, logits, arrivals, gates = experts_rows.scores(
            x, (norm.weight, norm.eps), weight.rows, gate_rows
        )
        has_shared, routing = bool(self._alike), self.router.routing
        choice = _tiled_choice(
            logits, bias, routing, arrivals, has_shared=has_shared, table=self.table
        )
        results, shared = self._results(normed, choice), None
        if has_shared:
            shared = results[choice.places.numel() :]
        elif self.shared is not None:
            shared = self.shared.down.linear(self.shared.gate_up.swiglu(normed))
        return experts_rows.add_weighted(
            results,
            choice.weights,
            choice.places,
            x,
            shared,
            gates,
            is_chosen=has_shared or self.shared is None,
        )

    def _add(self, x: Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> Tensor:
        router, weight, gate = self.router, self.router.weight, self.router.shared_gate
        if not isinstance(weight, TorchTable):
            return super()._add(x, gate_up, down)
        normed = router.norm(x)
        gate_rows = gate.rows if isinstance(gate, TorchTable) else None
        logits, gates = experts_rows.scores_of_many(normed, weight.rows, gate_rows)
        choice = choose(logits, router.bias, router.routing)
        results, shared = down.linear(gate_up.swiglu(normed, choice), choice), None
        if self.shared is not None:
            shared = self.shared.down.linear(self.shared.gate_up.swiglu(normed))
        return experts_rows.add_weighted(results, choice.weights, choice.places, x, shared, gates)

    def _results(self, normed: Tensor, choice: TiledChoice) -> Tensor:
        """What each place's expert gives, and then, if it is one of them, the shared one."""
        if not self._alike:
            return self.down.linear(self.gate_up.swiglu(normed, choice), choice)
        gate_up, down = self.gate_up, self.down
        assert isinstance(gate_up, SharingExperts) and isinstance(down, SharingExperts)
        inner = gate_up.swiglu(normed, choice, self._alike[0])
        return down.linear(inner, choice, self._alike[1])
