"""Both ends of a model: the embedding before its first layer, norm and head after its last."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from luceasync.models.layer_reader import TensorPart
from luceasync.models.loader import TensorReader
from luceasync.models.ops import Norm
from luceasync.models.weights import EmbeddingTable, Weight


@dataclass(frozen=True, slots=True)
class ModelEnds:
    """The ends that a shard has. A tied head is the embedding."""

    embedding: EmbeddingTable | None
    norm: Norm | None
    head: Weight | None

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up int64 tokens [...] -> [..., hidden]. First shard only."""
        assert self.embedding is not None, "only the first shard embeds"
        return self.embedding.lookup(tokens)

    def project_rows(self, x: Tensor) -> Tensor:
        """Apply the head without the final norm: [..., hidden] -> logits float32 [..., vocab]. Last
        shard only.
        """
        assert self.head is not None, "only the last shard projects"
        return self.head.linear_float(x)

    def project(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply norm and head: [..., hidden] -> logits float32 [..., vocab], in `out` if given.
        Last shard only.
        """
        assert self.norm is not None and self.head is not None, "only the last shard projects"
        return self.head.linear_float(x, self.norm, out)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights; tied weights count once."""
        parts = {id(part): part for part in (self.embedding, self.head, self.norm) if part}
        return sum(part.num_bytes for part in parts.values())


def read_ends(reader: TensorReader, *, is_first: bool, is_last: bool) -> ModelEnds:
    """Read a shard's ends under the names that most families use. Raises ModelError."""
    spec = reader.spec
    shape = (spec.vocab_size, spec.hidden_size)
    name = f"{spec.prefix}embed_tokens.weight"
    embedding = reader.table(name, shape) if is_first else None
    if not is_last:
        return ModelEnds(embedding, None, None)
    norm = reader.norm(f"{spec.prefix}norm.weight", (spec.hidden_size,))
    if not spec.tied_embeddings:
        head: Weight = reader.stacked([TensorPart("lm_head.weight")], {"lm_head.weight": shape})
    else:  # never packed: the same bits, whether or not the embedding is on this shard
        head = embedding or reader.table(name, shape)
    return ModelEnds(embedding, norm, head)
