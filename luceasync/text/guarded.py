"""A chat template whose messages cannot forge turns: their text never becomes a control token.

Owns which text of a rendered prompt came from the client: all strings except roles and the
template's own text. Independent of history and ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.control_tokens import BREAK, ControlTokens, with_breaks
from luceasync.text.past_calls import Arguments, with_parsed_arguments
from luceasync.text.template import Template
from luceasync.text.tokenizer import Tokenizer

Cover = Callable[[str], str]
CharSpan = tuple[int, int]  # [begin, end)

_FIRST_STAND_IN, _LAST_STAND_IN = 0xF0000, 0xFFFFD  # private use
_BETWEEN = "\0"  # occurs in no control token
_TAG = re.compile(r"<[^<>\s]{1,32}>")


@dataclass(frozen=True, slots=True)
class _TemplateInput:
    """The arguments of a template; all strings except roles come from the client."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]

    def covered(self, cover: Cover) -> _TemplateInput:
        """A copy with `cover` applied to each string. Keys that are plain words stay: templates
        look them up by name, and they can only be the middle of a control token.
        """
        return _TemplateInput(
            [
                {k: v if k == "role" else _covered(v, cover) for k, v in message.items()}
                for message in self.messages
            ],
            _covered(self.tools, cover),
            {name: _covered(value, cover) for name, value in self.variables.items()},
        )

    @property
    def strings(self) -> list[str]:
        """All strings that `covered` would change."""
        items = ((k, v) for message in self.messages for k, v in message.items())
        values = [v for k, v in items if k != "role"]
        return [
            *_strings_in(values),
            *_strings_in(self.tools),
            *_strings_in([*self.variables.values()]),
        ]


class GuardedTemplate:
    """Renders like `template`, but puts a BREAK into every control token that the template did not
    write entirely by itself.

    If the messages may contain such text, they are rendered again with stand-ins for the characters
    of control tokens: whatever is changed in the output came from the messages. At first, all of
    their text is covered. A template may inspect the text and then write something else; in that
    case only suspect parts are covered.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        check: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Takes a second or two with a large vocabulary. Raises ModelError. `check` is called with
        the rendered text before it is processed further, and may raise RequestError; the guarded
        text does not have fewer tokens.
        """
        self._template = template
        self._check = check
        self._control = tokenizer.control
        self._control.prepare()
        self._suspects = SuspectScanner(self._control)
        self._alphabet = sorted({char for text in self._control.texts for char in text})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """As ChatTemplate.render; also raises RequestError for text that is not Unicode, or nested
        too deeply.
        """

        def render(values: _TemplateInput) -> str:
            return self._template.render(
                values.messages,
                values.tools,
                add_generation_prompt=add_generation_prompt,
                **values.variables,
            )

        # Parse arguments first: JSON can escape the characters of a control token.
        values = _TemplateInput(with_parsed_arguments(messages), tools, kwargs)
        text = render(values)
        self._check(text)
        if BREAK in text:
            raise RequestError("The text is not valid Unicode: surrogates not allowed.")
        try:
            return self._guarded(values, text, render)
        except RecursionError:
            raise RequestError("The messages are nested too deeply.", param="messages") from None

    def _guarded(
        self, values: _TemplateInput, text: str, render: Callable[[_TemplateInput], str]
    ) -> str:
        if not self._suspects.are_in(values.strings):
            return text
        to_stand_in = dict(zip(map(ord, self._alphabet), _unused(text), strict=False))
        from_stand_in = {ord(new): chr(old) for old, new in to_stand_in.items()}

        def cover_suspects(string: str) -> str:
            # Repeat until none is left: covering one may reveal another.
            while spans := self._suspects.find(string):
                string = _covered_at(string, spans, to_stand_in)
            return string

        try:
            covered = render(values.covered(lambda string: string.translate(to_stand_in)))
        except RequestError:  # the template looked for a word and did not find it
            covered = ""
        if covered.translate(from_stand_in) != text:
            covered = render(values.covered(cover_suspects))
        return self._broken(covered, covered.translate(from_stand_in))

    def _broken(self, covered: str, text: str) -> str:
        """`text` with a BREAK in each control token that is partly covered in `covered`."""
        while True:
            places = []
            for token in self._control.find(text):
                shown, plain = covered[token.begin : token.end], text[token.begin : token.end]
                if shown != plain:
                    places.append(token.begin + max(1, _first_difference(shown, plain)))
            if not places:
                return text
            covered, text = with_breaks(covered, places), with_breaks(text, places)


