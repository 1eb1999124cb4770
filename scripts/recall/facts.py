"""Texts that hide facts among filler and ask for them: the recall model's whole language.

A slot is 16 words. Owns the words and what a row is made of; knows no network and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SLOT_WORDS = 16
NUM_VALUES = 6  # of a fact
SPECIAL = ("<pad>", "<eos>", "FACT", "ASK", "END")
PAD, EOS, FACT, ASK, END = range(len(SPECIAL))
BEFORE_VALUES = 3  # FACT or ASK, and two names


@dataclass(frozen=True, slots=True)
class Language:
    """How many words there are of each kind, and phrases of filler; ids follow in this order."""

    num_first: int = 64
    num_second: int = 1024
    num_value_words: int = 256
    num_filler_words: int = 699
    num_phrases: int = 4096

    @property
    def begins(self) -> tuple[int, int, int, int]:
        """The first id of first names, second names, values and filler."""
        first = len(SPECIAL)
        second = first + self.num_first
        values = second + self.num_second
        return first, second, values, values + self.num_value_words

    @property
    def vocab_size(self) -> int:
        return self.begins[3] + self.num_filler_words

    @property
    def words(self) -> list[str]:
        """Every word, by its id."""
        kinds = zip(
            "abvf",
            (self.num_first, self.num_second, self.num_value_words, self.num_filler_words),
            strict=True,
        )
        return [*SPECIAL, *(f"{kind}{i}" for kind, count in kinds for i in range(count))]


LANGUAGES = {
    "full": Language(),
    "small": Language(
        num_first=8, num_second=16, num_value_words=16, num_filler_words=19, num_phrases=64
    ),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """Two names, which together are one fact's, and its values; all as ids."""

    names: tuple[int, int]
    values: tuple[int, ...]

    def told(self, kind: int) -> list[int]:
        """FACT or ASK, the names, the values, END."""
        return [kind, *self.names, *self.values, END]

    @property
    def question(self) -> list[int]:
        """What is to be gone on with the values."""
        return [ASK, *self.names]


class Writer:
    """Writes rows of one language; what it writes follows from the seed."""

    def __init__(self, language: Language, seed: int) -> None:
        self._language = language
        self._random = np.random.default_rng(seed)
        phrases = np.random.default_rng(7)  # the same for every writer
        begin = language.begins[3]
        shape = (language.num_phrases, SLOT_WORDS)
        self._phrases = phrases.integers(begin, begin + language.num_filler_words, shape)
        weights = 1 / (np.arange(language.num_phrases) + 10)  # some are met often, most are rare
        self._weights = weights / weights.sum()

    def facts(self, count: int) -> list[Fact]:
        """Facts of different names."""
        language, (first, second, values, _) = self._language, self._language.begins
        pairs = language.num_first * language.num_second
        names = self._random.choice(pairs, count, replace=False)
        said = self._random.integers(0, language.num_value_words, (count, NUM_VALUES)) + values
        return [
            Fact(
                (
                    first + int(pair) // language.num_second,
                    second + int(pair) % language.num_second,
                ),
                tuple(row),
            )
            for pair, row in zip(names, said.tolist(), strict=True)
        ]

    def row(self, num_tokens: int, num_facts: int, num_questions: int) -> np.ndarray:
        """A row of slots, int64 [num_tokens]: facts, and questions after them that ask for one of
        those that stand before.
        """
        num_slots = num_tokens // SLOT_WORDS
        slots = self._filler(num_slots)
        used = np.sort(self._random.choice(num_slots, num_facts + num_questions, replace=False))
        # The first is a fact; the others as they come.
        kinds = self._random.permutation(num_facts - 1 + num_questions) < num_questions
        facts, told = self.facts(num_facts), 0
        for slot, is_question in zip(used, [False, *kinds.tolist()], strict=True):
            if is_question:
                line = facts[self._random.integers(told)].told(ASK)
            else:
                line, told = facts[told].told(FACT), told + 1
            slots[slot, : len(line)] = line
        return slots.reshape(-1)

    def context(self, num_tokens: int, facts: Sequence[Fact], depths: Sequence[float]) -> list[int]:
        """Filler of so many tokens with each fact at its depth, 0 for the first slot and 1 for the
        last; facts whose slots are taken move to the next that is free.
        """
        slots = self._filler(num_tokens // SLOT_WORDS)
        free = [True] * len(slots)
        for fact, depth in zip(facts, depths, strict=True):
            slot = round(depth * (len(slots) - 1))
            order = [*range(slot, len(slots)), *range(slot - 1, -1, -1)]
            slot = next(s for s in order if free[s])
            free[slot] = False
            line = fact.told(FACT)
            slots[slot, : len(line)] = line
        return [int(token) for token in slots.reshape(-1)]

    def _filler(self, num_slots: int) -> np.ndarray:
        chosen = self._random.choice(len(self._phrases), num_slots, p=self._weights)
        return self._phrases[chosen].copy()


def value_places(rows: np.ndarray) -> np.ndarray:
    """Which tokens [rows, tokens] are values that a question was gone on with: bool."""
    slots = rows.reshape(len(rows), -1, SLOT_WORDS)
    asked = slots[:, :, 0] == ASK
    places = np.zeros(slots.shape, bool)
    places[:, :, BEFORE_VALUES : BEFORE_VALUES + NUM_VALUES] = asked[:, :, None]
    return places.reshape(rows.shape)
