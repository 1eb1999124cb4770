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
from luceasync.models.rows import Entry, Rows
from luceasync.models.spec import AttentionSpec, DeltaSpec
from luceasync.models.trees import (
    AttentionScratch,
    DeltaScratch,
    Scratch,
    Trees,
    attend_trees,
    commit_attention,
    commit_delta,
    delta_trees,
)

LayerState = tuple[Tensor, Tensor]  # (keys, values) or (conv, delta): all lanes of one layer


class Ops(Protocol):
    """The operations of luceasync.models.ops.TorchOps, which says what each means."""

    def pack(self, weight: Tensor) -> Tensor: ...

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


class Layer(Protocol):
    """One decoder layer."""

    def forward(self, ops: Ops, x: Tensor, state: LayerState, rows: Rows) -> Tensor:
        """x: [entries, rows, hidden], the residual stream; `state` moves on in place."""
        ...

    def verify(
        self, ops: Ops, x: Tensor, state: LayerState, rows: Rows, trees: Trees
    ) -> tuple[Tensor, Scratch]:
        """As `forward`, for rows that form trees; `state` stays as it is."""
        ...

    def commit(
        self, scratch: Any, state: LayerState, entry: int, path: Tensor, placed: Entry
    ) -> None:
        """Move the state on along `path` (rows of `entry` of a verify pass); `placed` says where
        its tokens go.
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
        self, ops: Ops, x: Tensor, state: LayerState, rows: Rows, trees: Trees
    ) -> tuple[Tensor, AttentionScratch]:
        projected = ops.norm_linear(x, self.norm.weight, self.norm.eps, self.projection)
        mixed, scratch = attend_trees(projected, self.spec, self.head_norms, *state, rows, trees)
        return self.mlp.forward(ops, ops.linear_add(mixed, self.output, x)), scratch

    def commit(
        self, scratch: AttentionScratch, state: LayerState, entry: int, path: Tensor, placed: Entry
    ) -> None:
        commit_attention(scratch, *state, entry, placed.lane, path, placed.write)


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
        self, ops: Ops, x: Tensor, state: LayerState, rows: Rows, trees: Trees
    ) -> tuple[Tensor, DeltaScratch]:
        projected = ops.norm_linear(x, self.norm.weight, self.norm.eps, self.projection)
        mixed, scratch = delta_trees(projected, self.spec, self.parameters, *state, rows, trees)
        return self.mlp.forward(ops, ops.linear_add(mixed, self.output, x)), scratch

    def commit(
        self, scratch: DeltaScratch, state: LayerState, entry: int, path: Tensor, placed: Entry
    ) -> None:
        commit_delta(scratch, *state, entry, placed.lane, path)


def rotation(spec: AttentionSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [entries, rows, rotary_dim / 2], of RoPE (Su et al., 2021) at
    `positions`.
    """
    half = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device=positions.device)
    inverse = spec.rope_theta ** -(half / spec.rotary_dim)
    angles = positions.float()[..., None] * inverse
    return angles.cos(), angles.sin()
