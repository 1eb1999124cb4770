"""Grouped-query attention to all earlier tokens: its state, its weights, and its implementations.

These (attention_torch and others) know only its sizes. Does not import torch at its top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from luceasync.kv.state import StateTensor
from luceasync.models.layer_reader import LayerReader, TensorPart
from luceasync.models.mixers.attention_sizes import AttentionBody, AttentionSizes, HeadNorms
from luceasync.models.mixers.mixer import ProbeBody, Shape, State

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.ops import Norm, Ops
    from luceasync.models.pass_rows import Handed, Rows
    from luceasync.models.trees import Trees
    from luceasync.models.weights import Weight

RECENT_ROWS = 64  # queries of a lane that probe its chunks
BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
SOFTPLUS_GATE = "self_attn.g_proj.weight"
KEYS, VALUES = "self_attn.k_proj.weight", "self_attn.v_proj.weight"
QUERY_NORM, KEY_NORM = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
OUTPUT_NORM = "post_attention_layernorm.weight"
VERIFY_SPLITS = 32  # parts of a context that programs of kernels.tree_attention share


@dataclass(frozen=True, slots=True)
class AttentionSpec(AttentionSizes):
    """The Mixer of attention."""

    @property
    def rows(self) -> tuple[StateTensor, ...]:
        if self.keys == "borrowed":
            return ()  # keys of this layer are those of the layer that lends them
        heads = (self.num_kv_heads, self.head_dim)
        return StateTensor("attn_k", heads, "kv"), StateTensor("attn_v", heads, "kv")

    @property
    def end(self) -> tuple[StateTensor, ...]:
        return ()

    @property
    def scratch(self) -> tuple[StateTensor, ...]:
        return self.rows

    @property
    def recent(self) -> RecentQueries | None:
        if self.keys == "borrowed":
            return None
        return RecentQueries(self.num_heads, self.head_dim)

    @property
    def reach(self) -> int:
        return 1

    @property
    def width(self) -> int:
        return self.query_dim * 4

    @property
    def verified_row_bytes(self) -> int:
        return self.query_dim * VERIFY_SPLITS * 4

    def tensors(self, hidden_size: int) -> dict[str, Shape]:
        norms = (QUERY_NORM,) if self.keys == "borrowed" else (QUERY_NORM, KEY_NORM)
        dims = (self.query_dim, self.kv_dim, self.kv_dim)
        biases = zip(BIASES, dims, strict=True) if self.has_bias else ()
        return {
            "self_attn.q_proj.weight": (self.query_dim * (2 if self.gated else 1), hidden_size),
            **dict.fromkeys(self._keys_values, (self.kv_dim, hidden_size)),
            "self_attn.o_proj.weight": (hidden_size, self.query_dim),
            **{name: (dim,) for name, dim in biases},
            **{name: (self.head_dim,) for name in norms if self.has_head_norms},
            "input_layernorm.weight": (hidden_size,),
            **({OUTPUT_NORM: (hidden_size,)} if self.norms_output else {}),
            **({SOFTPLUS_GATE: (self.softplus_dim, hidden_size)} if self.softplus_gate else {}),
        }

    def load(self, reader: LayerReader) -> AttentionLayer:
        query = TensorPart("self_attn.q_proj.weight")
        gates: list[TensorPart] = []
        if self.gated:  # stacked, the gates of all heads come after the values
            gates = [TensorPart(query.name, self._of_each_head(1), divisor=2)]
            query = TensorPart(query.name, self._of_each_head(0), divisor=2)
        keys_values = [TensorPart(name) for name in self._keys_values]
        return AttentionLayer(
            body=reader.ops.pick(self.torch_body, self.triton_body, self.compiled_body),
            norm=reader.norm("input_layernorm.weight"),
            projection=reader.stacked([query, *keys_values, *gates]),
            bias=self._bias(reader),
            head_norms=self._head_norms(reader),
            output=reader.matrix("self_attn.o_proj.weight"),
            output_norm=reader.norm(OUTPUT_NORM) if self.norms_output else None,
            softplus_gate=reader.matrix(SOFTPLUS_GATE) if self.softplus_gate else None,
            values=self._value_norm(reader),
            loan=None if self.keys == "own" else KeyLoan(self, reader.handed),
        )

    @property
    def _keys_values(self) -> tuple[str, ...]:
        """The matrices of keys and values."""
        if self.keys == "borrowed":
            return ()
        return (KEYS,) if self.shares_keys else (KEYS, VALUES)

    def _bias(self, reader: LayerReader) -> Tensor | None:
        """The biases of query, key and value, float32 [projection width]."""
        if not self.has_bias:
            return None
        assert not self.gated, "gates with a bias come apart like the rows of their projection"
        import torch

        return torch.cat([reader.vector(name) for name in BIASES])

    def _head_norms(self, reader: LayerReader) -> HeadNorms:
        if not self.has_head_norms:
            assert self.query_scale == 1.0, "a norm's weight holds it"
            return HeadNorms(None, None, reader.norm_eps)
        query = reader.vector(QUERY_NORM, reader.norm_offset) * self.query_scale
        if self.keys == "borrowed":
            return HeadNorms(query, None, reader.norm_eps)
        return HeadNorms(query, reader.vector(KEY_NORM, reader.norm_offset), reader.norm_eps)

    def _value_norm(self, reader: LayerReader) -> ValueNorm | None:
        if self.keys == "borrowed":
            return None  # they are already normed
        if not self.norms_values:
            assert not self.shares_keys, "values that are keys are normed"
            return None
        assert not self.gated, "gates come after the values"
        begin = self.query_dim + (0 if self.shares_keys else self.kv_dim)
        end = self.query_dim + self.kv_dim
        return ValueNorm(reader.ops, begin, end, self.head_dim, reader.norm_eps)

    def torch_body(self) -> AttentionBody:
        from luceasync.models.mixers.attention_torch import TorchAttention

        return TorchAttention(self)

    def triton_body(self) -> AttentionBody:
        from luceasync.models.mixers.attention_triton import TritonAttention

        return TritonAttention(self)

    def compiled_body(self) -> AttentionBody:
        from luceasync.models.mixers.attention_compiled import CompiledAttention, can_attend

        return CompiledAttention(self) if can_attend(self) else self.torch_body()

    def _of_each_head(self, which: int) -> Callable[[Tensor], Tensor]:
        """A Select of every head's query rows (0) or gate rows (1)."""

        def select(stored: Tensor) -> Tensor:
            by_head: Tensor = stored.unflatten(0, (self.num_heads, 2, -1))
            return by_head[:, which].flatten(0, 1)

        return select


