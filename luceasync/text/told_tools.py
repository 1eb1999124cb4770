"""Tools for chat templates that do not render them: described in the system message, and called in
tags, in which earlier calls are also shown.

Owns that notation, which is that of Hermes. Independent of how a model was trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.past_calls import call_text
from luceasync.text.template import Template

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
NAME, PROBE = "probe_of_tools", "probe of a message"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
ABOUT = """\
You may call functions to assist with the user query. Their signatures are JSON schemas:
<tools>
{}
</tools>"""
NOTATION = """

For each function call, return a JSON object with the function's name and arguments:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
CALL = "<tool_call>\n{}\n</tool_call>"
RESULT = "<tool_response>\n{}\n</tool_response>"


class ToldTools:
    """Renders like `template`, but also shows tools, calls and results, which
    `template` does not.
    """

    def __init__(
        self, template: Template, *, takes_system: bool = True, shows_calls: bool = False
    ) -> None:
        """`takes_system`: the template accepts a system message; otherwise the first user message
        gets the text. `shows_calls`: the template writes calls itself, in a known notation.
        """
        self._template = template
        self._takes_system = takes_system
        self._shows_calls = shows_calls

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Like ChatTemplate.render."""
        told = list(messages if self._shows_calls else _as_texts(messages))
        if tools:
            told = self._with_tools(told, tools)
        return self._template.render(told, add_generation_prompt=add_generation_prompt, **kwargs)

    def _with_tools(self, messages: list[Message], tools: Sequence[Message]) -> list[Message]:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        about = ABOUT.format(listed) + ("" if self._shows_calls else NOTATION)
        role = SYSTEM if self._takes_system else USER
        for i, message in enumerate(messages):
            if message["role"] == role:
                texts = [message.get("content") or "", about]
                joined = "\n\n".join(filter(None, texts if self._takes_system else texts[::-1]))
                return [*messages[:i], {**message, "content": joined}, *messages[i + 1 :]]
            if self._takes_system:  # only the first message is considered
                break
        return [{"role": role, "content": about}, *messages]


def shows_tools(template: Template) -> bool:
    """Whether a prompt names the tools that it is rendered with. Also true for a template that does
    not show the user's text: nothing is known about it then.
    """
    user = [{"role": USER, "content": PROBE}]
    return PROBE not in _rendered(template, user) or NAME in _rendered(template, user, TOOLS)


def told_tools(template: Template, *, shows_calls: bool) -> ToldTools:
    """`template` with tools described in words, and calls too unless it `shows_calls`."""
    chat = [{"role": SYSTEM, "content": PROBE}, {"role": USER, "content": "said"}]
    takes_system = PROBE in _rendered(template, chat)
    return ToldTools(template, takes_system=takes_system, shows_calls=shows_calls)


def _as_texts(messages: Sequence[Message]) -> Iterator[Message]:
    """Calls as text of their message, and results as text of a user message, merged with the next
    one: some templates do not accept two in a row.
    """
    results: list[str] = []
    for message in messages:
        if message["role"] == TOOL:
            results.append(RESULT.format(message.get("content") or ""))
            continue
        if results and message["role"] == USER:
            texts = [*results, message.get("content") or ""]
            message = {**message, "content": "\n".join(texts)}
        elif results:
            yield {"role": USER, "content": "\n".join(results)}
        results = []
        yield _with_calls_as_text(message)
    if results:
        yield {"role": USER, "content": "\n".join(results)}


def _with_calls_as_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [CALL.format(call_text(call)) for call in message["tool_calls"]]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [message.get("content") or "", *calls]))}


def _rendered(template: Template, messages: Sequence[Message], tools: Tools = None) -> str:
    """The prompt; "" if the template refuses it."""
    try:
        return template.render(messages, tools)
    except RequestError:
        return ""
