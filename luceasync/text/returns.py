"""Whether an answer can come back: whether a later prompt can begin with its prompt and with it.

Templates leave out what was thought before a user's last turn, or open an old answer otherwise than
a new one. Owns how they are tried. Knows no cache and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.template import Template

Message = Mapping[str, Any]

THOUGHT, SAID = "thought", "said"  # of the answer that is tried
CALL = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}


def answer_returns(
    template: Template,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Message] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> bool:
    """Whether a prompt that goes on from `messages` may begin with `text`, to which these are
    rendered, and the answer as it was generated.

    Tried are answers with and without their reasoning, then a user's turn and, where there are
    `tools`, a result. True also where the template refuses all of these: nothing is known then.
    """
    is_known = False
    for start, said in _continued(has_tools=bool(tools)):
        try:
            later = template.render([*messages, *said], tools, **(template_kwargs or {}))
        except RequestError:
            continue
        if later.startswith(text + start):
            return True
        is_known = True
    return not is_known


def _continued(*, has_tools: bool) -> Iterator[tuple[str, list[Message]]]:
    """How an answer starts, and the messages of which it is the first."""
    plain = {"role": "assistant", "content": SAID}
    thoughtful = {**plain, "reasoning_content": THOUGHT}
    for start, answer in ((SAID, plain), (THOUGHT, thoughtful)):
        yield start, [answer, {"role": "user", "content": "0"}]
        if has_tools:
            result = {"role": "tool", "tool_call_id": CALL["id"], "name": "f", "content": "0"}
            yield start, [{**answer, "tool_calls": [CALL]}, result]
