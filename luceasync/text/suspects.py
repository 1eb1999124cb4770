"""What of a string may become a control token, or a part of one, when a template puts it down.

Owns where a template is thought to cut a string: at its ends, at added tokens and at tags such as
"</think>", with the space around left away. Knows no template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

from luceasync.text.control_tokens import ControlTokens

_BETWEEN = "\0"  # in no control token
_TAG = re.compile(r"<[^<>\s]{1,32}>")

Part = tuple[int, int]


class Suspects:
    """Judges strings; `[begin, end)` of each suspect is told in characters."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        texts = control.texts
        self._all_texts = _BETWEEN.join(texts)
        # By the character beside the cut, longest first: most places have none of them.
        self._beginnings = _grouped((text[:i] for text in texts for i in range(1, len(text))), -1)
        self._endings = _grouped((text[i:] for text in texts for i in range(1, len(text))), 0)
        self._most_chars = max(map(len, texts), default=0)

    def parts_of(self, string: str) -> list[Part]:
        """Control tokens in `string`, and parts of some where it may be cut."""
        return self._parts(string, (0, len(string)))

    def are_in(self, strings: Sequence[str]) -> bool:
        """Whether any has such parts, or is the middle of a control token."""
        if any(self._is_middle(string) for string in strings):
            return True
        begins = accumulate((len(string) + len(_BETWEEN) for string in strings), initial=0)
        ranges = (
            (begin, begin + len(string)) for begin, string in zip(begins, strings, strict=False)
        )
        return bool(self._parts(_BETWEEN.join(strings), chain.from_iterable(ranges)))

    def _is_middle(self, string: str) -> bool:
        if len(string) > 2 * self._most_chars:
            return False
        word = string.strip()
        return bool(word) and _BETWEEN not in word and word in self._all_texts

    def _parts(self, text: str, cuts: Iterable[int]) -> list[Part]:
        added = self._control.find_added(text)
        whole = [token[:2] for token in added if self._control.is_control(token.token_id)]
        places = {*cuts, *(place for token in added for place in token[:2])}
        places.update(place for tag in _TAG.finditer(text) for place in tag.span())
        before = {_without_space_before(text, place) for place in places} | places
        after = {_without_space_after(text, place) for place in places} | places
        ending = (self._beginning_that_ends(text, place) for place in before)
        starting = (self._ending_that_starts(text, place) for place in after)
        return sorted([*whole, *filter(None, ending), *filter(None, starting)])

    def _beginning_that_ends(self, text: str, end: int) -> Part | None:
        for beginning in self._beginnings.get(text[end - 1 : end], ()):
            if text.endswith(beginning, 0, end):
                return end - len(beginning), end
        return None

    def _ending_that_starts(self, text: str, begin: int) -> Part | None:
        for ending in self._endings.get(text[begin : begin + 1], ()):
            if text.startswith(ending, begin):
                return begin, begin + len(ending)
        return None


def _grouped(parts: Iterable[str], place: int) -> dict[str, list[str]]:
    """`parts` by the character at `place`, longest first."""
    groups: dict[str, list[str]] = {}
    for part in sorted(set(parts), key=len, reverse=True):
        groups.setdefault(part[place], []).append(part)
    return groups


def _without_space_before(text: str, end: int) -> int:
    while end > 0 and text[end - 1].isspace():
        end -= 1
    return end


def _without_space_after(text: str, begin: int) -> int:
    while begin < len(text) and text[begin].isspace():
        begin += 1
    return begin
