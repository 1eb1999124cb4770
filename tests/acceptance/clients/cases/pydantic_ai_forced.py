"""pydantic-ai: output by a tool and by a schema, over chat and over responses, two turns."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from told import LONG, MODEL, URL, covers, tell

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="k")


class Verdict(BaseModel):
    """What somebody thinks of a function."""

    name: Literal["json.dumps", "json.loads"]
    depth: int = Field(ge=0, le=9)


def two_turns(model, output):
    """Asked, answered in the form, asked again."""
    agent = Agent(model(MODEL, provider=provider), output_type=output, retries=0)
    first = agent.run_sync(LONG)
    assert isinstance(first.output, Verdict)
    second = agent.run_sync("And json.loads?", message_history=first.all_messages())
    assert isinstance(second.output, Verdict)
    covers(second.usage.cache_read_tokens, first.usage.input_tokens)


def tool_output():
    two_turns(OpenAIChatModel, ToolOutput(Verdict))


def native_output():
    two_turns(OpenAIChatModel, NativeOutput(Verdict))


def tool_output_by_responses():
    two_turns(OpenAIResponsesModel, ToolOutput(Verdict))


def native_output_by_responses():
    two_turns(OpenAIResponsesModel, NativeOutput(Verdict))


tell(tool_output, native_output, tool_output_by_responses, native_output_by_responses)
