"""How conversations go on: who says what next, and what a client sends back of an answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turns.client import Client

Flow = Callable[[Client, "Size"], Awaitable[None]]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read lines of a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True, slots=True)
class Size:
    """How long things are: texts in sentences, answers in tokens."""

    num_turns: int = 4
    num_steps: int = 3
    system: int = 40
    message: int = 6
    answer: int = 48
    long: int = 800


def said(topic: str, num_sentences: int) -> str:
    """Text of its own for each topic."""
    return " ".join(f"The {i}. line about {topic} stands here." for i in range(num_sentences))


def user(topic: str, size: Size) -> dict[str, Any]:
    return {"role": "user", "content": said(topic, size.message)}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def beginning(topic: str, size: Size) -> list[dict[str, Any]]:
    return [{"role": "system", "content": said(topic, size.system)}]


async def chat(client: Client, size: Size, **variables: Any) -> None:
    """A chat whose answers come back as they were."""
    messages = beginning("chats", size)
    for turn in range(size.num_turns):
        messages.append(user(f"question {turn}", size))
        messages.append(assistant(await client.ask(messages, size.answer, **variables)))


async def chat_without_thinking(client: Client, size: Size) -> None:
    """The same, and the template is told not to think."""
    await chat(client, size, enable_thinking=False)


async def thinking(client: Client, size: Size) -> None:
    """The first half of each answer is reasoning, which the client leaves out."""
    messages = beginning("thinking", size)
    for turn in range(size.num_turns):
        messages.append(user(f"question {turn}", size))
        text = await client.ask(messages, size.answer)
        messages.append(assistant(text[len(text) // 2 :]))


async def agent(client: Client, size: Size, *, sends_reasoning: bool = True) -> None:
    """Steps with a tool within each turn; the answer of a step is reasoning."""
    messages = beginning("agents", size)
    for turn in range(size.num_turns):
        messages.append(user(f"task {turn}", size))
        for step in range(size.num_steps):
            text = await client.ask(messages, size.answer, TOOLS)
            call = {"name": "read", "arguments": json.dumps({"path": f"{turn}/{step}"})}
            reasoning = {"reasoning_content": text} if sends_reasoning else {}
            calls = [{"id": str(step), "type": "function", "function": call}]
            messages.append(assistant("", tool_calls=calls, **reasoning))
            content = said(f"file {turn} {step}", size.message)
            messages.append({"role": "tool", "tool_call_id": str(step), "content": content})
        text = await client.ask(messages, size.answer, TOOLS)
        messages.append(assistant(text))


async def agent_without_reasoning(client: Client, size: Size) -> None:
    """The same, and the client leaves reasoning out."""
    await agent(client, size, sends_reasoning=False)


async def edits(client: Client, size: Size) -> None:
    """Answers are asked for again, messages are changed, old turns are gone on from."""
    messages = beginning("edits", size)
    for turn in range(size.num_turns):
        messages.append(user(f"question {turn}", size))
        await client.ask(messages, size.answer)
        messages.append(assistant(await client.ask(messages, size.answer)))
    await client.ask([*messages[:-2], user("another question", size)], size.answer)
    await client.ask([*messages[:3], user("another branch", size)], size.answer)


async def compaction(client: Client, size: Size) -> None:
    """After some turns a summary stands for all of them."""
    messages = beginning("summaries", size)
    for round_ in range(2):
        for turn in range(size.num_turns):
            messages.append(user(f"question {round_} {turn}", size))
            messages.append(assistant(await client.ask(messages, size.answer)))
        messages = [*messages[:1], user(f"the summary {round_}", size)]
        messages.append(assistant("Understood."))


async def cancel(client: Client, size: Size) -> None:
    """A client leaves while a long prompt is run, comes again, and leaves later."""
    messages = [*beginning("long texts", size), {"role": "user", "content": said("x", size.long)}]
    await client.ask([*messages[:1], user("a warm-up", size)], 8)
    for _ in range(2):
        await client.leave(messages, size.long)
    await client.ask(messages, 8)


FLOWS: Mapping[str, Flow] = {
    flow.__name__: flow
    for flow in (
        chat,
        chat_without_thinking,
        thinking,
        agent,
        agent_without_reasoning,
        edits,
        compaction,
        cancel,
    )
}
