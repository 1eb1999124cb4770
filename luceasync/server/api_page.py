"""Serves the OpenAPI document, and a page at /docs to read it and to try requests.

The page is complete without its script, which only sends the requests. Independent of routes.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from luceasync.server.family import ApiFamily
from luceasync.server.http.responses import json_response
from luceasync.server.openapi import document
from luceasync.server.unserved import NOT_SERVED
from luceasync.server.web.page import HEADERS

Schemas = Mapping[str, Mapping[str, Any]]

HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>luceasync: API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="web/icon.svg"><link rel="stylesheet" href="web/api.css">
<script type="module" src="web/docs.js"></script></head><body>
<header><h1>luceasync: API</h1><nav><a href="./">Chat</a>
<a href="openapi.json">openapi.json</a></nav>
<label>API key <input id="key" type="password" autocomplete="off" placeholder="none"></label>
<label>Find <input id="find" type="search" placeholder="chat, tokens, cache"></label></header><main>
"""
MAX_ENUM = 12  # members of an enumeration that are shown
QUOTED = re.compile(r"`([^`]+)`")


class ApiPages:
    """The document and the page. Building them takes 60 ms, so the first request for either builds
    both, in a thread.
    """

    def __init__(self, families: Sequence[ApiFamily], pages: Iterable[Route]) -> None:
        self._families = families
        self._pages = list(pages)
        self._built: tuple[dict[str, Any], str] | None = None

    @property
    def routes(self) -> list[Route]:
        return [Route("/openapi.json", self.as_json), Route("/docs", self.as_page)]

    async def as_json(self, request: Request) -> Response:
        found, _ = await asyncio.to_thread(self._build)
        return json_response(found)

    async def as_page(self, request: Request) -> Response:
        _, page = await asyncio.to_thread(self._build)
        return HTMLResponse(page, headers=HEADERS)

    def _build(self) -> tuple[dict[str, Any], str]:
        """The document and the page, built once."""
        if self._built is None:
            found = document(self._families, self._pages)
            self._built = found, page_of(found)
        return self._built


def page_of(api: Mapping[str, Any]) -> str:
    """Render the document as HTML: each operation is a collapsible section with its fields and a
    form.
    """
    by_tag: dict[str, list[tuple[str, str, Any]]] = defaultdict(list)
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            by_tag[operation["tags"][0]].append((path, method.upper(), operation))
    schemas: Schemas = api["components"]["schemas"]
    parts = [HEAD]
    for tag, operations in by_tag.items():
        parts.append(f"<section><h2>{escape(tag)}</h2>")
        for path, method, operation in operations:
            parts += _operation(path, method, operation, schemas)
        parts.append("</section>")
    return "".join([*parts, *_types(schemas)]) + "</main></body></html>"


def _operation(
    path: str, method: str, operation: Mapping[str, Any], schemas: Schemas
) -> Iterator[str]:
    yield f'<details id="{escape(operation["operationId"])}"><summary>'
    yield f'<code class="{method.lower()}">{method}</code> <code>{escape(path)}</code> '
    yield f"<span>{escape(operation['summary'])}</span></summary>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    yield from _form(path, method, operation, body)
    if body is not None:
        yield from _fields("Request", body["schema"], schemas)
    for media_type, content in operation["responses"]["200"]["content"].items():
        yield from _fields(f"Answer, {media_type}", _data_schema(content["schema"]), schemas)
    yield "</details>"


def _form(
    path: str, method: str, operation: Mapping[str, Any], body: Mapping[str, Any] | None
) -> Iterator[str]:
    yield f'<form data-method="{method}" data-path="{escape(path)}">'
    for parameter in operation["parameters"]:
        name = escape(parameter["name"])
        yield f'<label>{name} <input name="{name}" required></label>'
    if body is not None:
        example = json.dumps(body.get("example", {}), indent=2, ensure_ascii=False)
        rows = example.count("\n") + 1
        label = f"Body of {method} {escape(path)}"
        yield f'<textarea aria-label="{label}" rows="{rows}" spellcheck="false">'
        yield f"{escape(example, quote=False)}</textarea>"
    yield '<p><button type="submit">Send</button> '
    yield '<button type="button" class="stop" hidden>Stop</button> <output></output></p>'
    yield '<pre tabindex="0" hidden></pre></form>'


