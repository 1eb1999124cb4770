"""Ask the recall model for facts far back in a context, through a whole server, by policy and pool.

An answer counts if all of its values are right in free-running generation. Questions of a context
share it; if it has too few facts, more contexts are made. `train_recall` trains the model.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.start import build_engine
from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig
from training.recall.facts import LANGUAGES, NUM_VALUES, Fact, Hop, Language, Writer

DEPTHS = (0.1, 0.5, 0.9)
SPREAD = 0.05  # the maximum distance of a fact from its depth
NUM_LANES = 4
QUESTION_TOKENS = 256  # of a lane, after the context: a question, an answer
HOST_BYTES = 3 << 30  # enough for four lanes and a few contexts
ANSWER_S = 300.0
FULL = "full cache"


@dataclass(frozen=True, slots=True)
class Question:
    """The tokens that follow a context, and the right answer; `kind` is the category it
    counts for.
    """

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """A text, and its questions."""

    tokens: tuple[int, ...]
    questions: tuple[Question, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--form", choices=LANGUAGES, default="full")
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--facts", type=int, nargs="*", default=[64, 1000])
    parser.add_argument("--questions", type=int, default=100, help="of each depth, and of hops")
    parser.add_argument("--pools", type=int, nargs="*", default=[16384, 6144, 4096])
    parser.add_argument("--policies", nargs="*", default=[FULL, "qk", "lru"])
    parser.add_argument("--taus", type=int, nargs="*", default=[64])
    parser.add_argument("--draft", type=Path, help="a drafter, for its policy")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    columns = ("facts", "kept", "by", "tau", *(f"depth {d}" for d in DEPTHS), "all", "two hops")
    print(f"| {' | '.join((*columns, 's'))} |\n|{'---|' * (len(columns) + 1)}", flush=True)
    for config, told in configs_of(args):
        asyncio.run(_asked(args, config, told))


def configs_of(args: argparse.Namespace) -> Iterator[tuple[Config, Sequence[str]]]:
    """The configurations to evaluate, and the first cells of each row of the table."""
    for policy in args.policies:
        if policy == FULL:
            yield config_of(args, KvFlashConfig()), ("all", FULL, "-")
            continue
        for pool in args.pools:
            for tau in args.taus:
                share = f"{pool / args.context:.0%}"
                yield config_of(args, KvFlashConfig(pool, policy, tau)), (share, policy, str(tau))


def config_of(args: argparse.Namespace, kvflash: KvFlashConfig) -> Config:
    """A server with lanes for the context and a question."""
    with_drafter = kvflash.pool_tokens is not None and kvflash.policy == "drafter"
    return Config(
        model=ModelConfig(model_dir=args.model_dir, dtype=args.dtype),
        placement=PlacementConfig(device=args.device),
        engine=EngineConfig(parallel=NUM_LANES, max_ctx_tokens=args.context + QUESTION_TOKENS),
        cache=CacheConfig(memory_bytes=HOST_BYTES),
        draft=DraftConfig(draft_dir=args.draft if with_drafter else "none"),
        kvflash=kvflash,
    )


async def _asked(args: argparse.Namespace, config: Config, told: Sequence[str]) -> None:
    """Rows of the table: one server, for each number of facts."""
    async with build_engine(config) as engine:
        await engine.load()
        transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=ANSWER_S
        ) as client:
            for num_facts in args.facts:
                begin_s = time.perf_counter()
                shares = await shares_of(client, args, num_facts)
                seconds = f"{time.perf_counter() - begin_s:.0f}"
                values = [*(shares[str(depth)] for depth in DEPTHS)]
                figures = [*values, float(np.mean(values)), shares["hop"]]
                row = (str(num_facts), *told, *(f"{share:.3f}" for share in figures), seconds)
                print(f"| {' | '.join(row)} |", flush=True)


async def shares_of(
    client: httpx.AsyncClient, args: argparse.Namespace, num_facts: int
) -> dict[str, float]:
    """The share of right answers, by kind of question."""
    language = LANGUAGES[args.form]
    found: dict[str, list[bool]] = {}
    gate = asyncio.Semaphore(NUM_LANES)

    async def ask(context: Context, question: Question) -> None:
        async with gate:
            is_right = await answered(client, language, context.tokens, question)
            found.setdefault(question.kind, []).append(is_right)

    for context in contexts(language, args.context, num_facts, args.questions):
        # The first question computes the context, the others restore it.
        first, *others = context.questions
        await ask(context, first)
        await asyncio.gather(*(ask(context, question) for question in others))
    return {kind: float(np.mean(answers)) for kind, answers in found.items()}


def contexts(
    language: Language, num_tokens: int, num_facts: int, num_questions: int
) -> Iterator[Context]:
    """Contexts with this many facts, until each depth, and hops, have enough questions. No fact is
    requested twice; the two facts of a hop are at different depths.
    """
    of_each = min(num_questions, num_facts // (len(DEPTHS) + 1))  # the others are links
    for seed, done in enumerate(range(0, num_questions, of_each)):
        writer, random = Writer(language, 1000 + seed), np.random.default_rng(seed)
        facts, count = writer.facts(num_facts), min(of_each, num_questions - done)
        depths = random.uniform(0, 1, num_facts)
        asked = {depth: range(i * of_each, i * of_each + count) for i, depth in enumerate(DEPTHS)}
        for depth, numbers in asked.items():
            depths[numbers] = depth + random.uniform(-SPREAD, SPREAD, count)
        hops = []
        for number in range(count):
            link, target = len(DEPTHS) * of_each + number, asked[DEPTHS[number % 3]][number]
            facts[link] = facts[link].linked_to(facts[target])
            depths[link] = DEPTHS[(number + 1) % 3] + random.uniform(-SPREAD, SPREAD)
            hops.append(_hop(Hop(facts[link], facts[target])))
        questions = [_of_values(str(d), facts[n]) for d in DEPTHS for n in asked[d]]
        yield Context(
            tuple(writer.context(num_tokens, facts, np.clip(depths, 0, 1).tolist())),
            (*questions, *hops),
        )


def _of_values(kind: str, fact: Fact) -> Question:
    return Question(kind, tuple(fact.question), fact.values)


def _hop(hop: Hop) -> Question:
    return Question("hop", tuple(hop.question), tuple(hop.answer))


async def answered(
    client: httpx.AsyncClient, language: Language, context: Sequence[int], question: Question
) -> bool:
    """Whether the server continues the question with all of the values."""
    body = {
        "prompt": [*context, *question.prompt],
        "max_tokens": len(question.answer),
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    words = [language.words[token] for token in question.answer[-NUM_VALUES:]]
    return answer.json()["choices"][0]["text"].split()[-NUM_VALUES:] == words


if __name__ == "__main__":
    main()
