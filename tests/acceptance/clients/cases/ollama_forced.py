"""Ollama's own package where an answer's form is forced."""

from __future__ import annotations

import json
from typing import Literal

import ollama
from pydantic import BaseModel, Field
from told import LONG, MODEL, URL, tell

client = ollama.Client(host=URL)


class Verdict(BaseModel):
    name: Literal["json.dumps", "json.loads"]
    depth: int = Field(ge=0, le=9)


def schema():
    messages = [{"role": "user", "content": LONG}]
    ask = {"model": MODEL, "format": Verdict.model_json_schema(), "options": {"temperature": 0}}
    plain = client.chat(messages=messages, **ask)
    Verdict.model_validate_json(plain.message.content)
    parts = client.chat(messages=messages, stream=True, **ask)
    Verdict.model_validate_json("".join(part.message.content for part in parts))


def generate_schema():
    told = client.generate(MODEL, prompt=LONG, format=Verdict.model_json_schema())
    Verdict.model_validate_json(told.response)


def any_object():
    told = client.chat(
        MODEL, messages=[{"role": "user", "content": "Name one."}], format="json",
        options={"num_predict": 400, "temperature": 0},
    )  # fmt: skip
    if told.done_reason == "stop":
        assert isinstance(json.loads(told.message.content), dict)
    assert told.message.content.startswith("{")


tell(schema, generate_schema, any_object)
