"""What happens to servers and requests: several at once, cancelled, killed, warmed up."""

from __future__ import annotations

from tests.acceptance.turns.client import Client, Question
from tests.acceptance.turns.flow import Size, assistant, beginning, said, user


async def cancelled(client: Client, size: Size) -> None:
    """A client leaves during a long prefill, comes again, and leaves later."""
    messages = [*beginning("long texts", size), {"role": "user", "content": said("x", size.long)}]
    await client.ask([*messages[:1], user("a warm-up", size)], 8)
    for _ in range(2):
        await client.leave(messages, size.long * 3)
    await client.ask(messages, 8)


async def killed(client: Client, size: Size) -> None:
    """The server is killed during a long prefill."""
    messages = [*beginning("long texts", size), {"role": "user", "content": said("x", size.long)}]
    await client.ask([*messages[:1], user("a warm-up", size)], 8)
    await client.kill(messages, size.long * 6)
    await client.ask(messages, 8)


async def together(client: Client, size: Size) -> None:
    """Four chats at once with a new system prompt, then the same again."""
    chats = [[*beginning("four", size), user(f"question {i}", size)] for i in range(4)]
    for turn in range(2):
        texts = await client.ask_all([Question(messages, size.answer) for messages in chats])
        for messages, text in zip(chats, texts, strict=True):
            messages += [assistant(text), user(f"turn {turn}", size)]


async def choices(client: Client, size: Size) -> None:
    """Four answers to one prompt."""
    messages = [*beginning("choices", size), user("a question", size)]
    (text,) = await client.ask_all([Question(messages, size.answer, num_choices=4)])
    messages += [assistant(text), user("another question", size)]
    await client.ask_all([Question(messages, size.answer, num_choices=4)])


async def warmed(client: Client, size: Size, *, through_server: bool = True) -> None:
    """A system prompt is kept ahead of time, as by `luceasync warm`."""
    await client.ask([*beginning("others", size), user("something", size)], size.answer)
    system = said("rules", size.system)
    await client.warm(system, through_server=through_server)
    for i in range(2):
        messages = [{"role": "system", "content": system}, user(f"question {i}", size)]
        await client.ask(messages, size.answer)


async def warmed_directory(client: Client, size: Size) -> None:
    """The same, while no server runs."""
    await warmed(client, size, through_server=False)


async def ended(client: Client, size: Size) -> None:
    """A server is ended right after each answer."""
    messages = beginning("ends", size)
    for turn in range(size.num_turns):
        messages.append(user(f"question {turn}", size))
        messages.append(assistant(await client.ask(messages, size.answer)))
        client.end("in order")


async def killed_at_once(client: Client, size: Size) -> None:
    """A server is killed right after each answer: the turn being written may be lost."""
    messages = beginning("ends", size)
    for turn in range(size.num_turns):
        messages.append(user(f"question {turn}", size))
        messages.append(assistant(await client.ask(messages, size.answer)))
        client.end("at once")
