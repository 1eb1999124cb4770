"""Chats: turn after turn, with and without reasoning, edited, and summarized."""

from __future__ import annotations

from typing import Any

from tests.acceptance.turns.client import Client
from tests.acceptance.turns.flow import Size, assistant, beginning, user


async def chat(client: Client, size: Size, **variables: Any) -> None:
    """A chat whose answers come back unchanged."""
    messages = beginning("chats", size)
    for turn in range(size.num_turns):
        messages.append(user(f"question {turn}", size))
        messages.append(assistant(await client.ask(messages, size.answer, **variables)))


async def chat_without_thinking(client: Client, size: Size) -> None:
    """The same, with thinking switched off in the template."""
    await chat(client, size, enable_thinking=False)


async def thinking(client: Client, size: Size, form: str = "content") -> None:
    """The first half of each answer is reasoning; `form` says how the client sends it back."""
    messages = beginning("thinking", size)
    for turn in range(size.num_turns):
        messages.append(user(f"question {turn}", size))
        text = await client.ask(messages, size.answer)
        thought, content = text[: len(text) // 2], text[len(text) // 2 :]
        if form == "content":
            messages.append(assistant(content))
        elif form == "field":
            messages.append(assistant(content, reasoning_content=thought))
        else:
            messages.append(assistant(f"{thought}\n</think>\n\n{content}"))


async def thinking_in_a_field(client: Client, size: Size) -> None:
    """The same, and reasoning comes back as `reasoning_content`."""
    await thinking(client, size, "field")


async def thinking_as_text(client: Client, size: Size) -> None:
    """The same, and reasoning comes back before `</think>`."""
    await thinking(client, size, "text")


async def edits(client: Client, size: Size) -> None:
    """Answers are regenerated, messages edited, old turns continued."""
    messages = beginning("edits", size)
    for turn in range(size.num_turns):
        messages.append(user(f"question {turn}", size))
        await client.ask(messages, size.answer)
        messages.append(assistant(await client.ask(messages, size.answer)))
    await client.ask([*messages[:-2], user("another question", size)], size.answer)
    await client.ask([*messages[:3], user("another branch", size)], size.answer)


async def compaction(client: Client, size: Size) -> None:
    """After some turns a summary replaces them."""
    messages = beginning("summaries", size)
    for round_ in range(2):
        for turn in range(size.num_turns):
            messages.append(user(f"question {round_} {turn}", size))
            messages.append(assistant(await client.ask(messages, size.answer)))
        messages = [*messages[:1], user(f"the summary {round_}", size)]
        messages.append(assistant("Understood."))
