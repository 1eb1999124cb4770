"""The marks that Anthropic's clients set where a prompt is worth keeping: `cache_control`.

Source: docs.anthropic.com, Prompt caching. Owns how many there may be, and what they may say.
"""

from __future__ import annotations

from collections.abc import Iterator

from luceasync.errors import RequestError
from luceasync.server.anthropic.body import Block, CacheControl, Content, CountBody
from luceasync.server.checks import refuse

MAX_MARKS = 4
LIFETIMES = (None, "5m", "1h")

Placed = tuple[str, CacheControl]


def check_marks(body: CountBody) -> None:
    """Raise RequestError for one that is none, and for more than there may be."""
    marks = list(_all(body))
    for where, mark in marks:
        if mark.type != "ephemeral":
            refuse(f"{where}.cache_control.type", mark.type, "'ephemeral'")
        if mark.ttl not in LIFETIMES:
            refuse(f"{where}.cache_control.ttl", mark.ttl, "'5m' or '1h'")
    if len(marks) > MAX_MARKS:
        where = f"{marks[MAX_MARKS][0]}.cache_control"
        raise RequestError(
            f"{where}: A maximum of {MAX_MARKS} blocks with cache_control may be provided. "
            f"Found {len(marks)}.",
            param=where,
        )


def _all(body: CountBody) -> Iterator[Placed]:
    """In the order of the prompt: tools, system text, messages."""
    for i, tool in enumerate(body.tools or ()):
        if tool.cache_control:
            yield f"tools[{i}]", tool.cache_control
    yield from _within("system", body.system)
    for i, message in enumerate(body.messages):
        yield from _within(f"messages[{i}].content", message.content)


def _within(where: str, content: Content | None) -> Iterator[Placed]:
    for i, block in enumerate(content if isinstance(content, list) else ()):
        yield from _of_block(f"{where}[{i}]", block)


def _of_block(where: str, block: Block) -> Iterator[Placed]:
    yield from _within(f"{where}.content", block.content)
    if block.cache_control:
        yield where, block.cache_control
