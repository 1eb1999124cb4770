"""The process that tries programs first, so that one which never ends holds up nobody.

Owns that process: started when it is first needed, killed where it takes too long, and started
again. See luceasync.grammar.proving for what it runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from luceasync.errors import RequestError, Unavailable
from luceasync.grammar.program import Program

# The program of a process that tries what strangers want compiled: it may take for ever, or
# end. Owns nothing but its own memory, which is bounded. Each line that comes is a JSON object
# with a `program` of llguidance; each that goes says what is wrong with it, or that nothing is.
# Imports nothing of ours: it is run as a file, and starts in a tenth of a second.


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


log = logging.getLogger(__name__)

LIMIT_S = 5.0  # of one program
WAIT_S = 30.0  # for one's turn
END_S = 2.0
MAX_WORDS_CHARS = 200
MOST_LINE_BYTES = 1 << 20
# Isolated from everything but the llguidance of this process, wherever it is installed.
START = "import sys; sys.path.append(sys.argv[2]); exec(open(sys.argv[1], encoding='utf-8').read())"
# Of llguidance: its own, but for what an engine waits for at each token (some milliseconds), and
# for how much memory a matcher may take.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 30_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}


class Proving:
    """One program after the other. Used from one event loop."""

    def __init__(self, limit_s: float = LIMIT_S, wait_s: float = WAIT_S) -> None:
        self._limit_s = limit_s
        self._wait_s = wait_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def prove(self, program: Program) -> None:
        """Return where the program compiles. Raises RequestError, which names the field and the
        place in its schema, where it does not, or not in time; Unavailable where others take long.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turn.acquire()
        except TimeoutError:
            raise Unavailable("Other schemas and grammars take long to compile.") from None
        try:
            answer = await self._asked(program)
        finally:
            self._turn.release()
        if answer["error"]:
            place = "".join(_step(key) for key in answer["place"])
            param = cut(program.params.get(answer["schema"], program.param) + place)
            words = f"'{param}' does not compile: {cut(answer['error'])}"
            raise RequestError(words, param=param)

    async def close(self) -> None:
        """End the process."""
        async with self._turn:
            await self._kill()

    async def _asked(self, program: Program) -> dict[str, Any]:
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        answer = b""
        is_in_time = False
        try:
            async with asyncio.timeout(self._limit_s):
                order = json.dumps({"program": program.text, "limits": LIMITS})
                process.stdin.write(order.encode() + b"\n")
                with suppress(ConnectionError):  # then there is no answer either
                    await process.stdin.drain()
                answer = await process.stdout.readline()
            is_in_time = True
        except TimeoutError:
            words = f"'{program.param}' takes more than {self._limit_s:g} s to compile."
            raise RequestError(words, param=program.param) from None
        finally:
            if not (is_in_time and answer):
                await self._kill()
        if not answer:
            why = "it takes too much memory, or is nested too deep"
            raise RequestError(f"'{program.param}' does not compile: {why}.", param=program.param)
        told: dict[str, Any] = json.loads(answer)
        return told

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is not None:
            self._process = None  # it has died of itself, or somebody has ended it
        if self._process is None:
            pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-c",
                START,
                __file__,
                str(Path(llguidance.__file__).parents[1]),
                stdin=pipe,
                stdout=pipe,
                stderr=nothing,
                limit=MOST_LINE_BYTES,
            )
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            log.error("process %d, which tries grammars, does not end", process.pid)


def cut(words: str) -> str:
    """No more of them than a client is told of what it sent."""
    return words if len(words) <= MAX_WORDS_CHARS else f"{words[:MAX_WORDS_CHARS]}..."


def _step(key: str | int) -> str:
    return f"[{key}]" if isinstance(key, int) else f".{key}"