def _data_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of an answer's or event's data without its envelope, the first of several."""
    data: Mapping[str, Any] = schema.get("properties", {}).get("data", schema)
    if "contentSchema" in data.get("anyOf", [{}])[0]:  # the alternative is the last event
        data = data["anyOf"][0]
    data = data.get("contentSchema", data)
    if data.get("anyOf", [])[1:2] == [{"type": "object"}]:  # fields can be selected
        data = data["anyOf"][0]
    return data


def _fields(title: str, schema: Mapping[str, Any], schemas: Schemas) -> Iterator[str]:
    """A table of the fields of an object; for anything else, only its type."""
    found = _resolved(schema, schemas)
    yield f"<h3>{escape(title)}</h3>"
    if "properties" not in found:
        yield f"<p>{_kind(schema)}</p>"
        return
    yield from _table(found)


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    """The fields of an object; fields that are refused are named below the table."""
    if "description" in schema:
        yield f"<p>{_prose(schema['description'])}</p>"
    required, refused = schema.get("required", ()), []
    yield "<table><thead><tr><th>field<th>type<th>default</tr></thead>"
    for name, one in schema.get("properties", {}).items():
        if one.get("description") == NOT_SERVED:
            refused.append(f"<code>{escape(name)}</code>")
            continue
        default = "required" if name in required else _default(one)
        yield f"<tr><td><code>{escape(name)}</code><td>{_full_type(one)}<td>{escape(default)}</tr>"
    yield "</table>"
    if refused:
        yield f"<p>Not served, and a 400 if used: {', '.join(refused)}.</p>"


def _types(schemas: Schemas) -> Iterator[str]:
    """The types that the tables refer to."""
    yield "<section><h2>Types</h2>"
    for name, schema in sorted(schemas.items()):
        yield f'<details id="type-{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        if "properties" in schema:
            yield from _table(schema)
        else:
            yield f"<p>{_kind(schema)}</p>"
        yield "</details>"
    yield "</section>"


def _resolved(schema: Mapping[str, Any], schemas: Schemas) -> Mapping[str, Any]:
    reference = str(schema.get("$ref", ""))
    return schemas[reference.rpartition("/")[2]] if reference else schema


def _default(one: Mapping[str, Any]) -> str:
    default = one.get("default")
    return "" if default is None or default in ("", [], {}) else json.dumps(default)


def _prose(text: str) -> str:
    """Text with its backquoted names as code."""
    return QUOTED.sub(r"<code>\1</code>", escape(text, quote=False))


def _full_type(one: Mapping[str, Any]) -> str:
    """The type of a field and its range."""
    low, high = one.get("minimum"), one.get("maximum")
    return _kind(one) if low is None else f"{_kind(one)}, {low} to {high}"


def _kind(one: Mapping[str, Any]) -> str:
    """The type of a value, in words, with links to named types."""
    if "anyOf" in one:
        return " or ".join(_kind(each) for each in one["anyOf"])
    if "$ref" in one:
        name = escape(str(one["$ref"]).rpartition("/")[2])
        return f'<a href="#type-{name}">{name}</a>'
    if "enum" in one:
        return escape(", ".join(map(str, one["enum"][:MAX_ENUM])))
    if "const" in one:
        return escape(str(one["const"]))
    kind = escape(str(one.get("type", "anything")))
    if kind == "array" and one.get("items"):
        return f"list of {_kind(one['items'])}"
    if kind == "object" and isinstance(values := one.get("additionalProperties"), Mapping):
        return f"object of {_kind(values)}"
    return kind
