"""The OpenAPI document at /openapi.json, and a page of it without scripts at /docs.

Source: OpenAPI 3.1. Bodies are described by the structs that the server decodes; LIMITS has the
ranges that are checked elsewhere. Knows no API family.
"""

from __future__ import annotations

import asyncio
import inspect
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
from luceasync.server.family import ApiFamily, Endpoint
from luceasync.server.fields import MAX_INT
from luceasync.server.http.responses import json_response
from luceasync.server.web.page import HEADERS

# The widest range that any API accepts, by field name. Keep in step with the checks.
LIMITS: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_INT},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "repeat_penalty": {"minimum": 0.01, "maximum": 100},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "n": {"minimum": 1, "maximum": 16},
    "max_tokens": {"minimum": -1, "maximum": MAX_INT},
    "max_completion_tokens": {"minimum": -1, "maximum": MAX_INT},
    "max_output_tokens": {"minimum": 1, "maximum": MAX_INT},
    "n_predict": {"minimum": -1, "maximum": MAX_INT},
    "min_tokens": {"minimum": 0, "maximum": MAX_INT},
    "prompt_cache_key": {"maxLength": 64},
    "priority": {"minimum": -1000, "maximum": 1000},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "thinking_budget": {"minimum": 0, "maximum": MAX_INT},
    "thinking_token_budget": {"minimum": 0, "maximum": MAX_INT},
    "messages": {"minItems": 1, "maxItems": 8192},
}
ERRORS = {
    "400": "Something in the request is wrong; the error names the field.",
    "401": "An API key is missing or wrong.",
    "403": "The host, the origin or the key is not allowed.",
    "404": "There is no such route, model or object.",
    "405": "The route does not take this method.",
    "408": "The body did not arrive in time.",
    "409": "The request was cancelled.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too many requests wait; Retry-After says when to come back.",
    "500": "The generation failed.",
    "503": "The model is not available; Retry-After says when to come back.",
}
REF = "#/components/schemas/{name}"
ANYTHING: dict[str, Any] = {"schema": {}}
OBJECT = {"schema": {"type": "object"}}

HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>luceasync: API</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<link rel="stylesheet" href="web/api.css"><main><h1>luceasync</h1>'
    '<p>As a document: <a href="openapi.json">openapi.json</a></p>'
)


