"""What a model writes comes through the whole server: tokens, parsers, all three APIs.

The model is real and says a given text (tests/crafted.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionMessage

from luceasync.config import Config, EngineConfig, ModelConfig
from luceasync.engine.start import build_engine
from luceasync.errors import RequestError
from luceasync.server.app import create_app
from luceasync.server.openai.chat_body import check_tools
from luceasync.server_config import ServerConfig
from tests import crafted

pytestmark = pytest.mark.slow

TOOL = {"name": "edit", "description": "d"}
SCHEMA = {
    "type": "object",
    "properties": {"old": {"type": "string"}, "new": {"type": "string"}},
}
CHAT_TOOLS = [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]
MESSAGES_TOOLS = [{**TOOL, "input_schema": SCHEMA}]
RESPONSES_TOOLS = [{"type": "function", **TOOL, "parameters": SCHEMA}]

_CALLS = {
    "json": '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n'
    "</tool_call>",
    "xml": "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "keyed": "<tool_call>{{ c.name }}\n{% for k, v in c.arguments | items %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "mistral": "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}",
    "pythonic": "[{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %})]",
}
# As gpt-oss' template: reasoning, then one call, which takes no text beside reasoning.
_HARMONY = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% set thought = m.thinking or '' %}"
    "{% if m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>"
    "{{ m.content }}<|end|>{% elif m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|end|>{% elif m.tool_calls %}{% if m.content and thought %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "{% if thought or m.content %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ thought or m.content }}<|end|>{% endif %}{% set c = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>{% else %}{% if thought and loop.last %}<|start|>assistant"
    "<|channel|>analysis<|message|>{{ thought }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# As Gemma 4's: an answer that calls stays open for the result, and its text comes behind its calls.
_GEMMA_4 = (
    "{% if tools %}<|turn>system\n<|tool>{{ tools | tojson }}<tool|><turn|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>response:f{value:"
    '<|"|>{{ m.content }}<|"|>}<tool_response|>{% else %}'
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content and m.tool_calls %}<|channel>thought\n{{ m.reasoning_content }}\n"
    "<channel|>{% endif %}{% for c in m.tool_calls or [] %}{% set c = c.function %}"
    "<|tool_call>call:{{ c.name ~ '{' }}"
    '{% for k, v in c.arguments | dictsort %}{{ k }}:<|"|>{{ v }}<|"|>'
    "{{ ',' if not loop.last }}{% endfor %}}<tool_call|>{% endfor %}{{ m.content or '' }}"
    "{{ '<turn|>\n' if not m.tool_calls }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n"
    "{{ '<|channel>thought\n<channel|>' if not enable_thinking }}{% endif %}"
)
_FUNCTION_GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content or '' }}{% if loop.first %}{{ tools | tojson }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<start_function_call>call:{{ c.function.name ~ '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ k }}:<escape>{{ v }}<escape>"
    "{{ ',' if not loop.last }}{% endfor %}}<end_function_call>{% endfor %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_WHOLE = {"harmony": _HARMONY, "gemma 4": _GEMMA_4, "functiongemma": _FUNCTION_GEMMA}
_GEMMA_TOKENS = ("turn", "tool", "tool_call", "tool_response", "channel")
_ADDED = {
    "gemma 4": ['<|"|>', *(each for t in _GEMMA_TOKENS for each in (f"<|{t}>", f"<{t}|>"))],
    "functiongemma": ["<start_function_call>", "<end_function_call>", "<escape>", "<end_of_turn>"],
}
_OPENING = {"json": "", "xml": "<think>\n", "keyed": "<think>\n", "mistral": "", "pythonic": ""}


def _template(kind: str) -> str:
    if kind in _WHOLE:
        return _WHOLE[kind]
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{% set c = c.function %}"
        + _CALLS[kind]
        + "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + _OPENING[kind] + "{% endif %}"
    )


def _xml(*parameters: tuple[str, str]) -> str:
    said = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters)
    return f"<tool_call>\n<function=edit>\n{said}</function>\n</tool_call>"


def _json(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "edit", "arguments": {arguments}}}\n</tool_call>'


Expected = tuple[str, str, list[dict[str, str]]]  # reasoning, content, arguments of calls

# By kind of template, then by name: what the model says, and what clients must see.
CASES: dict[str, dict[str, tuple[str, Expected]]] = {
    "json": {
        "a1": (_json('{"old": "a1", "new": "é 😀"}'), ("", "", [{"old": "a1", "new": "é 😀"}])),
        "a2": (
            f"<think>\nwhy a2\n</think>\n\nFirst:\n{_json('{}')}\nthen so",
            ("why a2", "First:\n\nthen so", [{}]),
        ),
        "a3": (_json('{"old": NaN, "x": 3}'), ("", _json('{"old": NaN, "x": 3}'), [])),
        "a4": (_json('{"old": "h4", }'), ("", _json('{"old": "h4", }'), [])),
        "a5": (
            '<tool_call>\n[{"name": "edit", "arguments": {"old": "u5"}}]\n</tool_call>',
            ("", "", [{"old": "u5"}]),
        ),
        "a6": (
            '<tool_call>{"name": "edit", "arguments": {"old": "v6"}}\n'
            '{"name": "edit", "arguments": {"new": "w6"}}</tool_call>',
            ("", "", [{"old": "v6"}, {"new": "w6"}]),
        ),
        "a7": (
            "<think>\nnever ends a7\n" + _json('{"old": "i7"}'),
            ("never ends a7", "", [{"old": "i7"}]),
        ),
    },
    "xml": {
        "b1": (f"I call b1.\n{_xml(('old', 'b1'))}", ("I call b1.", "", [{"old": "b1"}])),
        "b2": (
            f"in b2\n{_xml(('old', 'b2'))}\n</think>\n\nDone b2.",
            (f"in b2\n{_xml(('old', 'b2'))}", "Done b2.", []),
        ),
        "b3": (
            "d3\n</think>\n\n<tool_call>\n<function=edit>\n<parameter=old>\nP3\n<parameter=new>\n"
            "Q3\n</parameter>\n</function>\n</tool_call>",
            ("d3", "", [{"old": "P3", "new": "Q3"}]),
        ),
        "b4": (
            "d4\n</think>\n\n<tool_call>\n<function=edit>\n<parameter=old>\nP4 and so on",
            ("d4", "<tool_call>\n<function=edit>\n<parameter=old>\nP4 and so on", []),
        ),
        "b5": (
            'd5\n</think>\n\n<function=edit>{"old": "Q5"}</function>',
            ("d5", "", [{"old": "Q5"}]),
        ),
        "b6": (
            "d6\n</think>\n\nWrite `<function=edit>` so.",
            ("d6", "Write `<function=edit>` so.", []),
        ),
    },
    "keyed": {
        "g1": (
            "I call g1\n<tool_call>edit\n<arg_key>old</arg_key>\n<arg_value>R1</arg_value>\n"
            "</tool_call>",
            ("I call g1", "", [{"old": "R1"}]),
        ),
        "g2": (
            "e2\n</think>\n<tool_call>edit\n<arg_key>old</arg_key>\n<arg_value>R2\n"
            "<arg_key>new</arg_key>\n<arg_value>S2</arg_value>\n</tool_call>",
            ("e2", "", [{"old": "R2", "new": "S2"}]),
        ),
    },
    "mistral": {
        "m1": (
            'Sure:[TOOL_CALLS]edit[ARGS]{"old": "m1"}[TOOL_CALLS]edit[ARGS]{}',
            ("", "Sure:", [{"old": "m1"}, {}]),
        ),
    },
    "harmony": {
        "h1": (
            "<|channel|>analysis<|message|>why h1<|end|><|start|>assistant<|channel|>final"
            "<|message|>so h1",
            ("why h1", "so h1", []),
        ),
        "h2": (
            "<|channel|>analysis<|message|>why h2<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>I will h2.<|end|><|start|>assistant<|channel|>commentary to=functions.edit "
            '<|constrain|>json<|message|>{"old": "h2"}',
            ("why h2", "I will h2.", [{"old": "h2"}]),
        ),
        "h3": (
            "<|start|>assistant to=functions.edit<|channel|>commentary json<|message|>"
            '{"new": "h3"}',
            ("", "", [{"new": "h3"}]),
        ),
        "h4": (
            "<|channel|>analysis<|message|>h4a<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>h4b<|end|><|start|>assistant<|channel|>final<|message|>so\n\nh4 `a<b`",
            ("h4a\n\nh4b", "so\n\nh4 `a<b`", []),
        ),
        "h5": (
            '<|channel|>commentary to=functions.edit json<|message|>{"old": "h5", }',
            ("", '<|channel|>commentary to=functions.edit json<|message|>{"old": "h5", }', []),
        ),
        "h6": ("no channel h6", ("", "no channel h6", [])),
        "h7": (
            "<|channel|>final<|message|>The tag <|channel|> h7",
            ("", "The tag <|channel|> h7", []),
        ),
    },
    "gemma 4": {
        "q1": (
            "<|channel>thought\nwhy q1\n<channel|>Now q1:<|tool_call>call:edit{new:"
            '<|"|>it\'s {a, b}<|"|>,old:<|"|>q1 "x"<|"|>}<tool_call|>',
            ("why q1", "Now q1:", [{"new": "it's {a, b}", "old": 'q1 "x"'}]),
        ),
        "q2": (
            '<|tool_call>call:edit{old:<|"|>q2<|"|>}<tool_call|>'
            '<|tool_call>call:edit{new:<|"|>r2<|"|>}<tool_call|>',
            ("", "", [{"old": "q2"}, {"new": "r2"}]),
        ),
        "q3": ("<|channel>thought\n<channel|>q3 `<|tool_call>`", ("", "q3 `<|tool_call>`", [])),
    },
    "functiongemma": {
        "f1": (
            "f1 so<start_function_call>call:edit{old:<escape>f1, {<escape>}<end_function_call>",
            ("", "f1 so", [{"old": "f1, {"}]),
        ),
        "f2": (
            "<start_function_call>call:edit{new:<escape>f2<escape>}",
            ("", "", [{"new": "f2"}]),
        ),
    },
    "pythonic": {
        "p1": ("[edit(old='p1', new=\"it's\")]", ("", "", [{"old": "p1", "new": "it's"}])),
        "p2": ("[other(old='p2')]", ("", "[other(old='p2')]", [])),
    },
}


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app over a real engine."""
    model = ModelConfig(model_dir=directory, dtype="fp32")
    engine = build_engine(Config(model=model, engine=EngineConfig(max_ctx_tokens=2048, parallel=2)))
    async with engine:
        await engine.load()
        app = create_app(engine, ServerConfig())
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json={"model": "crafted", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def chat(client: httpx.AsyncClient, said: list[Any]) -> tuple[Expected, dict[str, Any]]:
    body = {"messages": said, "tools": CHAT_TOOLS, "max_tokens": 300}
    [choice] = (await post(client, "/v1/chat/completions", body))["choices"]
    message = choice["message"]
    calls = [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    seen = message.get("reasoning_content") or "", message["content"] or "", calls
    return seen, message


async def streamed_chat(client: httpx.AsyncClient, said: list[Any]) -> Expected:
    body = {"model": "crafted", "temperature": 0, "messages": said, "tools": CHAT_TOOLS}
    answer = await client.post("/v1/chat/completions", json={**body, "stream": True})
    reasoning = content = ""
    calls: dict[int, str] = {}
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                written = call["function"].get("arguments") or ""
                calls[call["index"]] = calls.get(call["index"], "") + written
    return reasoning, content, [json.loads(arguments) for arguments in calls.values()]


async def messages(client: httpx.AsyncClient, text: str) -> Expected:
    body = {
        "messages": [{"role": "user", "content": text}],
        "tools": MESSAGES_TOOLS,
        "max_tokens": 300,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    blocks = (await post(client, "/v1/messages", {**body, "max_tokens": 1500}))["content"]
    return (
        "".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
        "".join(b["text"] for b in blocks if b["type"] == "text"),
        [b["input"] for b in blocks if b["type"] == "tool_use"],
    )


async def responses(client: httpx.AsyncClient, text: str) -> tuple[str, list[dict[str, str]]]:
    """Content and calls."""
    body = {"input": text, "tools": RESPONSES_TOOLS, "max_output_tokens": 300}
    items = (await post(client, "/v1/responses", body))["output"]
    content = [c["text"] for i in items if i["type"] == "message" for c in i["content"]]
    calls = [json.loads(i["arguments"]) for i in items if i["type"] == "function_call"]
    return "".join(content), calls


@pytest.mark.parametrize("kind", CASES)
async def test_what_the_model_says_is_told_alike_by_every_api(kind: str, tmp_path: Path) -> None:
    cases = CASES[kind]
    directory = crafted.save(
        tmp_path / "crafted",
        {name: text for name, (text, _) in cases.items()},
        _template(kind),
        added=_ADDED.get(kind, crafted.ADDED),
    )
    async with serving(directory) as client:
        for name, (_, expected) in cases.items():
            asked = [{"role": "user", "content": f"~{name}"}]
            seen, message = await chat(client, asked)
            assert seen == expected, name
            assert await streamed_chat(client, asked) == expected, name
            assert await messages(client, f"~{name}") == expected, name
            assert await responses(client, f"~{name}") == expected[1:], name
            # The answer can be sent back, with results of its calls.
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "done"}
                for call in message.get("tool_calls") or []
            ]
            await chat(client, [*asked, message, *results, asked[0]])


def _custom(name: str, syntax: str, definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, "description": "d", "format": form}}


