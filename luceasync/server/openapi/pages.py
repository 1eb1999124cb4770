"""GET /openapi.json, and /docs, which shows it by a page without a script.

Owns the page's form. Knows no route.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from luceasync.server.family import Family
from luceasync.server.openapi.document import document
from luceasync.server.page import HEADERS
from luceasync.server.status_pages import json_response

HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>luceasync: API</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<link rel="stylesheet" href="web/api.css"><main><h1>luceasync</h1>'
    '<p>As a document: <a href="openapi.json">openapi.json</a></p>'
)


class OpenApi:
    """The document and its page, made once."""

    def __init__(self, families: Sequence[Family], pages: Iterable[Route]) -> None:
        self._document = document(families, pages)
        self._page = HEAD + "".join(_lines(self._document)) + "</main></html>"

    @property
    def routes(self) -> list[Route]:
        return [Route("/openapi.json", self.told), Route("/docs", self.shown)]

    async def told(self, request: Request) -> Response:
        return json_response(self._document)

    async def shown(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=HEADERS)


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    schemas = told["components"]["schemas"]
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            if "summary" in operation:
                yield f"<p>{escape(operation['summary'])}</p>"
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                yield from _fields(schemas[name])


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    yield "<table><tr><th>field<th>type<th></tr>"
    for name, field in schema.get("properties", {}).items():
        need = "required" if name in required else ""
        yield f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(field))}<td>{need}</tr>"
    yield "</table>"


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(each) for each in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    kind = str(field.get("type", "anything"))
    return f"list of {_kind(field['items'])}" if kind == "array" and field.get("items") else kind
