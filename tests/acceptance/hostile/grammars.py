"""Odd schemas, expressions and grammars of a hostile client, as fields of a request's body.

    python -m tests.acceptance.hostile.grammars PORT NUM_REQUESTS SEED

As a process of its own it asks one after the other and prints the outcomes as JSON.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.acceptance.hostile.server import CHAT, SAID

Fields = dict[str, Any]
Make = Callable[[random.Random], Any]
LARGE = (1, 30, 100, 1_000, 30_000, 100_000, 10**9)
NUM_TOKENS = 40

ATOMS = (
    "a", "[a-z]", r"\w", r"\d", r"\p{L}", r"\p{Greek}", r"\P{Lu}", "[^x]", r"\s", "(?s:.)", "é",
    r"\bfoo", "^a$", "(?=a)", r"(a)\1", r"[^\s\S]", "", "(?i:straße)", r"\x{10FFFF}", "[[:alpha:]]",
)  # fmt: skip


def regex_of(draw: random.Random, depth: int = 0) -> str:
    """Atoms, counted, joined, nested."""
    kind = draw.randrange(6) if depth < 4 else 0
    if kind <= 1:
        return draw.choice(ATOMS)
    inner = regex_of(draw, depth + 1)
    if kind == 2:
        return f"({inner}){{{draw.choice((0, 1))},{draw.choice(LARGE)}}}"
    if kind == 3:
        return "|".join([inner, *(regex_of(draw, depth + 1) for _ in range(draw.randint(1, 3)))])
    if kind == 4:
        return f"({inner}){draw.choice('*+?')}"
    return inner + regex_of(draw, depth + 1)


REGEXES: dict[str, Make] = {
    "made up": regex_of,
    "counted in counts": lambda d: f"((a{{1,100}}){{1,100}}){{1,{d.choice(LARGE)}}}",
    "far look back": lambda d: f"(a|b)*a(a|b){{{d.randint(10, 60)}}}",
    "many tails": lambda d: f"(.*a){{{d.randint(5, 200)}}}",
    "classes": lambda d: rf"(\p{{L}}|\p{{N}}){{1,{d.choice(LARGE)}}}",
    "alternatives": lambda d: "|".join(str(i) for i in range(d.choice((10, 1000, 5000)))),
    "groups": lambda d: "(" * (n := d.choice((10, 300, 10_000))) + "a" + ")" * n,
}


def nested(draw: random.Random, schema: Any, depth: int) -> Any:
    """The schema in arrays, objects and alternatives."""
    for _ in range(depth):
        schema = draw.choice(
            [
                {"type": "array", "items": schema},
                {"type": "object", "properties": {"a": schema}, "required": ["a"]},
                {"anyOf": [schema, {"type": "null"}]},
                {"allOf": [schema]},
                {"additionalProperties": schema},
            ]
        )
    return schema


def cycle(draw: random.Random) -> Any:
    """References in a circle, with something beside some of them."""
    names = [f"d{i}" for i in range(draw.randint(1, 6))]
    beside = ({}, {"type": "object"}, {"minProperties": 1}, {"description": "x"})
    defs = {}
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        target = {"$ref": f"#/$defs/{following}", **draw.choice(beside)}
        defs[name] = draw.choice(
            [target, {"properties": {"n": target}}, {"anyOf": [target, {"type": "null"}]}]
        )
    return {"$ref": f"#/$defs/{names[0]}", "$defs": defs}


def crossed(draw: random.Random) -> Any:
    """Alternatives of which each combination has to be looked at."""
    each = [
        {"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(3)]}
        for i in range(draw.randint(2, 14))
    ]
    return {"type": "object", "allOf": each}


def numbers(draw: random.Random) -> Any:
    """Ranges and multiples at their ends."""
    values = (0, 0.5, 7, 7919, 99999989, 10**18, 10**30, -1e300, 1e-7)
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    found = {key: draw.choice(values) for key in keys if draw.random() < 0.5}
    return {"type": draw.choice(("integer", "number")), **found}


SCHEMAS: dict[str, Make] = {
    "nested": lambda d: nested(d, {"type": "string"}, d.choice((10, 60, 200, 1000))),
    "cycles": cycle,
    "crossed": crossed,
    "numbers": numbers,
    "enums": lambda d: {"enum": [f"{d.random()}" for _ in range(d.choice((1, 1000, 9000)))]},
    "no values": lambda d: d.choice([{"enum": []}, {"not": {}}, {"type": []}, {"maxItems": -1}]),
    "patterns": lambda d: {"type": "string", "pattern": regex_of(d), "maxLength": d.choice(LARGE)},
    "lengths": lambda d: {"type": "string", "minLength": d.choice(LARGE)},
    "items": lambda d: {"type": "array", "items": {"type": "integer"}, "minItems": d.choice(LARGE)},
    "properties": lambda d: {
        "type": "object",
        "properties": {f"ключ {i}": {"type": "string"} for i in range(d.choice((9, 300, 3000)))},
        "required": [f"ключ {i}" for i in range(d.choice((0, 9, 300)))],
    },
    "names by pattern": lambda d: {
        "patternProperties": {regex_of(d): {"type": "integer"} for _ in range(d.randint(1, 20))},
        "additionalProperties": False,
    },
}


def ring(draw: random.Random) -> str:
    """Rules that lead to each other, some ambiguous, some without an end."""
    num_rules = draw.randint(2, 40)
    rules = []
    for i in range(num_rules):
        parts = [f"r{draw.randrange(num_rules)}" for _ in range(draw.randint(0, 3))]
        parts += draw.sample(['"a"', '"b"', "/[a-z]+/", '""', "/.{1,9}/"], draw.randint(0, 2))
        rules.append(
            f"r{i}: {' '.join(parts) or '_'.join(['r0'])} | {draw.choice(parts or ['r0'])}"
        )
    return "start: r0\n" + "\n".join(rules)


GRAMMARS: dict[str, Make] = {
    "ring": ring,
    "ambiguous": lambda d: f'start: e\ne: {" ".join(["e"] * d.randint(2, 6))} | e e | "a" | "b"',
    "ambiguous, with nothing": lambda d: 'start: e\ne: e e e | e e | "a" | ""',
    "two ambiguous": lambda d: 'start: a\na: a b | b a | "a"\nb: b a | a b | "a" | "b"',
    "counted": lambda d: f'start: ("a" "b"?){{1,{d.choice(LARGE)}}}',
    "counted expression": lambda d: f"start: /{regex_of(d)}/{{1,{d.choice(LARGE)}}}",
    "lines": lambda d: 'root ::= "a"' + "\n" * d.choice((8_000, 16_000, 32_700)),
    "lines before": lambda d: "\n" * d.choice((8_000, 16_000, 32_000)) + 'root ::= "a"',
    "groups": lambda d: "root ::= " + "(" * (n := d.choice((50, 5_000))) + '"a"' + ")" * n,
    "chain": lambda d: (
        "start: r0\n"
        + "\n".join(f'r{i}: r{i + 1} "a"' for i in range(d.choice((100, 1500))))
        + '\nr100: "b"\nr1500: "b"'
    ),
    "words": lambda d: "start: " + " | ".join(f'"w{i}"' for i in range(d.choice((100, 3000)))),
    "schema within": lambda d: f"start: %json {json.dumps(numbers(d))}",
    "limited": lambda d: 'start: w ("." w)*\nw[max_tokens=3]: /[a-z]+/',
    "itself": lambda d: "start: @said",
    "no grammar": lambda d: "".join(chr(d.randrange(32, 1000)) for _ in range(d.randint(1, 300))),
}


def fields_of(draw: random.Random) -> tuple[str, Fields]:
    """One odd demand: its kind, and the fields of a body."""
    which = draw.randrange(4)
    if which == 0:
        kind = draw.choice(list(REGEXES))
        return f"regex, {kind}", {"guided_regex": REGEXES[kind](draw)}
    if which == 1:
        kind = draw.choice(list(GRAMMARS))
        return f"grammar, {kind}", {"guided_grammar": GRAMMARS[kind](draw)}
    kind = draw.choice(list(SCHEMAS))
    schema = nested(draw, SCHEMAS[kind](draw), draw.choice((0, 0, 2)))
    form = {"name": "x", "schema": schema, "strict": draw.random() < 0.5}
    return f"schema, {kind}", {"response_format": {"type": "json_schema", "json_schema": form}}


def main() -> None:
    """Ask, and print statuses by kind, what was a 5xx, and the slowest."""
    port, num_requests, seed = map(int, sys.argv[1:])
    sys.setrecursionlimit(20_000)  # to write what is nested deep
    draw = random.Random(seed)
    statuses: Counter[str] = Counter()
    failed, slowest = [], (0.0, "")
    for _ in range(num_requests):
        kind, fields = fields_of(draw)
        options = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "temperature": 1.0}
        body = f"{{{SAID},{json.dumps({**options, **fields})[1:]}"
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", CHAT, body.encode(), {"content-type": "application/json"})
        response = connection.getresponse()
        said = response.read()
        connection.close()
        statuses[str(response.status)] += 1
        seconds = time.perf_counter() - begin
        slowest = max(slowest, (round(seconds, 2), kind))
        print(f"{response.status} {seconds:6.2f} s {kind}: {said[:160]!r}", file=sys.stderr)
        if response.status >= 500:
            failed.append((kind, response.status, said[:200].decode(errors="replace")))
    print(json.dumps({"statuses": statuses, "failed": failed, "slowest": slowest}))


if __name__ == "__main__":
    main()