SQL = _custom("query", "regex", "SELECT [a-z]{1,3}( LIMIT [0-9]| OFFSET 0)?")
PATCH = _custom("patch", "lark", 'start: "*** " LINE~1..2 "end"\nLINE: /[+-]["a-c]{1,3}/ "\\n"')
TEXTS = {
    "query": r"SELECT [a-z]{1,3}( LIMIT [0-9]| OFFSET 0)?",
    "patch": r'\*\*\* ([+-]["a-c]{1,3}\n){1,2}end',
}


@pytest.mark.parametrize("kind", ["json", "xml"])
async def test_a_custom_tool_gets_one_text_that_follows_its_grammar(
    kind: str, tmp_path: Path
) -> None:
    asks = [{"role": "user", "content": "~k1"}]
    async with serving(
        crafted.save(tmp_path / "crafted", {"k1": "so k1"}, _template(kind))
    ) as client:
        body = {"messages": asks, "tools": [*CHAT_TOOLS, SQL, PATCH], "max_tokens": 200}
        body["reasoning_effort"] = "none"
        for name, written in TEXTS.items():
            body["tool_choice"] = {"type": "custom", "custom": {"name": name}}
            [choice] = (await post(client, "/v1/chat/completions", body))["choices"]
            [call] = choice["message"]["tool_calls"]
            assert (call["type"], call["custom"]["name"]) == ("custom", name)
            assert re.fullmatch(written, call["custom"]["input"])
            assert choice["finish_reason"] == "tool_calls"
            ChatCompletionMessage.model_validate(choice["message"])
            assert await streamed_input(client, body) == (name, call["custom"]["input"])
            result = {"role": "tool", "tool_call_id": call["id"], "content": "3 rows"}
            again = {**body, "messages": [*asks, choice["message"], result]}
            again |= {"tool_choice": "none", "max_tokens": 2}
            await post(client, "/v1/chat/completions", again)
        asked = {"input": "~k1", "reasoning": {"effort": "none"}, "max_output_tokens": 200}
        form = {"type": "grammar", **PATCH["custom"]["format"]["grammar"]}
        asked["tools"] = [{"type": "custom", "name": "patch", "format": form}]
        asked["tool_choice"] = {"type": "custom", "name": "patch"}
        [item] = (await post(client, "/v1/responses", asked))["output"]
        assert item["type"] == "custom_tool_call" and re.fullmatch(TEXTS["patch"], item["input"])


