"""The OpenAPI document at /openapi.json.

Source: OpenAPI 3.1. Bodies are described by the structs that decode them, answers by the structs
that are sent; LIMITS has the ranges that are checked elsewhere. Independent of API families.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from starlette.routing import Route

from luceasync import __version__
from luceasync.server.family import ApiFamily, BodySpec, Endpoint, page_spec
from luceasync.server.fields import MAX_INT
from luceasync.server.unserved import NOT_SERVED

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


@dataclass(frozen=True, slots=True)
class Operation:
    """A route and a method. `body` describes requests; `answers` are types by media type."""

    path: str
    method: str
    tag: str
    handler: object
    answers: Mapping[str, Any]
    error: Any
    body: BodySpec | None = None

    @property
    def name(self) -> str:
        """Its operationId."""
        return "_".join([self.method.lower(), *re.findall(r"\w+", self.path)])

    @property
    def kinds(self) -> list[Any]:
        """All types that the operation refers to."""
        asked = [] if self.body is None else [self.body.struct]
        return [described(kind) for kind in (*asked, *self.answers.values(), self.error)]


def document(families: Sequence[ApiFamily], pages: Iterable[Route]) -> dict[str, Any]:
    """The document of all routes of `families`, and of the server's own `pages`."""
    found = list(_operations(families, pages))
    kinds = [kind for each in found for kind in each.kinds]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    remaining = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for each in found:
        operation = _described_operation(each, [next(remaining) for _ in each.kinds])
        methods, method = paths.setdefault(each.path, {}), each.method.lower()
        methods[method] = _either(methods[method], operation) if method in methods else operation
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


def _operations(families: Sequence[ApiFamily], pages: Iterable[Route]) -> Iterator[Operation]:
    """All operations; for two with the same path and method, the route of the later one is tried
    first.
    """
    errors = [_error_of(family) for family in families]
    for family, error in zip(families, errors, strict=True):
        tag = type(family).__name__
        for endpoint in family.endpoints:
            if endpoint.body is not None:
                yield _posting(endpoint, endpoint.body, tag, family.framing.media_type)
        yield from _of_pages(family.pages, tag, error)
    yield from _of_pages(pages, "Server", errors[0] if errors else Any)


def _error_of(family: ApiFamily) -> Any:
    """The type of the family's errors, the same for all of its endpoints."""
    return next((each.body.error for each in family.endpoints if each.body is not None), Any)


def _posting(endpoint: Endpoint, body: BodySpec, tag: str, event_type: str) -> Operation:
    answers = {"application/json": body.answer}
    if body.event is not None:
        answers[event_type] = body.event
    return Operation(endpoint.path, "POST", tag, type(endpoint), answers, body.error, body)


def _of_pages(routes: Iterable[Route], tag: str, error: Any) -> Iterator[Operation]:
    for route in routes:
        if route.include_in_schema:
            path, spec = re.sub(r"{(\w+):path}", r"{\1}", route.path), page_spec(route.endpoint)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                answers = {spec.media_type: spec.answer(method)}
                yield Operation(path, method, tag, route.endpoint, answers, error)


def _described_operation(of: Operation, schemas: Sequence[Any]) -> dict[str, Any]:
    """The operation in the document's form; `schemas` correspond to its `kinds`."""
    num_asked = 0 if of.body is None else 1
    asked, answers, error = schemas[:num_asked], schemas[num_asked:-1], schemas[-1]
    content = {
        media_type: {"schema": _as_sent(media_type, schema, of.body)}
        for media_type, schema in zip(of.answers, answers, strict=True)
    }
    operation: dict[str, Any] = {"operationId": of.name, "tags": [of.tag]}
    operation["summary"] = _summary(of.handler, of.method)
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", of.path)
    ]
    if of.body is not None:
        body = {"schema": asked[0], "example": dict(of.body.example)}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    operation["responses"] = {
        "200": {"description": "The answer.", "content": content},
        **{
            status: {"description": text, "content": {"application/json": {"schema": error}}}
            for status, text in ERRORS.items()
        },
    }
    return operation


