"""The head that a model brings to draft with (multi-token prediction, MTP) on preallocated tensors.

One layer that predicts the token after the next from what the model's head sees of a token, and the
token behind it. Owns its weights, and keys, values and states of all lanes. Knows no target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from luceasync.models.encodings import WeightPlacement
from luceasync.models.feed_forward.feed_forward import FeedForwardLayer
from luceasync.models.layer_reader import LayerReader, TensorPart
from luceasync.models.loader import TensorReader, TensorSource
from luceasync.models.ops import Norm
from luceasync.models.spec import MTP, ModelSpec
from luceasync.models.weights import EmbeddingTable, Weight
from luceasync.speculation.dflash.context import DraftContext
from luceasync.speculation.dflash.draft import ChooseOps, Embed
from luceasync.speculation.dflash.draft_ops import AttendedLayer
from luceasync.speculation.dflash.draft_spec import DraftSpec, spec_of_layer

RING_TOKENS = 4096  # places for keys and values of a lane
HEAD_ROWS = 32768  # tokens that are drafted first of all: byte pairs are merged by frequency
SPARE_PLACES = 62  # of them: rows that were drafted and refused replace none that is still seen

OTHER_ROWS = 1024  # more of a lane's prompt

# The best tokens after rows [entries, 1, hidden] of lanes [entries]: int64 [entries].
Choose = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The weights on one device. `projection`: query, key, value rows, and gates; `context`: key
    and value rows alone; heads' numbers are ordered as `in_halves` says. `final_norm`: the model's.
    """

    embedding_norm: Norm
    hidden_norm: Norm
    fc: Weight
    norm: Norm
    final_norm: Norm
    projection: Weight
    context: Weight
    layer: AttendedLayer
    output: Weight
    feed_forward: FeedForwardLayer

    @property
    def num_bytes(self) -> int:
        norms = (self.embedding_norm, self.hidden_norm, self.norm, self.final_norm)
        matrices = (self.fc, self.projection, self.context, self.output, self.feed_forward)
        return sum(part.num_bytes for part in (*norms, *matrices))


def head_name(spec: ModelSpec) -> str:
    """The checkpoint name of the model's head."""
    return spec.embedding_name if spec.tied_embeddings else spec.end_names.head


@dataclass(frozen=True, slots=True)
class HeadReader:
    """Reads rows of the model's head."""

    source: TensorSource
    spec: ModelSpec
    place: WeightPlacement

    def __call__(self, tokens: Sequence[int]) -> EmbeddingTable:
        """The rows of these tokens. Raises ModelError."""
        shape = (self.spec.vocab_size, self.spec.hidden_size)
        reader = TensorReader(self.source, self.spec, self.place)
        found = reader.some_rows(head_name(self.spec), shape, tokens)
        self.place.findings.raise_fault()
        return found


def context_spec(spec: ModelSpec) -> DraftSpec:
    """The head's layer, as rings and operations of drafters know it."""
    return spec_of_layer(spec, RING_TOKENS - SPARE_PLACES)


def in_halves(spec: DraftSpec) -> list[int]:
    """An order of a head's numbers in which each that turns is half a head before its partner, as
    drafters' kernels pair them, though the layer turns a part of each head alone. Scores are the
    same in any order that queries and keys share.
    """
    dim, turned = spec.attention.head_dim, spec.attention.rotary_dim // 2
    still = range(2 * turned, dim)
    num_first = dim // 2 - turned
    first = [*range(turned), *still[:num_first]]
    return [*first, *range(turned, 2 * turned), *still[num_first:]]


def read_mtp(
    source: TensorSource, spec: ModelSpec, place: WeightPlacement, advance: Callable[[int], None]
) -> MtpWeights:
    """Read the layer, and the final norm of the model. Raises ModelError."""
    assert spec.mtp is not None
    drafting, hidden = context_spec(spec), spec.hidden_size
    model = TensorReader(source, spec, place)
    final_norm = model.norm(f"{spec.prefix}{spec.end_names.norm}", (hidden,))
    # The layer has the names that it would have in a model of its own.
    reader = TensorReader(source, replace(spec, prefix=MTP, layers=(spec.mtp,)), place, advance)
    layer, name, heads = reader.of_layer(0), f"{MTP}fc.weight", _HeadParts(drafting)
    own = [heads.query(0), heads.keys(), TensorPart("self_attn.v_proj.weight"), heads.query(1)]
    return MtpWeights(
        embedding_norm=reader.norm(f"{MTP}pre_fc_norm_embedding.weight", (hidden,)),
        hidden_norm=reader.norm(f"{MTP}pre_fc_norm_hidden.weight", (hidden,)),
        fc=reader.stacked([TensorPart(name)], {name: (hidden, 2 * hidden)}),
        norm=reader.norm(f"{MTP}norm.weight", (hidden,)),
        final_norm=final_norm,
        projection=layer.stacked(own),
        context=layer.stacked(own[1:3]),
        layer=AttendedLayer(layer.norm("input_layernorm.weight"), _head_norms(drafting, layer)),
        output=layer.matrix("self_attn.o_proj.weight"),
        feed_forward=spec.mtp.feed_forward.load(layer),
    )


