"""instructor, in the modes in which a model is only told what to say: two turns each."""

from __future__ import annotations

from collections.abc import Iterable

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel
from told import LONG, MODEL, URL, covers, tell, usage_of

open_ai = OpenAI(base_url=f"{URL}/v1", api_key="k", max_retries=0)
anthropic = Anthropic(base_url=URL, api_key="k", max_retries=0)
ASK = {"model": MODEL, "max_retries": 0, "max_tokens": 400}
Mode = instructor.Mode
VERDICT = '{"name": "json.dumps", "depth": 3}'
FENCED = f"```json\n{VERDICT}\n```"


class Verdict(BaseModel):
    """What somebody thinks of a function."""

    name: str
    depth: int


def two_turns(client, said: str, taken_back: int = 0):
    """Asked to say it, and again; the second prompt goes on from the first, but for so many tokens
    that the client had put at its end.
    """
    messages = [{"role": "user", "content": f"{LONG} {said}"}]
    ask = {"response_model": Verdict, **ASK}
    first, raw = client.create_with_completion(messages=messages, **ask)
    check(first)
    messages += [
        {"role": "assistant", "content": VERDICT},
        {"role": "user", "content": f"Once more: {said}"},
    ]
    second, raw_again = client.create_with_completion(messages=messages, **ask)
    check(second)
    covers(usage_of(raw_again)[1], usage_of(raw)[0] - taken_back)


def check(found):
    [verdict] = [found] if isinstance(found, Verdict) else list(found)
    assert (verdict.name, verdict.depth) == ("json.dumps", 3)


def json():
    two_turns(instructor.from_openai(open_ai, mode=Mode.JSON), f"[[say {VERDICT}]]")


def json_o1():
    two_turns(instructor.from_openai(open_ai, mode=Mode.JSON_O1), f"[[say {VERDICT}]]")


def md_json():
    client = instructor.from_openai(open_ai, mode=Mode.MD_JSON)
    two_turns(client, f"[[say {FENCED}]]", taken_back=80)  # it asks for a code block, always last


def anthropic_json():
    client = instructor.from_anthropic(anthropic, mode=Mode.ANTHROPIC_JSON)
    two_turns(client, f"[[say {VERDICT}]]")


def parallel_tools():
    in_parallel(instructor.from_openai(open_ai, mode=Mode.PARALLEL_TOOLS))


def anthropic_parallel_tools():
    in_parallel(instructor.from_anthropic(anthropic, mode=Mode.ANTHROPIC_PARALLEL_TOOLS))


def in_parallel(client):
    asked = [{"role": "user", "content": f"{LONG} [[Verdict {VERDICT}]]"}]
    check(client.create(response_model=Iterable[Verdict], messages=asked, **ASK))


tell(json, json_o1, md_json, anthropic_json, parallel_tools, anthropic_parallel_tools)
