"""`luceasync bench speculation --only edits`: the gain from copied proposals, by kind of answer.

A real model edits functions of Python's standard library, writes new code, and writes prose. One
engine decodes without proposals and one copies, others have a drafter; each question is sent to all
of them in turn.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from luceasync.bench.report import NOTHING, Cell, Report, figure
from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.request import ChatPrompt, Request, Sampling

MODULES = (
    "bisect calendar colorsys difflib fnmatch fractions glob heapq keyword linecache locale "
    "mimetypes ntpath posixpath pprint quopri random reprlib sched shlex shutil statistics string "
    "tempfile textwrap token tokenize traceback types uuid warnings weakref zipfile"
).split()
LEAST_LINES, MOST_LINES = 8, 40
PLAIN, COPIED, DRAFTED, BOTH = "plain", "lookup", "drafter", "drafter and lookup"
MAX_CTX_TOKENS = 4096

NEW_CODE = (
    "a function that parses a line of an Apache access log into a dict",
    "a class for a least-recently-used cache with get and put",
    "a function that finds the shortest path in a grid of walls with A*",
    "a function that converts Roman numerals to integers and back",
    "a command line program that counts words in files, with argparse",
    "a function that merges overlapping intervals",
    "a class for a bank account with deposits, withdrawals and a history",
    "a function that validates an IPv4 address without the standard library",
)
PROSE = (
    "how a bicycle stays upright",
    "the history of the printing press",
    "why the sky is blue in the day and red in the evening",
    "how bread rises, and what salt does in the dough",
    "the life of a river from its spring to the sea",
    "what makes a good teacher",
    "how sailing boats can sail against the wind",
    "the difference between weather and climate",
)

FUNCTION = "Here is a Python function:\n\n```python\n{source}```\n\n{task} "
EDITS = (
    "Rename the function to `new_{name}`.",
    "Add a docstring of one line.",
    "Rename its parameter `{parameter}` to `the_{parameter}` everywhere.",
)
ANSWERS: Mapping[str, str] = {
    "whole rewrite": "Answer with the whole function in a code block and with nothing else.",
    "search and replace": (
        "Answer with blocks of this form and with nothing else, each with whole lines of the "
        "function and the lines that replace them:\n"
        "<<<<<<< SEARCH\nold lines\n=======\nnew lines\n>>>>>>> REPLACE"
    ),
    "unified diff": "Answer with a unified diff, with three lines of context, and nothing else.",
}
KINDS = (*ANSWERS, "new code", "prose")
KIND_OF = dict(zip(("rewrite", "replace", "diff", "code", "prose"), KINDS, strict=True))  # --kinds
TURN_QUESTIONS = 5  # between two lines of progress


def functions(num: int) -> list[tuple[str, str, str]]:
    """(source, name, first parameter) of functions of the standard library."""
    found = []
    for name in MODULES:
        module = importlib.import_module(name)
        for _, function in sorted(inspect.getmembers(module, inspect.isfunction)):
            if function.__module__ != name:
                continue
            try:
                source = inspect.getsource(function)
            except OSError:  # the function was generated
                continue
            parameters = [*inspect.signature(function).parameters]
            num_lines = source.count("\n")
            if parameters and LEAST_LINES <= num_lines <= MOST_LINES and source.startswith("def "):
                found.append((source, function.__name__, parameters[0]))
    step = max(1, len(found) // num)
    return found[::step][:num]


def questions_of(kind: str, num: int) -> list[str]:
    """Questions with answers of this kind."""
    if kind == "new code":
        return [f"Write {what} in Python. Explain nothing." for what in NEW_CODE[:num]]
    if kind == "prose":
        return [f"Tell me about {what}, in three paragraphs." for what in PROSE[:num]]
    found = []
    for number, (source, name, parameter) in enumerate(functions(num)):
        task = EDITS[number % len(EDITS)].format(name=name, parameter=parameter)
        found.append(FUNCTION.format(source=source, task=task) + ANSWERS[kind])
    return found


@dataclass
class Totals:
    """Totals of an engine's answers of one kind; `decode_s` is wall time, `cpu_s` processor time of
    this process.
    """

    num_tokens: int = 0
    decode_s: float = 0.0
    cpu_s: float = 0.0
    num_rounds: int = 0
    num_accepted: int = 0
    texts: list[str] = field(default_factory=list)


async def bench_edits(
    report: Report,
    model: Path,
    device: str,
    *,
    dtype: str,
    questions: int,
    max_tokens: int,
    kinds: Sequence[str] = tuple(KIND_OF),
    draft: Path | None = None,
) -> None:
    """Greedy tokens per second after the first, by kind of answer; with a drafter also its gain
    alone, and in combination with lookup. `kinds`: keys of KIND_OF. Progress goes to stderr.
    """
    config = Config(
        model=ModelConfig(model_dir=model, dtype=dtype),  # type: ignore[arg-type]
        placement=PlacementConfig(device=device),
        engine=EngineConfig(parallel=1, max_ctx_tokens=MAX_CTX_TOKENS),
        cache=CacheConfig(memory_bytes=0),
    )
    ways = {PLAIN: DraftConfig("none"), COPIED: DraftConfig("lookup")}
    if draft is not None:
        ways |= {DRAFTED: DraftConfig(draft, lookup="off"), BOTH: DraftConfig(draft, lookup="on")}
    columns = (
        *("answers", "by", "tokens", "tau", PLAIN, "speculating", "ratio"),
        *("plain, CPU ms", "speculating, CPU ms", "CPU ratio", "equal texts"),
    )
    table = report.table(
        columns,
        f"{model.name}, tokens/s while decoding, by the clock, and processor time of a token; "
        f"{questions} questions of each kind",
    )
    async with AsyncExitStack() as stack:
        engines: dict[str, LocalEngine] = {}
        for name, way in ways.items():
            chosen = replace(config, draft=way)
            engines[name] = await stack.enter_async_context(build_engine(chosen))
            await engines[name].load()
        for kind in map(KIND_OF.__getitem__, kinds):
            totals = {name: Totals() for name in engines}
            for number, question in enumerate(questions_of(kind, questions)):
                for name in list(engines)[:: 1 if number % 2 else -1]:
                    await _ask(engines[name], question, max_tokens, totals[name])
                if number % TURN_QUESTIONS == TURN_QUESTIONS - 1:
                    _tell_progress(kind, number + 1, totals)
            for name in list(engines)[1:]:
                table.add(kind, name, *_compared(totals[PLAIN], totals[name]))


def _tell_progress(kind: str, num_asked: int, totals: Mapping[str, Totals]) -> None:
    """Print what is known so far: a run of many questions may be stopped."""
    plain = totals[PLAIN]
    for name, other in list(totals.items())[1:]:
        ratio = other.num_tokens * plain.decode_s / (plain.num_tokens * other.decode_s or 1)
        cpu_ratio = other.num_tokens * plain.cpu_s / (plain.num_tokens * other.cpu_s or 1)
        so_far = f"{ratio:.2f} times plain, {cpu_ratio:.2f} by processor time"
        print(f"{kind}, {num_asked} questions, {name}: {so_far}", file=sys.stderr, flush=True)


def _compared(plain: Totals, other: Totals) -> Iterator[Cell | int | str]:
    """The figures in a row."""
    rates = [of.num_tokens / max(of.decode_s, 1e-9) for of in (plain, other)]
    cpu_ms = [1e3 * of.cpu_s / max(of.num_tokens, 1) for of in (plain, other)]
    yield other.num_tokens
    yield figure(other.num_tokens / max(other.num_tokens - other.num_accepted, 1))
    yield from (figure(rate, digits=1) for rate in rates)
    yield figure(rates[1] / rates[0])
    yield from map(figure, cpu_ms)
    yield figure(cpu_ms[0] / cpu_ms[1]) if cpu_ms[1] else NOTHING
    yield f"{sum(map(str.__eq__, plain.texts, other.texts))} of {len(plain.texts)}"


async def _ask(engine: LocalEngine, question: str, max_tokens: int, totals: Totals) -> None:
    """Send a question and add its answer to the totals."""
    prompt = ChatPrompt([{"role": "user", "content": question}])
    text, began_s, cpu_s = "", 0.0, 0.0
    stream = await engine.open(Request(prompt, sampling=Sampling(), max_tokens=max_tokens))
    async for delta in stream:
        if not began_s:
            began_s, cpu_s = time.perf_counter(), time.process_time()
        text += delta.words
        if delta.finish is not None:
            speculation = delta.finish.speculation
            totals.num_tokens += delta.finish.usage.completion_tokens - 1
            if speculation is not None:
                totals.num_rounds += speculation.rounds
                totals.num_accepted += speculation.accepted
    totals.decode_s += time.perf_counter() - began_s
    totals.cpu_s += time.process_time() - cpu_s
    totals.texts.append(text)
