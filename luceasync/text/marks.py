"""After how many tokens of a prompt the places lie that a client marks within its messages.

Owns how they are found: the prompt is rendered with other words from there on. Knows no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.parting import Parting

MAX_MARKS = 4  # of a prompt, the last ones: each is two renderings
OTHERS = ("0", "a")  # other words; with one of them what is marked does not go on as it does

Message = Mapping[str, Any]


def marked_tokens(
    parting: Parting,
    text: str,
    ids: Sequence[int],
    messages: Sequence[Message],
    marks: Sequence[tuple[int, int]],
    render: Callable[[Sequence[Message]], str],
) -> tuple[int, ...]:
    """How many of the first `ids` come before each place, where `messages` are what `render` makes
    `text` of, and `ids` spell that. A place at the end of a message is none: turns are kept anyway.
    """
    found = []
    for message, num_chars in marks[-MAX_MARKS:]:
        if 0 < num_chars < len(str(messages[message].get("content") or "")):
            try:
                others = [render(said) for said in _others(messages, message, num_chars)]
            except RequestError:  # nothing is known then
                continue
            found.append(parting.num_tokens(text, ids, others))
    return tuple(sorted({place for place in found if place}))


def _others(
    messages: Sequence[Message], message: int, num_chars: int
) -> Iterator[Sequence[Message]]:
    """The messages with other words in one of them, after so many characters."""
    marked = messages[message]
    for other in OTHERS:
        said = {**marked, "content": marked["content"][:num_chars] + other}
        yield [*messages[:message], said, *messages[message + 1 :]]
