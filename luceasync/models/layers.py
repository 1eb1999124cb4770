"""The two kinds of decoder layer: attention and Gated DeltaNet, each followed by a SwiGLU MLP.

A layer holds its weights; the state that it reads and writes is handed in, with the operations to
use. Knows no devices, no other layers and no checkpoint names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from luceasync.models.ops import AttentionNorms, DeltaParameters
from luceasync.models.pass_rows import Paths, Rows
from luceasync.models.scratch import AttentionScratch, DeltaScratch
from luceasync.models.spec import AttentionSpec, DeltaSpec
from luceasync.models.trees import Trees

LayerState = tuple[Tensor, Tensor]  # (keys, values) or (conv, delta): all lanes of one layer


class Ops(Protocol):
    """The operations of luceasync.models.ops.TorchOps, which says what each means."""

    def pack(self, weight: Tensor) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor: ...

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor: ...

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor: ...

    def attend(
        self,
        projected: Tensor,
        spec: AttentionSpec,
        norms: AttentionNorms,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
    ) -> Tensor: ...

    def delta(
        self,
        projected: Tensor,
        spec: DeltaSpec,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
    ) -> Tensor: ...


class TreeOps(Protocol):
    """The operations of luceasync.models.trees.TorchTrees, which says what each means."""

    def trees(self, parents: Tensor, reach: int) -> Trees: ...

    def attend(
        self,
        projected: Tensor,
        spec: AttentionSpec,
        norms: AttentionNorms,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
        trees: Trees,
        scratch: AttentionScratch,
    ) -> Tensor: ...

    def delta(
        self,
        projected: Tensor,
        spec: DeltaSpec,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
        trees: Trees,
        scratch: DeltaScratch,
    ) -> Tensor: ...

    def commit_attention(
        self, scratch: AttentionScratch, keys: Tensor, values: Tensor, paths: Paths
    ) -> None: ...

    def commit_delta(
        self, scratch: DeltaScratch, conv_state: Tensor, delta_state: Tensor, paths: Paths
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class VerifyPass:
    """What a verify pass is besides its rows: how to run it, and the trees that the rows form."""

    ops: TreeOps
    trees: Trees


class Layer(Protocol):
    """One decoder layer."""

    def forward(self, ops: Ops, x: Tensor, state: LayerState, rows: Rows) -> Tensor:
        """x: [entries, rows, hidden], the residual stream; `state` moves on in place."""
        ...

    def verify(
        self, ops: Ops, x: Tensor, state: LayerState, rows: Rows, step: VerifyPass, scratch: Any
    ) -> Tensor:
        """As `forward`, for rows that form trees; `state` stays as it is, and `scratch`, of the
        layer's kind, takes what a path of the rows would change.
        """
        ...


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm; weight float32 [dim], with the family's offset already added."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Mlp:
    """SwiGLU with its norm. gate_up: [2 * inner, hidden], gate first; down: [hidden, inner]."""

    norm: Norm
    gate_up: Tensor
    down: Tensor

    def forward(self, ops: Ops, x: Tensor) -> Tensor:
        inner = ops.norm_swiglu(x, self.norm.weight, self.norm.eps, self.gate_up)
        return ops.linear_add(inner, self.down, x)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention, then MLP. projection: query, key, value (and gate) rows stacked, in this order."""

    spec: AttentionSpec
    norm: Norm
    projection: Tensor
    head_norms: AttentionNorms
    output: Tensor
    mlp: Mlp

    def forward(self, ops: Ops, x: Tensor, state: LayerState, rows: Rows) -> Tensor:
        projected = ops.norm_linear(x, self.norm.weight, self.norm.eps, self.projection)
        mixed = ops.attend(projected, self.spec, self.head_norms, *state, rows)
        return self.mlp.forward(ops, ops.linear_add(mixed, self.output, x))

    def verify(
        self,
        ops: Ops,
        x: Tensor,
        state: LayerState,
        rows: Rows,
        step: VerifyPass,
        scratch: AttentionScratch,
    ) -> Tensor:
        projected = ops.norm_linear(x, self.norm.weight, self.norm.eps, self.projection)
        mixed = step.ops.attend(
            projected, self.spec, self.head_norms, *state, rows, step.trees, scratch
        )
        return self.mlp.forward(ops, ops.linear_add(mixed, self.output, x))


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Gated DeltaNet, then MLP. projection: query|key|value, z, b, a rows stacked, in this
    order.
    """

    spec: DeltaSpec
    norm: Norm
    projection: Tensor
    parameters: DeltaParameters
    output: Tensor
    mlp: Mlp

    def forward(self, ops: Ops, x: Tensor, state: LayerState, rows: Rows) -> Tensor:
        projected = ops.norm_linear(x, self.norm.weight, self.norm.eps, self.projection)
        mixed = ops.delta(projected, self.spec, self.parameters, *state, rows)
        return self.mlp.forward(ops, ops.linear_add(mixed, self.output, x))

    def verify(
        self,
        ops: Ops,
        x: Tensor,
        state: LayerState,
        rows: Rows,
        step: VerifyPass,
        scratch: DeltaScratch,
    ) -> Tensor:
        projected = ops.norm_linear(x, self.norm.weight, self.norm.eps, self.projection)
        mixed = step.ops.delta(
            projected, self.spec, self.parameters, *state, rows, step.trees, scratch
        )
        return self.mlp.forward(ops, ops.linear_add(mixed, self.output, x))


def rotation(spec: AttentionSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [entries, rows, rotary_dim / 2], of RoPE (Su et al., 2021) at
    `positions`.
    """
    half = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device=positions.device)
    inverse = spec.rope_theta ** -(half / spec.rotary_dim)
    angles = positions.float()[..., None] * inverse
    return angles.cos(), angles.sin()
