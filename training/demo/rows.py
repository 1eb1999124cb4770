"""From conversations to rows of token ids: endless batches, drawn in worker processes.

Owns the token layout of a conversation and which tokens count in the loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from training.demo.dialogue import Dialogue, Turn


class Layout:
    """The ChatML layout in token ids, equal to that of chat template and tokenizer. Ids of answers
    are cached.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[str, list[int]] = {}
        self._begin = {r: self._ids(f"<|im_start|>{r}\n") for r in ("system", "user", "assistant")}
        self._im_end = self._ids("<|im_end|>")
        self._newline = self._ids("\n")
        self._end_of_text = self._ids("<|endoftext|>")

    def lay(self, turns: list[Turn]) -> tuple[list[int], list[bool]]:
        """Ids of the conversation and, for each, whether it is learnt: answers and their end marks
        are.
        """
        ids: list[int] = []
        learnt: list[bool] = []
        for role, text in turns:
            answers = role == "assistant"
            said = (self._kept_ids(text) if answers else self._ids(text)) + self._im_end
            ids += self._begin[role] + said + self._newline
            learnt += [False] * len(self._begin[role]) + [answers] * len(said) + [False]
        return ids + self._end_of_text, [*learnt, False]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _kept_ids(self, text: str) -> list[int]:
        if text not in self._kept:
            self._kept[text] = self._ids(text)
        return self._kept[text]


class Rows(IterableDataset):
    """Batches `(tokens int32, learnt bool)`, both [rows, row_tokens + 1]; each worker adds its
    number to the seed.
    """

    def __init__(
        self, dialogue: Dialogue, tokenizer: Tokenizer, num_rows: int, row_tokens: int, seed: int
    ) -> None:
        self._dialogue = dialogue
        self._tokenizer = tokenizer
        self._shape = (num_rows, row_tokens + 1)
        self._seed = seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        rng = random.Random(self._seed + (worker.id if worker else 0))
        layout = Layout(self._tokenizer)
        while True:
            tokens = np.empty(self._shape, dtype=np.int32)
            learnt = np.empty(self._shape, dtype=bool)
            for row in range(self._shape[0]):
                tokens[row], learnt[row] = self._row(rng, layout)
            yield torch.from_numpy(tokens), torch.from_numpy(learnt)

    def _row(self, rng: random.Random, layout: Layout) -> tuple[list[int], list[bool]]:
        """Consecutive conversations; the last one is cut at the end of the row."""
        ids: list[int] = []
        learnt: list[bool] = []
        while len(ids) < self._shape[1]:
            more_ids, more_learnt = layout.lay(self._dialogue.draw(rng))
            ids += more_ids
            learnt += more_learnt
        return ids[: self._shape[1]], learnt[: self._shape[1]]
