"""The text of an answer while it is generated: whole characters, cut before a stop string.

Owns what is held back, and where stop strings apply: not in reasoning. Independent of end tokens
and length limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from luceasync.errors import RequestError
from luceasync.text.answer.channels import ChannelMessages
from luceasync.text.answer.pieces import THINK, Before, ReasoningWords
from luceasync.text.tokenizer import Tokenizer


class SafeText(NamedTuple):
    """Text that is safe to send. `stopped`: a stop string follows and ends the text."""

    text: str
    stopped: bool


class Detokenizer:
    """Turns the tokens of one answer into text piece by piece; joined, the pieces equal
    `tokenizer.decode` of all tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        before: Before = "nothing",
        shown: frozenset[str] = frozenset(),
        words: ReasoningWords = THINK,
        least_indent: int = 0,
    ) -> None:
        """`before` is the kind of reasoning before the answer, between `words`, in which `stop`
        does not apply. `shown` are special tokens that are text nevertheless. A line after the
        first that is indented by less than `least_indent` ends the text too. Raises RequestError
        for an empty stop string.
        """
        self._token = tokenizer.shown_token
        self._special_token = tokenizer.special_token
        self._shown = shown
        self._stream = tokenizer.stream()
        self._scanner: StopScanner | IndentScanner | None = StopScanner(stop) if stop else None
        if least_indent > 0:
            self._scanner = IndentScanner(least_indent, StopScanner(stop))
        self._reasoning: ReasoningScanner | ChannelScanner = (
            ChannelScanner() if words.has_channels else ReasoningScanner(before, words)
        )
        self.stopped = False

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if any."""
        return self._scanner.found if self._scanner is not None else None

    @property
    def has_stops(self) -> bool:
        """Whether the text can be ended by its content."""
        return self._scanner is not None

    def push(self, token_id: int) -> SafeText:
        """The text that is final once `token_id` is appended. Must not be called after a stop.
        Amortised O(1).
        """
        assert not self.stopped, "a token after a stop string"
        token = self._token(token_id)
        if token is None and self._shown:
            special = self._special_token(token_id)
            token = special if special in self._shown else None
        if token is None:
            return SafeText("", False)
        text = self._stream.push(token)
        return SafeText(text, False) if self._scanner is None else self._scan(self._scanner, text)

    def flush(self) -> str:
        """The text held back, once no token follows; empty after a stop. It may complete a stop
        string: check `stopped`.
        """
        if self.stopped:
            return ""
        text = self._stream.flush()
        if self._scanner is None:
            return text
        safe = self._scan(self._scanner, text, is_last=True)
        return safe.text if safe.stopped else safe.text + self._scanner.flush()

    def _scan(
        self, scanner: StopScanner | IndentScanner, text: str, *, is_last: bool = False
    ) -> SafeText:
        parts = self._reasoning.push(text)
        if is_last:
            parts += self._reasoning.flush()
        found = ""
        for part in parts:
            if not part.is_answer:
                found += scanner.flush() + part.text
                continue
            safe = scanner.push(part.text)
            found += safe.text
            if safe.stopped:
                self.stopped = True
                break
        return SafeText(found, self.stopped)


class ScannedPart(NamedTuple):
    """A part of a text. `is_answer`: stop strings apply to it."""

    is_answer: bool
    text: str


class ChannelScanner:
    """Separates the text for the user from the rest of an answer that consists of messages in
    channels.
    """

    def __init__(self) -> None:
        self._messages = ChannelMessages()

    def push(self, text: str) -> list[ScannedPart]:
        """The parts that are final once `text` is appended."""
        return self._scanned(text, is_last=False)

    def flush(self) -> list[ScannedPart]:
        """The parts held back, once nothing follows."""
        return self._scanned("", is_last=True)

    def _scanned(self, text: str, *, is_last: bool) -> list[ScannedPart]:
        return [
            ScannedPart(header is not None and header.is_text, part)
            for header, part, _ in self._messages.parts(text, is_last=is_last)
        ]


class ReasoningScanner:
    """Separates the reasoning at the beginning of a text from the answer after it, however the text
    is split into pieces. The line ends after the reasoning belong to it.
    """

    def __init__(self, before: Before, words: ReasoningWords = THINK) -> None:
        self._words = words
        self._state: Before | Literal["closed"] = before
        self._held = ""  # may be part of a word that begins or ends reasoning

    def push(self, text: str) -> list[ScannedPart]:
        """The parts that are final once `text` is appended."""
        before, answer = self._split(text)
        return (
            [ScannedPart(False, before), ScannedPart(True, answer)]
            if before
            else [ScannedPart(True, answer)]
        )

    def _split(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that are final once `text` is appended."""
        begin, end = self._words.begin, self._words.end
        if self._state == "nothing":
            return "", text
        text, self._held = self._held + text, ""
        before = ""
        if self._state == "perhaps":
            rest = text.lstrip()
            if not rest.startswith(begin) and begin.startswith(rest):
                self._held = text
                return "", ""
            self._state = "open" if rest.startswith(begin) else "nothing"
        if self._state == "open":
            before, found, text = text.partition(end)
            if not found:
                num_safe = len(before) - (len(end) - 1)
                self._held = before[max(0, num_safe) :]
                return before[: max(0, num_safe)], ""
            before, self._state = before + found, "closed"
        if self._state == "closed":
            answer = text.lstrip("\n")
            before += text[: len(text) - len(answer)]
            text = answer
            self._state = "nothing" if answer else "closed"
        return before, text

    def flush(self) -> list[ScannedPart]:
        """The reasoning or answer held back, once nothing follows."""
        held, self._held = self._held, ""
        return [ScannedPart(self._state != "open", held)]


