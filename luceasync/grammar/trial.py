"""The program of a process that tries clients' grammars, which may never finish, or crash.

Each line on standard input is a JSON object with a `program` of llguidance; each line of output
reports its error, if any. Memory and processor time are limited. Imports nothing from luceasync: it
is run as a file, and starts in a tenth of a second. Started by luceasync.grammar.proving.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

MAX_ADDRESS_BYTES = 2 << 30  # of address space
MAX_PLACES = 200  # parts of a schema that are tried to locate an error
MAX_PLACE_S = 1.0  # of processor time, for locating it
NUM_STEPS = 64  # of a made-up answer
END = 256
NOT_LARK = "neither Lark, without 'start:', nor GBNF: "
# Distinguishes Lark from GBNF like llguidance, but in linear time, also for many blank lines.
IS_LARK = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*(?:\[[^\]\n]*\]\s*)?:(?!:=))")
LARK_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
LARK_EXCERPT = re.compile(r"\n *\d+ \|.*", re.DOTALL)
VIA = re.compile(r"\n  while processing .*")  # the references through which an error was reached
NAMED = re.compile(r"(@\w+|%json|%regex|'[\w-]+')")  # names in an error without a position
WHOLE = "whole"  # the name of a schema within one that refers to a part of it
CIRCULAR = "circular references"  # of llguidance's error
BEYOND = "Failed to generate regex for"  # likewise: a range that it cannot represent
RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

Key = str | int
Place = tuple[Key, ...]


class ByteTokenizer(TokenizerWrapper):
    """A vocabulary of single bytes: errors of grammars do not depend on the vocabulary."""

    def __init__(self) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = END, None
        self.tokens = [*(bytes([i]) for i in range(END)), b"<end>"]
        self.special_token_ids = [END]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


class GrammarTrial:
    """Tries programs of llguidance, in which parts with a `source` are in Lark or in GBNF."""

    def __init__(self) -> None:
        self._table = LLTokenizer(ByteTokenizer(), n_vocab=END + 1, eos_token=END, slices=[])

    def answer(self, order: Any) -> dict[str, Any]:
        """`error` describes the error of the order's `program`, "" if there is none. `program` is
        the one that compiles, if grammars were converted or keywords of lenient schemas dropped.

        For an error in a part, `part` is its name. For a JSON schema, `place` has the keys to the
        error; for a grammar, `at` is a line and a column, if known.
        """
        limits = LLParserLimits(**order["limits"], verbose_errors=False)
        parts = json.loads(order["program"])["grammars"]
        sources = {part["name"]: part["source"] for part in parts if "source" in part}
        for part in parts:
            if "source" in part:
                try:
                    part["lark_grammar"] = to_lark(part.pop("source"))
                except GrammarError as refused:
                    return {"error": refused.words, "part": part["name"], "at": refused.at}
        program = json.dumps({"grammars": parts}) if sources else order["program"]
        error = self._error(program, limits)
        if not error:
            return {"error": "", "program": program} if sources else {"error": ""}
        relaxed = self._relaxed(program, error, limits)
        if relaxed and not self._error(relaxed, limits):
            return {"error": "", "program": relaxed}
        return self._refused(parts, sources, error, limits)

    def _refused(
        self, parts: list[Any], sources: dict[str, str], error: str, limits: LLParserLimits
    ) -> dict[str, Any]:
        """The answer for an error of the whole program: which part causes it, and where."""
        for part in parts:
            name = part.get("name", "")
            kinds = part.keys() & {"json_schema", "lark_grammar"}
            alone = json.dumps({"grammars": [{kind: part[kind] for kind in kinds}]})
            if (_is_schema(part.get("json_schema")) or name in sources) and (
                self._error(alone, limits) == error
            ):
                if name in sources:
                    words, at = placed(error, sources[name], part["lark_grammar"])
                    return {"error": words, "part": name, "at": at}
                found = SchemaSearch(part["json_schema"], lambda s: self._schema_error(s, limits))
                return {"error": error, "part": name, "place": found.place_of(error)}
        words = LARK_EXCERPT.sub("", LARK_PLACE.sub("", error))  # of the composed text
        return {"error": words, "part": ""}

    def _relaxed(self, program: str, error: str, limits: LLParserLimits) -> str:
        """The program without the keywords of its lenient schemas that cannot be enforced; "" if
        there are none.
        """
        parsed = json.loads(program)
        for part in parsed["grammars"]:
            root = part.get("json_schema")
            if _is_schema(root) and root.get("x-guidance", {}).get("lenient"):
                for schema in _all_of(root):
                    self._relax(schema, limits)
                if CIRCULAR in error or CIRCULAR in self._schema_error(root, limits):
                    drop_beside_recursive(root)
        relaxed = json.dumps(parsed)
        return "" if relaxed == json.dumps(json.loads(program)) else relaxed

    def _relax(self, schema: dict[str, Any], limits: LLParserLimits) -> None:
        """Drop patterns that llguidance does not support, such as look-around, patterns of names
        that overlap with others, and ranges that it cannot represent.
        """
        if "pattern" in schema and self._schema_error({"pattern": schema["pattern"]}, limits):
            del schema["pattern"]
        ranges = {key: schema[key] for key in RANGE if _is_number(schema.get(key))}
        for kind in ("integer", "number") if ranges else ():
            while BEYOND in self._schema_error({"type": kind, **ranges}, limits):
                key, _value = max(ranges.items(), key=lambda item: abs(item[1]))
                del ranges[key], schema[key]
        named, kept = schema.get("patternProperties"), dict[str, Any]()
        named = named if isinstance(named, dict) else {}
        for pattern in list(named):
            names = {"patternProperties": {**kept, pattern: {}}}
            if self._schema_error({"pattern": pattern}, limits) or self._schema_error(
                names, limits
            ):
                del named[pattern]
                schema.pop("additionalProperties", None)  # may forbid what was dropped
            else:
                kept[pattern] = {}

    def _schema_error(self, schema: Any, limits: LLParserLimits) -> str:
        return self._error(json.dumps({"grammars": [{"json_schema": schema}]}), limits)

    def _error(self, program: str, limits: LLParserLimits) -> str:
        """Compile the program and follow a made-up answer for some steps. Returns the error, if
        any.
        """
        matcher = LLMatcher(self._table, program, log_level=0, limits=limits)
        for _ in range(NUM_STEPS):
            if matcher.is_error():
                return VIA.sub("", matcher.get_error()) or "it does not compile"
            if matcher.is_stopped():
                break
            allowed = _allowed(matcher.compute_bitmask())
            if not allowed:
                return VIA.sub("", matcher.get_error()) or "nothing at all is an answer to it"
            matcher.consume_token(allowed[len(allowed) // 2])
        return ""


def _allowed(mask: bytes) -> list[int]:
    return [i for i in range(END + 1) if mask[i // 8] >> (i % 8) & 1]


# --- grammars in Lark and GBNF ------------------------------------------------------------------


class GrammarError(Exception):
    """A grammar that cannot be read; `at` is line and column, if known."""

    def __init__(self, words: str, at: list[int] | None) -> None:
        super().__init__(words)
        self.words = words
        self.at = at


def to_lark(source: str) -> str:
    """Convert a grammar in Lark or in llama.cpp's GBNF to Lark. Raises GrammarError."""
    if IS_LARK.search(source):
        return source
    before = "" if "::=" in source else NOT_LARK
    try:
        return gbnf_to_lark(source)
    except GbnfToLarkError as error:
        words = before + str(error).removesuffix(f" at {error.pos}")
        raise GrammarError(words, _at(source, error.pos.pos)) from error
    except RecursionError as error:
        raise GrammarError("it is nested too deep", None) from error
    except IndexError as error:  # the converter reads past a trailing backslash
        raise GrammarError(before + "unexpected end", _at(source, len(source))) from error
    except Exception as error:  # the converter raises plain Exception for rules
        raise GrammarError(before + str(error), _at_named(str(error), source)) from error


