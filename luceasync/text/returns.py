"""Whether an answer can come back: whether a later prompt can begin with its prompt and with it.

Templates leave out what was thought before a user's last turn, or open an old answer otherwise than
a new one. Owns how they are tried. Knows no cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.template import Template
from luceasync.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

THOUGHT, SAID = "thought", "said"  # of the answer that is tried
OPENING = "<think>"  # what a model writes that opens its reasoning itself
WRITTEN = f"{OPENING}\n{THOUGHT}\n</think>\n\n{SAID}"
CALL = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}


class Returns:
    """Whether answers to one prompt can come back: those that the model opens with `opening_id`,
    which begins its reasoning, and others. None: the model's vocabulary has no such token.

    Either is tried once, when somebody first asks: to render a long chat again takes a while. Any
    thread may ask; others wait meanwhile.
    """

    def __init__(
        self,
        others: Callable[[], bool] = lambda: True,
        thoughtful: Callable[[], bool] = lambda: True,
        opening_id: int | None = None,
    ) -> None:
        self._tries = {False: others, True: thoughtful}  # by whether reasoning begins it
        self._opening_id = opening_id
        self._lock = threading.Lock()
        self._found: dict[bool, bool] = {}

    @classmethod
    def of(
        cls,
        template: Template,
        tokenizer: Tokenizer,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Returns:
        """What `template` does with answers to the prompt `text`, to which these are rendered."""
        has_tools, variables = bool(tools), template_kwargs or {}

        def returns(tried: Iterator[tuple[str, list[Message]]]) -> bool:
            return _returns(template, text, messages, tools, variables, tried)

        def others() -> bool:
            return returns(_continued(has_tools=has_tools))

        def thoughtful() -> bool:
            written = {"role": "assistant", "content": WRITTEN}
            return returns(_followed(WRITTEN, written, has_tools=has_tools))

        opening_id = tokenizer.token_id(OPENING)
        if opening_id is None or text.rstrip().endswith(OPENING):  # the model does not open it
            return cls(others)
        return cls(others, thoughtful, opening_id)

    def __call__(self, generated_ids: Sequence[int]) -> bool:
        """Whether a later prompt may begin with this answer, whole, or with all that begin so."""
        is_thoughtful = len(generated_ids) > 0 and generated_ids[0] == self._opening_id
        with self._lock:
            if is_thoughtful not in self._found:
                self._found[is_thoughtful] = self._tries[is_thoughtful]()
            return self._found[is_thoughtful]


def _returns(
    template: Template,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    variables: Mapping[str, Any],
    tried: Iterator[tuple[str, list[Message]]],
) -> bool:
    """Whether any of the continuations begins with the prompt and its answer; true also where the
    template refuses all of them: nothing is known then.
    """
    is_known = False
    for start, said in tried:
        try:
            later = template.render([*messages, *said], tools, **variables)
        except RequestError:
            continue
        if later.startswith(text + start):
            return True
        is_known = True
    return not is_known


def _continued(*, has_tools: bool) -> Iterator[tuple[str, list[Message]]]:
    """How an answer starts, and the messages of which it is the first: with and without reasoning,
    which the template opens if anybody does.
    """
    plain = {"role": "assistant", "content": SAID}
    yield from _followed(SAID, plain, has_tools=has_tools)
    thoughtful = {**plain, "reasoning_content": THOUGHT}
    yield from _followed(THOUGHT, thoughtful, has_tools=has_tools)


def _followed(
    start: str, answer: Message, *, has_tools: bool
) -> Iterator[tuple[str, list[Message]]]:
    """A user's turn follows and, where there are tools, a result."""
    yield start, [answer, {"role": "user", "content": "0"}]
    if has_tools:
        result = {"role": "tool", "tool_call_id": CALL["id"], "name": "f", "content": "0"}
        yield start, [{**answer, "tool_calls": [CALL]}, result]
