"""The target's own answers, greedy or sampled, in large batches.

Every token runs the whole text again, which suits targets of some ten million parameters. For
larger ones, let a server generate answers and train on the file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from training.draft.target import FrozenTarget
from training.draft.texts import Text

BATCH_PROMPTS = 256


def answer(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float
) -> list[Text]:
    """Each prompt followed by an answer of at most `max_tokens` tokens, including the end mark."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts: dict[int, Text] = {}
    for begin in range(0, len(order), BATCH_PROMPTS):
        members = order[begin : begin + BATCH_PROMPTS]
        answered = _answer_batch(target, [prompts[i] for i in members], max_tokens, temperature)
        texts.update(zip(members, answered, strict=True))
    return [texts[i] for i in range(len(prompts))]


@torch.inference_mode()
def _answer_batch(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float
) -> list[Text]:
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    ids = torch.zeros(len(prompts), int(lengths.max()) + max_tokens, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    ids, ends, row = ids.to(target.device), lengths.clone(), torch.arange(len(prompts))
    row, stops = row.to(target.device), torch.tensor(sorted(target.spec.eos_ids))
    stops, open_ = stops.to(target.device), torch.ones_like(ends, dtype=torch.bool)
    for _ in range(max_tokens):
        used = int(ends.max())
        _, rows = target.run(ids[:, : -(-used // 32) * 32], ())
        token = _pick(rows[row, ends - 1] @ target.head.T, temperature)
        ids[row, ends] = torch.where(open_, token, ids[row, ends])
        ends += open_
        open_ &= ~torch.isin(token, stops)
        if not open_.any():
            break
    return [_text(*each) for each in zip(ids.cpu(), lengths.tolist(), ends.tolist(), strict=True)]


def _pick(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1)[:, 0]


def _text(ids: Tensor, begin: int, end: int) -> Text:
    said = np.zeros(end, dtype=bool)
    said[begin:] = True
    return Text(ids[:end].numpy().astype(np.int32), said)
