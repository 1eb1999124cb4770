"""The tools of a responses request as the functions that a model is offered, and back.

Source: OpenAI's OpenAPI document, `Tool`. Custom tools, which chat has too, take one text; those in
a namespace are offered under a joined name. Owns both names of each tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from luceasync.server.fields import (
    at_most,
    check_arguments_schema,
    refuse,
    tool_function,
    with_whole_characters,
)
from luceasync.server.openai.request_body import (
    MAX_GRAMMAR_CHARS,
    ToolChoice,
    allowed_tools,
    max_calls,
    must_call,
)

MAX_TOOLS = 1024
INPUT = "input"  # the argument of a custom tool
INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}

SYNTAXES = ("lark", "regex")
CLIENT_TOOLS = ("function", "custom", "namespace")

TemplateTool = dict[str, Any]


class CustomFormat(msgspec.Struct, omit_defaults=True):
    """What the text of a custom tool looks like."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponsesTool(msgspec.Struct):
    """A function, a custom tool or a namespace of the client's, or a tool of another `type`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[ResponsesTool] | None = None

    def echo(self) -> dict[str, Any]:
        """The tool as the response repeats it, with the fields that clients' types want."""
        fields: dict[str, Any]
        match self.type:
            case "function":
                fields = {"parameters": self.parameters, "strict": self.strict}
            case "custom":
                fields = {} if self.format is None else {"format": self.format}
            case _:
                fields = {"tools": [tool.echo() for tool in self.tools or ()]}
        described = {"name": self.name, "description": self.description or ""}
        return {"type": self.type, **described, **fields}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool under the client's own name; `where`: the path of its field."""

    where: str
    tool: ResponsesTool
    namespace: str | None = None

    @property
    def name(self) -> str:
        return self.tool.name or ""

    @property
    def is_custom(self) -> bool:
        return self.tool.type == "custom"

    @property
    def offered_name(self) -> str:
        return offered_name(self.namespace, self.name)

    @property
    def schema_place(self) -> str:
        return f"{self.where}.format" if self.is_custom else f"{self.where}.parameters"

    def function(self) -> TemplateTool:
        """The function that the model is offered. Raises RequestError, which names the field."""
        tool, where = self.tool, self.where
        if not tool.name:
            refuse(f"{where}.name", tool.name, "a name")
        if self.is_custom:
            form = tool.format or CustomFormat("text")
            about = self.offered_name, tool.description
            custom = custom_function(f"{where}.format", *about, form.syntax, form.definition)
            return {"type": "function", "function": custom}
        check_arguments_schema(f"{where}.parameters", tool.parameters or {})
        fields = {"description": tool.description, "parameters": tool.parameters}
        strict = {"strict": True} if tool.strict else {}
        named = tool_function({"name": self.offered_name, **fields, **strict})
        return {"type": "function", "function": named}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of one request, by the names that the model knows; `functions` are what its
    template shows.
    """

    by_name: dict[str, ClientTool] = field(default_factory=dict)
    functions: tuple[TemplateTool, ...] = ()
    max_calls: int | None = None
    must_call: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        tools: Sequence[ResponsesTool],
        choice: ToolChoice | None = None,
        parallel: bool | None = None,
    ) -> OfferedTools:
        """Tools that run on OpenAI's servers are left out. Raises RequestError."""
        at_most("tools", tools, MAX_TOOLS, "tools")
        if choice == "none":
            return cls()
        listed = list(_of_client(tools))
        at_most("tools", listed, MAX_TOOLS, "tools")
        choice, allowed = allowed_tools(choice)
        if allowed is not None:
            listed = [one for one in listed if any(_is_meant(one, each) for each in allowed)]
        by_name = {one.offered_name: one for one in listed}
        functions = tuple(one.function() for one in by_name.values())
        choice = _offered_choice(choice, listed)
        return cls(by_name, functions, max_calls(choice, parallel), must_call(choice, functions))

    @property
    def schema_places(self) -> tuple[str, ...]:
        return tuple(one.schema_place for one in self.by_name.values())


def custom_function(
    where: str, name: str, description: str | None, syntax: str | None, definition: str | None
) -> dict[str, Any]:
    """The function that stands for a custom tool. The text of a tool with a regular expression
    follows it; another grammar stands in the description. Raises RequestError, which names the
    field below `where`.
    """
    if not definition:
        return {"name": name, "description": description or "", "parameters": INPUT_SCHEMA}
    if syntax not in SYNTAXES:
        refuse(f"{where}.syntax", syntax, "'lark' or 'regex'")
    if len(definition) > MAX_GRAMMAR_CHARS:
        refuse(f"{where}.definition", definition, f"at most {MAX_GRAMMAR_CHARS} characters")
    shown = f"The text of `{INPUT}` follows this {syntax} grammar:\n{definition}"
    function = {"name": name, "description": "\n\n".join(filter(None, [description, shown]))}
    if syntax == "lark":
        return {**function, "parameters": INPUT_SCHEMA}
    text = {"type": "string", "pattern": f"^(?:{definition})$"}
    return {**function, "parameters": {**INPUT_SCHEMA, "properties": {INPUT: text}}, "strict": True}


def offered_name(namespace: str | None, name: str) -> str:
    """The name that the model knows."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def input_arguments(text: str) -> str:
    """The arguments of a call of a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The text for a custom tool; the arguments themselves if they have none."""
    try:
        match msgspec.json.decode(with_whole_characters(arguments.encode())):
            case {"input": str(text)}:
                return text
            case _:
                return arguments
    except (msgspec.DecodeError, RecursionError):
        return arguments


def _of_client(tools: Sequence[ResponsesTool]) -> Iterator[ClientTool]:
    for i, tool in enumerate(tools):
        if tool.type in ("function", "custom"):
            yield ClientTool(f"tools[{i}]", tool)
        elif tool.type == "namespace":
            for j, inner in enumerate(tool.tools or ()):
                if inner.type in ("function", "custom"):
                    yield ClientTool(f"tools[{i}].tools[{j}]", inner, tool.name)


def _is_meant(one: ClientTool, choice: Any) -> bool:
    """Whether an object that chooses a tool means this one."""
    if not isinstance(choice, dict) or choice.get("name") not in (one.name, one.offered_name):
        return False
    return choice.get("namespace") in (None, one.namespace)


def _offered_choice(choice: ToolChoice | None, listed: Sequence[ClientTool]) -> ToolChoice | None:
    """The choice under the name that the model knows."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return choice
    meant = next((one for one in listed if _is_meant(one, choice)), None)
    return choice if meant is None else {"type": "function", "name": meant.offered_name}