@dataclass(frozen=True, slots=True)
class RecentQueries:
    """The RecentSpec of attention: queries, normed and rotated as when they are multiplied with
    keys."""

    num_heads: int
    head_dim: int

    @property
    def ring(self) -> StateTensor:
        return StateTensor("attn_q", (RECENT_ROWS, self.num_heads, self.head_dim), "compute")

    @property
    def scratch(self) -> StateTensor:
        return StateTensor("attn_q", (self.num_heads, self.head_dim), "compute")

    @property
    def probed_tensor(self) -> str:
        return "attn_k"

    def torch_body(self) -> ProbeBody:
        from luceasync.models.mixers.attention_torch import TorchProbe

        return TorchProbe()

    def triton_body(self) -> ProbeBody:
        from luceasync.models.mixers.attention_triton import TritonProbe

        return TritonProbe()


@dataclass(frozen=True, slots=True)
class ValueNorm:
    """RMS norms of value heads, without a weight. Values are the projection's last columns, from
    `begin` on, which may be its keys; keys end at `end`.
    """

    ops: Ops
    begin: int
    end: int
    head_dim: int
    eps: float

    def __call__(self, projected: Tensor) -> Tensor:
        """[..., width] -> query, key and normed value columns."""
        return self.ops.norm_values(projected, self.begin, self.end, self.head_dim, self.eps)


