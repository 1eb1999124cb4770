"""langchain-openai: with_structured_output by each of its methods, calls that must come."""

from __future__ import annotations

from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from told import LONG, MODEL, URL, covers, tell

OPTIONS = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "k", "max_retries": 0}


class Verdict(BaseModel):
    """What somebody thinks of a function."""

    name: Literal["json.dumps", "json.loads"]
    depth: int = Field(ge=0, le=9)


def two_turns(method, **options):
    """Asked, answered in the form, asked again."""
    model = ChatOpenAI(**OPTIONS, **options)
    made = model.with_structured_output(Verdict, method=method, include_raw=True)
    asked = [HumanMessage(LONG)]
    first = made.invoke(asked)
    assert isinstance(first["parsed"], Verdict), first
    said = AIMessage(first["parsed"].model_dump_json())
    second = made.invoke([*asked, said, HumanMessage("And json.loads?")])
    assert isinstance(second["parsed"], Verdict), second
    usage = second["raw"].usage_metadata
    covers(usage["input_token_details"]["cache_read"], first["raw"].usage_metadata["input_tokens"])


def json_schema():
    two_turns("json_schema")


def function_calling():
    two_turns("function_calling")


def json_schema_by_responses():
    two_turns("json_schema", use_responses_api=True)


def function_calling_by_responses():
    two_turns("function_calling", use_responses_api=True)


def streamed():
    made = ChatOpenAI(**OPTIONS).with_structured_output(Verdict)
    *_, last = made.stream(LONG)
    assert isinstance(last, Verdict)


def must_call():
    bound = ChatOpenAI(**OPTIONS).bind_tools([Verdict], tool_choice="any")
    answer = bound.invoke(LONG)
    assert {call["name"] for call in answer.tool_calls} == {"Verdict"}


tell(
    json_schema,
    function_calling,
    json_schema_by_responses,
    function_calling_by_responses,
    streamed,
    must_call,
)
