"""What each step of a long session finds again, where memory holds a part of what it leaves. CPU.

    python scripts/bench_long_session.py [--steps 200] [--share 0.33] [--sessions back,left,parts]

Answers sent back, their first half left out, or sub-agents now and then. A state is as many rows as
one of Qwen3.5-27B. Short of: tokens that were seen and run again; from disk: steps that read files.
"""

from __future__ import annotations

import asyncio
import string
import tempfile
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luceasync.bench import command
from luceasync.bench.lives import LIMITS, Machine, life, make_machine
from luceasync.bench.report import Report, Table
from luceasync.bench.small import AGENTS
from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.engine.engine import LocalEngine
from luceasync.prefix_cache.index import Limits
from luceasync.prefix_tree.node import common_prefix
from luceasync.request import ChatPrompt, Request, Sampling
from luceasync.text.history import History
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

STEP_TOKENS = 160  # at most: an answer, and what a tool gives back
SYSTEM_SENTENCES, RESULT_SENTENCES, NUM_ANSWER_TOKENS = 60, 7, 32
NUM_SUB_STEPS = 4
TRANSIT_SHARE = 16  # of the memory: what nodes on their way to and from the disk may take besides

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Step:
    """Of a prompt `num_ideal` tokens were seen before; `num_cached` were not run again."""

    num_prompt: int
    num_ideal: int
    num_cached: int
    is_from_disk: bool

    @property
    def num_short(self) -> int:
        """Tokens that were run for nothing."""
        return self.num_ideal - self.num_cached


class Session:
    """Asks an engine, and knows what each prompt could share with what was said before."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        tokenizer = Tokenizer.load(BUNDLED_MODEL_DIR)
        self._template = ChatTemplate.load(BUNDLED_MODEL_DIR)
        self._history = History(tokenizer)
        self._seen: list[array[int]] = []
        letters = {tokenizer.encode(letter)[0]: 100.0 for letter in string.ascii_lowercase}
        self._sampling = Sampling(logit_bias=letters)  # whatever the weights are, it says text
        self.steps: list[Step] = []

    async def ask(self, messages: Messages) -> str:
        """One answer, which counts as a step unless nothing was said before."""
        text = self._template.render(messages)
        ids = array("i", self._history.recall(text))
        prompt = ChatPrompt([dict(message) for message in messages])
        stream = await self._engine.open(
            Request(prompt, self._sampling, max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True)
        )
        deltas = [delta async for delta in stream]
        finish = deltas[-1].finish
        assert finish is not None and finish.reason == "length", finish
        if self._seen:
            ideal = max(common_prefix(seen, ids) for seen in self._seen)
            is_from_disk = finish.restore.tier == "disk"
            self.steps.append(Step(len(ids), ideal, finish.usage.cached_tokens, is_from_disk))
        answer = [token for delta in deltas for token in delta.token_ids]
        self._history.remember(text, ids, answer)
        self._seen.append(ids + array("i", answer[:-1]))
        return "".join(delta.words for delta in deltas)


def sentences(topic: str, count: int) -> str:
    return " ".join(f"The {i}. line about {topic} stands here." for i in range(count))


async def agent(
    session: Session, num_steps: int, *, keeps: bool = True, every: int = 0, topic: str = "main"
) -> None:
    """A task in so many steps. `keeps`: answers come back as they were, else without their first
    half, as reasoning is left out; `every` so many steps another agent does a part of it.
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
            await agent(session, NUM_SUB_STEPS, keeps=keeps, topic=f"part {step}")


def kinds(num_steps: int, every: int) -> dict[str, Callable[[Session], Coroutine[Any, Any, None]]]:
    """The sessions that are measured, by name."""
    return {
        "back": lambda session: agent(session, num_steps),
        "left": lambda session: agent(session, num_steps, keeps=False),
        "parts": lambda session: agent(session, num_steps, every=every),
    }


async def held(
    run: Callable[[Session], Coroutine[Any, Any, None]],
    num_steps: int,
    limits: Limits,
) -> tuple[list[Step], int]:
    """The steps of a session within these limits, and how many bytes memory holds after it."""
    num_tokens = 2048 + STEP_TOKENS * num_steps
    with tempfile.TemporaryDirectory() as root:
        machine: Machine = make_machine(
            AGENTS, "cpu:0", num_tokens, Path(root), dtype="fp32", parallel=1
        )
        async with life(machine, limits) as engine:
            session = Session(engine)
            await run(session)
            cache = engine.status().cache
            assert cache is not None
            return session.steps, cache.num_bytes["memory"]


def within(memory_bytes: int, *, with_disk: bool) -> Limits:
    """Limits of a cache in so much memory."""
    transit_bytes = memory_bytes // TRANSIT_SHARE if with_disk else 0
    return Limits(memory_bytes, transit_bytes, disk_bytes=LIMITS.disk_bytes if with_disk else None)


async def compare(
    report: Report, names: Sequence[str], num_steps: int, share: float, every: int, block: int
) -> None:
    """A table for each kind of session."""
    for name in names:
        run = kinds(num_steps, every)[name]
        table = report.table(
            ("memory", "steps", "tokens", "short of, worst", "short of, all", "from disk"), name
        )
        steps, held_bytes = await held(run, num_steps, within(LIMITS.memory_bytes, with_disk=False))
        tell(table, f"all it takes, {held_bytes >> 20} MiB", steps, block)
        for with_disk in (False, True):
            limits = within(int(share * held_bytes), with_disk=with_disk)
            steps, _ = await held(run, num_steps, limits)
            where = " and a directory" if with_disk else ""
            tell(table, f"{limits.memory_bytes >> 20} MiB{where}", steps, block)


def tell(table: Table, memory: str, steps: Sequence[Step], block: int) -> None:
    """A row for each block of steps."""
    for begin in range(0, len(steps), block):
        part = steps[begin : begin + block]
        short = [step.num_short for step in part]
        table.add(
            memory,
            f"{begin + 1} to {begin + len(part)}",
            part[-1].num_prompt,
            max(short),
            sum(short),
            sum(step.is_from_disk for step in part),
        )


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--share", type=float, default=1 / 3, help="of the memory that it takes")
    parser.add_argument("--every", type=int, default=10, help="steps between sub-agents")
    parser.add_argument("--block", type=int, default=50, help="steps in a row of the table")
    parser.add_argument(
        "--sessions", type=command.names, default=list(kinds(0, 0)), help="default: back,left,parts"
    )
    asked = parser.parse_args()
    report = command.begin(asked)
    asyncio.run(compare(report, asked.sessions, asked.steps, asked.share, asked.every, asked.block))


if __name__ == "__main__":
    main()