def _strings_in(value: Any) -> Iterator[str]:
    """The strings in `value` that `_covered` would change."""
    match value:
        case str():
            yield value
        case dict():
            for key, inner in value.items():
                if re.search(r"\W", key):
                    yield key
                yield from _strings_in(inner)
            if isinstance(value, Arguments):
                yield value.text
        case list() | tuple():
            for inner in value:
                yield from _strings_in(inner)


def _covered(value: Any, cover: Cover) -> Any:
    match value:
        case str():
            return cover(value)
        case Arguments():
            return Arguments(_covered_values(value, cover), cover(value.text))
        case dict():
            return _covered_values(value, cover)
        case list() | tuple():
            return [_covered(inner, cover) for inner in value]
        case _:
            return value


def _covered_values(values: Mapping[str, Any], cover: Cover) -> dict[str, Any]:
    return {
        cover(key) if re.search(r"\W", key) else key: _covered(inner, cover)
        for key, inner in values.items()
    }


def _covered_at(string: str, spans: Sequence[CharSpan], to_stand_in: Mapping[int, str]) -> str:
    """`string` with stand-ins in `spans`, which are sorted and may overlap."""
    pieces, end = [], 0
    for span_begin, span_end in spans:
        if span_end > end:
            begin = max(span_begin, end)
            pieces += [string[end:begin], string[begin:span_end].translate(to_stand_in)]
            end = span_end
    return "".join([*pieces, string[end:]])


def _first_difference(one: str, other: str) -> int:
    if one[0] != other[0]:  # true in nearly all cases
        return 0
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


def _unused(text: str) -> Iterator[str]:
    """Private-use characters that do not occur in `text`."""
    present = set(text)
    chars = map(chr, range(_FIRST_STAND_IN, _LAST_STAND_IN))
    return (char for char in chars if char not in present)


class SuspectScanner:
    """Finds the parts of strings that may become a control token, or a part of one, once a template
    inserts them.

    A template is assumed to cut a string at its ends, at added tokens and at tags such as
    "</think>", and to strip the whitespace there.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        texts = control.texts
        self._all_texts = _BETWEEN.join(texts)
        # By the character next to the cut, longest first: most positions have none of them.
        self._beginnings = _grouped((text[:i] for text in texts for i in range(1, len(text))), -1)
        self._endings = _grouped((text[i:] for text in texts for i in range(1, len(text))), 0)
        self._most_chars = max(map(len, texts), default=0)

    def find(self, string: str) -> list[CharSpan]:
        """Control tokens in `string`, and parts of control tokens where it may be cut; sorted."""
        return self._parts(string, (0, len(string)))

    def are_in(self, strings: Sequence[str]) -> bool:
        """Whether any of `strings` has such parts, or is the middle of a control token."""
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

    def _parts(self, text: str, cuts: Iterable[int]) -> list[CharSpan]:
        added = self._control.find_added(text)
        whole = [token[:2] for token in added if self._control.is_control(token.token_id)]
        places = {*cuts, *(place for token in added for place in token[:2])}
        places.update(place for tag in _TAG.finditer(text) for place in tag.span())
        before = {_without_space_before(text, place) for place in places} | places
        after = {_without_space_after(text, place) for place in places} | places
        ending = (self._beginning_that_ends(text, place) for place in before)
        starting = (self._ending_that_starts(text, place) for place in after)
        return sorted([*whole, *filter(None, ending), *filter(None, starting)])

    def _beginning_that_ends(self, text: str, end: int) -> CharSpan | None:
        for beginning in self._beginnings.get(text[end - 1 : end], ()):
            if text.endswith(beginning, 0, end):
                return end - len(beginning), end
        return None

    def _ending_that_starts(self, text: str, begin: int) -> CharSpan | None:
        for ending in self._endings.get(text[begin : begin + 1], ()):
            if text.startswith(ending, begin):
                return begin, begin + len(ending)
        return None


def _grouped(parts: Iterable[str], place: int) -> dict[str, list[str]]:
    """`parts` by the character at index `place`, longest first."""
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