class OpenApiPages:
    """The document and its page. Building them takes 40 ms, so that is left to the first request
    for either, and to a thread.
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
            self._built = found, HEAD + "".join(_lines(found)) + "</main></html>"
        return self._built


def document(families: Sequence[ApiFamily], pages: Iterable[Route]) -> dict[str, Any]:
    """The document of all routes of `families`, and of the server's own `pages`."""
    paths: dict[str, dict[str, Any]] = {}
    endpoints = {each.path: each for family in families for each in family.endpoints if each.body}
    bodies = {path: endpoint.body for path, endpoint in endpoints.items() if endpoint.body}
    kinds = {
        (path, part): described(getattr(body, part))
        for path, body in bodies.items()
        for part in ("struct", "answer", "error", "event")
    }
    schemas, components = msgspec.json.schema_components(kinds.values(), ref_template=REF)
    of = dict(zip(kinds, schemas, strict=True))
    for path, body in bodies.items():
        schema, answer, error = (of[path, part] for part in ("struct", "answer", "error"))
        content = {"application/json": {"schema": answer}}
        if body.event is not None:
            content["text/event-stream"] = {"schema": of[path, "event"]}
        paths[path] = {"post": _operation(endpoints[path], schema, content, {"schema": error})}
    for family in families:
        _add_pages(paths, family.pages)
    _add_pages(paths, pages)
    return {
        "openapi": "3.1.0",
        "info": {"title": "luceasync", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {
                name: _portable(_with_limits(schema) if name.endswith("Body") else schema)
                for name, schema in components.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(
    endpoint: Endpoint,
    schema: Mapping[str, Any],
    content: Mapping[str, Any],
    error: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "operationId": _name("post", endpoint.path),
        "summary": _summary(type(endpoint)),
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The answer.", "content": content}, **_errors(error)},
    }


def _add_pages(paths: dict[str, dict[str, Any]], routes: Iterable[Route]) -> None:
    for route in routes:
        if not route.include_in_schema:
            continue
        path = re.sub(r"{(\w+):path}", r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _page(path, method, route)


def _page(path: str, method: str, route: Route) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    content = {"*/*": ANYTHING}
    return {
        "operationId": _name(method.lower(), path),
        "summary": _summary(route.endpoint, method),
        "parameters": parameters,
        "responses": {"200": {"description": "The answer.", "content": content}, **_errors(OBJECT)},
    }


def _errors(error: Mapping[str, Any]) -> dict[str, Any]:
    content = {"application/json": error}
    return {status: {"description": text, "content": content} for status, text in ERRORS.items()}


def _name(method: str, path: str) -> str:
    return "_".join([method, *re.findall(r"\w+", path)])


def _summary(handler: Any, method: str = "") -> str:
    """The first sentence of what handles a route; that after `method` if it handles several."""
    told = inspect.cleandoc(handler.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    return (told.partition(f"{method}: ")[2] or told).partition(". ")[0].rstrip(".")


def _with_limits(schema: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        name: {**field, **LIMITS[name]} if name in LIMITS else field
        for name, field in schema.get("properties", {}).items()
    }
    return {**schema, "properties": fields} if fields else dict(schema)


def _portable(schema: Any) -> Any:
    """Fixed tuples as lists of their first type: generators fail on `items: false`."""
    match schema:
        case {"prefixItems": [first, *_], "items": False}:
            rest = {name: each for name, each in schema.items() if name != "prefixItems"}
            return {**rest, "items": _portable(first)}
        case dict():
            return {name: _portable(each) for name, each in schema.items()}
        case list():
            return [_portable(each) for each in schema]
        case _:
            return schema


# Raw fields have no schema, and a union tells structs apart by a tag. So structs with Raw fields
# are rebuilt with Any in their place, and those with a constant `type` with it as their tag.

TAG = "type"


def described(kind: Any) -> Any:
    """`kind` with Any in place of msgspec.Raw and with tags, at any depth."""
    if kind is msgspec.Raw:
        return Any
    if not _is_rebuilt(kind, set()):
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
    tag = _tag(kind)
    for field in msgspec.structs.fields(kind):
        if tag is not None and field.name == TAG:
            continue
        default: tuple[Any, ...] = () if field.required else (field.default,)
        if field.type is msgspec.Raw:
            default = (None,)
        elif not field.required and field.default is msgspec.NODEFAULT:
            default = (msgspec.field(default_factory=field.default_factory),)
        fields.append((field.name, described(field.type), *default))
    namespace = {"__doc__": kind.__doc__}
    tagged: dict[str, Any] = {} if tag is None else {"tag_field": TAG, "tag": tag}
    return msgspec.defstruct(
        kind.__name__, fields, kw_only=True, namespace=namespace, module=kind.__module__, **tagged
    )


def _tag(kind: type[msgspec.Struct]) -> str | None:
    """The constant `type` of a struct, if it has one."""
    for field in msgspec.structs.fields(kind):
        if field.name == TAG and get_origin(field.type) is Literal and not field.required:
            return str(field.default)
    return None


def _is_rebuilt(kind: Any, seen: set[Any]) -> bool:
    if kind is msgspec.Raw:
        return True
    if get_origin(kind) is Literal or kind in seen:
        return False
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        seen.add(kind)
        if _tag(kind) is not None:
            return True
        return any(_is_rebuilt(field.type, seen) for field in msgspec.structs.fields(kind))
    return any(_is_rebuilt(each, seen) for each in get_args(kind))


# The page


def _lines(api: Mapping[str, Any]) -> Iterator[str]:
    schemas = api["components"]["schemas"]
    for path, methods in api["paths"].items():
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
