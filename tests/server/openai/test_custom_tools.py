"""Custom tools and namespaces: offered as functions, answered in the client's own form. Grammars in
Lark are regular expressions where their rules do not lead back to themselves.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from luceasync.errors import RequestError
from luceasync.request import ArgumentsPiece, CallPiece, Delta, TextPiece, TokenLogprob
from luceasync.server.openai.custom_tools import (
    INPUT_SCHEMA,
    MAX_REGEX_CHARS,
    NotRegular,
    custom_function,
    lark_regex,
)
from tests.server.openai.test_responses import BODY, RESPONSES, events_of
from tests.server.scripted import ScriptedEngine, finish

PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}  # fmt: skip
READ = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}
FILES = {"type": "namespace", "name": "mcp__fs", "tools": [READ]}
NOTES = {"type": "namespace", "name": "mcp__notes__", "tools": [READ]}
TOOLS = [PATCH, FILES, NOTES, READ, {"type": "web_search"}]


def calling(name: str, *arguments: str, reason: str = "stop") -> ScriptedEngine:
    pieces = (CallPiece(0, "call_1", name), *(ArgumentsPiece(0, part) for part in arguments))
    return ScriptedEngine([Delta(0, pieces, (1,)), Delta(0, finish=finish(reason, 1))])


async def output(in_memory, engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    async with in_memory(engine) as client:
        response = await client.post(RESPONSES, json={**BODY, "tools": TOOLS, **fields})
    assert response.status_code == 200, response.text
    return response.json()["output"][0]


async def test_the_model_is_offered_a_function_for_each(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        await client.post(RESPONSES, json={**BODY, "tools": TOOLS})
    prompt = engine.requests[0].prompt
    functions = [tool["function"] for tool in prompt.tools]
    names = ["apply_patch", "mcp__fs__read", "mcp__notes__read", "read"]
    assert [function["name"] for function in functions] == names
    assert functions[0]["parameters"]["required"] == ["input"]
    assert functions[0]["description"].endswith('lark grammar:\nstart: "x"')
    assert prompt.schema_places == (
        "tools[0].format", "tools[1].tools[0].parameters", "tools[2].tools[0].parameters",
        "tools[3].parameters",
    )  # fmt: skip


async def test_the_text_of_a_custom_tool_must_follow_a_regular_expression(in_memory):
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        asked = {**BODY, "tools": [{**PATCH, "format": form}]}
        await client.post(RESPONSES, json=asked)
        form["syntax"] = "bnf"
        refused = await client.post(RESPONSES, json=asked)
    [tool] = engine.requests[0].prompt.tools
    assert tool["function"]["strict"] is True
    properties = tool["function"]["parameters"]["properties"]
    assert properties == {"input": {"type": "string", "pattern": "^(?:[a-z]+)$"}}
    assert refused.json()["error"]["param"] == "tools[0].format.syntax"


async def test_a_call_of_a_custom_tool_has_one_text(in_memory):
    engine = calling("apply_patch", '{"input": "*** Beg', 'in\\n"}')
    item = await output(in_memory, engine)
    del item["id"]
    assert item == {
        "type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch",
        "status": "completed", "input": "*** Begin\n",
    }  # fmt: skip


async def test_each_of_two_calls_in_a_row_has_its_text(in_memory):
    pieces = []
    for index, text in enumerate(("x", "y")):
        pieces += [CallPiece(index, f"call_{index}", "apply_patch")]
        pieces += [ArgumentsPiece(index, f'{{"input": "{text}"}}')]
    script = [Delta(0, tuple(pieces), (1,)), Delta(0, finish=finish("stop", 1))]
    async with in_memory(ScriptedEngine(script)) as client:
        response = await client.post(RESPONSES, json={**BODY, "tools": TOOLS})
    assert [item["input"] for item in response.json()["output"]] == ["x", "y"]


async def test_openais_own_types_read_all_of_it(in_memory):
    read_event = TypeAdapter(ResponseStreamEvent).validate_python
    for name, arguments in (("apply_patch", '{"input": "x"}'), ("mcp__fs__read", "{}")):
        async with in_memory(calling(name, arguments)) as client:
            body = {**BODY, "tools": TOOLS}
            Response.model_validate((await client.post(RESPONSES, json=body)).json())
            for event in events_of(await client.post(RESPONSES, json=body | {"stream": True})):
                read_event(event)


@pytest.mark.parametrize("arguments", ['{"input": "*** Beg', '{"patch": "x"}', "[1]", ""])
async def test_the_text_of_a_broken_call_is_what_was_written(in_memory, arguments):
    item = await output(in_memory, calling("apply_patch", *filter(None, [arguments])))
    assert item["input"] == arguments


async def test_the_text_is_streamed_and_done(in_memory):
    engine = calling("apply_patch", '{"input": "x"}')
    async with in_memory(engine) as client:
        body = {**BODY, "tools": TOOLS, "stream": True}
        events = events_of(await client.post(RESPONSES, json=body))
    told = [event["type"].removeprefix("response.") for event in events[2:]]
    assert told == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert (events[3]["delta"], events[4]["input"]) == ("x", "x")


@pytest.mark.parametrize(
    ("called", "namespace"),
    [("mcp__fs__read", "mcp__fs"), ("mcp__notes__read", "mcp__notes__"), ("read", None)],
)
async def test_a_call_names_its_namespace(in_memory, called, namespace):
    item = await output(in_memory, calling(called, "{}"))
    assert (item["type"], item["name"], item.get("namespace")) == (
        "function_call", "read", namespace,
    )  # fmt: skip
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        body = {**BODY, "tools": TOOLS, "input": [item, {**item, "arguments": '{"a'}]}
        assert (await client.post(RESPONSES, json=body)).status_code == 200
    [message] = engine.requests[0].prompt.messages
    assert [call["function"]["name"] for call in message["tool_calls"]] == [called, called]


@pytest.mark.parametrize(
    ("choice", "names", "must_call"),
    [
        ({"type": "custom", "name": "apply_patch"}, 4, ("apply_patch",)),
        ({"type": "function", "name": "read", "namespace": "mcp__fs"}, 4, ("mcp__fs__read",)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", **PATCH}]},
            1,
            (),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"name": "apply_patch"}]},
            1,
            ("apply_patch",),
        ),
    ],
)
async def test_a_choice_of_tools(in_memory, choice, names, must_call):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        body = {**BODY, "tools": TOOLS, "tool_choice": choice}
        assert (await client.post(RESPONSES, json=body)).status_code == 200
    prompt = engine.requests[0].prompt
    assert (len(prompt.tools), prompt.must_call) == (names, must_call)


async def test_allowed_tools_of_a_chat(in_memory):
    engine = ScriptedEngine()
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    allowed = {"mode": "required", "tools": [tools[1]]}
    body = {
        "messages": [{"role": "user", "content": "Hi"}], "tools": tools,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }  # fmt: skip
    async with in_memory(engine) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = engine.requests[0].prompt
    assert [tool["function"]["name"] for tool in prompt.tools] == ["g"]
    assert prompt.must_call == ("g",)
    assert prompt.schema_places == ("tools[1].function.parameters",)


async def test_log_probabilities_of_the_text(in_memory):
    def of(token: str) -> TokenLogprob:
        return TokenLogprob(token, token.encode(), -1.0)

    script = [
        Delta(0, (TextPiece("a"),), (1,), (of("a"),)),
        Delta(0, (), (2,), (of("b"),)),
        Delta(0, (TextPiece("bc"),), (3,), (of("c"),), finish=finish("stop", 3)),
    ]
    engine = ScriptedEngine(script)
    body = {**BODY, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with in_memory(engine) as client:
        plain = (await client.post(RESPONSES, json=body)).json()
        events = events_of(await client.post(RESPONSES, json={**body, "stream": True}))
    assert engine.requests[0].top_logprobs == 2
    [part] = plain["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["a", "b", "c"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in delta["logprobs"]] for delta in deltas] == [["a"], ["b", "c"]]
    assert json.dumps(events[-1]).count('"token"') == 3


APPLY_PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
    | update_hunk  // the rest
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
ADDED = "*** Begin Patch\n*** Add File: a.py\n+x\n+\n*** End Patch"
UPDATED = "*** Begin Patch\n*** Update File: a/b\n*** Move to: c\n@@ f\n-x\n+y\n z\n*** End Patch\n"
SUM = """
?start: term (("+" | "-") term)*
term.2: NUMBER | "(" NAME ")" | [ "not"i ] NAME ~ 2
NAME: "a".."c" /[x\\/"]/i
%import common (NUMBER, WS)
%ignore WS
"""


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        (APPLY_PATCH, [ADDED, UPDATED], [ADDED.replace("+x", "x"), ADDED[:-2], UPDATED[1:]]),
        (SUM, ["1+ ( aX )\n-2.5 ", 'NOT a/b"', "cxbx"], ["1+", "ax", "1 + (ax", "dxdx", "axbxcx"]),
        (
            'start: "a" ~ 2..3 | "b"{2} | "c"{1,} |',
            ["aa", "aaa", "bb", "ccc", ""],
            ["a", "b", "bbb"],
        ),
        ('start: A*\nA: "\\\\n" | "\\n" | "."\n | "\\u20ac"', ["\\n\n.€."], ["x", "\\"]),
        ("start: /a.b/s | /a.b/ # dots", ["a\nb", "a.b"], ["ab"]),
        ('%import common.INT -> N\nstart: N ("," N)*', ["1,22"], ["1,"]),
    ],
)
def test_a_grammar_without_recursion_is_an_expression(grammar, taken, refused):
    regex = re.compile(lark_regex(grammar))
    assert [text for text in taken if not regex.fullmatch(text)] == []
    assert [text for text in refused if regex.fullmatch(text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | "x"',
        'start: a\na: b\nb: "x" | a',
        r"start: /a\b/",
        "start: /^a$/",
        "start: /a(?=b)/",
        "start: /a/x",
        'start: pair{"a"}\npair{x}: x x',
        "start: A\n%declare A",
        "%import python.NAME\nstart: NAME",
        "start: %json {}",
        'start: ("x"',
        'start: "x")',
        "start: A\nA: b\nb: /x/",
        "no grammar",
        "",
        "start: " + "(" * 200 + '"x"' + ")" * 200,
        "\n".join(["start: a0", *(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)), 'a40: "x"']),
        f'start: "{"x" * (MAX_REGEX_CHARS + 1)}"',
    ],
)
def test_another_grammar_is_told_and_not_enforced(grammar):
    with pytest.raises(NotRegular):
        lark_regex(grammar)
    if 0 < len(grammar) < 1000:
        function = custom_function("tools[0].format", "f", "d", "lark", grammar)
        assert function["parameters"] == INPUT_SCHEMA and "strict" not in function
        assert function["description"].endswith(grammar)


@pytest.mark.parametrize(("grammar", "name"), [("start: a", "a"), ('a: "x"', "start")])
def test_a_grammar_that_lacks_a_rule_is_refused_with_its_name(grammar, name):
    with pytest.raises(RequestError, match=f"definition': '{name}'") as refused:
        custom_function("tools[0].format", "f", None, "lark", grammar)
    assert refused.value.param == "tools[0].format.definition"
