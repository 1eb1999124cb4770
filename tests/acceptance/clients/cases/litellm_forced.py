"""litellm: response_format as a schema and as a class, calls that must come, by each provider."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its prices are not fetched

import json
from typing import Literal

import litellm
from pydantic import BaseModel, Field
from told import LONG, MODEL, URL, covers, tell

litellm.telemetry = False
OPEN = {"api_base": f"{URL}/v1", "api_key": "k", "num_retries": 0}
FIRST = [{"role": "user", "content": LONG}]


class Verdict(BaseModel):
    """What somebody thinks of a function."""

    name: Literal["json.dumps", "json.loads"]
    depth: int = Field(ge=0, le=9)


SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "Verdict", "strict": True, "schema": Verdict.model_json_schema()},
}
FUNCTION = {"name": "judge", "description": "Judges.", "parameters": Verdict.model_json_schema()}
MUST_CALL = {
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "judge"}},
}


def two_turns(model, read, **fields):
    """Asked, answered in the form, asked again."""
    first = litellm.completion(model, FIRST, **fields)
    Verdict.model_validate_json(read(first.choices[0].message))
    said = {"role": "assistant", "content": read(first.choices[0].message)}
    again = [*FIRST, said, {"role": "user", "content": "And json.loads?"}]
    second = litellm.completion(model, again, **fields)
    Verdict.model_validate_json(read(second.choices[0].message))
    covers(second.usage.prompt_tokens_details.cached_tokens, first.usage.prompt_tokens)


def text(message):
    return message.content


def arguments(message):
    [call] = message.tool_calls
    assert call.function.name == "judge"
    return json.dumps(json.loads(call.function.arguments))


def schema():
    two_turns(f"openai/{MODEL}", text, response_format=SCHEMA, **OPEN)


def a_class():
    two_turns(f"openai/{MODEL}", text, response_format=Verdict, **OPEN)


def schema_by_hosted_vllm():
    two_turns(f"hosted_vllm/{MODEL}", text, response_format=SCHEMA, **OPEN)


def must_call():
    two_turns(f"openai/{MODEL}", arguments, **MUST_CALL, **OPEN)


def must_call_by_anthropic():
    ask = {"api_base": URL, "api_key": "k", "max_tokens": 200, "num_retries": 0}
    two_turns(f"anthropic/{MODEL}", arguments, **MUST_CALL, **ask)


tell(schema, a_class, schema_by_hosted_vllm, must_call, must_call_by_anthropic)
