"""Tools in words, for a chat template that shows none: described in the system message, and called
in tags that the model writes and is shown.

Owns that notation, Hermes' own. Knows how no model was trained.
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
    """A template that shows tools, calls and results where `template` shows none."""

    def __init__(
        self, template: Template, *, takes_system: bool = True, shows_calls: bool = False
    ) -> None:
        """`takes_system`: there may be a system message; else the user's first one has the text.
        `shows_calls`: the template writes calls in a notation of its own, which is known.
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
        """As ChatTemplate.render."""
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
            if self._takes_system:  # only the first message is looked at
                break
        return [{"role": role, "content": about}, *messages]


def shows_tools(template: Template) -> bool:
    """Whether a prompt names the tools that it is rendered with. Also true of a template that does
    not show what a user says: nothing is known of it.
    """
    user = [{"role": USER, "content": PROBE}]
    return PROBE not in _rendered(template, user) or NAME in _rendered(template, user, TOOLS)


def told_tools(template: Template, *, shows_calls: bool) -> ToldTools:
    """`template` with tools told in words, and calls too unless it `shows_calls`."""
    chat = [{"role": SYSTEM, "content": PROBE}, {"role": USER, "content": "said"}]
    takes_system = PROBE in _rendered(template, chat)
    return ToldTools(template, takes_system=takes_system, shows_calls=shows_calls)


def _as_texts(messages: Sequence[Message]) -> Iterator[Message]:
    """Calls as text of their message; results as text of the user's message, which is one with what
    the user says next: some templates take no two in a row.
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
