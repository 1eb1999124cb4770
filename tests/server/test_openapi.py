"""The document names every route and method, and describes the bodies that are read."""

from __future__ import annotations

import json
import re

import pytest

from luceasync.config import ServerConfig
from luceasync.server.app import create_app
from luceasync.server.openapi import LIMITS
from tests.server.scripted import ScriptedEngine

# Routes of the document itself.
UNDOCUMENTED = {"/openapi.json", "/docs"}


async def document(in_memory) -> dict:
    async with in_memory(ScriptedEngine()) as client:
        return (await client.get("/openapi.json")).json()


async def test_every_route_is_there_with_its_methods(in_memory):
    told = await document(in_memory)
    app = create_app(ScriptedEngine(), ServerConfig())
    for route in app.routes:
        path = re.sub(r"{(\w+):path}", r"{\1}", route.path)
        if path not in UNDOCUMENTED and route.include_in_schema:
            methods = {method.lower() for method in route.methods - {"HEAD"}}
            assert methods == told["paths"][path].keys(), path


async def test_a_body_has_its_fields_required_ones_and_ranges(in_memory):
    told = await document(in_memory)
    post = told["paths"]["/v1/chat/completions"]["post"]
    reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    body = told["components"]["schemas"][reference.rpartition("/")[2]]
    assert body["required"] == ["messages"]
    assert body["properties"]["temperature"]["maximum"] == 2
    assert "grammar" in body["properties"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (name, limit[bound] + step)
        for name, limit in LIMITS.items()
        for bound, step in (("minimum", -1), ("maximum", 1))
        if bound in limit and name != "max_output_tokens"
    ],
)
async def test_a_value_outside_of_a_documented_range_is_refused(in_memory, field, value):
    async with in_memory(ScriptedEngine()) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], field: value}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text


async def test_the_page_shows_it_and_loads_nothing_from_elsewhere(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        shown = await client.get("/docs")
    assert "POST /v1/chat/completions" in shown.text and "<script" not in shown.text
    assert "default-src 'none'" in shown.headers["content-security-policy"]
    assert not re.search(r'(src|href)="(https?:)?//', shown.text)


async def test_other_methods_are_refused_and_head_works_everywhere(in_memory):
    app = create_app(ScriptedEngine(), ServerConfig())
    async with in_memory(ScriptedEngine()) as client:
        for route in app.routes:
            if "{" in route.path or route.path == "/status/events":
                continue
            wrong = "PUT" if "PUT" not in route.methods else "PATCH"
            refused = await client.request(wrong, route.path)
            assert refused.status_code == 405, route.path
            assert set(refused.headers["allow"].split(", ")) == route.methods
            if "GET" in route.methods and route.path != "/admin/cache":
                assert (await client.head(route.path)).status_code == 200, route.path


async def test_every_operation_has_a_summary_and_a_name_of_its_own(in_memory):
    told = await document(in_memory)
    operations = [each for methods in told["paths"].values() for each in methods.values()]
    assert all(each["summary"] and "ASGI" not in each["summary"] for each in operations)
    assert len({each["operationId"] for each in operations}) == len(operations)
    assert not [path for path in told["paths"] if path.startswith("/web/")]


@pytest.mark.parametrize(
    ("path", "answer", "event"),
    [
        ("/v1/chat/completions", "ChatCompletion", "ChatChunk"),
        ("/v1/completions", "Completion", "Completion"),
        ("/v1/responses", "ResponseObject", "ResponsesEvent"),
        ("/v1/messages", "AnthropicAnswer", None),
        ("/v1/messages/count_tokens", "TokenCount", None),
        ("/tokenize", "TokenizedPrompt", None),
    ],
)
async def test_answers_and_errors_are_typed(in_memory, path, answer, event):
    told = await document(in_memory)
    responses = told["paths"][path]["post"]["responses"]
    content = responses["200"]["content"]
    assert content["application/json"]["schema"]["$ref"].endswith(f"/{answer}")
    assert "Error" in responses["400"]["content"]["application/json"]["schema"]["$ref"]
    if event is not None:
        assert content["text/event-stream"]["schema"]["$ref"].endswith(f"/{event}")


async def test_a_union_tells_its_structs_apart(in_memory):
    told = await document(in_memory)
    events = told["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]
    union = events["text/event-stream"]["schema"]
    assert union["discriminator"]["propertyName"] == "type"
    assert len(union["anyOf"]) == 7
    assert told["components"]["schemas"]["TextBlock"]["properties"]["type"] == {"enum": ["text"]}


async def test_nothing_in_it_fails_generators_of_clients(in_memory):
    text = json.dumps(await document(in_memory))
    assert '"items": false' not in text and "prefixItems" not in text
    references = set(re.findall(r'"#/components/schemas/([^"]*)"', text))
    assert references <= (await document(in_memory))["components"]["schemas"].keys()
