"""What implementations of attention do, and the sizes and small weights that they are given.

Does not import torch at its top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from luceasync.models.mixers.mixer import MixerBody, State
from luceasync.models.rope import PLAIN, Rope

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.pass_rows import Rows
    from luceasync.models.trees import Trees
    from luceasync.models.weights import Weight


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """`rotary_dim` of each head's `head_dim` numbers are rotated. `gated`: the output is multiplied
    by sigmoid(gate), and q_proj holds query and gate of each head side by side. `has_head_norms`:
    each query and key head has an RMS norm. `has_bias`: query, key and value projections add a
    bias. `window`: newest tokens that a token sees, itself included; 0: all.
    `query_scale` multiplies normed queries. `norms_output`: an RMS norm comes before the addition
    to the residual stream. `softplus_gate`: the output is multiplied by softplus of g_proj's
    product, which has a number for each head, or for each "element" of each.
    `norms_values`: each value head has an RMS norm without a weight. `shares_keys`: values are what
    the projection of keys gives, before norm and rotation. `keys`: with "lent", the next layers
    with this window that have "borrowed" ones take keys and values of this one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gated: bool
    has_head_norms: bool = True
    rope: Rope = PLAIN
    has_bias: bool = False
    window: int = 0
    query_scale: float = 1.0
    norms_output: bool = False
    norms_values: bool = False
    shares_keys: bool = False
    softplus_gate: Literal["", "head", "element"] = ""
    keys: Literal["own", "lent", "borrowed"] = "own"

    @property
    def query_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def softplus_dim(self) -> int:
        """Numbers of the softplus gate of a row."""
        return {"": 0, "head": self.num_heads, "element": self.query_dim}[self.softplus_gate]

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of query and key heads, float32 [head_dim] each; None if there are none."""

    query: Tensor | None
    key: Tensor | None
    eps: float

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in (self.query, self.key) if weight is not None)


class AttentionBody(MixerBody, Protocol):
    """An implementation of attention; attention_torch.TorchAttention documents the methods."""

    def attend(self, projected: Tensor, norms: HeadNorms, state: State, rows: Rows) -> Tensor: ...

    def attend_tree(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        trees: Trees,
        scratch: State,
    ) -> Tensor: ...

    def add(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        output: Weight,
        x: Tensor,
    ) -> Tensor:
        """x + output(attend(...)). May overwrite x."""
        return output.linear_add(self.attend(projected, norms, state, rows), x)

    def add_tree(
        self,
        projected: Tensor,
        norms: HeadNorms,
        state: State,
        rows: Rows,
        trees: Trees,
        scratch: State,
        output: Weight,
        x: Tensor,
    ) -> Tensor:
        """x + output(attend_tree(...)). May overwrite x."""
        mixed = self.attend_tree(projected, norms, state, rows, trees, scratch)
        return output.linear_add(mixed, x)
