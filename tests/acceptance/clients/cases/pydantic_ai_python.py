"""pydantic-ai: an agent with a tool, streams, a second turn; over chat and over responses."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from told import FOUND, LONG, LOOK, MODEL, URL, WORDS, covers, tell

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="k")
KINDS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


def agent(kind="chat"):
    made = Agent(KINDS[kind](MODEL, provider=provider), retries=0)

    @made.tool_plain
    def look_up(name: str, depth: int = 1) -> str:
        """Look a name up."""
        return FOUND

    return made


def two_turns():
    plain = Agent(KINDS["chat"](MODEL, provider=provider))
    first = plain.run_sync(LONG)
    second = plain.run_sync("And json.loads?", message_history=first.all_messages())
    covers(second.usage.cache_read_tokens, first.usage.input_tokens)


def tools():
    run = agent().run_sync(LOOK)
    assert run.output == "It writes JSON"
    assert run.usage.cache_read_tokens > 0


def tools_by_responses():
    assert agent("responses").run_sync(LOOK).output == "It writes JSON"


def stream():
    async def read():
        async with Agent(KINDS["chat"](MODEL, provider=provider)).run_stream("Hello") as run:
            return await run.get_output()

    assert asyncio.run(read()) == WORDS


class Verdict(BaseModel):
    """What somebody thinks of a function."""

    name: str
    depth: int


def prompted_output():
    asked = f'{LONG} [[say {{"name": "json.dumps", "depth": 3}}]]'
    made = Agent(
        KINDS["chat"](MODEL, provider=provider), output_type=PromptedOutput(Verdict), retries=0
    )
    first = made.run_sync(asked)
    assert first.output == Verdict(name="json.dumps", depth=3)
    second = made.run_sync(asked, message_history=first.all_messages())
    assert second.output == first.output
    covers(second.usage.cache_read_tokens, first.usage.input_tokens)


tell(two_turns, tools, tools_by_responses, stream, prompted_output)
