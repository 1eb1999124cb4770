"""The frozen target for training: whole sequences at once, no cache, with its taps.

Runs the same layers as the server, read by the same loader; only the parts that use a lane's state
are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.encodings import WeightPlacement
from luceasync.models.ends import read_ends
from luceasync.models.files import ModelFiles
from luceasync.models.loader import Layer, TensorReader
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_sizes import HeadNorms
from luceasync.models.mixers.attention_torch import TorchAttention, gated, heads_of
from luceasync.models.mixers.delta import DeltaSpec
from luceasync.models.mixers.delta_sizes import DeltaParameters
from luceasync.models.mixers.delta_torch import (
    TorchDelta,
    convolved,
    delta_gates,
    delta_heads,
    gated_norm,
)
from luceasync.models.mixers.gated_delta import delta_chunks
from luceasync.models.mixers.mixer import Mixer, State
from luceasync.models.ops import TorchOps
from training.draft.plain import PlainSource

HEAD_ROWS = 16384  # at a time: logits are large


@dataclass(frozen=True, slots=True)
class _Rows:
    """Whole sequences; `prepared` as in luceasync.models.pass_rows.Rows."""

    prepared: dict[Mixer, Any]


class _SequenceAttention(TorchAttention):
    """TorchAttention over sequences that begin with their first row; uses no state."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.spec = spec

    def attend(self, projected: Tensor, norms: HeadNorms, state: State, rows: _Rows) -> Tensor:
        q, k, v, gates = heads_of(projected, self.spec, norms, rows.prepared[self.spec])
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return gated(out.transpose(1, 2).flatten(2), gates)


class _SequenceDelta(TorchDelta):
    """TorchDelta over sequences that begin with their first row; uses no state."""

    def __init__(self, spec: DeltaSpec) -> None:
        super().__init__(spec)
        self.spec = spec

    def delta(
        self,
        projected: Tensor,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: _Rows,
    ) -> Tensor:
        spec = self.spec
        mixed, z, b, a = projected.split_with_sizes(self._widths, -1)
        window = F.pad(mixed, (0, 0, parameters.conv.shape[1] - 1, 0))
        q, k, v = delta_heads(F.silu(convolved(window, parameters.conv, mixed.shape[1])), spec)
        g, beta = delta_gates(a, b, parameters)
        state = q.new_zeros(q.shape[0], spec.num_value_heads, spec.key_dim, spec.value_dim)
        out, _, _ = delta_chunks(q, k, v, g, beta, state)
        return gated_norm(out, z, parameters)


OVER_SEQUENCES = {AttentionSpec: _SequenceAttention, DeltaSpec: _SequenceDelta}


def _over_sequences(layer: Layer, mixer: Mixer) -> Layer:
    """The layer with an implementation that runs whole sequences."""
    return replace(layer, mixer=replace(layer.mixer, body=OVER_SEQUENCES[type(mixer)](mixer)))


class FrozenTarget:
    """The network of a model directory on one device. Its weights are frozen."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        """`model_dir` is a directory or a GGUF file; quantised weights are unpacked. Raises
        ModelError.
        """
        files = ModelFiles(model_dir)
        self.spec = files.spec
        self.device = device
        self.dtype = dtype
        place = WeightPlacement(TorchOps(), device, dtype)
        with files.weights.open() as stored:
            reader = TensorReader(PlainSource(stored, place), self.spec, place)
            self.layers = [
                _over_sequences(reader.layer(i), mixer) for i, mixer in enumerate(self.spec.mixers)
            ]
            ends = read_ends(reader, is_first=True, is_last=True)
        self.embedding, self.norm, self.head = ends.embedding.rows, ends.norm, ends.head.rows

    @torch.inference_mode()
    def run(self, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run tokens int64 [batch, tokens]. Returns the features [batch, tokens, taps * hidden] and
        the final hidden rows [batch, tokens, hidden] for the head.
        """
        positions = torch.arange(tokens.shape[1], device=self.device)[None]
        prepared = {
            mixer: OVER_SEQUENCES[type(mixer)](mixer).prepare(positions)
            for mixer in set(self.spec.mixers)
        }
        rows = _Rows(prepared)
        x = F.embedding(tokens, self.embedding)
        nothing = x.new_empty(0)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            x = layer.forward(x, (nothing, nothing), rows)
            if i in taps:
                tapped[i] = x
        features = torch.cat([tapped[i] for i in taps], -1) if taps else nothing
        return features, self.norm(x)

    @torch.inference_mode()
    def choices(self, rows: Tensor) -> Tensor:
        """The most probable token after each row: int64 [batch, tokens] from [..., hidden]."""
        parts = rows.flatten(0, 1).split(HEAD_ROWS)
        chosen = torch.cat([F.linear(part, self.head).argmax(-1) for part in parts])
        return chosen.view(rows.shape[:2])
