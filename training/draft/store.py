"""Texts and the target's features of them, all on the device, and batches drawn from them.

Texts are stored consecutively in flat tensors. A row of a batch is a slice that begins at a text:
there is no padding, and nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.draft.network import Places
from training.draft.target import FrozenTarget
from training.draft.texts import Text

# Total length of the texts that run through the target together.
PASS_TOKENS = {"cuda": 65536, "cpu": 2048}
LENGTH_STEP = 64  # the lengths of passes are multiples of this


@dataclass(frozen=True, slots=True)
class Batch:
    """Anchors of packed rows. `blocks` int64 [batch, anchors, block] are the anchors and the
    target's tokens after them; `counted` bool [batch, anchors, block - 1] are the slots that count;
    `features` [batch, tokens, taps * hidden].
    """

    features: Tensor
    places: Places
    blocks: Tensor
    counted: Tensor


class FeatureStore:
    """Storage for `capacity` tokens of texts."""

    def __init__(
        self,
        target: FrozenTarget,
        taps: Sequence[int],
        *,
        capacity: int,
        row_tokens: int,
        block: int,
    ) -> None:
        self._target = target
        self._taps = tuple(taps)
        self.row_tokens = row_tokens
        self._block = block
        self.device = target.device
        size = capacity + row_tokens + block  # a row may begin with the last token
        width = len(taps) * target.spec.hidden_size
        self.capacity = capacity
        self.begins = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.firsts = torch.zeros(size, dtype=torch.int64, device=self.device)
        # Tokens that the target would have generated itself, in its own answer.
        self.true = torch.zeros(size, dtype=torch.bool, device=self.device)
        self.features = torch.zeros(size, width, dtype=target.dtype, device=self.device)
        self.agreement = 0.0

    def fill(self, texts: Sequence[Text]) -> int:
        """Replace the contents by the first texts, as many as fit. Returns their number."""
        lengths = torch.tensor([len(text.ids) for text in texts])
        ends = lengths.cumsum(0)
        count = int((ends <= self.capacity).sum())
        assert count, "a store holds at least one text"
        begins = (ends - lengths)[:count]
        self.true.zero_()
        said = agreed = 0
        order = sorted(range(count), key=lambda i: len(texts[i].ids))
        while order:
            length = -(-len(texts[order[-1]].ids) // LENGTH_STEP) * LENGTH_STEP
            num_texts = max(1, PASS_TOKENS[self.device.type] // length)
            members, order = order[-num_texts:], order[:-num_texts]
            more_said, more_agreed = self._take(
                [texts[i] for i in members], begins[members], length
            )
            said, agreed = said + more_said, agreed + more_agreed
        self.begins = begins.to(self.device)
        self.agreement = float(agreed) / max(1, int(said))
        return count

    @torch.inference_mode()
    def _take(self, texts: Sequence[Text], begins: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Run `texts`, padded to `length`, through the target, and store the results."""
        ids = torch.zeros(len(texts), length, dtype=torch.int64)
        said = torch.zeros(len(texts), length, dtype=torch.bool)
        there = torch.zeros(len(texts), length, dtype=torch.bool)
        for i, text in enumerate(texts):
            ids[i, : len(text.ids)] = torch.from_numpy(text.ids)
            said[i, : len(text.ids)] = torch.from_numpy(text.said)
            there[i, : len(text.ids)] = True
        ids, said, there = (x.to(self.device) for x in (ids, said, there))
        features, rows = self._target.run(ids, self._taps)
        chosen = self._target.choices(rows)
        agreed = torch.zeros_like(said)
        agreed[:, 1:] = said[:, 1:] & (chosen[:, :-1] == ids[:, 1:])
        firsts = begins.to(self.device)[:, None].expand(-1, length)
        places = (firsts + torch.arange(length, device=self.device))[there]
        self.tokens[places] = ids[there]
        self.firsts[places] = firsts[there]
        self.true[places] = agreed[there]
        self.features[places] = features[there]
        return said.sum(), agreed.sum()

    def draw(
        self, num_rows: int, num_anchors: int, short_share: float, generator: torch.Generator
    ) -> Batch:
        """Random rows with random anchors in answers; superfluous anchors do not count. The given
        share of the blocks is shorter, with any length from 2 on.
        """
        text = torch.randint(len(self.begins), (num_rows,), generator=generator, device=self.device)
        begins = self.begins[text]
        chances = torch.rand(num_rows, self.row_tokens, generator=generator, device=self.device)
        anchors = torch.where(self._candidates(begins), chances, -1.0).topk(num_anchors, 1).indices
        size = {"size": anchors.shape, "generator": generator, "device": self.device}
        lengths = torch.randint(2, max(3, self._block), **size)
        lengths = torch.where(torch.rand(**size) < short_share, lengths, self._block)
        return self.batch(begins, anchors.sort(1).values, lengths)

    def batch(self, begins: Tensor, anchors: Tensor, lengths: Tensor | None = None) -> Batch:
        """Rows that begin at `begins` int64 [batch], with `anchors` int64 [batch, anchors], indices
        in their row, and blocks of `lengths` int64 [batch, anchors]; without lengths, whole blocks.
        """
        if lengths is None:
            lengths = torch.full_like(anchors, self._block)
        index = begins[:, None] + torch.arange(self.row_tokens, device=self.device)
        firsts = self.firsts[index]
        firsts = (firsts - begins[:, None]).clamp(0)
        place = torch.arange(self.row_tokens, device=self.device)
        places = Places(place - firsts, firsts, anchors, lengths, self._block)
        behind = torch.arange(self._block, device=self.device)
        blocks = (begins[:, None] + anchors)[..., None] + behind
        true = self.true[blocks]
        counted = true[..., 1:].long().cumprod(-1).bool()
        counted &= self._candidates(begins).gather(1, anchors)[..., None] & places.there[..., 1:]
        return Batch(self.features[index], places, self.tokens[blocks], counted)

    def _candidates(self, begins: Tensor) -> Tensor:
        """Where anchors may be, bool [batch, tokens]: at the last known token before an unknown
        one, both generated by the target.
        """
        index = begins[:, None] + torch.arange(self.row_tokens, device=self.device)
        return self.true[index] & self.true[index + 1]