def placed(error: str, source: str, lark: str) -> tuple[str, list[int] | None]:
    """An error in `lark` without excerpts, and its line and column in `source`, from which `lark`
    was converted: in GBNF, those of the rule.
    """
    words = LARK_EXCERPT.sub("", LARK_PLACE.sub("", error))
    found = LARK_PLACE.match(error)
    if found is None:
        return words, _at_named(error, source)
    line, column = int(found[1]), int(found[2])
    if source == lark:
        return words, [line, column]
    above = re.findall(r"(?m)^(\w+):", "\n".join(lark.split("\n")[:line]))
    rules = re.finditer(r"(?m)^[^\S\n]*([\w-]+)\s*::=", source)
    begins = {_normal(rule[1]): rule.start(1) for rule in rules}
    begin = begins.get(_normal(above[-1])) if above else None
    return words, None if begin is None else _at(source, begin)


def _normal(rule: str) -> str:
    """A rule's name, as far as the conversion preserves it."""
    name = re.sub(r"[-_]", "", rule.lower())
    return "start" if name == "root" else name


def _at(text: str, index: int) -> list[int]:
    """Line and column of a character, counted from 1."""
    return [text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)]


def _at_named(error: str, source: str) -> list[int] | None:
    """The position in the source of what the error names."""
    named = NAMED.search(error)
    name = re.escape(named[0].strip("'")) if named else ""
    found = re.search(rf"(?<![\w-]){name}(?![\w-])", source) if named else None
    return None if found is None else _at(source, found.start())


