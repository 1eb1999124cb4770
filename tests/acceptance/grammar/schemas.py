"""Random JSON schemas of the kinds in JSONSchemaBench (Geng et al. 2025): what describes APIs,
tools and settings.

Values are small, so that a model that knows nothing also ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
Make = Callable[[random.Random, int], Schema]

NAMES = [*"id name kind ok size tags next é/π note_2 $x a-b".split(), "two words", 'q"t']
PATTERNS = ["^[a-z]{1,6}$", "^(red|green|blue)-[0-9]{2}$", "^[A-Z][a-z]?$", "^\\d{3}-\\d{4}$"]
FORMATS = ["date", "time", "date-time", "ipv4", "uuid", "email"]
TEXTS = ["red", "", 'a "b"', "né\n", "<|im_end|>", "0"]


def schema_of(seed: int) -> Schema:
    """The schema of a seed: mostly an object, as answers are."""
    rng = random.Random(seed)
    schema = _kind(rng)(rng, 3)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def kind_of(seed: int) -> str:
    """Its outermost part."""
    return _kind(random.Random(seed)).__name__.removeprefix("_")


def _kind(rng: random.Random) -> Make:
    return rng.choice([*[_object] * 6, _array, _union, _merged, _recursive, _tagged, _shared])


def _any(rng: random.Random, depth: int) -> Schema:
    plain: list[Make] = [_text, _text, _integer, _number, _listed, _flag, _nullable, _formatted]
    nested: list[Make] = [_object, _array, _union, _tuple, _map]
    return rng.choice(plain if depth <= 0 else plain + nested)(rng, depth - 1)


def _text(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    least = rng.choice([0, 0, 1, 3])
    lengths = {"minLength": least} if least else {}
    return {"type": "string", **lengths, "maxLength": least + rng.randrange(8)}


def _formatted(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def _integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(-1000, 1000)
    words = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    schema: Schema = {"type": "integer"}
    if rng.random() < 0.8:
        schema |= {words[0]: least, words[1]: least + rng.randrange(2, 500)}
    elif rng.random() < 0.5:
        schema["multipleOf"] = rng.choice([2, 5, 7])
    return schema


def _number(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"type": "number"}
    return {"type": "number", "minimum": -1.5, "maximum": rng.choice([0.25, 99.5])}


def _listed(rng: random.Random, depth: int) -> Schema:
    values = [*TEXTS, 1, -2.5, None, True, [1, "a"], {"k": None}]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _flag(rng: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _nullable(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.sample(["null", "boolean", "integer"], rng.randint(1, 3))}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 5))
    required = [name for name in names if rng.random() < 0.6]
    schema: Schema = {
        "type": "object",
        "title": "T",
        "description": "what it is",
        "properties": {name: _any(rng, depth) for name in names},
        "additionalProperties": False,
    }
    return {**schema, "required": required} if required else schema


def _map(rng: random.Random, depth: int) -> Schema:
    """An object whose property names match a pattern."""
    return {
        "type": "object",
        "patternProperties": {"^k[0-9]$": _any(rng, 0)},
        "properties": {"fixed": _any(rng, 0)},
        "required": ["fixed"],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(3)
    bounds = {"minItems": least, "maxItems": least + rng.randrange(3)}
    return {"type": "array", "items": _any(rng, depth), **bounds}


def _tuple(rng: random.Random, depth: int) -> Schema:
    parts = [_any(rng, 0) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _tagged(rng: random.Random, depth: int) -> Schema:
    """One of several objects, told apart by a name, as discriminated unions are."""
    cases = []
    for name in rng.sample(["circle", "square", "line"], rng.randint(2, 3)):
        inner = _object(rng, depth - 1)
        inner["properties"] = {"type": {"const": name}, **inner["properties"]}
        inner["required"] = ["type", *inner.get("required", [])]
        cases.append(inner)
    return {"type": "object", "properties": {"shape": {"oneOf": cases}}, "required": ["shape"]} | {
        "additionalProperties": False
    }


def _merged(rng: random.Random, depth: int) -> Schema:
    """Parts that must all hold."""
    one = {"properties": {"a": _any(rng, 0)}, "required": ["a"]}
    other = {"properties": {"b": _any(rng, 0), "c": _any(rng, 0)}, "required": ["b"]}
    named: Schema = {"properties": {"a": True, "b": True, "c": True}}
    return {"type": "object", "allOf": [one, other], **named, "additionalProperties": False}


def _recursive(rng: random.Random, depth: int) -> Schema:
    node: Schema = {
        "type": "object",
        "properties": {
            "value": _any(rng, 0),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _shared(rng: random.Random, depth: int) -> Schema:
    """The same part in several places."""
    inner = _object(rng, depth - 1)
    places = {"from": {"$ref": "#/definitions/part"}, "to": {"$ref": "#/definitions/part"}}
    schema: Schema = {"type": "object", "properties": places, "required": list(places)}
    return schema | {"additionalProperties": False, "definitions": {"part": inner}}
