"""The frozen target as training sees it: whole sequences at once, no cache, with its taps.

Runs the layers that the server runs, read by the same loader; only what touches a lane's state is
replaced. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.config import read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.models.loader import TensorReader
from luceasync.models.mixers.attention import AttentionSpec, HeadNorms
from luceasync.models.mixers.attention_torch import attention_widths, heads_norm, rotate, rotation
from luceasync.models.mixers.delta import DeltaParameters, DeltaSpec
from luceasync.models.mixers.delta_torch import delta_gates, delta_heads, delta_widths, gated_norm
from luceasync.models.mixers.gated_delta import delta_chunks
from luceasync.models.ops import TorchOps, rms_norm
from luceasync.pipeline.adapter import adapter_of

HEAD_ROWS = 16384  # at a time: logits are large


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rotation of whole sequences: float32 [1, tokens, rotary_dim / 2]."""

    cos: Tensor
    sin: Tensor


class _SequenceOps(TorchOps):
    """TorchOps for sequences that begin with their first row; the states handed in stay unused."""

    def attend(
        self,
        projected: Tensor,
        spec: AttentionSpec,
        norms: HeadNorms,
        keys: Tensor,
        values: Tensor,
        rows: _Rows,
    ) -> Tensor:
        q, k, v, *gates = projected.split(attention_widths(spec), -1)
        q = rotate(heads_norm(q, spec.head_dim, norms.query, norms.eps), spec, rows)
        k = rotate(heads_norm(k, spec.head_dim, norms.key, norms.eps), spec, rows)
        v = v.unflatten(-1, (-1, spec.head_dim))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2).flatten(2)
        for gate in gates:
            out = out * torch.sigmoid(gate)
        return out

    def delta(
        self,
        projected: Tensor,
        spec: DeltaSpec,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: _Rows,
    ) -> Tensor:
        mixed, z, b, a = projected.split(delta_widths(spec), -1)
        kernel, num_rows = parameters.conv.shape[1], mixed.shape[1]
        window = F.pad(mixed.float(), (0, 0, kernel - 1, 0))
        taps = (window[:, i : i + num_rows] * parameters.conv[:, i] for i in range(kernel))
        q, k, v = delta_heads(F.silu(sum(taps)), spec)
        g, beta = delta_gates(a, b, parameters)
        state = q.new_zeros(q.shape[0], spec.num_value_heads, spec.key_dim, spec.value_dim)
        out, _ = delta_chunks(q, k, v, g, beta, state)
        return gated_norm(out, z, parameters)


class FrozenTarget:
    """A model directory's network on one device. Nothing in it learns."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError."""
        self.spec = read_spec(model_dir)
        self.device = device
        self.dtype = dtype
        self._ops = _SequenceOps()
        shape = (self.spec.vocab_size, self.spec.hidden_size)
        with open_checkpoint(model_dir) as checkpoint:
            reader = TensorReader(
                checkpoint, self.spec, device, dtype, lambda num_bytes: None, self._ops.pack
            )
            read_layer = adapter_of(self.spec).read_layer
            self._layers = [read_layer(reader, layer) for layer in range(self.spec.num_layers)]
            self.embedding = reader.table(f"{self.spec.prefix}embed_tokens.weight", shape)
            norm = f"{self.spec.prefix}norm.weight"
            shapes = {norm: (self.spec.hidden_size,)}
            self.norm = reader.vector(norm, shapes, self.spec.norm_offset)
            tied = self.spec.tied_embeddings
            self.head = self.embedding if tied else reader.table("lm_head.weight", shape)

    @torch.inference_mode()
    def run(self, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """tokens int64 [batch, tokens]: the features [batch, tokens, taps * hidden] and the final
        hidden rows [batch, tokens, hidden], ready for the head.
        """
        positions = torch.arange(tokens.shape[1], device=self.device)[None]
        rows = _Rows(*rotation(self.spec.attention, positions))
        x = F.embedding(tokens, self.embedding)
        nothing = x.new_empty(0)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(self._layers):
            x = layer.forward(self._ops, x, (nothing, nothing), rows)
            if i in taps:
                tapped[i] = x
        features = torch.cat([tapped[i] for i in taps], -1) if taps else nothing
        return features, rms_norm(x, self.norm, self.spec.norm_eps)

    @torch.inference_mode()
    def choices(self, rows: Tensor) -> Tensor:
        """The most probable token behind each row: int64 [batch, tokens] of [..., hidden]."""
        parts = rows.flatten(0, 1).split(HEAD_ROWS)
        chosen = torch.cat([F.linear(part, self.head).argmax(-1) for part in parts])
        return chosen.view(rows.shape[:2])
