"""Calls that clients write otherwise than the model did are still found, also after a restart.

The model is real and says a given text (tests/crafted.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from luceasync.config import CacheConfig, Config, EngineConfig, ModelConfig
from luceasync.engine.start import build_engine
from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig
from tests import crafted

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '\n\n' if m.content }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WRITTEN = (
    "I read it: ~b2\n\n"
    '<tool_call>\n{"name": "read", "arguments": {"path":  "a.py",  "line":  3}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


# As Mistral's: calls have ids that the model makes up.
WITH_IDS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.tool_call_id or '' }}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}"
    "[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLED = "".join(
    f'[TOOL_CALLS]read[CALL_ID]{own_id}[ARGS]{{"path": "{path}"}}'
    for own_id, path in (("a1B2c3D4e", "a.py"), ("f5G6h7I8j", "~b2"))
)


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server of its own."""
    engine = build_engine(config)
    async with engine:
        await engine.load()
        transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "crafted", "messages": messages, "tools": TOOLS}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_call_that_a_client_spaces_otherwise_is_cached_after_a_restart(
    tmp_path: Path,
) -> None:
    model = crafted.save(tmp_path / "crafted", {"a1": WRITTEN, "b2": "Read."}, TEMPLATE)
    config = Config(
        model=ModelConfig(model_dir=model, dtype="fp32"),
        engine=EngineConfig(max_ctx_tokens=1024, parallel=1),
        cache=CacheConfig(cache_dir=tmp_path / "cache", min_tokens=1),
    )
    asked: list[dict[str, Any]] = [{"role": "user", "content": "~a1"}]
    async with serving(config) as client:
        first = await ask(client, asked)
    message = first["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert call["function"]["arguments"] == '{"path":  "a.py",  "line":  3}'
    call["function"]["arguments"] = '{"path":"a.py","line":3}'
    result = {"role": "tool", "tool_call_id": call["id"], "content": "three lines"}
    async with serving(config) as client:
        second = await ask(client, [*asked, message, result])
    assert second["choices"][0]["message"]["content"] == "Read."
    seen = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= seen - 1


async def test_calls_whose_ids_the_model_has_made_up_are_cached(tmp_path: Path) -> None:
    """Clients get ids of their own, which never repeat."""
    texts = {"a1": CALLED, "b2": "Read."}
    model = crafted.save(tmp_path / "crafted", texts, WITH_IDS, added=())
    config = Config(
        model=ModelConfig(model_dir=model, dtype="fp32"),
        engine=EngineConfig(max_ctx_tokens=1024, parallel=1),
        cache=CacheConfig(cache_dir=tmp_path / "cache", min_tokens=1),
    )
    asked: list[dict[str, Any]] = [{"role": "user", "content": "~a1"}]
    async with serving(config) as client:
        first = await ask(client, asked)
        message = first["choices"][0]["message"]
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(ids) == 2 and not {"a1B2c3D4e", "f5G6h7I8j"} & {*ids}
        results = [{"role": "tool", "tool_call_id": i, "content": "read"} for i in reversed(ids)]
        second = await ask(client, [*asked, message, *results])
    assert second["choices"][0]["message"]["content"] == "Read."
    seen = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= seen - 1
