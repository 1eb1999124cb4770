"""Gated DeltaNet (Yang, Kautz, Hatamizadeh, 2024): its state, its weights, and its implementations.

These (delta_torch and delta_triton) know only its sizes. Does not import torch at its top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from luceasync.kv.state import StateTensor
from luceasync.models.mixers.delta_sizes import DeltaParameters, DeltaSizes
from luceasync.models.mixers.mixer import MixerBody, Shape, State

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.layer_reader import LayerReader
    from luceasync.models.ops import Norm
    from luceasync.models.pass_rows import Rows
    from luceasync.models.trees import Trees
    from luceasync.models.weights import Weight


END_KINDS = CONV, DELTA = "conv", "delta"  # snapshot names of the end state


@dataclass(frozen=True, slots=True)
class DeltaSpec(DeltaSizes):
    """The Mixer of Gated DeltaNet."""

    @property
    def rows(self) -> tuple[StateTensor, ...]:
        return ()

    @property
    def end(self) -> tuple[StateTensor, ...]:
        window = self.conv_kernel - 1
        heads = (self.num_value_heads, self.key_dim, self.value_dim)
        return (
            StateTensor(CONV, (window, self.conv_channels), "compute"),
            StateTensor(DELTA, heads, "float32"),
        )

    @property
    def scratch(self) -> tuple[StateTensor, ...]:
        """Inputs of the convolution, keys, updates u, and log decay since the committed end."""
        return (
            StateTensor("inputs", (self.conv_channels,), "compute"),
            StateTensor("keys", (self.num_key_heads, self.key_dim), "float32"),
            StateTensor("updates", (self.num_value_heads, self.value_dim), "float32"),
            StateTensor("totals", (self.num_value_heads,), "float32"),
        )

    @property
    def recent(self) -> None:
        """None: it has no chunks that could be absent."""
        return None

    @property
    def reach(self) -> int:
        return self.conv_kernel

    @property
    def width(self) -> int:
        return self.conv_channels + self.output_dim

    @property
    def verified_row_bytes(self) -> int:
        return 0

    def tensors(self, hidden_size: int) -> dict[str, Shape]:
        return {
            "linear_attn.in_proj_qkv.weight": (self.conv_channels, hidden_size),
            "linear_attn.in_proj_z.weight": (self.output_dim, hidden_size),
            "linear_attn.in_proj_b.weight": (self.num_value_heads, hidden_size),
            "linear_attn.in_proj_a.weight": (self.num_value_heads, hidden_size),
            "linear_attn.conv1d.weight": (self.conv_channels, 1, self.conv_kernel),
            "linear_attn.A_log": (self.num_value_heads,),
            "linear_attn.dt_bias": (self.num_value_heads,),
            "linear_attn.norm.weight": (self.value_dim,),
            "linear_attn.out_proj.weight": (hidden_size, self.output_dim),
            "input_layernorm.weight": (hidden_size,),
        }

    def load(self, reader: LayerReader) -> DeltaLayer:
        """Read one layer. The inner norm is used as stored in every family, without offset."""
        stacked = [f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
        decay = reader.vector("linear_attn.A_log")
        return DeltaLayer(
            body=reader.ops.pick(self.torch_body, self.triton_body, self.compiled_body),
            norm=reader.norm("input_layernorm.weight"),
            projection=reader.matrix(*stacked),
            parameters=DeltaParameters(
                conv=reader.vector("linear_attn.conv1d.weight").squeeze(1),
                decay_rate=decay if self.stores_decay_rate else -decay.exp(),
                dt_bias=reader.vector("linear_attn.dt_bias"),
                norm=reader.vector("linear_attn.norm.weight"),
                eps=reader.norm_eps,
            ),
            output=reader.matrix("linear_attn.out_proj.weight"),
        )

    def torch_body(self) -> DeltaBody:
        from luceasync.models.mixers.delta_torch import TorchDelta

        return TorchDelta(self)

    def triton_body(self) -> DeltaBody:
        from luceasync.models.mixers.delta_triton import TritonDelta

        return TritonDelta(self)

    def compiled_body(self) -> DeltaBody:
        return self.torch_body()


class DeltaBody(MixerBody, Protocol):
    """An implementation of Gated DeltaNet; delta_torch.TorchDelta documents the methods."""

    def delta(
        self,
        projected: Tensor,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
    ) -> Tensor: ...

    def delta_tree(
        self,
        projected: Tensor,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
        trees: Trees,
        scratch: State,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Gated DeltaNet with its weights. projection: query|key|value, z, b, a rows, in this order."""

    body: DeltaBody
    norm: Norm
    projection: Weight
    parameters: DeltaParameters
    output: Weight

    @property
    def num_bytes(self) -> int:
        parts = (self.norm, self.projection, self.parameters, self.output)
        return sum(part.num_bytes for part in parts)

    def forward(self, x: Tensor, state: State, rows: Rows) -> Tensor:
        projected = self.projection.linear(x, self.norm)
        conv, delta = state
        mixed = self.body.delta(projected, self.parameters, conv, delta, rows)
        return self.output.linear_add(mixed, x)

    def verify(self, x: Tensor, state: State, rows: Rows, trees: Trees, scratch: State) -> Tensor:
        projected = self.projection.linear(x, self.norm)
        conv, delta = state
        parameters = self.parameters
        mixed = self.body.delta_tree(projected, parameters, conv, delta, rows, trees, scratch)
        return self.output.linear_add(mixed, x)
