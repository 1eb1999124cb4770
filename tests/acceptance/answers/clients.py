"""What clients of each API ask, see of an answer, and send back."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.acceptance.answers.cases import CUSTOM, Case, Seen, Wrong
from tests.text.answer.written import SCHEMA, TOOL

MAX_ANSWER_TOKENS = 1 << 15
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
OLLAMA = "/api/chat"
TOOLS = {
    CHAT: [{"type": "function", "function": {"name": TOOL, "parameters": SCHEMA}}],
    OLLAMA: [{"type": "function", "function": {"name": TOOL, "parameters": SCHEMA}}],
    MESSAGES: [{"name": TOOL, "input_schema": SCHEMA}],
    RESPONSES: [{"type": "function", "name": TOOL, "parameters": SCHEMA}],
}
TEXT_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
GRAMMARS = {"lark": 'start: LINE+\nLINE: /x.*/ "\\n"?', "regex": "(x.*\n?)+"}
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def body_of(path: str, case: Case, asks: str) -> dict[str, Any]:
    """A request that gets the answer of `case`."""
    most = case.max_tokens or MAX_ANSWER_TOKENS
    body: dict[str, Any] = {"model": "tiny", "temperature": 0}
    if case.has_tools:
        body["tools"] = [*TOOLS[path], *([custom_tool(path, case.custom)] if case.custom else ())]
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": asks}], "max_tokens": most}
        body |= {"stop": case.stop, "parallel_tool_calls": case.is_parallel}
    elif path == MESSAGES:
        body |= {"messages": [{"role": "user", "content": asks}], "max_tokens": most}
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        body |= {"stop_sequences": [case.stop]} if case.stop else {}
        if case.has_tools and not case.is_parallel:
            body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    elif path == OLLAMA:
        options = {"temperature": body.pop("temperature"), "num_predict": most}
        options |= {"stop": [case.stop]} if case.stop else {}
        body |= {"messages": [{"role": "user", "content": asks}], "options": options}
        body["stream"] = False
    else:
        body |= {"input": [{"role": "user", "content": asks}], "max_output_tokens": most}
        body["parallel_tool_calls"] = case.is_parallel
    return body


def custom_tool(path: str, kind: str) -> dict[str, Any]:
    """A tool with one text, which follows a grammar of the kind; Anthropic's and Ollama's have a
    schema.
    """
    if path == MESSAGES:
        return {"name": CUSTOM, "input_schema": TEXT_SCHEMA}
    if path == OLLAMA:
        return {"type": "function", "function": {"name": CUSTOM, "parameters": TEXT_SCHEMA}}
    grammar = {"syntax": kind, "definition": GRAMMARS.get(kind)}
    if path == CHAT:
        form = {"type": "text"} if kind == "text" else {"type": "grammar", "grammar": grammar}
        return {"type": "custom", "custom": {"name": CUSTOM, "format": form}}
    form = {"type": "text"} if kind == "text" else {"type": "grammar", **grammar}
    return {"type": "custom", "name": CUSTOM, "format": form}


def parsed(written: str) -> dict[str, Any]:
    """The arguments of a call, which are an object."""
    try:
        found = json.loads(written)
    except ValueError as error:
        raise Wrong(f"arguments do not parse: {written!r}") from error
    if not isinstance(found, dict):
        raise Wrong(f"arguments are no object: {written!r}")
    return found


def of_text(text: str) -> dict[str, Any]:
    """The arguments of a call of a custom tool, which stand as they are if they have no text."""
    try:
        return parsed(text)
    except Wrong:
        return {"input": text}


def _named(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A call of any tool; of what the custom tool gets besides its text, others see nothing."""
    if name == CUSTOM and isinstance(text := arguments.get("input"), str):
        return name, {"input": text}
    return name, arguments


def called_in_chat(call: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if call["type"] == "custom":
        return call["custom"]["name"], of_text(call["custom"]["input"])
    return _named(call["function"]["name"], parsed(call["function"]["arguments"]))


def seen_in_chat(answer: dict[str, Any]) -> Seen:
    ChatCompletion.model_validate(answer)
    [choice] = answer["choices"]
    message = choice["message"]
    return Seen(
        message.get("reasoning_content") or "",
        message["content"] or "",
        [called_in_chat(call) for call in message.get("tool_calls") or ()],
        choice["finish_reason"],
    )


def seen_in_chunks(events: list[dict[str, Any]]) -> Seen:
    reasoning = content = finish = ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if '"custom": {' not in json.dumps(event):  # whose deltas the library has no types for
            ChatCompletionChunk.model_validate(event)
        for choice in event["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            finish = choice["finish_reason"] or finish
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], {"type": call.get("type")})
                whole = known.setdefault(known["type"], {"name": "", "input": "", "arguments": ""})
                for part, text in call[known["type"]].items():
                    whole[part] += text
    return Seen(reasoning, content, [called_in_chat(call) for call in calls.values()], finish)


FINISHES = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls"}


