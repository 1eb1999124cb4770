"""Both ends of a model: the embedding before its first layer, norm and head after its last."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.models.layer_reader import TensorPart
from luceasync.models.loader import TensorReader
from luceasync.models.ops import Norm
from luceasync.models.pass_rows import Handed
from luceasync.models.spec import INPUT_NORM, INPUT_PROJECTION, INPUT_TABLE
from luceasync.models.weights import EmbeddingTable, Weight


@dataclass(frozen=True, slots=True)
class InputsOfLayers:
    """Makes an input of each layer from tokens and their embeddings, and hands them to the layers.
    table: [vocab, layers * size]; projection: [layers * size, hidden]."""

    table: EmbeddingTable
    projection: Weight
    norm: Norm
    handed: Handed

    @property
    def num_bytes(self) -> int:
        return self.table.num_bytes + self.projection.num_bytes + self.norm.num_bytes

    def hand(self, tokens: Tensor, x: Tensor) -> None:
        """tokens: int64 [entries, rows]; x: [entries, rows, hidden], as embedded."""
        size = len(self.norm.weight)
        projected = (self.projection.linear(x) * x.shape[-1] ** -0.5).unflatten(-1, (-1, size))
        of_tokens = (self.table.lookup(tokens) * math.sqrt(size)).view(projected.shape)
        self.handed.inputs = (self.norm(projected) + of_tokens) * 2**-0.5


@dataclass(frozen=True, slots=True)
class ModelEnds:
    """The ends that a shard has. A tied head is the embedding. `suppressed`: int64 ids of tokens
    that are never chosen; their logits are -inf. `scale`, `cap`: see ModelSpec."""

    embedding: EmbeddingTable | None
    norm: Norm | None
    head: Weight | None
    suppressed: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None
    inputs: InputsOfLayers | None = None

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up int64 tokens [...] -> [..., hidden]. First shard only."""
        assert self.embedding is not None, "only the first shard embeds"
        rows = self.embedding.lookup(tokens)
        if self.scale != 1.0:
            # In the rows' dtype, as in training.
            rows = rows * torch.tensor(self.scale, dtype=rows.dtype).item()
        if self.inputs is not None:
            self.inputs.hand(tokens, rows)
        return rows

    def project_rows(self, x: Tensor) -> Tensor:
        """Apply the head without the final norm: [..., hidden] -> logits float32 [..., vocab]. Last
        shard only.
        """
        assert self.head is not None, "only the last shard projects"
        return self._chosen(self.head.linear_float(x))

    def project_uncapped(self, x: Tensor) -> Tensor:
        """`project_rows` without the cap on logits, for a drafter that has its own."""
        assert self.head is not None, "only the last shard projects"
        return self._suppressed(self.head.linear_float(x))

    def project(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply norm and head: [..., hidden] -> logits float32 [..., vocab], in `out` if given.
        Last shard only.
        """
        assert self.norm is not None and self.head is not None, "only the last shard projects"
        return self._chosen(self.head.linear_float(x, self.norm, out))

    def _chosen(self, logits: Tensor) -> Tensor:
        """The logits by which tokens are chosen, computed in place."""
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return self._suppressed(logits)

    def _suppressed(self, logits: Tensor) -> Tensor:
        if self.suppressed is None:
            return logits
        return logits.index_fill_(-1, self.suppressed, -torch.inf)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights; tied weights count once."""
        own = (self.embedding, self.head, self.norm, self.inputs)
        parts = {id(part): part for part in own if part}
        return sum(part.num_bytes for part in parts.values())


def read_ends(reader: TensorReader, *, is_first: bool, is_last: bool) -> ModelEnds:
    """Read a shard's ends. Raises ModelError."""
    spec, shape = reader.spec, (reader.spec.vocab_size, reader.spec.hidden_size)
    embedding = reader.table(spec.embedding_name, shape) if is_first else None
    inputs = _read_inputs(reader) if is_first and spec.layer_inputs is not None else None
    if not is_last:
        return ModelEnds(embedding, None, None, scale=spec.embedding_scale, inputs=inputs)
    norm = reader.norm(f"{spec.prefix}{spec.end_names.norm}", (spec.hidden_size,))
    if not spec.tied_embeddings:
        name = spec.end_names.head
        head: Weight = reader.stacked([TensorPart(name)], {name: shape})
    else:  # never packed: this gives the same bits, whether or not the embedding is on this shard
        head = embedding or reader.table(spec.embedding_name, shape)
    suppressed = None
    if spec.suppressed:
        suppressed = torch.tensor(spec.suppressed, device=reader.place.device)
    scale, cap = spec.embedding_scale, spec.logit_cap
    return ModelEnds(embedding, norm, head, suppressed, scale, cap, inputs)


def _read_inputs(reader: TensorReader) -> InputsOfLayers:
    spec = reader.spec
    assert spec.layer_inputs is not None
    shapes = {
        f"{spec.prefix}{name}": shape
        for name, shape in spec.layer_inputs.shapes(spec.num_layers, spec.hidden_size).items()
    }
    table, projection, norm = (
        f"{spec.prefix}{name}" for name in (INPUT_TABLE, INPUT_PROJECTION, INPUT_NORM)
    )
    return InputsOfLayers(
        reader.table(table, shapes[table]),
        reader.stacked([TensorPart(projection)], shapes),
        reader.norm(norm, shapes[norm]),
        reader.handed,
    )