@dataclass(frozen=True, slots=True)
class _HeadParts:
    """Rows of projections, each head's in the order of `in_halves`."""

    spec: DraftSpec

    def query(self, which: int) -> TensorPart:
        """Queries (0), or their gates (1), which stay in order as values do."""
        spec, order = self.spec.attention, in_halves(self.spec)

        def select(stored: Tensor) -> Tensor:
            rows = stored.unflatten(0, (spec.num_heads, 2, -1))[:, which]
            chosen: Tensor = rows.flatten(0, 1) if which else rows[:, order].flatten(0, 1)
            return chosen

        return TensorPart("self_attn.q_proj.weight", select, divisor=2)

    def keys(self) -> TensorPart:
        spec, order = self.spec.attention, in_halves(self.spec)

        def select(stored: Tensor) -> Tensor:
            chosen: Tensor = stored.unflatten(0, (spec.num_kv_heads, -1))[:, order].flatten(0, 1)
            return chosen

        return TensorPart("self_attn.k_proj.weight", select)


def _head_norms(spec: DraftSpec, layer: LayerReader) -> Tensor:
    """Weights of heads' norms, float32 [heads + kv_heads, head_dim]; those of numbers that turn
    hold the magnitude of the rope.
    """
    attention, order = spec.attention, in_halves(spec)
    scale = torch.ones(attention.head_dim)
    scale[: attention.rotary_dim] = attention.rope.magnitude
    norms = []
    for name, num in (("q", attention.num_heads), ("k", attention.num_kv_heads)):
        weight = layer.vector(f"self_attn.{name}_norm.weight", layer.norm_offset)
        norms.append((weight * scale.to(weight.device))[order].expand(num, -1))
    return torch.cat(norms)


class DraftVocabulary:
    """The part of the model's head that drafts are chosen with: the rows of the first tokens, and
    for each lane those of others that its prompt has, the newest ones. A token that is left out is
    never drafted.
    """

    def __init__(
        self, read_rows: HeadReader, num_first: int, *, num_lanes: int, num_others: int = OTHER_ROWS
    ) -> None:
        """`read_rows`: the head's rows of these tokens."""
        self._read_rows = read_rows
        self._first = read_rows(range(num_first))
        self._num_first = num_first
        some = self._first.lookup(torch.zeros(1, dtype=torch.int64, device=self._device))
        shape = (num_lanes + 1, num_others)
        self._ids = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._rows = some.new_zeros(*shape, some.shape[-1])
        self._masks = torch.full(shape, -torch.inf, device=self._device)
        # Of each lane: the tokens at its places, oldest first.
        self._held: list[dict[int, int]] = [{} for _ in range(num_lanes)]

    def begin(self, lane: int) -> None:
        """Another text begins on the lane."""
        self._held[lane] = {}
        self._masks[lane] = -torch.inf

    def add(self, lane: int, tokens: Sequence[int]) -> None:
        """A part of the lane's prompt."""
        held, num_places = self._held[lane], self._ids.shape[1]
        found = (token for token in reversed(tokens) if token >= self._num_first)
        new = [t for t in dict.fromkeys(found) if t not in held][:num_places]
        if not new:
            return
        places = []
        for token in new:
            place = len(held) if len(held) < num_places else held.pop(next(iter(held)))
            held[token] = place
            places.append(place)
        at = torch.tensor(places, device=self._device)
        rows = self._read_rows(new)
        self._rows[lane, at] = rows.lookup(torch.arange(len(new), device=self._device))
        self._ids[lane, at] = torch.tensor(new, device=self._device)
        self._masks[lane, at] = 0.0

    def __call__(self, hidden: Tensor, lanes: Tensor) -> Tensor:
        """See Choose. Fixed shapes, on the device alone."""
        rows, lane = hidden[:, 0], lanes.long()
        best, first = self._first.linear_float(rows).max(-1)
        scores = torch.bmm(self._rows[lane], rows[..., None])[..., 0].float()
        other, place = (scores + self._masks[lane]).max(-1)
        tokens = self._ids[lane].gather(1, place[:, None])[:, 0]
        return torch.where(other > best, tokens, first)

    @property
    def _device(self) -> torch.device:
        return self._read_rows.place.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        own = (self._ids, self._rows, self._masks)
        return self._first.num_bytes + sum(tensor.nbytes for tensor in own)


