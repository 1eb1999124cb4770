"""The document names every route and method, and describes the bodies that are read."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from starlette.routing import Match

from luceasync.server.app import create_app
from luceasync.server.family import page_spec
from luceasync.server.openapi import LIMITS
from luceasync.server_config import ServerConfig
from luceasync.status import BackendProcesses, CacheStatus, ProcessStatus, SpeculationStatus
from tests.server.scripted import ScriptedEngine

# Routes of the document itself.
UNDOCUMENTED = {"/openapi.json", "/docs"}


async def document(in_memory) -> dict:
    async with in_memory(ScriptedEngine()) as client:
        return (await client.get("/openapi.json")).json()


def event_of(content: dict) -> dict:
    """The schema of the data of each server-sent event."""
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    return data.get("anyOf", [data])[0]["contentSchema"]


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
        ("/api/show", "ShownModel", None),
    ],
)
async def test_answers_and_errors_are_typed(in_memory, path, answer, event):
    told = await document(in_memory)
    responses = told["paths"][path]["post"]["responses"]
    content = responses["200"]["content"]
    assert content["application/json"]["schema"]["$ref"].endswith(f"/{answer}")
    assert "Error" in responses["400"]["content"]["application/json"]["schema"]["$ref"]
    if event is not None:
        assert event_of(content)["$ref"].endswith(f"/{event}")


async def test_a_union_tells_its_structs_apart(in_memory):
    told = await document(in_memory)
    events = told["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]
    union = event_of(events)
    assert union["discriminator"]["propertyName"] == "type"
    assert len(union["anyOf"]) == 7
    assert told["components"]["schemas"]["TextBlock"]["properties"]["type"] == {"enum": ["text"]}


async def test_nothing_in_it_fails_generators_of_clients(in_memory):
    text = json.dumps(await document(in_memory))
    assert '"items": false' not in text and "prefixItems" not in text
    assert not re.search(r'{"type": "array"}|"type": "array", "default"', text)
    references = set(re.findall(r'"#/components/schemas/([^"]*)"', text))
    assert references <= (await document(in_memory))["components"]["schemas"].keys()


def typed_pages() -> list[str]:
    """Pages that are read without a parameter and answer with JSON."""
    routes = create_app(ScriptedEngine(), ServerConfig()).routes
    pages = (route for route in routes if route.include_in_schema and "GET" in route.methods)
    return [
        route.path
        for route in pages
        if "{" not in route.path and page_spec(route.endpoint).media_type == "application/json"
    ]


@pytest.mark.parametrize("path", sorted(set(typed_pages())))
async def test_a_page_answers_what_it_is_said_to(in_memory, path):
    """No field is missing, of another type, or not described."""
    engine = ScriptedEngine()
    engine.cache, engine.speculation = CacheStatus(), SpeculationStatus()
    engine.processes = BackendProcesses((ProcessStatus("stage", ("cpu",)),))
    app = create_app(engine, ServerConfig(admin_keys=("a",)))
    [kind, *_] = [
        page_spec(route.endpoint).answer("GET")
        for route in app.routes
        if route.matches({"type": "http", "path": path, "method": "GET"})[0] is Match.FULL
    ]
    async with in_memory(engine, ServerConfig(admin_keys=("a",))) as client:
        told = (await client.get(path, headers={"authorization": "Bearer a"})).json()
    assert json.loads(msgspec.json.encode(msgspec.convert(told, kind))) == told


async def test_every_answer_is_typed(in_memory):
    told = await document(in_memory)
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            for content in operation["responses"]["200"]["content"].values():
                assert content["schema"], (path, method)
            assert operation["responses"]["400"]["content"]["application/json"]["schema"]


async def test_events_of_the_status_are_typed(in_memory):
    content = (await document(in_memory))["paths"]["/status/events"]["get"]["responses"]["200"]
    assert event_of(content["content"])["$ref"].endswith("/LiveStatus")


async def test_a_path_that_two_apis_share_has_the_answers_of_both(in_memory):
    told = (await document(in_memory))["paths"]["/v1/models"]["get"]["responses"]["200"]
    named = [each["$ref"] for each in told["content"]["application/json"]["schema"]["anyOf"]]
    assert [name.rpartition("/")[2] for name in named] == ["OpenAiModels", "AnthropicModels"]


async def test_each_example_is_served(in_memory):
    told = await document(in_memory)
    async with in_memory(ScriptedEngine()) as client:
        for path, methods in told["paths"].items():
            body = methods.get("post", {}).get("requestBody")
            if body is not None:
                example = body["content"]["application/json"]["example"]
                sent = example | ({"model": "tiny"} if "model" in example else {})
                answer = await client.post(path, json=sent)
                assert answer.status_code == 200, (path, answer.text)


async def test_it_is_read_without_a_key(in_memory):
    async with in_memory(ScriptedEngine(), ServerConfig(api_keys=("k",))) as client:
        assert (await client.get("/openapi.json")).status_code == 200
        assert (await client.get("/docs")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


async def test_a_field_that_is_refused_has_no_range(in_memory):
    """0 of them is taken, since it switches a field off."""
    schemas = (await document(in_memory))["components"]["schemas"]
    assert "minimum" not in schemas["ResponsesBody"]["properties"]["n"]
    assert schemas["ChatBody"]["properties"]["n"]["minimum"] == 1


async def test_the_end_of_a_stream_and_chosen_fields_are_described(in_memory):
    paths = (await document(in_memory))["paths"]
    told = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    *_, last = told["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    assert last["enum"] == ["[DONE]"]
    chosen = paths["/completion"]["post"]["responses"]["200"]["content"]["application/json"]
    assert chosen["schema"]["anyOf"][1] == {"type": "object"}


async def test_tokenize_takes_as_many_messages_as_it_says(in_memory):
    most = (await document(in_memory))["components"]["schemas"]["TokenizeBody"]["properties"]
    messages = [{"role": "user", "content": "x"}] * (most["messages"]["maxItems"] + 1)
    async with in_memory(ScriptedEngine()) as client:
        for wrong in (messages, []):
            answer = await client.post("/tokenize", json={"messages": wrong})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