# --- JSON schemas -------------------------------------------------------------------------------


class SchemaSearch:
    """Locates the error in a schema. `error_of` compiles a schema and returns its error, "" if
    none.
    """

    def __init__(self, root: Any, error_of: Any) -> None:
        self._root = root
        self._error_of = error_of
        self._rest = {key: root[key] for key in ("x-guidance", "$schema") if key in root}
        skipped = ("x-guidance", "$schema", "$id")
        parts = {key: root[key] for key in root if key not in skipped}
        self._whole = _referring(parts, root.get("$id"))

    def place_of(self, error: str) -> list[Key]:
        """The keys of the innermost part that gives the same error by itself, or those of a
        definition.
        """
        place: Place = ()
        seen = {place}
        ends_at = time.process_time() + MAX_PLACE_S
        is_found = self._gives(place, error)
        while is_found:
            is_found = False
            for inner in self._below(place):
                if inner in seen:
                    continue
                if len(seen) > MAX_PLACES or time.process_time() > ends_at:
                    return list(place)
                seen.add(inner)
                if self._gives(inner, error):
                    place, is_found = inner, True
                    break
        return list(place)

    def _below(self, place: Place) -> Iterator[Place]:
        """The schemas that the one at `place` consists of."""
        schema = _value_at(self._root, place)
        if not _is_schema(schema):
            return
        yield from (place + tuple(keys) for keys, _ in parts_of(schema))
        target = _target(self._root, schema)
        if target is not None:
            yield target

    def _gives(self, place: Place, error: str) -> bool:
        pointer = f"#/$defs/{WHOLE}" + _pointer(place)
        schema = {**self._rest, "$defs": {WHOLE: self._whole}, "$ref": pointer}
        found: str = self._error_of(schema)
        return found.replace(f"/$defs/{WHOLE}", "") == error


def _referring(value: Any, name: Any) -> Any:
    """The schema, whose `$id` is `name`, as the definition WHOLE: its references point there."""
    if isinstance(value, list):
        return [_referring(each, name) for each in value]
    if not isinstance(value, dict):
        return value
    made = {key: _referring(each, name) for key, each in value.items()}
    pointer = _pointer_in(made, name)
    if pointer is not None:
        made["$ref"] = f"#/$defs/{WHOLE}{pointer}"
    return made


def _pointer_in(schema: dict[str, Any], name: Any) -> str | None:
    """The pointer of the schema's reference into the root with `$id` `name`; None if it has no
    reference, or one to elsewhere.
    """
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return None
    resource, _, pointer = reference.partition("#")
    is_root = not resource or (isinstance(name, str) and resource == name.rstrip("#"))
    return pointer if is_root and (not pointer or pointer.startswith("/")) else None


