"""The tokens that later prompts share with a prompt, and whether one can begin with it and its
answer.

Shared text is found by rendering the prompt with other words in one place, and mapped from
characters to tokens. Answers are tried out: templates drop reasoning, or open old answers
differently. Independent of caches.
"""

from __future__ import annotations

import json
import re
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate, takewhile
from typing import Any

from luceasync.errors import RequestError, TemplateOverrun, Unavailable
from luceasync.text.control_tokens import BREAK
from luceasync.text.template import Template, TurnBoundaries
from luceasync.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

MAX_MARKS = 4  # the last marks of a prompt; each takes two renderings
# Replacement words with different first characters: at least one of them differs from the original
# in its first character.
PROBES = ("0", "a")
SYSTEM_ROLES = ("system", "developer")
USER_TURN = {"role": "user", "content": "0"}  # some templates refuse a chat without a user's turn

REASONING, CONTENT = "thought", "said"  # of the answer that is tried
OPENING = "<think>"  # written by a model that opens its reasoning itself
WITH_REASONING = f"{OPENING}\n{REASONING}\n</think>\n\n{CONTENT}"
CLOSING = "</think>"
MAX_FORMS = 1024  # of chats, whose results are kept
LEADING_TAG = re.compile(r"\s*<[^<>\s]{1,32}>")
REPLAY_S = 2.0  # a rendering takes milliseconds, unless the machine or the template is very slow
CALL = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}


class CommonPrefix:
    """Counts the tokens that a prompt shares with texts whose tokens are unknown. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._num_bytes = _TokenLengths(tokenizer)

    def num_tokens(self, text: str, ids: Sequence[int], others: Iterable[str]) -> int:
        """How many of the first `ids`, which spell `text`, lie within the prefix that `text` shares
        with all of `others`.
        """
        shared = text[: min(_num_shared_chars(text, other) for other in others)]
        num_bytes = len(shared.replace(BREAK, "").encode("utf-8", "surrogatepass"))
        ends = accumulate(map(self._num_bytes.__getitem__, ids))
        return sum(1 for _ in takewhile(num_bytes.__ge__, ends))


class _TokenLengths(dict[int, int]):
    """The number of bytes of each token, cached since a lookup in the tokenizer is slow."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> int:
        num_bytes = self[token_id] = len(self._tokenizer.token_bytes(token_id))
        return num_bytes


def _num_shared_chars(text: str, other: str) -> int:
    limit = min(len(text), len(other))
    return bisect_left(range(limit), True, key=lambda i: text[: i + 1] != other[: i + 1])


def marked_tokens(
    prefix: CommonPrefix,
    text: str,
    ids: Sequence[int],
    messages: Sequence[Message],
    marks: Sequence[tuple[int, int]],
    render: Callable[[Sequence[Message]], str],
) -> tuple[int, ...]:
    """The number of `ids` before each cache mark of a client.

    `render(messages)` is `text`, which `ids` spell. A mark is a message's index and a number of
    characters of its content. Marks at the end of a message are left out: the ends of turns are
    kept anyway.
    """
    found = []
    for message, num_chars in marks[-MAX_MARKS:]:
        if 0 < num_chars < len(str(messages[message].get("content") or "")):
            try:
                others = [render(changed) for changed in _changed(messages, message, num_chars)]
            except RequestError:  # unknown: the template refuses other words there
                continue
            found.append(prefix.num_tokens(text, ids, others))
    return tuple(sorted({num_tokens for num_tokens in found if num_tokens}))


def _changed(
    messages: Sequence[Message], message: int, num_chars: int
) -> Iterator[Sequence[Message]]:
    """The messages with other words in one of them, after `num_chars` characters."""
    marked = messages[message]
    for probe in PROBES:
        changed = {**marked, "content": marked["content"][:num_chars] + probe}
        yield [*messages[:message], changed, *messages[message + 1 :]]


def begun_answer(
    template: Template, messages: Sequence[Message], tools: Tools, **kwargs: Any
) -> str:
    """The prompt's text up to the end of the last message's content, which is the beginning of the
    answer. Raises RequestError like Template.render, and if the template drops that content.
    """
    *before, last = messages
    one, other = (
        template.render(
            [*before, {**last, "content": last["content"] + probe}],
            tools,
            add_generation_prompt=False,
            **kwargs,
        )
        for probe in PROBES
    )
    if one == other:
        raise RequestError("The chat template does not show the last message.", param="messages")
    return one[: _num_shared_chars(one, other)]


