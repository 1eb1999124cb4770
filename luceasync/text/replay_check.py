"""Whether an answer can be replayed: whether a later prompt can begin with its prompt and with it.

Templates drop reasoning before the user's last turn, or open an old answer differently from a new
one. Owns how that is tried. Knows no cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.template import Template
from luceasync.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

REASONING, CONTENT = "thought", "said"  # of the answer that is tried
OPENING = "<think>"  # written by a model that opens its reasoning itself
WITH_REASONING = f"{OPENING}\n{REASONING}\n</think>\n\n{CONTENT}"
CALL = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}


class ReplayCheck:
    """Whether answers to one prompt can be replayed, with separate results for answers that begin
    with `opening_id`, which opens reasoning, and for others. `opening_id` None: not in the
    vocabulary.

    Each kind is tried once, on first use, since rendering a long chat again takes a while. Safe to
    call from any thread; concurrent callers wait.
    """

    def __init__(
        self,
        others: Callable[[], bool] = lambda: True,
        reasoning: Callable[[], bool] = lambda: True,
        opening_id: int | None = None,
    ) -> None:
        self._tries = {False: others, True: reasoning}  # by whether the answer opens reasoning
        self._opening_id = opening_id
        self._lock = threading.Lock()
        self._results: dict[bool, bool] = {}

    @classmethod
    def of(
        cls,
        template: Template,
        tokenizer: Tokenizer,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ReplayCheck:
        """The check for answers to the prompt `text`, which `template` renders from the other
        arguments.
        """
        has_tools, variables = bool(tools), template_kwargs or {}

        def is_replayed(tried: Iterator[tuple[str, list[Message]]]) -> bool:
            return _is_replayed(template, text, messages, tools, variables, tried)

        def others() -> bool:
            return is_replayed(_continuations(has_tools=has_tools))

        def reasoning() -> bool:
            answer = {"role": "assistant", "content": WITH_REASONING}
            return is_replayed(_followed(WITH_REASONING, answer, has_tools=has_tools))

        opening_id = tokenizer.token_id(OPENING)
        if opening_id is None or text.rstrip().endswith(OPENING):  # the model does not open it
            return cls(others)
        return cls(others, reasoning, opening_id)

    def __call__(self, generated_ids: Sequence[int]) -> bool:
        """Whether a later prompt may begin with this complete answer."""
        opens_reasoning = len(generated_ids) > 0 and generated_ids[0] == self._opening_id
        with self._lock:
            if opens_reasoning not in self._results:
                self._results[opens_reasoning] = self._tries[opens_reasoning]()
            return self._results[opens_reasoning]


def _is_replayed(
    template: Template,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    variables: Mapping[str, Any],
    tried: Iterator[tuple[str, list[Message]]],
) -> bool:
    """Whether any continuation begins with the prompt and its answer. Also true if the template
    refuses them all: then nothing is known.
    """
    is_known = False
    for start, continuation in tried:
        try:
            later = template.render([*messages, *continuation], tools, **variables)
        except RequestError:
            continue
        if later.startswith(text + start):
            return True
        is_known = True
    return not is_known


def _continuations(*, has_tools: bool) -> Iterator[tuple[str, list[Message]]]:
    """How an answer starts, and the messages that continue the prompt, the answer first: without
    reasoning, and with reasoning that the template opens, if any does.
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
