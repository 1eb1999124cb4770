"""/docs shows the document as a page, on which each operation has a form."""

from __future__ import annotations

import json
import re
from html import unescape

from tests.server.scripted import ScriptedEngine


async def page(in_memory) -> tuple[str, dict[str, str]]:
    async with in_memory(ScriptedEngine()) as client:
        shown = await client.get("/docs")
    return shown.text, dict(shown.headers)


async def test_every_operation_has_a_fold_a_form_and_an_example_that_is_json(in_memory):
    text, _ = await page(in_memory)
    async with in_memory(ScriptedEngine()) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    operations = {(m.upper(), path) for path, methods in paths.items() for m in methods}
    forms = re.findall(r'<form data-method="(\w+)" data-path="([^"]+)">', text)
    assert set(forms) == operations and len(forms) == len(operations)
    ids = re.findall(r'<details id="(\w+)">', text)
    assert len(set(ids)) == len(ids) == len(operations)
    for example in re.findall(r"<textarea[^>]*>(.*?)</textarea>", text, re.DOTALL):
        assert json.loads(unescape(example))


async def test_fields_have_types_ranges_and_defaults(in_memory):
    text, _ = await page(in_memory)
    assert "<code>temperature</code><td>number or null, 0 to 2" in text
    link = '<a href="#type-ChatMessage">ChatMessage</a>'
    assert f"<code>messages</code><td>list of {link}<td>required" in text


async def test_every_type_that_is_named_is_there(in_memory):
    text, _ = await page(in_memory)
    named = set(re.findall(r'href="#(type-\w+)"', text))
    assert len(named) > 20 and named <= set(re.findall(r'<details id="([\w-]+)">', text))


async def test_fields_that_are_refused_stand_apart(in_memory):
    text, _ = await page(in_memory)
    chat = text[text.index('id="post_v1_chat_completions"') :]
    chat = chat[: chat.index("Answer, application/json")]
    assert "<tr><td><code>logit_bias</code>" in chat and "<tr><td><code>mirostat</code>" not in chat
    refused = chat[chat.index("Not served, and a 400 if used") :]
    assert "<code>mirostat</code>" in refused and "<code>guided_json</code>" not in refused


async def test_it_loads_from_this_server_alone_and_runs_no_script_within(in_memory):
    text, headers = await page(in_memory)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r'(src|href)="(https?:)?//', text)
    assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="web/docs.js">']
    assert " on" not in re.sub(r">[^<]*<", "><", text) and "style=" not in text


async def test_its_files_are_served(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        for name in ("docs.js", "api.css", "icon.svg"):
            assert (await client.get(f"/web/{name}")).status_code == 200
