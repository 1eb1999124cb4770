"""After a restart, calls that clients write otherwise than the model did are still found.

The model is real and says a given text (tests/crafted.py).
"""

from __future__ import annotations

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


async def ask(config: Config, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer of a server of its own."""
    engine = build_engine(config)
    async with engine:
        await engine.load()
        transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
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
    first = await ask(config, asked)
    message = first["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert call["function"]["arguments"] == '{"path":  "a.py",  "line":  3}'
    call["function"]["arguments"] = '{"path":"a.py","line":3}'
    result = {"role": "tool", "tool_call_id": call["id"], "content": "three lines"}
    second = await ask(config, [*asked, message, result])
    assert second["choices"][0]["message"]["content"] == "Read."
    seen = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= seen - 1
