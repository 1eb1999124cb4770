"""instructor, in each mode that forces a form: two turns, and the second finds the first again."""

from __future__ import annotations

from typing import Literal

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, Field
from told import LONG, MODEL, URL, covers, tell, usage_of

open_ai = OpenAI(base_url=f"{URL}/v1", api_key="k", max_retries=0)
anthropic = Anthropic(base_url=URL, api_key="k", max_retries=0)
ASK = {"model": MODEL, "max_retries": 0}
Mode = instructor.Mode


class Verdict(BaseModel):
    """What somebody thinks of a function."""

    name: Literal["json.dumps", "json.loads"]
    depth: int = Field(ge=0, le=9)
    words: list[Literal["short", "long"]] = Field(max_length=2)


def two_turns(client, **fields):
    """Asked, answered in the form, asked again."""
    first, raw = client.create_with_completion(
        response_model=Verdict, messages=[{"role": "user", "content": LONG}], **ASK, **fields
    )
    assert isinstance(first, Verdict)
    said = {"role": "assistant", "content": first.model_dump_json()}
    again = [{"role": "user", "content": LONG}, said, {"role": "user", "content": "And loads?"}]
    second, raw_again = client.create_with_completion(
        response_model=Verdict, messages=again, **ASK, **fields
    )
    assert isinstance(second, Verdict)
    covers(usage_of(raw_again)[1], usage_of(raw)[0])


def tools():
    two_turns(instructor.from_openai(open_ai, mode=Mode.TOOLS))


def tools_strict():
    two_turns(instructor.from_openai(open_ai, mode=Mode.TOOLS_STRICT))


def functions():
    two_turns(instructor.from_openai(open_ai, mode=Mode.FUNCTIONS))


def json_schema():
    two_turns(instructor.from_openai(open_ai, mode=Mode.JSON_SCHEMA))


def responses_tools():
    two_turns(instructor.from_openai(open_ai, mode=Mode.RESPONSES_TOOLS))


def responses_tools_with_inbuilt_tools():
    two_turns(instructor.from_openai(open_ai, mode=Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS))


def anthropic_tools():
    two_turns(instructor.from_anthropic(anthropic, mode=Mode.ANTHROPIC_TOOLS), max_tokens=400)


def anthropic_reasoning_tools():
    mode = Mode.ANTHROPIC_REASONING_TOOLS
    two_turns(instructor.from_anthropic(anthropic, mode=mode), max_tokens=400)


def stream_partial():
    client = instructor.from_openai(open_ai, mode=Mode.TOOLS)
    *_, last = client.create_partial(
        response_model=Verdict, messages=[{"role": "user", "content": LONG}], **ASK
    )
    assert 0 <= last.depth <= 9


tell(
    tools,
    tools_strict,
    functions,
    json_schema,
    responses_tools,
    responses_tools_with_inbuilt_tools,
    anthropic_tools,
    anthropic_reasoning_tools,
    stream_partial,
)
