"""langchain-openai: messages, streams, tools."""

from __future__ import annotations

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from told import FOUND, LONG, LOOK, MODEL, URL, WORDS, covers, tell

OPTIONS = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "k", "max_retries": 0}
model = ChatOpenAI(**OPTIONS, stream_usage=True)


@tool
def look_up(name: str, depth: int = 1) -> str:
    """Look a name up."""
    return FOUND


def cached(answer):
    return answer.usage_metadata["input_token_details"]["cache_read"]


def invoke():
    asked = [HumanMessage(LONG)]
    first = model.invoke(asked)
    second = model.invoke([*asked, first, HumanMessage("And json.loads?")])
    covers(cached(second), first.usage_metadata["input_tokens"])


def stream():
    assert "".join(chunk.content for chunk in model.stream("Hello")) == WORDS


def tools():
    bound = model.bind_tools([look_up])
    asked = [HumanMessage(LOOK)]
    first = bound.invoke(asked)
    [call] = first.tool_calls
    assert call["args"] == {"name": "json.dumps", "depth": 3}
    second = bound.invoke([*asked, first, ToolMessage(FOUND, tool_call_id=call["id"])])
    assert second.content == "It writes JSON"
    covers(cached(second), first.usage_metadata["input_tokens"])


def responses():
    answer = ChatOpenAI(**OPTIONS, use_responses_api=True).invoke("Hello")
    assert answer.text == WORDS or answer.text() == WORDS


class Verdict(BaseModel):
    """What somebody thinks of a function."""

    name: str
    depth: int


def json_mode():
    asked = 'Answer in JSON. [[say {"name": "json.dumps", "depth": 3}]]'
    made = ChatOpenAI(**OPTIONS).with_structured_output(Verdict, method="json_mode")
    assert made.invoke(asked) == Verdict(name="json.dumps", depth=3)


tell(invoke, stream, tools, responses, json_mode)