@dataclass(frozen=True, slots=True)
class KeyLoan:
    """Hands a layer's keys and values to later layers, or uses those of an earlier one. A borrower
    with a window has its own rings: by the time it runs, a chunk has overwritten the lender's."""

    sizes: AttentionSizes
    handed: Handed

    def __call__(self, projected: Tensor, norms: HeadNorms) -> tuple[Tensor, HeadNorms]:
        """Columns of query, key and value, and their norms. A borrower projects only a query."""
        import torch

        from luceasync.models.pass_rows import LentKeys

        window, kept = self.sizes.window, self.handed.keys
        if self.sizes.keys == "borrowed":
            lent = kept[window]
            return torch.cat([projected, lent.columns], -1), replace(norms, key=lent.norm)
        assert norms.key is not None and not self.sizes.gated
        kept[window] = LentKeys(projected[..., self.sizes.query_dim :].clone(), norms.key)
        return projected, norms

    def places(self, state: State, rows: Rows, scratch: State) -> tuple[State, Rows, State]:
        """Where keys and values of this layer are: state, earlier rows and scratch. A borrower
        writes there again what the lender wrote."""
        if self.sizes.window:
            return state, rows, scratch
        if self.sizes.keys == "borrowed":
            assert self.handed.places is not None, "the lender comes first"
            state, past, scratch = self.handed.places
            return state, replace(rows, past=past), scratch
        self.handed.places = state[:2], rows.past, scratch[:2]  # without a ring of newest queries
        return state, rows, scratch


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention with its weights. projection: query, key, value (and gate) rows, in this order.
    bias: float32, added to their products.
    """

    body: AttentionBody
    norm: Norm
    projection: Weight
    bias: Tensor | None
    head_norms: HeadNorms
    output: Weight
    output_norm: Norm | None = None
    softplus_gate: Weight | None = None
    values: ValueNorm | None = None
    loan: KeyLoan | None = None

    @property
    def num_bytes(self) -> int:
        parts = (self.norm, self.projection, self.head_norms, self.output)
        own = (*parts, self.output_norm, self.softplus_gate)
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return sum(part.num_bytes for part in own if part is not None) + bias_bytes

    def forward(self, x: Tensor, state: State, rows: Rows) -> Tensor:
        projected, norms = self._projected(x)
        if self.loan is not None:
            state, rows, _ = self.loan.places(state, rows, ())
        if self.softplus_gate is None and self.output_norm is None:
            return self.body.add(projected, norms, state, rows, self.output, x)
        return self._added(self.body.attend(projected, norms, state, rows), x)

    def verify(self, x: Tensor, state: State, rows: Rows, trees: Trees, scratch: State) -> Tensor:
        projected, norms = self._projected(x)
        if self.loan is not None:
            state, rows, scratch = self.loan.places(state, rows, scratch)
        given = (projected, norms, state, rows, trees, scratch)
        if self.softplus_gate is None and self.output_norm is None:
            return self.body.add_tree(*given, self.output, x)
        return self._added(self.body.attend_tree(*given), x)

    def _added(self, mixed: Tensor, x: Tensor) -> Tensor:
        """The sum of the residual stream and the output of `mixed` heads."""
        if self.softplus_gate is not None:
            mixed = self._gated(mixed, x, self.softplus_gate)
        if self.output_norm is None:
            return self.output.linear_add(mixed, x)
        return self.output_norm.add_to(x, self.output.linear(mixed))

    def _gated(self, mixed: Tensor, x: Tensor, weight: Weight) -> Tensor:
        """Heads [..., numbers], each times softplus of its gate, which is computed in float32."""
        from torch.nn.functional import softplus

        gate = softplus(weight.linear(x, self.norm).float()).to(mixed.dtype)
        heads: Tensor = mixed.unflatten(-1, (gate.shape[-1], -1)) * gate[..., None]
        return heads.flatten(-2)

    def _projected(self, x: Tensor) -> tuple[Tensor, HeadNorms]:
        """Columns of query, key, value and gate, and the norms of heads."""
        projected = self.projection.linear(x, self.norm)
        if self.values is not None:
            projected = self.values(projected)
        if self.bias is not None:
            # In float32, rounded once more afterwards: biases of keys may be hundreds of times
            # larger.
            projected = projected.add_(self.bias)
        norms = self.head_norms
        return (projected, norms) if self.loan is None else self.loan(projected, norms)
