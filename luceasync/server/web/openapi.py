"""The OpenAPI document: the routes that there are, with the types of what they read.

Source: OpenAPI 3.1. Bodies are the structs that the server itself reads; ranges that are checked
elsewhere stand in `limits`. Knows no API family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from html import escape
from operator import or_
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from luceasync import __version__
from luceasync.server.family import Family, Form
from luceasync.server.status_pages import json_response
from luceasync.server.web.page import HEADERS

# Structs of bodies as schemas can describe them: what is taken as it came is anything. Owns
# that translation. Knows no field by name.


def described(kind: Any) -> Any:
    """The same type, with Any in place of what has no schema."""
    if kind is msgspec.Raw:
        return Any
    if not _has_raw(kind, set()):
        return kind
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct(kind)
    inner = tuple(map(described, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return reduce(or_, inner)
    return get_origin(kind)[inner]


@cache  # a schema names each type once
def _struct(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        default: tuple[Any, ...] = () if field.required else (field.default,)
        if field.type is msgspec.Raw:
            default = (None,)
        elif not field.required and field.default is msgspec.NODEFAULT:
            default = (msgspec.field(default_factory=field.default_factory),)
        fields.append((field.name, described(field.type), *default))
    told = {"__doc__": kind.__doc__}
    return msgspec.defstruct(
        kind.__name__, fields, kw_only=True, namespace=told, module=kind.__module__
    )


def _has_raw(kind: Any, seen: set[Any]) -> bool:
    if kind is msgspec.Raw:
        return True
    if get_origin(kind) is Literal or kind in seen:
        return False
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        seen.add(kind)
        return any(_has_raw(field.type, seen) for field in msgspec.structs.fields(kind))
    return any(_has_raw(each, seen) for each in get_args(kind))


# Ranges of fields that are checked where they are read, for the document: by the field's name.
# Owns what the document says of them: the widest range that any API takes. Whoever changes a
# range there changes it here.


LIMITS: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "n": {"minimum": 1, "maximum": 16},
    "max_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "max_completion_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "max_output_tokens": {"minimum": 1, "maximum": 2**31 - 1},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "prompt_cache_key": {"maxLength": 64},
    "priority": {"minimum": -1000, "maximum": 1000},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "thinking_budget": {"minimum": 0, "maximum": 2**31 - 1},
    "thinking_token_budget": {"minimum": 0, "maximum": 2**31 - 1},
    "messages": {"minItems": 1, "maxItems": 8192},
}


def limited(components: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of bodies with the ranges of their fields."""
    return {
        name: _with_limits(schema) if name.endswith("Body") else schema
        for name, schema in components.items()
    }


def _with_limits(schema: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        name: {**field, **LIMITS[name]} if name in LIMITS else field
        for name, field in schema.get("properties", {}).items()
    }
    return {**schema, "properties": fields} if fields else dict(schema)


REFUSALS = {
    "400": "Something in the request is wrong; the error names the field.",
    "401": "An API key is missing or wrong.",
    "403": "The host, the origin or the key may not do this.",
    "404": "There is no such route, model or thing.",
    "405": "The route does not take this method.",
    "408": "The body did not arrive in time.",
    "409": "The request was cancelled.",
    "413": "The body is too large.",
    "429": "Too many requests wait; Retry-After says when to come back.",
    "500": "The generation failed.",
    "503": "The model is not there now; Retry-After says when to come back.",
}
REF = "#/components/schemas/{name}"
STREAM: dict[str, Any] = {"schema": {}}
ANYTHING: dict[str, Any] = {"schema": {}}
OBJECT = {"type": "object"}


def document(families: Sequence[Family], pages: Iterable[Route]) -> dict[str, Any]:
    """Of these families, and of the server's own pages."""
    paths: dict[str, dict[str, Any]] = {}
    forms = {each.path: each.form for family in families for each in family.endpoints if each.form}
    kinds = [described(form.body) for form in forms.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    for (path, form), body in zip(forms.items(), schemas, strict=True):
        paths[path] = {"post": _operation(path, form, body)}
    for family in families:
        _add_pages(paths, family.pages)
    _add_pages(paths, pages)
    return {
        "openapi": "3.1.0",
        "info": {"title": "luceasync", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": limited(components),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, form: Form, body: Mapping[str, Any]) -> dict[str, Any]:
    said = {"application/json": {"schema": OBJECT}}
    if form.streams:
        said["text/event-stream"] = STREAM
    return {
        "operationId": _name("post", path),
        "summary": _first_line(form.body),
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The answer.", "content": said}, **_refusals()},
    }


def _add_pages(paths: dict[str, dict[str, Any]], routes: Iterable[Route]) -> None:
    for route in routes:
        path = re.sub(r"{(\w+):path}", r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _page(path, method)


def _page(path: str, method: str) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    return {
        "operationId": _name(method.lower(), path),
        "parameters": parameters,
        "responses": {"200": {"description": "It.", "content": {"*/*": ANYTHING}}, **_refusals()},
    }


def _refusals() -> dict[str, Any]:
    said = {"application/json": {"schema": OBJECT}}
    return {status: {"description": words, "content": said} for status, words in REFUSALS.items()}


def _name(method: str, path: str) -> str:
    return "_".join([method, *re.findall(r"\w+", path)])


def _first_line(kind: type) -> str:
    return (kind.__doc__ or kind.__name__).strip().partition("\n")[0]


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