class StopScanner:
    """Finds the first stop string to be complete, however the text is split into pieces.

    If several are complete at the same character, the longest counts. The automaton is that of Aho
    and Corasick (Efficient string matching, CACM 1975); the depth of its state is the number of
    characters at the end of the text that begin a stop string, and must therefore be held back.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        """Raises RequestError for an empty stop string."""
        self._next: list[dict[str, int]] = [{}]  # state -> character -> deeper state
        self._depth = [0]
        self._match = [0]  # state -> length of the longest stop string that ends here
        for string in stop:
            self._add(string)
        self._fail = self._link()
        self._state = 0
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> SafeText:
        """The text before a stop string, or as much as can no longer be part of one."""
        buffer, num_before = self._held + text, len(self._held)
        for i, char in enumerate(text, start=num_before + 1):
            self._state = self._step(self._state, char)
            length = self._match[self._state]
            if length:
                self._held = ""
                self.found = buffer[i - length : i]
                return SafeText(buffer[: i - length], True)
        num_safe = len(buffer) - self._depth[self._state]
        self._held = buffer[num_safe:]
        return SafeText(buffer[:num_safe], False)

    def flush(self) -> str:
        """The text held back, once nothing follows."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, string: str) -> None:
        if not string:
            raise RequestError("A stop string must not be empty.", param="stop")
        state = 0
        for char in string:
            deeper = self._next[state].setdefault(char, len(self._next))
            if deeper == len(self._next):
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = deeper
        self._match[state] = len(string)

    def _link(self) -> list[int]:
        """For each state, the deepest other state whose text is a suffix of its own text; breadth
        first.
        """
        self._fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:
            for char, deeper in self._next[state].items():
                self._fail[deeper] = self._step(self._fail[state], char)
                queue.append(deeper)
            self._match[state] = self._match[state] or self._match[self._fail[state]]
        return self._fail

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)


class IndentScanner:
    """Ends a text at a stop string, or before a line, except the first, that is not blank and
    begins with fewer than `least` blanks.
    """

    def __init__(self, least: int, stops: StopScanner) -> None:
        self._least = least
        self._stops = stops
        self._num_blanks: int | None = None  # in the line so far; None: it is indented enough
        self._held = ""  # a line end, and blanks after it that are still too few
        self.found: str | None = None

    def push(self, text: str) -> SafeText:
        """The text before the end, or as much as is certainly before it."""
        safe = self._stops.push(text)
        found = self._scan(safe.text)
        if self.found is not None:
            return SafeText(found, True)
        self.found = self._stops.found
        return SafeText(found + self._take_held(), True) if safe.stopped else SafeText(found, False)

    def flush(self) -> str:
        """The text held back, once nothing follows."""
        found = self._scan(self._stops.flush())
        return found if self.found is not None else found + self._take_held()

    def _scan(self, text: str) -> str:
        """The part of `text`, preceded by what was held back, that is certain."""
        buffer, num_before = self._held + text, len(self._held)
        num_safe = 0 if self._held else len(buffer)
        for place, char in enumerate(text, start=num_before):
            if char == "\n":
                num_safe, self._num_blanks = place, 0
            elif self._num_blanks is None or char == "\r":
                continue
            elif char not in " \t":
                self.found, self._held = "\n", ""
                return buffer[:num_safe]
            else:
                self._num_blanks += 1
                if self._num_blanks >= self._least:
                    num_safe, self._num_blanks = len(buffer), None
        self._held = buffer[num_safe:]
        return buffer[:num_safe]

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held
