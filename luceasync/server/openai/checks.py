"""A JSON body becomes a struct, and what is wrong in it is told by its name.

Owns the words of a refusal. Knows no field.
"""

from __future__ import annotations

import re
from typing import NoReturn, TypeVar

import msgspec

from luceasync.errors import RequestError

Body = TypeVar("Body")
Number = TypeVar("Number", int, float)


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """What `body` says. Raises RequestError with the field's path as `param`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        param = re.sub(r"^\$\.?", "", path.strip("`").rsplit("`", 1)[-1]) or None
        where = f"'{param}'" if param else "the request body"
        raise RequestError(f"Invalid value for {where}: {what}.", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The request body is not valid JSON: {error}.") from None


def refuse(param: str, value: object, allowed: str) -> NoReturn:
    """Raise the RequestError for a field that holds `value`, where `allowed` was expected."""
    raise RequestError(f"Invalid value for '{param}': {value!r}; expected {allowed}.", param=param)


def in_range(param: str, value: Number, least: Number, most: Number) -> Number:
    """`value`, unless it is outside `[least, most]`. Raises RequestError then."""
    if not least <= value <= most:
        refuse(param, value, f"a number from {least} to {most}")
    return value


def in_range_or(
    default: Number, param: str, value: Number | None, least: Number, most: Number
) -> Number:
    """`in_range`, and `default` for a field that is absent."""
    return default if value is None else in_range(param, value, least, most)
