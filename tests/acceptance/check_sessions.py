"""Long agent sessions in a third of the memory that they fill: what is run again. CPU.

    python -m tests.acceptance.check_sessions [--steps 200] [--share 0.33] [--kinds back,left,parts]

Small random models. Answers are sent back, or without their first half, or sub-agents do parts; a
state has as many bytes as the rows of one of Qwen3.5-27B. Exit status 1 if a step ran more than a
chunk again.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luceasync.bench.engines import (
    EngineSetup,
    Messages,
    ask,
    engine_of,
    letters,
    write_random_model,
)
from luceasync.bench.report import BenchTable
from luceasync.bench.shapes import AGENTS
from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.engine.engine import LocalEngine
from luceasync.prefix_tree.node import common_prefix
from luceasync.text.history import History
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer
from tests.acceptance import command

STEP_TOKENS = 160  # at most: an answer, and what a tool gives back
SYSTEM_SENTENCES, RESULT_SENTENCES, NUM_ANSWER_TOKENS = 60, 7, 32
NUM_SUB_STEPS = 4
FULL_BYTES = 12 << 30
MAX_SHORT_TOKENS = 64  # that a step may run again


@dataclass(frozen=True, slots=True)
class SessionStep:
    """Of a prompt, `num_ideal` tokens had been seen before; `num_cached` were not run again."""

    num_prompt: int
    num_ideal: int
    num_cached: int
    is_from_disk: bool

    @property
    def num_short(self) -> int:
        """Tokens that were run again."""
        return self.num_ideal - self.num_cached


class Session:
    """Asks an engine, and knows how much of each prompt was seen before."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._template = ChatTemplate.load(BUNDLED_MODEL_DIR)
        self._history = History(Tokenizer.load(BUNDLED_MODEL_DIR))
        self._seen: list[array[int]] = []
        self._sampling = letters()
        self.steps: list[SessionStep] = []

    async def ask(self, messages: Messages) -> str:
        """One answer. It counts as a step unless it is the first."""
        text = self._template.render(messages)
        ids = array("i", self._history.recall(text))
        answered = await ask(self._engine, messages, NUM_ANSWER_TOKENS, self._sampling)
        finish = answered.finish
        assert finish.reason == "length", finish
        if self._seen:
            ideal = max(common_prefix(seen, ids) for seen in self._seen)
            is_from_disk = finish.restore.tier == "disk"
            step = SessionStep(len(ids), ideal, finish.usage.cached_tokens, is_from_disk)
            self.steps.append(step)
        self._history.remember(text, ids, answered.token_ids)
        self._seen.append(ids + array("i", answered.token_ids[:-1]))
        return answered.text


def sentences(topic: str, count: int) -> str:
    return " ".join(f"The {i}. line about {topic} stands here." for i in range(count))


async def run_agent(
    session: Session, num_steps: int, *, keeps: bool = True, every: int = 0, topic: str = "main"
) -> None:
    """A task in `num_steps` steps. Answers come back whole, or without their first half unless
    `keeps`, as reasoning is left out; `every` so many steps a sub-agent does a part.
    """
    messages: Messages = [
        {"role": "system", "content": sentences("rules", SYSTEM_SENTENCES)},
        {"role": "user", "content": sentences(topic, RESULT_SENTENCES)},
    ]
    for step in range(num_steps):
        text = await session.ask(messages)
        messages.append({"role": "assistant", "content": text if keeps else text[len(text) // 2 :]})
        content = sentences(f"{topic} {step}", RESULT_SENTENCES)
        messages.append({"role": "tool", "content": content})
        if every and step % every == every - 1:
            await run_agent(session, NUM_SUB_STEPS, keeps=keeps, topic=f"part {step}")


RunSession = Callable[[Session], Coroutine[Any, Any, None]]


def session_kinds(num_steps: int, every: int) -> dict[str, RunSession]:
    """Answers sent back; without their first half; with a sub-agent `every` so many steps."""
    return {
        "back": lambda session: run_agent(session, num_steps),
        "left": lambda session: run_agent(session, num_steps, keeps=False),
        "parts": lambda session: run_agent(session, num_steps, every=every),
    }


async def run_session(
    run: RunSession, num_steps: int, memory_bytes: int, *, has_disk: bool
) -> tuple[list[SessionStep], int]:
    """The steps of a session, and the bytes that memory holds after it."""
    with tempfile.TemporaryDirectory() as folder:
        root, num_tokens = Path(folder), 2048 + STEP_TOKENS * num_steps
        model_dir = write_random_model(root / "model", AGENTS, "fp32", num_tokens + 2048)
        cache_dir = root / "cache" if has_disk else None
        setup = EngineSetup(model_dir, "cpu:0", "fp32", num_tokens, cache_dir, memory_bytes)
        async with engine_of(setup) as engine:
            session = Session(engine)
            await run(session)
            cache = engine.status().cache
            assert cache is not None
            return session.steps, cache.num_bytes["memory"]


def main() -> None:
    """A table for each kind of session."""
    parser = command.parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--share", type=float, default=1 / 3, help="of the memory that it fills")
    parser.add_argument("--every", type=int, default=10, help="steps between sub-agents")
    parser.add_argument("--block", type=int, default=50, help="steps in a row of the table")
    parser.add_argument("--kinds", type=command.names, default=["back", "left", "parts"])
    options = parser.parse_args()
    report, worst = command.open_report(options), 0
    for name in options.kinds:
        run = session_kinds(options.steps, options.every)[name]
        columns = ("memory", "steps", "tokens", "run again, worst", "run again", "from disk")
        table = report.table(columns, name)
        found, held_bytes = asyncio.run(run_session(run, options.steps, FULL_BYTES, has_disk=False))
        add_steps(table, f"all it fills, {held_bytes >> 20} MiB", found, options.block)
        for has_disk in (False, True):
            limit = int(options.share * held_bytes)
            found, _ = asyncio.run(run_session(run, options.steps, limit, has_disk=has_disk))
            where = " and a directory" if has_disk else ""
            add_steps(table, f"{limit >> 20} MiB{where}", found, options.block)
            worst = max(worst, *(step.num_short for step in found))
    sys.exit(1 if worst > MAX_SHORT_TOKENS else 0)


def add_steps(table: BenchTable, memory: str, steps: Sequence[SessionStep], block: int) -> None:
    """A row for each `block` steps."""
    for begin in range(0, len(steps), block):
        part = steps[begin : begin + block]
        short = [step.num_short for step in part]
        span = f"{begin + 1} to {begin + len(part)}"
        num_read = sum(step.is_from_disk for step in part)
        table.add(memory, span, part[-1].num_prompt, max(short), sum(short), num_read)


if __name__ == "__main__":
    main()