def drop_beside_recursive(root: dict[str, Any]) -> None:
    """Drop the siblings of a reference to a schema that contains it, and of alternatives with such
    a reference: llguidance refuses them.
    """
    for schema in _all_of(root):
        references = _recursive(root, schema, [schema, *_members(schema, "allOf")])
        kept = {key: schema[key] for key in _SHARED if key in schema}
        if references:
            kept["$ref"] = references[0]["$ref"]
        else:
            found = (key for key in ("anyOf", "oneOf") if key in schema)
            key = next((k for k in found if _recursive(root, schema, _members(schema, k))), None)
            if key is None:
                continue
            kept[key] = schema[key]
        schema.clear()
        schema.update(kept)


def _members(schema: dict[str, Any], key: str) -> list[dict[str, Any]]:
    members = schema.get(key)
    return [*filter(_is_schema, members if isinstance(members, list) else ())]


def _recursive(
    root: Any, schema: dict[str, Any], together: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The schemas that refer to one which contains `schema`."""
    return [each for each in together if "$ref" in each and _leads_to(root, each, schema)]


_SHARED = ("$defs", "definitions", "x-guidance", "$schema")


def _leads_to(root: Any, begin: dict[str, Any], sought: dict[str, Any]) -> bool:
    """Whether the target of `begin`'s reference contains `sought`, through parts and references."""
    target = _target(root, begin)
    waiting = [] if target is None else [_value_at(root, target)]
    seen: set[int] = set()
    while waiting:
        schema = waiting.pop()
        if schema is sought:
            return True
        if not _is_schema(schema) or id(schema) in seen:
            continue
        seen.add(id(schema))
        waiting += [inner for keys, inner in parts_of(schema) if keys[0] not in _SHARED]
        target = _target(root, schema)
        if target is not None:
            waiting.append(_value_at(root, target))
    return False


def _target(root: Any, schema: dict[str, Any]) -> Place | None:
    """The place in `root` that the schema refers to; None if it refers to none."""
    pointer = _pointer_in(schema, root.get("$id"))
    if pointer is None:
        return None
    place: Place = ()
    value = root
    for written in pointer.split("/")[1:]:
        name = written.replace("~1", "/").replace("~0", "~")
        key: Key = int(name) if isinstance(value, list) and name.isdecimal() else name
        place += (key,)
        value = _value_at(value, (key,))
    return None if value is None else place


def _value_at(value: Any, place: Place) -> Any:
    for key in place:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _pointer(place: Place) -> str:
    """A place as a JSON pointer in a URI fragment."""
    names = (str(key).replace("~", "~0").replace("/", "~1").replace("%", "%25") for key in place)
    return "".join(f"/{name}" for name in names)


def _all_of(root: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema, all schemas within it, and all that these refer to."""
    found: dict[int, dict[str, Any]] = {}
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if id(schema) in found:
            continue
        found[id(schema)] = schema
        waiting += [inner for _keys, inner in parts_of(schema)]
        target = _target(root, schema)
        referred = None if target is None else _value_at(root, target)
        if isinstance(referred, dict):
            waiting.append(referred)
    return list(found.values())


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[Sequence[Key], dict[str, Any]]]:
    """The schemas that a schema consists of, with their keys."""
    for key in ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas"):
        found = schema.get(key)
        if isinstance(found, dict):
            parts = found.items()
            yield from (((key, name), inner) for name, inner in parts if _is_schema(inner))
    for key in ("items", "additionalProperties", "contains", "not", "if", "then", "else"):
        if isinstance(found := schema.get(key), dict):
            yield (key,), found
    for key in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
        found = schema.get(key)
        if isinstance(found, list):
            yield from (((key, i), inner) for i, inner in enumerate(found) if _is_schema(inner))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict)


def main() -> None:
    """Answer each line of standard input. If an answer takes more processor time than the `cpu_s`
    of its order, if given, SIGPROF ends the process.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    trial = GrammarTrial()
    for line in sys.stdin:
        order = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, order.get("cpu_s", 0.0))
        print(json.dumps(trial.answer(order)), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


if __name__ == "__main__":
    main()