def shared_ids(
    template: Template,
    turns: TurnBoundaries,
    encode: Callable[[str], array[int]],
    messages: Sequence[Mapping[str, Any]],
    tools: Tools = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> array[int]:
    """The ids that every prompt begins with that continues `messages` with a user's turn, up to the
    beginning of that turn.

    Depending on what follows, templates refuse a lone system message, move it into the user's turn,
    or drop parts of older answers. So two prompts that differ only in that turn are compared.
    Raises RequestError like Template.render and `encode`.
    """

    variables = {**(template_kwargs or {}), "add_generation_prompt": False}

    def ids_of(reply: str, *before: Mapping[str, Any], tools: Tools = None) -> array[int]:
        user_turn = {"role": "user", "content": reply}
        return encode(template.render([*before, user_turn], tools, **variables))

    one, other = (ids_of(reply, *messages, tools=tools) for reply in PROBES)
    differing = (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    shared = one[: next(differing, min(len(one), len(other)))]
    ends = turns.ends(shared)
    if not ends:
        return shared
    # The text after the last boundary opens the user's turn; cut it off if it has no other content.
    opening, alone = shared[ends[-1] :], ids_of(PROBES[0])
    begin = max([0, *turns.ends(alone)])
    is_empty = alone[begin : begin + len(opening)] == opening
    return shared[: ends[-1]] if is_empty else shared


class ToolsBlock:
    """Finds the end of the tools in a prompt whose template puts a system message after them in the
    same turn: an agent's subagents share its tools, but not its system message. Thread-safe.
    """

    def __init__(self, template: Template, prefix: CommonPrefix) -> None:
        self._template = template
        self._prefix = prefix

    def end(
        self,
        text: str,
        ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int | None:
        """How many of the first `ids` are shared by prompts that differ only in their system
        message. `text`, which `ids` spell, is rendered from the other arguments. None without tools
        or system message; near 0 if the template puts tools after it.
        """
        if not tools or not messages or messages[0]["role"] not in SYSTEM_ROLES:
            return None
        system, variables = messages[0], template_kwargs or {}
        try:
            others = [
                self._template.render([{**system, "content": probe}, USER_TURN], tools, **variables)
                for probe in PROBES
            ]
        except RequestError:  # unknown: the template refuses other words there
            return None
        return self._prefix.num_tokens(text, ids, others)


class ReplayResults:
    """Results for chats of the same form: their roles, the fields of their messages, and the words
    that templates look for in texts. If a template looks for other words, cached tokens may be
    lost, but answers stay correct. Thread-safe.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, bool] = {}
        self._lock = threading.Lock()

    def get(self, form: Hashable) -> bool | None:
        """The result for chats of that form, None if there is none yet."""
        with self._lock:
            return self._results.get(form)

    def put(self, form: Hashable, result: bool) -> None:
        """Keep a result; the oldest are dropped."""
        with self._lock:
            self._results[form] = result
            while len(self._results) > MAX_FORMS:
                del self._results[next(iter(self._results))]


def _form_of(messages: Sequence[Message], tools: Tools, variables: Mapping[str, Any]) -> Hashable:
    return (
        tuple(map(_form_of_message, messages)),
        bool(tools),
        json.dumps(variables, sort_keys=True, default=str),
    )


def _form_of_message(message: Message) -> Hashable:
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    tag = LEADING_TAG.match(text)  # such as that of a tool's result
    set_fields = tuple(sorted(name for name, value in message.items() if value))
    return message["role"], set_fields, CLOSING in text, tag and tag[0].strip()


class ReplayCheck:
    """Whether answers to one prompt can be replayed, with separate results for answers that begin
    with `opening_id`, which opens reasoning, and for others. `opening_id` None: not in the
    vocabulary.

    Each kind is tried once, on first use, since rendering a long chat again takes a while.
    Thread-safe; a call returns at most `limit_s` after the first one, so the engine thread never
    waits for the renderings of other chats.
    """

    def __init__(
        self,
        others: Callable[[], bool | None] = lambda: True,
        reasoning: Callable[[], bool | None] = lambda: True,
        opening_id: int | None = None,
        limit_s: float = REPLAY_S,
        results: ReplayResults | None = None,
        form: Hashable = None,
    ) -> None:
        """`others` and `reasoning` try out the two kinds, and return None if that was not possible.
        `results` are shared with other chats; `form` is that of this chat.
        """
        self._tries = {False: others, True: reasoning}  # by whether the answer opens reasoning
        self._kept, self._form = ReplayResults() if results is None else results, form
        self._opening_id = opening_id
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._results: dict[bool, tuple[Future[bool], float]] = {}  # and when each was begun

    @classmethod
    def always(cls) -> ReplayCheck:
        """For a prompt without a template: any answer may come back."""
        results = ReplayResults()
        results.put((False, None), True)
        return cls(results=results)

    @classmethod
    def of(
        cls,
        template: Template,
        tokenizer: Tokenizer,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        results: ReplayResults | None = None,
    ) -> ReplayCheck:
        """The check for answers to the prompt `text`, which `template` renders from the other
        arguments. Reads `results` of the same template, and adds to them.
        """
        has_tools, variables = bool(tools), template_kwargs or {}

        def is_replayed(tried: Iterator[tuple[str, list[Message]]]) -> bool | None:
            return _is_replayed(template, text, messages, tools, variables, tried)

        def others() -> bool | None:
            return is_replayed(_continuations(has_tools=has_tools))

        def reasoning() -> bool | None:
            answer = {"role": "assistant", "content": WITH_REASONING}
            return is_replayed(_followed(WITH_REASONING, answer, has_tools=has_tools))

        opening_id = tokenizer.token_id(OPENING)
        is_opened = text.rstrip().endswith(OPENING)
        form = is_opened, _form_of(messages, tools, variables)
        if opening_id is None or is_opened:  # the model does not open it
            return cls(others, results=results, form=form)
        return cls(others, reasoning, opening_id, results=results, form=form)

    def __call__(self, generated_ids: Sequence[int]) -> bool:
        """Whether a later prompt may begin with this complete answer; False while that is unknown:
        the answer's state is then computed again.
        """
        found = self._found_or_begun(generated_ids)
        if isinstance(found, bool):
            return found
        result, begun_s = found
        try:
            return result.result(max(0.0, begun_s + self._limit_s - time.monotonic()))
        except TimeoutError:
            return False

    def begin(self, generated_ids: Sequence[int]) -> None:
        """Start to determine the result of a call for an answer that begins with these ids, without
        waiting. No-op if it is known.
        """
        self._found_or_begun(generated_ids)

    def _found_or_begun(self, generated_ids: Sequence[int]) -> bool | tuple[Future[bool], float]:
        """The result if known, otherwise its future and when it was begun."""
        opens_reasoning = len(generated_ids) > 0 and generated_ids[0] == self._opening_id
        if (known := self._kept.get((opens_reasoning, self._form))) is not None:
            return known
        with self._lock:
            if opens_reasoning not in self._results:
                self._results[opens_reasoning] = self._try(opens_reasoning), time.monotonic()
            return self._results[opens_reasoning]

    def _try(self, opens_reasoning: bool) -> Future[bool]:
        """Try in a separate thread."""
        result: Future[bool] = Future()

        def run() -> None:
            try:
                found = self._tries[opens_reasoning]()
                if found is not None and self._form is not None:
                    self._kept.put((opens_reasoning, self._form), found)
                result.set_result(bool(found))
            except BaseException as error:
                result.set_exception(error)  # raised in all callers

        threading.Thread(target=run, name="replay-check", daemon=True).start()
        return result


def _is_replayed(
    template: Template,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    variables: Mapping[str, Any],
    tried: Iterator[tuple[str, list[Message]]],
) -> bool | None:
    """Whether any continuation begins with the prompt and its answer. True if the template refuses
    all of them, since nothing is known then. None: they could not be rendered.
    """
    is_known = False
    for start, continuation in tried:
        try:
            later = template.render([*messages, *continuation], tools, **variables)
        except (TemplateOverrun, Unavailable):  # later prompts could not be rendered, or not now
            return None
        except RequestError:
            continue
        if later.startswith(text + start):
            return True
        is_known = True
    return not is_known


def _continuations(*, has_tools: bool) -> Iterator[tuple[str, list[Message]]]:
    """The beginning of an answer, and the messages that continue the prompt, the answer first:
    without reasoning, and with reasoning that the template opens, if any does.
    """
    plain = {"role": "assistant", "content": CONTENT}
    yield from _followed(CONTENT, plain, has_tools=has_tools)
    reasoned = {**plain, "reasoning_content": REASONING}
    yield from _followed(REASONING, reasoned, has_tools=has_tools)


def _followed(
    start: str, answer: Message, *, has_tools: bool
) -> Iterator[tuple[str, list[Message]]]:
    """The answer followed by a user's turn and, with tools, by a tool result."""
    yield start, [answer, {"role": "user", "content": "0"}]
    if has_tools:
        result = {"role": "tool", "tool_call_id": CALL["id"], "name": "f", "content": "0"}
        yield start, [{**answer, "tool_calls": [CALL]}, result]
