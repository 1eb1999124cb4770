"""Tries grammars in a process that can be killed, so that one that never ends does not block
others.

Owns that process: starts it on first use, kills it if a program takes too long, and then starts it
again. luceasync.grammar.trial is its program.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import llguidance

from luceasync.errors import RequestError, Unavailable
from luceasync.grammar import trial
from luceasync.grammar.matcher import in_words
from luceasync.grammar.program import GrammarProgram

log = logging.getLogger(__name__)

LIMIT_S = 5.0  # of processor time per program: the same on a busy machine
PATIENCE_S = 30.0  # of wall time, after which a program is given up on a busy machine
WAIT_S = 30.0  # for the programs ahead of it
END_S = 2.0
MAX_ERROR_CHARS = 200
MAX_LINE_BYTES = 2 << 20
# Isolated from everything but the llguidance of this process, wherever it is installed.
START = "import sys; sys.path.append(sys.argv[2]); exec(open(sys.argv[1], encoding='utf-8').read())"
# llguidance's own limits, except for the time per token (the engine waits for it, some
# milliseconds) and the memory of a matcher.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 30_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}


class GrammarProver:
    """Tries one program at a time. Used from one event loop."""

    def __init__(self, limit_s: float = LIMIT_S, wait_s: float = WAIT_S) -> None:
        """`limit_s` limits the processor time per program."""
        self._limit_s = limit_s
        self._wait_s = wait_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def prove(self, program: GrammarProgram) -> str:
        """The text that compiles: the program's, with its grammars converted to Lark and without
        keywords of its lenient schemas that cannot be enforced.

        Raises RequestError, which names the field and the position in its schema or grammar, if it
        does not compile or takes too much processor time; Unavailable if other programs take too
        long, or this machine is too busy.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turn.acquire()
        except TimeoutError:
            raise Unavailable("Other schemas and grammars take long to compile.") from None
        try:
            answer = await self._try(program)
        finally:
            self._turn.release()
        if answer["error"]:
            raise _refused(program, answer)
        text: str = answer.get("program", program.text)
        return text

    async def close(self) -> None:
        """Stop the process."""
        async with self._turn:
            await self._kill()

    async def _try(self, program: GrammarProgram) -> dict[str, Any]:
        """The answer of the process: see trial.GrammarTrial."""
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        answer = b""
        is_in_time = False
        try:
            async with asyncio.timeout(PATIENCE_S):
                order = {"program": program.text, "limits": LIMITS, "cpu_s": self._limit_s}
                process.stdin.write(json.dumps(order).encode() + b"\n")
                with suppress(ConnectionError):  # if it fails, there is no answer to read either
                    await process.stdin.drain()
                answer = await process.stdout.readline()
            is_in_time = True
        except TimeoutError:
            words = f"This machine is too busy to compile '{program.param}' now."
            raise Unavailable(words) from None
        finally:
            if not (is_in_time and answer):
                await self._kill()
        if not answer:
            raise _without_answer(program, process.returncode, self._limit_s)
        parsed: dict[str, Any] = json.loads(answer)
        return parsed

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is not None:
            self._process = None  # it crashed, or was killed from outside
        if self._process is None:
            pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-c",
                START,
                trial.__file__,
                str(Path(llguidance.__file__).parents[1]),
                stdin=pipe,
                stdout=pipe,
                stderr=nothing,
                limit=MAX_LINE_BYTES,
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


def _without_answer(program: GrammarProgram, exit_code: int | None, limit_s: float) -> RequestError:
    """The error of a program that the process ended on."""
    if exit_code == -signal.SIGPROF:
        words = f"takes more than {limit_s:g} s of processor time to compile."
    else:
        words = "does not compile: it takes too much memory, or is nested too deep."
    return RequestError(f"'{program.param}' {words}", param=program.param)


def _refused(program: GrammarProgram, answer: dict[str, Any]) -> RequestError:
    """The error that the process found; its position in a schema is given as a JSON pointer."""
    field = program.params.get(answer["part"], program.param)
    place = answer.get("place") or ()
    param = shorten(field + "".join(_subscript(key) for key in place))
    where = ""
    if place:
        where = f" at '{shorten(pointer_of(place))}'"
    elif answer.get("at"):
        line, column = answer["at"]
        where = f" at line {line}, column {column}"
    words = shorten(in_words(answer["error"]))
    return RequestError(f"'{field}' does not compile{where}: {words}", param=param)


def pointer_of(place: list[str | int]) -> str:
    """The keys to a part of a schema as a JSON pointer (RFC 6901)."""
    return "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in place)


def shorten(words: str) -> str:
    """`words`, truncated to the length at which clients' own input is quoted."""
    return words if len(words) <= MAX_ERROR_CHARS else f"{words[:MAX_ERROR_CHARS]}..."


def _subscript(key: str | int) -> str:
    return f"[{key}]" if isinstance(key, int) else f".{key}"
