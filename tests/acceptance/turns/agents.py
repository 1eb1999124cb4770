"""Agents: steps with a tool within each turn, and helpers beside the one that talks to the user."""

from __future__ import annotations

import json
from typing import Any

from tests.acceptance.turns.client import Client, Question
from tests.acceptance.turns.flow import TOOLS, Size, assistant, beginning, said, user


def step_messages(name: str, text: str, size: Size, *, sends_reasoning: bool) -> list[Any]:
    """A tool call after reasoning, and its result."""
    function = {"name": "read", "arguments": json.dumps({"path": name})}
    reasoning = {"reasoning_content": text} if sends_reasoning else {}
    calls = [{"id": name, "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": name, "content": said(f"file {name}", size.message)}
    return [assistant("", tool_calls=calls, **reasoning), result]


async def agent(client: Client, size: Size, *, sends_reasoning: bool = True) -> None:
    """Steps with a tool within each turn; each step's answer is reasoning."""
    messages = beginning("agents", size)
    for turn in range(size.num_turns):
        messages.append(user(f"task {turn}", size))
        for step in range(size.num_steps):
            text = await client.ask(messages, size.answer, TOOLS)
            name = f"{turn}/{step}"
            messages += step_messages(name, text, size, sends_reasoning=sends_reasoning)
        messages.append(assistant(await client.ask(messages, size.answer, TOOLS)))


async def agent_without_reasoning(client: Client, size: Size) -> None:
    """The same, with a client that leaves reasoning out."""
    await agent(client, size, sends_reasoning=False)


async def helpers(client: Client, size: Size, *, together: bool = False) -> None:
    """A main agent with two helpers, which have prompts of their own, and a request that names the
    chat.
    """
    main = [*beginning("agents", size), user("a task", size)]
    subs = [[*beginning("helpers", size), user(f"part {i}", size)] for i in range(2)]
    for step in range(size.num_steps):
        title = [*beginning("titles", size), user(f"a chat {step}", size)]
        questions = [Question(m, size.answer, TOOLS) for m in (main, *subs)]
        questions.append(Question(title, size.answer))
        texts = await client.ask_all(questions) if together else []
        if not together:
            texts = [(await client.ask_all([question]))[0] for question in questions]
        for i, (messages, text) in enumerate(zip((main, *subs), texts, strict=False)):
            messages += step_messages(f"{step}/{i}", text, size, sends_reasoning=True)


async def helpers_together(client: Client, size: Size) -> None:
    """The same, all at once."""
    await helpers(client, size, together=True)
