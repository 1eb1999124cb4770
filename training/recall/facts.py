"""Texts that hide facts among filler and ask for them: the complete language of the recall model.

A slot is 16 words, and a line begins anywhere in its slot: its position carries no information.
Owns the words and the composition of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SLOT_WORDS = 16
NUM_VALUES = 6  # of a fact
NUM_NAMES = 2
BEFORE_VALUES = 1 + NUM_NAMES  # FACT or ASK, and two names
LINE_WORDS = BEFORE_VALUES + NUM_VALUES + 1  # with END after the values
NUM_BEGINS = SLOT_WORDS - LINE_WORDS + 1  # positions in a slot
NUM_REHEARSALS = 20  # of the second names of a hop: about as many tokens as a probe takes
KINDS = ("<pad>", "<eos>", "<|mask|>", "FACT", "ASK", "HOP", "END")
SPECIAL = (*KINDS, *(f"r{i}" for i in range(NUM_REHEARSALS)))
PAD, EOS, MASK, FACT, ASK, HOP, END = range(len(KINDS))
REHEARSALS = tuple(range(len(KINDS), len(SPECIAL)))
HOP_SLOTS = -(
    -(BEFORE_VALUES + (NUM_NAMES + 1) * NUM_REHEARSALS + NUM_NAMES + NUM_VALUES + 1) // SLOT_WORDS
)
LINK_EVERY = 8  # one fact in this many is a link: its first values are another fact's names


@dataclass(frozen=True, slots=True)
class Language:
    """The number of words of each kind, and phrases of filler; ids follow in this order."""

    num_first: int = 64
    num_second: int = 1024
    num_value_words: int = 256
    num_filler_words: int = 677
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
        num_first=16, num_second=32, num_value_words=64, num_filler_words=32, num_phrases=64
    ),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """Two names, whose combination is unique to this fact, and its values; all as ids."""

    names: tuple[int, int]
    values: tuple[int, ...]

    def told(self, kind: int) -> list[int]:
        """FACT or ASK, the names, the values, END."""
        return [kind, *self.names, *self.values, END]

    @property
    def question(self) -> list[int]:
        """The prompt that is to be continued with the values."""
        return [ASK, *self.names]

    def linked_to(self, other: Fact) -> Fact:
        """The same fact with the other fact's names as its first values."""
        return Fact(self.names, (*other.names, *self.values[NUM_NAMES:]))


@dataclass(frozen=True, slots=True)
class Hop:
    """A question for the values of a fact that another fact names.

    The names that must be found first are repeated before the values: time to recall the fact.
    """

    link: Fact
    fact: Fact

    @property
    def question(self) -> list[int]:
        """The prompt that is to be continued with `answer`."""
        return [HOP, *self.link.names]

    @property
    def answer(self) -> list[int]:
        """The second names, repeated, and the values; END follows."""
        rehearsed = [token for i in REHEARSALS for token in (*self.fact.names, i)]
        return [*rehearsed, *self.fact.names, *self.fact.values]


