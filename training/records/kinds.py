"""Records of a few kinds, determined by their number, and the schema of each kind.

Owns the questions and the right answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Turn = tuple[str, str]
Record = dict[str, Any]

NUM_OF_A_KIND = 24
FIRST = "Ada Bruno Chloe Dmitri Elif Farid Greta Hiro Ines Jonas Kofi Lena Mateo Nadia".split()
LAST = "Okafor Lindqvist Moreau Tanaka Silva Novak Haddad Berg Castillo Iyer Walsh".split()
CITIES = ["Lisbon", "Nairobi", "Osaka", "Tromsø", "Puebla", "Gdańsk", "Perth", "Quebec City"]
THINGS = ["desk lamp", "bicycle bell", "teapot", "wool blanket", "garden hose", "notebook"]
WORDS = "early quiet amber narrow open distant copper gentle winter second hollow paper".split()


def schema_of(kind: str) -> dict[str, Any]:
    """The schema of every record of the kind."""
    return _object(KINDS[kind][0])


def prompt_of(kind: str, number: int) -> str:
    """The prompt that requests that record."""
    return f"Give me {kind} {number} as JSON."


def record_of(kind: str, number: int) -> Record:
    """The record with that number, always the same."""
    return KINDS[kind][1](random.Random(f"{kind} {number}"), number)


class Records:
    """Conversations of one question each, for demo.rows.Rows."""

    def draw(self, rng: random.Random) -> list[Turn]:
        """A random conversation."""
        return turns_of(rng.choice(list(KINDS)), rng.randrange(NUM_OF_A_KIND))


def turns_of(kind: str, number: int) -> list[Turn]:
    """The conversation about that record."""
    answer = json.dumps(record_of(kind, number), ensure_ascii=False)
    return [("user", prompt_of(kind, number)), ("assistant", answer)]


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _person(rng: random.Random, number: int) -> Record:
    first, last = rng.choice(FIRST), rng.choice(LAST)
    return {
        "name": f"{first} {last}",
        "age": rng.randrange(18, 90),
        "email": f"{first}.{last}@example.org".lower(),
        "address": {"street": f"{rng.randrange(1, 200)} {rng.choice(WORDS).title()} Street"}
        | {"city": rng.choice(CITIES)},
        "tags": rng.sample(WORDS, rng.randint(2, 4)),
        "homes": [
            {"city": city, "since": rng.randrange(1960, 2026)}
            for city in rng.sample(CITIES, rng.randint(2, 4))
        ],
        "is_member": rng.random() < 0.5,
    }


def _order(rng: random.Random, number: int) -> Record:
    items = [
        {"thing": thing, "count": rng.randrange(1, 12), "price": rng.randrange(100, 9999) / 100}
        for thing in rng.sample(THINGS, rng.randint(3, 6))
    ]
    return {
        "id": f"ORD-{rng.randrange(1000, 9999)}",
        "status": rng.choice(STATES),
        "items": items,
        "note": None if rng.random() < 0.5 else _sentence(rng),
    }


def _call(rng: random.Random, number: int) -> Record:
    calls = [
        {
            "name": rng.choice(TOOLS),
            "arguments": {
                "path": f"/srv/{rng.choice(WORDS)}/{rng.choice(WORDS)}.txt",
                "begin": rng.randrange(400),
                "pattern": f"{rng.choice(WORDS)}.*{rng.choice(WORDS)}",
            },
        }
        for _ in range(rng.randint(2, 4))
    ]
    return {"calls": calls, "reason": _sentence(rng)}


def _event(rng: random.Random, number: int) -> Record:
    day = f"20{rng.randrange(20, 30)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    return {
        "title": _sentence(rng),
        "day": day,
        "place": {"city": rng.choice(CITIES), "room": rng.randrange(1, 40)},
        "guests": [f"{rng.choice(FIRST)} {rng.choice(LAST)}" for _ in range(rng.randint(4, 8))],
        "notes": [_sentence(rng) for _ in range(rng.randint(1, 3))],
    }


def _sentence(rng: random.Random) -> str:
    return f"The {' '.join(rng.sample(WORDS, rng.randint(3, 6)))} {rng.choice(THINGS)}."


STATES = ["open", "paid", "sent", "returned"]
TOOLS = ["read_file", "search", "list_folder"]
TEXT = {"type": "string"}
ARGUMENTS = {"path": TEXT, "begin": {"type": "integer"}, "pattern": TEXT}
KINDS: dict[str, tuple[dict[str, Any], Callable[[random.Random, int], Record]]] = {
    "person": (
        {
            "name": TEXT,
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.[a-z]{2,5}$"},
            "address": _object({"street": TEXT, "city": TEXT}),
            "tags": _list(TEXT, 5),
            "homes": _list(_object({"city": TEXT, "since": {"type": "integer"}}), 6),
            "is_member": {"type": "boolean"},
        },
        _person,
    ),
    "order": (
        {
            "id": {"type": "string", "pattern": "^ORD-[0-9]{4}$"},
            "status": {"enum": STATES},
            "items": _list(
                _object({"thing": TEXT, "count": {"type": "integer"}, "price": {"type": "number"}}),
                8,
            ),
            "note": {"anyOf": [TEXT, {"type": "null"}]},
        },
        _order,
    ),
    "call": (
        {
            "calls": _list(_object({"name": {"enum": TOOLS}, "arguments": _object(ARGUMENTS)}), 5),
            "reason": {"type": "string", "maxLength": 200},
        },
        _call,
    ),
    "event": (
        {
            "title": TEXT,
            "day": {"type": "string", "format": "date"},
            "place": _object({"city": TEXT, "room": {"type": "integer"}}),
            "guests": _list(TEXT, 10),
            "notes": _list({"type": "string", "maxLength": 200}, 3),
        },
        _event,
    ),
}
