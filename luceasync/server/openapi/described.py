"""Structs of bodies as schemas can describe them: what is taken as it came is anything.

Owns that translation. Knows no field by name.
"""

from __future__ import annotations

from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec


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
