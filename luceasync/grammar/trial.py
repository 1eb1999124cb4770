"""The program of a process that tries what strangers want compiled: it may take for ever, or end.

Owns nothing but its own memory, which is bounded. Each line that comes is a JSON object with a
`program` of llguidance; each that goes says what is wrong with it, or that nothing is. Imports
nothing of ours: it is run as a file, and starts in a tenth of a second.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MOST_BYTES = 2 << 30  # of address space
MAX_PLACES = 200  # parts of a schema that are tried to say where it is wrong
NUM_STEPS = 64  # of an answer that is made up
END = 256


class Octets(TokenizerWrapper):
    """A vocabulary of single bytes: what is wrong with a program is so with any vocabulary."""

    def __init__(self) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = END, None
        self.tokens = [*(bytes([i]) for i in range(END)), b"<end>"]
        self.special_token_ids = [END]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


class Trial:
    """Tries programs."""

    def __init__(self) -> None:
        self._table = LLTokenizer(Octets(), n_vocab=END + 1, eos_token=END, slices=[])

    def answer(self, order: Any) -> dict[str, Any]:
        """`error`: what is wrong with the order's `program`, "" for nothing; `schema`: the name of
        the JSON schema that is wrong, if one is, and `place`: where in it, as keys.
        """
        limits = LLParserLimits(**order["limits"], verbose_errors=False)
        error = self._error(order["program"], limits)
        if not error:
            return {"error": ""}
        for part in json.loads(order["program"])["grammars"]:
            if "json_schema" in part and self._schema_error(part["json_schema"], limits) == error:
                place = self._place(part["json_schema"], error, limits)
                return {"error": error, "schema": part["name"], "place": place}
        return {"error": error, "schema": "", "place": []}

    def _schema_error(self, schema: Any, limits: LLParserLimits) -> str:
        return self._error(json.dumps({"grammars": [{"json_schema": schema}]}), limits)

    def _error(self, program: str, limits: LLParserLimits) -> str:
        matcher = LLMatcher(self._table, program, log_level=0, limits=limits)
        for _ in range(NUM_STEPS):
            if matcher.is_error():
                return matcher.get_error() or "it does not compile"
            if matcher.is_stopped():
                break
            allowed = _allowed(matcher.compute_bitmask())
            if not allowed:
                return matcher.get_error() or "nothing at all is an answer to it"
            matcher.consume_token(allowed[len(allowed) // 2])
        return ""

    def _place(self, root: Any, error: str, limits: LLParserLimits) -> list[str | int]:
        """The innermost part of a schema that is wrong in the same words."""
        place: list[str | int] = []
        part, num_tried = root, 0
        while True:
            for keys, inner in _parts(part):
                num_tried += 1
                if num_tried > MAX_PLACES:
                    return place
                if self._schema_error({**_shared(root), **inner}, limits) == error:
                    place += keys
                    part = inner
                    break
            else:
                return place


def _shared(root: Any) -> dict[str, Any]:
    """What parts of a schema, an object, refer to, and how it is read."""
    words = ("$defs", "definitions", "x-guidance", "$schema")
    return {word: root[word] for word in words if word in root}


def _parts(schema: Any) -> Iterator[tuple[Sequence[str | int], dict[str, Any]]]:
    """The schemas of which a schema is made, and where they are."""
    if not _is(schema):
        return
    for word in ("properties", "patternProperties", "$defs", "definitions"):
        found = schema.get(word)
        if isinstance(found, dict):
            yield from (((word, name), inner) for name, inner in found.items() if _is(inner))
    for word in ("items", "additionalProperties", "not"):
        if _is(found := schema.get(word)):
            yield (word,), found
    for word in ("anyOf", "oneOf", "allOf", "prefixItems"):
        found = schema.get(word)
        if isinstance(found, list):
            yield from (((word, i), inner) for i, inner in enumerate(found) if _is(inner))


def _is(schema: Any) -> bool:
    return isinstance(schema, dict)


def _allowed(mask: bytes) -> list[int]:
    return [i for i in range(END + 1) if mask[i // 8] >> (i % 8) & 1]


def main() -> None:
    """Answer each line of the standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    trial = Trial()
    for line in sys.stdin:
        print(json.dumps(trial.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