class Writer:
    """Writes rows of one language, determined by the seed."""

    def __init__(self, language: Language, seed: int) -> None:
        self._language = language
        self._random = np.random.default_rng(seed)
        phrases = np.random.default_rng(7)  # the same for every writer
        begin = language.begins[3]
        shape = (language.num_phrases, SLOT_WORDS)
        self._phrases = phrases.integers(begin, begin + language.num_filler_words, shape)
        weights = 1 / (np.arange(language.num_phrases) + 10)  # some are frequent, most are rare
        self._reached = np.cumsum(weights / weights.sum())

    def facts(self, count: int) -> list[Fact]:
        """Facts with different names."""
        names, values = self._facts(1, count)
        return [
            Fact((int(first), int(second)), tuple(said))
            for (first, second), said in zip(names[0], values[0].tolist(), strict=True)
        ]

    def rows(
        self, num_rows: int, num_tokens: int, num_facts: int, num_questions: int, num_hops: int = 0
    ) -> np.ndarray:
        """Rows of slots, int64 [num_rows, num_tokens]: facts, and questions after them that ask for
        one of the earlier facts; hops end a row, and then some facts are links.
        """
        num_slots = num_tokens // SLOT_WORDS
        slots = self._filler((num_rows, num_slots))
        names, values = self._facts(num_rows, num_facts)
        links = np.arange(LINK_EVERY - 1, num_facts, LINK_EVERY) if num_hops else np.arange(0)
        linked = self._below(links, num_rows) // LINK_EVERY * LINK_EVERY  # never a link
        every = np.arange(num_rows)[:, None]
        values[:, links, :NUM_NAMES] = names[every, linked]
        # --- facts and questions, in slots as they come
        num_lines, num_free = num_facts + num_questions, num_slots - num_hops * HOP_SLOTS
        drawn = self._random.random((num_rows, num_free))
        used = np.sort(np.argpartition(drawn, num_lines - 1)[:, :num_lines])
        asks = np.arange(num_lines - 1) < num_questions
        asks = self._random.permuted(np.tile(asks, (num_rows, 1)), axis=1)
        asks = np.concatenate([np.zeros((num_rows, 1), bool), asks], 1)  # the first is a fact
        told = np.cumsum(~asks, 1)
        about = np.where(asks, self._below(told), told - 1)
        kinds = np.where(asks, ASK, FACT)[..., None]
        ends = np.full_like(kinds, END)
        lines = np.concatenate([kinds, names[every, about], values[every, about], ends], 2)
        rows = slots.reshape(num_rows, num_tokens)
        begins = used * SLOT_WORDS + self._random.integers(0, NUM_BEGINS, used.shape)
        rows[every[..., None], begins[..., None] + np.arange(LINE_WORDS)] = lines
        # --- hops
        if num_hops:
            chosen = self._random.integers(0, len(links), (num_rows, num_hops))
            lines = _hop_lines(
                names[every, links[chosen]],
                names[every, linked[every, chosen]],
                values[every, linked[every, chosen]],
            )
            tail = slots[:, num_free:].reshape(num_rows, num_hops, HOP_SLOTS * SLOT_WORDS)
            tail[:, :, : lines.shape[2]] = lines
            rows[:, num_free * SLOT_WORDS :] = tail.reshape(num_rows, -1)
        return rows

    def context(self, num_tokens: int, facts: Sequence[Fact], depths: Sequence[float]) -> list[int]:
        """Filler of that many tokens with each fact at its depth, 0 for the first slot and 1 for
        the last; facts whose slots are taken move to the next free slot.
        """
        slots = self._filler((num_tokens // SLOT_WORDS,))
        free = [True] * len(slots)
        for fact, depth in zip(facts, depths, strict=True):
            slot = round(depth * (len(slots) - 1))
            order = [*range(slot, len(slots)), *range(slot - 1, -1, -1)]
            slot = next(s for s in order if free[s])
            free[slot] = False
            begin = int(self._random.integers(NUM_BEGINS))
            slots[slot, begin : begin + LINE_WORDS] = fact.told(FACT)
        return [int(token) for token in slots.reshape(-1)]

    def _facts(self, num_rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Names [rows, count, 2], which differ within a row, and values [rows, count, 6]."""
        language, (first, second, values, _) = self._language, self._language.begins
        pairs = self._different(num_rows, count, language.num_first * language.num_second)
        parted = np.divmod(pairs, language.num_second)
        names = np.stack(parted, 2) + np.array([first, second])
        said = self._random.integers(0, language.num_value_words, (num_rows, count, NUM_VALUES))
        return names, said + values

    def _different(self, num_rows: int, count: int, limit: int) -> np.ndarray:
        """Numbers below `limit` [rows, count], different within a row."""
        found = self._random.integers(0, limit, (num_rows, count))
        order = np.sort(found)
        for row in np.flatnonzero((order[:, 1:] == order[:, :-1]).any(1)):
            found[row] = self._random.choice(limit, count, replace=False)
        return found

    def _below(self, limits: np.ndarray, num_rows: int | None = None) -> np.ndarray:
        """A number below each limit, in `num_rows` rows unless the limits are given row by row."""
        shape = limits.shape if num_rows is None else (num_rows, *limits.shape)
        return (self._random.random(shape) * limits).astype(np.int64)

    def _filler(self, shape: tuple[int, ...]) -> np.ndarray:
        chosen = np.searchsorted(self._reached, self._random.random(shape))
        return self._phrases[np.minimum(chosen, len(self._phrases) - 1)]


def _hop_lines(links: np.ndarray, names: np.ndarray, values: np.ndarray) -> np.ndarray:
    """HOP, the link's names, the other fact's, repeated, its values, END: [rows, hops, tokens]."""
    one = (*names.shape[:2], 1)
    rehearsed = [part for i in REHEARSALS for part in (names, np.full(one, i))]
    return np.concatenate(
        [np.full(one, HOP), links, *rehearsed, names, values, np.full(one, END)], 2
    )


def value_places(rows: np.ndarray) -> np.ndarray:
    """Which tokens [rows, tokens] are values after an ASK: bool."""
    return _after(rows, ASK, [*range(BEFORE_VALUES, BEFORE_VALUES + NUM_VALUES)])


def hop_places(rows: np.ndarray) -> np.ndarray:
    """Which tokens [rows, tokens] have to be found for a HOP, without repetitions: bool."""
    names = [*range(BEFORE_VALUES, BEFORE_VALUES + NUM_NAMES)]
    begin = BEFORE_VALUES + (NUM_NAMES + 1) * NUM_REHEARSALS + NUM_NAMES
    return _after(rows, HOP, [*names, *range(begin, begin + NUM_VALUES)])


def _after(rows: np.ndarray, kind: int, offsets: Sequence[int]) -> np.ndarray:
    places = np.zeros(rows.shape, bool)
    row, begin = np.nonzero(rows == kind)
    for offset in offsets:
        places[row, begin + offset] = True
    return places
