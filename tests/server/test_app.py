"""Routes and errors: every answer is JSON, every failure an OpenAI error object."""

from __future__ import annotations

import pytest
from starlette.routing import Route

from luceasync.errors import ContextLengthError, QueueFull, RequestError, Unavailable
from luceasync.server_config import ServerConfig
from luceasync.status import BackendProcesses, ProcessStatus
from tests.server.scripted import ScriptedEngine

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/health/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/health", 405),
        ("PUT", "/v1/models", 405),
    ],
)
async def test_unknown_routes_and_methods_get_error_objects(in_memory, method, path, status):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in response.headers) == (status == 405)


async def test_head_of_the_root_is_200(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        assert (await client.head("/")).status_code == 200


async def test_a_failed_engine_is_unhealthy_and_sends_retry_after(in_memory):
    engine = ScriptedEngine()
    engine.failure = "the engine failed: OSError: '/srv/models/tiny/model.safetensors' is gone"
    async with in_memory(engine) as client:
        health, ready = await client.get("/health"), await client.get("/ready")
        asked = await client.post("/v1/chat/completions", json=BODY)
        lines = (await client.get("/metrics")).text.splitlines()
    words = "the engine failed: OSError: 'model.safetensors' is gone"
    assert health.json() == {"status": "failed", "detail": words}
    assert ready.json() == {"ready": False, "detail": words}
    assert {r.status_code for r in (health, ready, asked)} == {503}
    assert {r.headers["retry-after"] for r in (health, ready, asked)} == {"7"}
    assert asked.json()["error"]["message"] == words
    assert {"luceasync_failed 1.0", "luceasync_engine_restarts_total 2.0"} <= set(lines)


async def test_while_a_process_restarts_health_and_ready_name_it(in_memory):
    engine = ScriptedEngine()
    words = "stage 1 of the model failed and will be started again in 3 s: ended by SIGKILL"
    engine.processes = BackendProcesses(
        (
            ProcessStatus("group 0 of the model", ("hip:0",)),
            ProcessStatus("group 1 of the model", ("hip:1",), words, retry_after_s=5),
        )
    )
    async with in_memory(engine) as client:
        health, ready = await client.get("/health"), await client.get("/ready")
        asked = await client.get("/v1/models")
    assert health.json() == {"status": "failed", "detail": words}
    assert ready.json() == {"ready": False, "detail": words}
    assert (health.status_code, ready.status_code, asked.status_code) == (503, 503, 200)
    assert {r.headers["retry-after"] for r in (health, ready)} == {"5"}


async def test_while_the_model_loads_the_server_is_healthy_but_not_ready(in_memory):
    engine = ScriptedEngine()
    engine.loading = True
    async with in_memory(engine) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json() == {
            "ready": False,
            "detail": "loading the model",
        }
        for response in (await client.get("/v1/models"), await client.post(CHAT, json=BODY)):
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "loading the model"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("no", param="tools", code="x"), 400, "invalid_request_error", "x"),
        (ContextLengthError(10, 20), 400, "invalid_request_error", "context_length_exceeded"),
        (QueueFull(64, 7), 429, "rate_limit_error", "queue_full"),
        (Unavailable("gone"), 503, "server_error", "unavailable"),
        (ZeroDivisionError("a secret"), 500, "server_error", None),
    ],
)
async def test_what_the_engine_refuses_has_its_status(in_memory, error, status, kind, code, stream):
    async with in_memory(ScriptedEngine(opening=error)) as client:
        response = await client.post(CHAT, json=BODY | {"stream": stream})
    told = response.json()["error"]
    assert (response.status_code, told["type"], told["code"]) == (status, kind, code)
    assert "secret" not in response.text
    assert response.headers.get("retry-after") == {429: "7", 503: "1"}.get(status)


async def test_a_route_is_found_by_its_path_and_not_tried_after_all_others(in_memory, monkeypatch):
    tried, matches = [], Route.matches
    monkeypatch.setattr(Route, "matches", lambda *args: tried.append(args) or matches(*args))
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(CHAT, json=BODY)
    assert response.status_code == 200 and len(tried) == 1


async def test_a_body_over_the_limit_is_413_declared_or_chunked(in_memory):
    async def chunks():
        for _ in range(5):
            yield b" " * 30

    async with in_memory(ScriptedEngine(), ServerConfig(max_body_bytes=100)) as client:
        declared = await client.post(CHAT, content=b" " * 101)
        chunked = await client.post(CHAT, content=chunks())
        fitting = await client.post(CHAT, json=BODY)
    for response in (declared, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
    assert fitting.status_code == 200


async def test_a_body_over_the_limit_is_413_on_the_wire(on_port):
    async with on_port(ScriptedEngine(), ServerConfig(max_body_bytes=2**20)) as client:
        response = await client.post(CHAT, content=b" " * 5 * 2**20)
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "Bearer one"}, 200),
        ({"authorization": "bearer two"}, 200),
        ({"x-api-key": "two"}, 200),
        ({"x-api-key": "schlüssel".encode()}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
async def test_api_keys_guard_the_api_and_the_metrics(in_memory, headers, status, path):
    config = ServerConfig(api_keys=("one", "two"))
    async with in_memory(ScriptedEngine(), config) as client:
        response = await client.get(path, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


async def test_health_and_ready_need_no_key(in_memory):
    async with in_memory(ScriptedEngine(), ServerConfig(api_keys=("one",))) as client:
        for path in ("/", "/health", "/ready"):
            assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/api/v1/responses", "/v1/responses"),
        ("/v1/tokenize", "/tokenize"),
        ("/models", "/v1/models"),
    ],
)
async def test_a_route_that_is_not_there_names_the_one_that_was_meant(in_memory, path, meant):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.post(path, json={})
        lost = await client.post("/nowhere", json={})
    assert response.status_code == lost.status_code == 404
    assert response.json()["error"]["message"].endswith(f"Did you mean {meant}?")
    assert "mean" not in lost.text
