"""The OpenAPI document: the routes that there are, with the types of what they read.

Source: OpenAPI 3.1. Bodies are the structs that the server itself reads; ranges that are checked
elsewhere stand in `limits`. Knows no API family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from luceasync import __version__
from luceasync.server.family import Family, Form
from luceasync.server.openapi.described import described
from luceasync.server.openapi.limits import limited

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