def seen_in_message(answer: dict[str, Any]) -> Seen:
    Message.model_validate(answer)
    blocks = answer["content"]
    calls = [_named(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    return Seen(
        "".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
        "".join(b["text"] for b in blocks if b["type"] == "text"),
        calls,
        _finish(answer["stop_reason"], has_calls=bool(calls)),
    )


def _finish(reason: str, *, has_calls: bool) -> str:
    """A stop reason of Anthropic's in OpenAI's words, where a call comes before a stop string."""
    if reason == "stop_sequence" and has_calls:
        return "tool_calls"
    return FINISHES.get(reason, "length")


def seen_in_message_events(events: list[dict[str, Any]]) -> Seen:
    texts: dict[str, str] = {"thinking": "", "text": ""}
    calls: list[list[str]] = []
    finish = ""
    for event in events:
        if event["type"] != "ping":  # which the library drops
            MESSAGE_EVENT.validate_python(event)
        match event:
            case {"type": "content_block_start", "content_block": {"type": "tool_use"} as block}:
                calls.append([block["name"], ""])
            case {"delta": {"type": "input_json_delta", "partial_json": part}}:
                calls[-1][1] += part
            case {"delta": {"type": "text_delta", "text": part}}:
                texts["text"] += part
            case {"delta": {"type": "thinking_delta", "thinking": part}}:
                texts["thinking"] += part
            case {"delta": {"stop_reason": reason}}:
                finish = _finish(reason, has_calls=bool(calls))
    named = [_named(name, parsed(written)) for name, written in calls]
    return Seen(texts["thinking"], texts["text"], named, finish)


RESULTS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}


def called_in_response(item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if item["type"] == "custom_tool_call":
        return item["name"], of_text(item["input"])
    return _named(item["name"], parsed(item["arguments"]))


def seen_in_response(answer: dict[str, Any]) -> Seen:
    Response.model_validate(answer)
    items = answer["output"]
    calls = [called_in_response(item) for item in items if item["type"] in RESULTS]
    finish = "tool_calls" if calls else "stop"
    return Seen(
        "".join(s["text"] for i in items if i["type"] == "reasoning" for s in i["summary"]),
        "".join(c["text"] for i in items if i["type"] == "message" for c in i["content"]),
        calls,
        "length" if answer["status"] == "incomplete" else finish,
    )


def seen_in_response_events(events: list[dict[str, Any]]) -> Seen:
    for event in events:
        RESPONSE_EVENT.validate_python(event)
    deltas = Counter[str]()
    texts: dict[str, str] = {}
    for event in events:
        if isinstance(event.get("delta"), str):
            deltas[event["type"]] += 1
            texts[event["type"]] = texts.get(event["type"], "") + event["delta"]
    seen = seen_in_response(events[-1]["response"])
    items = events[-1]["response"]["output"]
    whole = {
        "response.output_text.delta": seen.content,
        "response.reasoning_summary_text.delta": seen.reasoning,
        "response.function_call_arguments.delta": "".join(i.get("arguments", "") for i in items),
        "response.custom_tool_call_input.delta": "".join(i.get("input", "") for i in items),
    }
    if texts != {kind: text for kind, text in whole.items() if text}:
        raise Wrong(f"deltas of a response: {texts} and not {whole}")
    return seen


def seen_in_ollama(answer: dict[str, Any]) -> Seen:
    return seen_in_lines([answer])


def seen_in_lines(lines: list[dict[str, Any]]) -> Seen:
    reasoning = content = ""
    calls: list[tuple[str, dict[str, Any]]] = []
    for line in lines:
        message = line["message"]
        reasoning += message.get("thinking", "")
        content += message["content"]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if function["index"] != len(calls) or not isinstance(function["arguments"], dict):
                raise Wrong(f"a call of Ollama's: {call}")
            calls.append(_named(function["name"], function["arguments"]))
    if [line["done"] for line in lines] != [False] * (len(lines) - 1) + [True]:
        raise Wrong(f"lines of Ollama's: {lines}")
    finish = lines[-1]["done_reason"]
    return Seen(reasoning, content, calls, "tool_calls" if calls and finish == "stop" else finish)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    if raw.startswith(b"{"):
        return [json.loads(line) for line in raw.splitlines()]
    lines = (line[6:] for line in raw.decode().split("\n") if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


def next_body(path: str, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The request that sends the answer back, with the results of its calls."""
    user = {"role": "user", "content": "y"}
    if path == CHAT:
        message = answer["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            for call in message.get("tool_calls") or ()
        ]
        return {**body, "messages": [*body["messages"], message, *results, user]}
    if path == OLLAMA:
        said = answer["message"]
        results = [
            {"role": "tool", "tool_name": call["function"]["name"], "content": "done"}
            for call in said.get("tool_calls", ())
        ]
        return {**body, "messages": [*body["messages"], said, *results, user]}
    if path == MESSAGES:
        said = {"role": "assistant", "content": answer["content"] or "nothing"}
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        user["content"] = [*results, {"type": "text", "text": "y"}]  # type: ignore[assignment]
        return {**body, "messages": [*body["messages"], said, user]}
    results = [
        {"type": RESULTS[item["type"]], "call_id": item["call_id"], "output": "done"}
        for item in answer["output"]
        if item["type"] in RESULTS
    ]
    return {**body, "input": [*body["input"], *answer["output"], *results, user]}


READERS = {
    CHAT: (seen_in_chat, seen_in_chunks),
    MESSAGES: (seen_in_message, seen_in_message_events),
    RESPONSES: (seen_in_response, seen_in_response_events),
    OLLAMA: (seen_in_ollama, seen_in_lines),
}