async def streamed_input(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
    """The name and the text of the one call of a streamed chat, of a custom tool."""
    asked = {"model": "crafted", "temperature": 0, **body, "stream": True}
    streamed = await client.post("/v1/chat/completions", json=asked)
    first, *others = [
        call
        for line in streamed.text.splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"]
        for call in choice["delta"].get("tool_calls") or ()
    ]
    assert first["type"] == "custom"
    return first["custom"]["name"], "".join(each["custom"]["input"] for each in others)


@pytest.mark.parametrize(
    ("custom", "param"),
    [
        (None, "tools[0].custom"),
        ({}, "tools[0].custom.name"),
        ({"name": "f", "format": {"type": "odd"}}, "tools[0].custom.format"),
        (
            {"name": "f", "format": {"type": "grammar", "grammar": {"definition": "a"}}},
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "regex"}}},
            "tools[0].custom.format.grammar.definition",
        ),
    ],
)
def test_a_malformed_custom_tool_is_refused_with_its_field(custom: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_tools([{"type": "custom", "custom": custom}])
    assert refused.value.param == param


async def test_a_stop_counts_in_the_answer_alone(tmp_path: Path) -> None:
    texts = {"s1": "one stop\n</think>\n\ntwo stop three"}
    async with serving(crafted.save(tmp_path / "crafted", texts, _template("xml"))) as client:
        body = {"messages": [{"role": "user", "content": "~s1"}], "stop": ["stop"]}
        [choice] = (await post(client, "/v1/chat/completions", body))["choices"]
        assert choice["message"]["reasoning_content"] == "one stop"
        assert choice["message"]["content"] == "two "
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("ends", [{"max_tokens": 6}, {"stop": ["P9"]}])
async def test_a_call_that_is_cut_is_text(tmp_path: Path, ends: dict[str, Any]) -> None:
    call = _xml(("old", "much text before P9 and after it, and yet more of it"))
    texts = {"s2": f"d\n</think>\n\n{call}"}
    async with serving(crafted.save(tmp_path / "crafted", texts, _template("xml"))) as client:
        body = {
            "messages": [{"role": "user", "content": "~s2"}],
            "tools": CHAT_TOOLS,
            **ends,
        }
        [choice] = (await post(client, "/v1/chat/completions", body))["choices"]
        message = choice["message"]
        assert not message.get("tool_calls")
        assert choice["finish_reason"] in ("stop", "length")
        assert call.startswith(message["content"]) and len(message["content"]) < len(call)