class MtpNetwork:
    """The head on one device.

        h_t    = final norm of the model's last layer at position t
        u_t+1  = fc [ norm(embedding of token t+1) ; norm(h_t) ]
        z_t+1  = norm( layer(u_t+1) )        token t+2: the head's best of z_t+1

    and once more with z in the place of h, and the drafted token, for each further one.

    `absorb` and `propose` read nothing but tensors on the device and have fixed shapes for fixed
    numbers of entries and rows, so they can be captured as CUDA graphs. An entry of lane -1 is
    padding. Not thread-safe; run under `torch.inference_mode`.

    The row of the layer at position p is of token p and of what the model's head saw at p - 1.
    `pending` holds what it saw of a lane's last token: the row behind it comes with the next one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: MtpWeights,
        embed: Embed,
        choose: Choose,
        choose_ops: ChooseOps,
        *,
        num_lanes: int,
        max_ctx_tokens: int,
    ) -> None:
        """`embed`: the model's embedding, whose rows come on the weights' device; `choose`: what
        its head likes best; `choose_ops` makes the operations on the context.
        """
        self.spec = context_spec(spec)
        self.dtype = weights.fc.dtype
        self.device = weights.norm.weight.device
        self._weights: MtpWeights | None = weights
        self._embed = embed
        self._choose = choose
        self.context = DraftContext(
            self.spec,
            num_lanes=num_lanes,
            max_ctx_tokens=max_ctx_tokens,
            dtype=self.dtype,
            device=self.device,
        )
        self._ops = choose_ops(self.spec, self.context)
        shape = (num_lanes + 1, spec.hidden_size)
        self.pending = torch.zeros(shape, dtype=self.dtype, device=self.device)

    @property
    def capacity_tokens(self) -> int:
        """The newest rows of a lane that any other may see."""
        return self.context.rings[0].capacity

    def reach_for(self, position: int) -> int | None:
        """See draft_ops.TorchDraftOps."""
        return self._ops.reach_for(position)

    def restart(self, lane: int, position: int) -> None:
        """Let the lane go on at `position` without anything before it. The first row is not kept:
        what the model's head saw before it is not known.
        """
        self.context.valid_from[lane] = position + 1
        self.pending[lane] = 0

    def absorb(
        self,
        taps: Tensor,
        tokens: Tensor,
        lanes: Tensor,
        begins: Tensor,
        counts: Tensor,
        paths: Tensor,
    ) -> None:
        """Add rows that the target has committed.

        taps: [entries, verified, hidden], the output of its last layer; tokens: int64 [entries,
        verified], what stands there; `paths` int64 [entries, rows]: of these the first `counts` are
        those of positions from `begins` on. No lane twice.
        """
        weights, lane = self._loaded, lanes.long()
        index = paths[..., None].expand(-1, -1, taps.shape[-1])
        hidden = weights.final_norm(taps.gather(1, index).to(self.dtype))
        before = torch.cat([self.pending[lane][:, None], hidden[:, :-1]], 1)
        rows = self._joined(tokens.gather(1, paths), before)
        keys_values = weights.context.linear(rows, weights.layer.norm)
        norms = weights.layer.head_norms[-1:]
        self._ops.write_context(keys_values, norms, lanes, begins, counts)
        last = (counts.long() - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        kept = torch.where((counts > 0)[:, None], hidden.gather(1, last)[:, 0], self.pending[lane])
        self.pending[lane] = kept

    def propose(
        self,
        anchors: Tensor,
        lanes: Tensor,
        begins: Tensor,
        num_tokens: int,
        *,
        reach: int | None = None,
    ) -> Tensor:
        """Each lane's newest token, `anchors` int64 [entries] at positions `begins`, and the
        `num_tokens` that are likely behind it: int64 [entries, 1 + num_tokens].
        """
        token, hidden = anchors, self.pending[lanes.long()][:, None]
        found = [anchors]
        ones = torch.ones_like(begins)
        for step in range(num_tokens):
            hidden = self._step(token[:, None], hidden, lanes, begins + step, ones, reach)
            token = self._choose(hidden, lanes)
            found.append(token)
        return torch.stack(found, 1)

    def _step(
        self,
        tokens: Tensor,
        hidden: Tensor,
        lanes: Tensor,
        begins: Tensor,
        counts: Tensor,
        reach: int | None,
    ) -> Tensor:
        """Run one row of each entry, which later rows see: what the head is to see, [entries, 1,
        hidden].
        """
        weights, attention = self._loaded, self.spec.attention
        x = self._joined(tokens, hidden)
        projected = weights.projection.linear(x, weights.layer.norm)
        num_heads = attention.query_dim + 2 * attention.kv_dim
        heads, gates = projected[..., :num_heads].contiguous(), projected[..., num_heads:]
        block = self._ops.block(lanes, begins, 1, reach)
        mixed = self._ops.attend(0, heads, weights.layer, block)
        if attention.gated:
            mixed = mixed * torch.sigmoid(gates)
        keys_values = heads[..., attention.query_dim :].contiguous()
        norms = weights.layer.head_norms[-1:]
        self._ops.write_context(keys_values, norms, lanes, begins, counts)
        x = weights.feed_forward.forward(weights.output.linear_add(mixed, x))
        return weights.norm(x)

    def _joined(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input for tokens [entries, rows] and what the head saw before each."""
        weights = self._loaded
        embedded = weights.embedding_norm(self._embed(tokens).to(self.dtype))
        return weights.fc.linear(torch.cat([embedded, weights.hidden_norm(hidden)], -1))

    @property
    def _loaded(self) -> MtpWeights:
        assert self._weights is not None, "the network is closed"
        return self._weights

    def close(self) -> None:
        """Free weights and context. Idempotent."""
        self.context.close()
        self._weights = None

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and context."""
        own = self._weights.num_bytes if self._weights else 0
        return own + self.context.num_bytes + self.pending.nbytes