def _as_sent(media_type: str, schema: Any, body: BodySpec | None) -> Any:
    """The schema of a response of that media type; for server-sent events, that of each event."""
    if body is not None and body.is_selected:
        some = {"type": "object"}
        schema = {"anyOf": [schema, some, {"type": "array", "items": some}]}
    if media_type != "text/event-stream":
        return schema
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    if body is not None and body.last:
        data = {"anyOf": [data, {"type": "string", "enum": [body.last]}]}
    properties = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "required": ["data"], "properties": properties}


def _either(one: Any, other: Any) -> Any:
    """Merge two descriptions of one operation, with the answers and errors of both."""
    for status, response in one["responses"].items():
        for media_type, content in response["content"].items():
            second = other["responses"][status]["content"].get(media_type, content)
            if second != content:
                content["schema"] = {"anyOf": [content["schema"], second["schema"]]}
    return one


def _summary(handler: Any, method: str = "") -> str:
    """The first sentence of a handler's docstring; if it handles several methods, the sentence
    after `method`.
    """
    summary = inspect.cleandoc(handler.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    return (summary.partition(f"{method}: ")[2] or summary).partition(". ")[0].rstrip(".")


def _with_limits(schema: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        name: {**one, **LIMITS[name]} if _is_limited(name, one) else one
        for name, one in schema.get("properties", {}).items()
    }
    return {**schema, "properties": fields} if fields else dict(schema)


def _is_limited(name: str, one: Mapping[str, Any]) -> bool:
    return name in LIMITS and one.get("description") != NOT_SERVED


def _portable(schema: Any) -> Any:
    """`schema` in a form that code generators accept. They fail on `items: false`, the form of
    fixed tuples, which become lists of their first type, and on lists without `items`.
    """
    match schema:
        case {"type": "array"} if "items" not in schema and "prefixItems" not in schema:
            return {**schema, "items": {}}
        case {"prefixItems": [first, *_], "items": False}:
            rest = {name: each for name, each in schema.items() if name != "prefixItems"}
            return {**rest, "items": _portable(first)}
        case dict():
            return {name: _portable(each) for name, each in schema.items()}
        case list():
            return [_portable(each) for each in schema]
        case _:
            return schema


# msgspec has no schema for Raw fields, and tells the structs of a union apart by their tags. So
# structs with Raw fields are rebuilt with Any in their place, and a constant `type` becomes a tag.

TAG = "type"


def described(kind: Any) -> Any:
    """`kind` with Any in place of msgspec.Raw and with tags, at any depth."""
    if kind is msgspec.Raw:
        return Any
    if not _is_rebuilt(kind, set()):
        return kind
    if get_origin(kind) is Annotated:
        return Annotated[described(kind.__origin__), *kind.__metadata__]
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
    for each in msgspec.structs.fields(kind):
        if tag is not None and each.name == TAG:
            continue
        default: tuple[Any, ...] = () if each.required else (each.default,)
        if msgspec.Raw in (each.type, getattr(each.type, "__origin__", None)):
            default = (None,)
        elif not each.required and each.default is msgspec.NODEFAULT:
            default = (msgspec.field(default_factory=each.default_factory),)
        fields.append((each.name, described(each.type), *default))
    namespace = {"__doc__": kind.__doc__}
    tagged: dict[str, Any] = {} if tag is None else {"tag_field": TAG, "tag": tag}
    return msgspec.defstruct(
        kind.__name__, fields, kw_only=True, namespace=namespace, module=kind.__module__, **tagged
    )


def _tag(kind: type[msgspec.Struct]) -> str | None:
    """The constant `type` of a struct, if it has one."""
    for each in msgspec.structs.fields(kind):
        if each.name == TAG and get_origin(each.type) is Literal and not each.required:
            return str(each.default)
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
