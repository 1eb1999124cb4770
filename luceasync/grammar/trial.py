"""The program of a process that tries grammars of strangers, which may take forever, or crash.

Each line on standard input is a JSON object with a `program` of llguidance; each line of output
says what is wrong with it, if anything. The memory of the process is bounded. Imports nothing of
ours: it is run as a file, and starts in a tenth of a second. Started by luceasync.grammar.proving.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_ADDRESS_BYTES = 2 << 30  # of address space
MAX_PLACES = 200  # parts of a schema that are tried to find where it is wrong
NUM_STEPS = 64  # of a made-up answer
END = 256
CIRCULAR = "circular references"  # of llguidance's error


class ByteTokenizer(TokenizerWrapper):
    """A vocabulary of single bytes: a grammar that is wrong is wrong with any vocabulary."""

    def __init__(self) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = END, None
        self.tokens = [*(bytes([i]) for i in range(END)), b"<end>"]
        self.special_token_ids = [END]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


class GrammarTrial:
    """Tries programs of llguidance."""

    def __init__(self) -> None:
        self._table = LLTokenizer(ByteTokenizer(), n_vocab=END + 1, eos_token=END, slices=[])

    def answer(self, order: Any) -> dict[str, Any]:
        """`error`: what is wrong with the order's `program`, "" for nothing. If a JSON schema is
        wrong, `schema` is its name and `place` the keys of the part that is. `program`: the one
        that compiles, if that took dropping words of lenient schemas.
        """
        limits = LLParserLimits(**order["limits"], verbose_errors=False)
        error = self._error(order["program"], limits)
        if not error:
            return {"error": ""}
        relaxed = self._relaxed(order["program"], limits)
        if relaxed and not self._error(relaxed, limits):
            return {"error": "", "program": relaxed}
        for part in json.loads(order["program"])["grammars"]:
            if "json_schema" in part and self._schema_error(part["json_schema"], limits) == error:
                place = self._place(part["json_schema"], error, limits)
                return {"error": error, "schema": part["name"], "place": place}
        return {"error": error, "schema": "", "place": []}

    def _relaxed(self, program: str, limits: LLParserLimits) -> str:
        """The program without the words of its lenient schemas that cannot be enforced; "" if there
        are none.
        """
        parsed = json.loads(program)
        for part in parsed["grammars"]:
            root = part.get("json_schema")
            if _is_schema(root) and root.get("x-guidance", {}).get("lenient"):
                self._relax(root, root, limits)
        relaxed = json.dumps(parsed)
        return "" if relaxed == json.dumps(json.loads(program)) else relaxed

    def _relax(self, schema: dict[str, Any], root: dict[str, Any], limits: LLParserLimits) -> None:
        """Drop patterns that llguidance does not know, such as look-around, and what stands beside
        a reference to a schema that holds it.
        """
        for _keys, inner in _parts(schema):
            self._relax(inner, root, limits)
        if "pattern" in schema and self._schema_error({"pattern": schema["pattern"]}, limits):
            del schema["pattern"]
        named = schema.get("patternProperties")
        if isinstance(named, dict):
            for pattern in list(named):
                if self._schema_error({"pattern": pattern}, limits):
                    del named[pattern]
                    schema.pop("additionalProperties", None)  # may forbid what it allowed
        references = [each for each in _together(schema) if "$ref" in each]
        if references and CIRCULAR in self._schema_error({**_shared(root), **schema}, limits):
            kept = {**_shared(schema), "$ref": references[0]["$ref"]}
            schema.clear()
            schema.update(kept)

    def _schema_error(self, schema: Any, limits: LLParserLimits) -> str:
        return self._error(json.dumps({"grammars": [{"json_schema": schema}]}), limits)

    def _error(self, program: str, limits: LLParserLimits) -> str:
        """Compile the program and follow a made-up answer for some steps."""
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
        """The keys of the innermost part of a schema that gives the same error."""
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
    """The definitions of a schema to which its parts refer, and how it is read."""
    keys = ("$defs", "definitions", "x-guidance", "$schema")
    return {key: root[key] for key in keys if key in root}


def _parts(schema: Any) -> Iterator[tuple[Sequence[str | int], dict[str, Any]]]:
    """The schemas of which a schema is composed, with their keys."""
    if not _is_schema(schema):
        return
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        found = schema.get(key)
        if isinstance(found, dict):
            parts = found.items()
            yield from (((key, name), inner) for name, inner in parts if _is_schema(inner))
    for key in ("items", "additionalProperties", "not"):
        if _is_schema(found := schema.get(key)):
            yield (key,), found
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        found = schema.get(key)
        if isinstance(found, list):
            yield from (((key, i), inner) for i, inner in enumerate(found) if _is_schema(inner))


def _together(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema itself, and those that hold with it."""
    members = schema.get("allOf")
    return [schema, *filter(_is_schema, members if isinstance(members, list) else ())]


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict)


def _allowed(mask: bytes) -> list[int]:
    return [i for i in range(END + 1) if mask[i // 8] >> (i % 8) & 1]


def main() -> None:
    """Answer each line of the standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    trial = GrammarTrial()
    for line in sys.stdin:
        print(json.dumps(trial.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
