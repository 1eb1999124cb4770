"""Ollama's own package: lists, chat, stream, tools, generate, errors."""

from __future__ import annotations

import ollama
from told import AGAIN, FOUND, LONG, LOOK, MODEL, URL, WORDS, tell

client = ollama.Client(host=URL, headers={"authorization": "Bearer k"})


def look_up(name: str, depth: int) -> str:
    """Looks a name up.

    Args:
        name: what to look up
        depth: how far
    """
    return FOUND


def lists():
    [listed] = client.list().models
    assert listed.model == MODEL and listed.details.parameter_size and listed.modified_at
    [running] = client.ps().models
    assert running.model == MODEL and running.context_length == 131072 and running.size > 0
    shown = client.show(MODEL)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities)
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == 131072


def chat():
    messages = [{"role": "user", "content": LONG}]
    first = client.chat(MODEL, messages=messages, options={"temperature": 0, "num_ctx": 8192})
    assert first.message.content == WORDS and first.done_reason == "stop"
    messages += [first.message, {"role": "user", "content": "And json.loads?"}]
    second = client.chat(MODEL, messages=messages, keep_alive="5m")
    assert second.message.content == WORDS
    assert second.prompt_eval_count > first.prompt_eval_count
    # The first turn's prompt was kept, so little of the second was run.
    assert second.eval_duration > 0 and second.total_duration > second.prompt_eval_duration > 0


def stream():
    parts = [*client.chat(MODEL, messages=[{"role": "user", "content": "Hello"}], stream=True)]
    assert "".join(part.message.content or "" for part in parts) == WORDS
    assert len(parts) > 2 and [part.done for part in parts[-2:]] == [False, True]
    assert parts[-1].eval_count > 0


def thinking():
    messages = [{"role": "user", "content": "Hello"}]
    parts = [*client.chat(MODEL, messages=messages, think=True, stream=True)]
    thoughts = "".join(part.message.thinking or "" for part in parts)
    assert "Let me see" in thoughts
    assert "".join(part.message.content or "" for part in parts) == WORDS
    quiet = client.chat(MODEL, messages=messages, think=False)
    assert not quiet.message.thinking and quiet.message.content == WORDS


def tools():
    messages = [{"role": "user", "content": LOOK}]
    first = client.chat(MODEL, messages=messages, tools=[look_up])
    [call] = first.message.tool_calls
    assert call.function.arguments == {"name": "json.dumps", "depth": 3}
    found = look_up(**call.function.arguments)
    messages += [first.message, {"role": "tool", "tool_name": "look_up", "content": found}]
    second = client.chat(MODEL, messages=messages, tools=[look_up])
    assert second.message.content == "It writes JSON"
    messages += [second.message, {"role": "user", "content": AGAIN}]
    parts = [*client.chat(MODEL, messages=messages, tools=[look_up], stream=True)]
    [called] = [call for part in parts for call in part.message.tool_calls or ()]
    assert called.function.arguments == {"name": "json.loads", "depth": 1}


def generate():
    plain = client.generate(MODEL, prompt="Hello", system="Be brief.")
    assert plain.response == WORDS and plain.done_reason == "stop"
    parts = [*client.generate(MODEL, prompt="Hello", stream=True)]
    assert "".join(part.response for part in parts) == WORDS
    raw = client.generate(MODEL, prompt="The sky is", raw=True, options={"num_predict": 2})
    assert raw.eval_count <= 4
    scored = client.generate(MODEL, prompt="Hello", logprobs=True, top_logprobs=2)
    assert len(scored.logprobs[0].top_logprobs) == 2
    assert client.generate(MODEL).done_reason == "load"


def errors():
    hello = [{"role": "user", "content": "Hello"}]
    cases = (
        (404, lambda: client.chat("other", messages=hello)),
        (400, lambda: client.chat(MODEL, messages=hello, options={"mirostat": 2})),
        (400, lambda: client.chat(MODEL, messages=hello, options={"temperature": 9})),
        (400, lambda: [*client.chat(MODEL, messages=hello, format={"type": 3}, stream=True)]),
        (400, lambda: client.generate(MODEL, prompt="x", images=["aGVsbG8="])),
        (400, lambda: client.embed(MODEL, input="x")),
        (400, lambda: client.embeddings(MODEL, prompt="x")),
        (400, lambda: client.pull("llama3")),
        (400, lambda: [*client.pull("llama3", stream=True)]),
        (400, lambda: client.create("mine", from_=MODEL)),
        (400, lambda: client.copy(MODEL, "mine")),
    )
    for i, (status, ask) in enumerate(cases):
        try:
            ask()
        except ollama.ResponseError as error:
            assert error.status_code == status and len(error.error) > 10, (i, error)
        else:
            raise AssertionError(f"{i} was taken")


tell(lists, chat, stream, thinking, tools, generate, errors)
