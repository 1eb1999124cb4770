"""Engines as a row of the table wants them, and their answers.

Owns conversations: which turn follows which, and what a server keeps in between.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.decoding import LaneDecoding, SpeculativeDecoding
from luceasync.engine.engine import LocalEngine
from luceasync.engine.load import speculate
from luceasync.engine.start import build_engine
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.request import ChatPrompt, Request, Sampling
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.lookup import LOOKUP
from luceasync.speculation.speculator import Speculator
from tests.acceptance.lossless.cases import KINDS, Answer, Answers, Case, Kind, Target
from tests.acceptance.lossless.rounds import ScriptedDecoding, forced, in_turns

MAX_TURNS = 2
MAX_CTX_TOKENS = 512


async def references(target: Target, kinds: set[Kind], num_turns: int) -> dict[Kind, Answers]:
    """Answers of plain decoding in one lane on one device, with no cache."""
    plain: dict[Kind, Answers] = {}
    for kind in KINDS:  # stop strings are taken from the plain answers
        if kind in kinds or kind == "plain":
            async with running(target, Case(None), None, drafts=False) as engine:
                plain[kind] = {}
                for turn in range(num_turns):
                    await ask_all(engine, target, Case(None, kind=kind), plain, plain[kind], turn)
    return plain


async def after_restart(
    target: Target, plain: Mapping[Kind, Answers], cache_dir: Path
) -> dict[Kind, Answers]:
    """The same, but second turns after a stop string are asked of a restarted server, which may
    tokenize differently what a client sends back when that is not all that was generated.
    """
    case = Case(None, "disk", "stop strings")
    return {**plain, case.kind: await answers_of(target, case, plain, cache_dir, drafts=False)}


async def answers_of(
    target: Target,
    case: Case,
    plain: Mapping[Kind, Answers],
    cache_dir: Path,
    *,
    drafts: bool = True,
) -> Answers:
    """Answers as the case wants them, with a second turn if something is to be kept."""
    found: Answers = {}
    if case.origin in ("cold", "memory"):
        async with running(target, case, plain, drafts=drafts) as engine:
            for turn in range(case.num_turns):
                await ask_all(engine, target, case, plain, found, turn)
        return found
    async with running(target, case, plain, cache_dir=cache_dir, drafts=drafts) as engine:
        await ask_all(engine, target, case, plain, found, 0)
    if case.origin == "disk, other split":
        case = replace(case, num_shards=4 - case.num_shards)
    async with running(target, case, plain, cache_dir=cache_dir, drafts=drafts) as engine:
        await ask_all(engine, target, case, plain, found, 1)
    return found


@asynccontextmanager
async def running(
    target: Target,
    case: Case,
    plain: Mapping[Kind, Answers] | None,
    *,
    cache_dir: Path | None = None,
    drafts: bool = True,
) -> AsyncIterator[LocalEngine]:
    """An engine as the case wants it; `drafts` False: without speculation."""
    tree = case.budget is not None
    lookup = "on" if LOOKUP in target.drafters else "off"
    draft = DraftConfig(target.draft_dir, ddtree=tree, ddtree_budget=case.budget, lookup=lookup)
    keeps = 0 if case.origin == "cold" else 1 << 28
    config = Config(
        model=ModelConfig(target.model_dir, dtype="fp32"),
        placement=PlacementConfig(devices=tuple(f"cpu:{i}" for i in range(case.num_shards))),
        engine=EngineConfig(parallel=case.num_lanes, max_ctx_tokens=MAX_CTX_TOKENS),
        cache=CacheConfig(memory_bytes=keeps, cache_dir=cache_dir, min_tokens=1),
        draft=draft if drafts else DraftConfig("none"),
    )

    def decode_with(backend: LayerSplitBackend, speculator: Speculator) -> LaneDecoding:
        first, *others = target.drafters
        if others:
            plans = in_turns(speculator.shapes, others[-1])
            return SpeculativeDecoding(backend, speculator, force=plans)
        shape = RoundShape(target.block, case.budget, first)
        if target.is_scripted and plain is not None:
            return ScriptedDecoding(
                backend, speculator, shape, plain_ids(case, plain), case.num_lanes
            )
        return SpeculativeDecoding(backend, speculator, force=forced(shape))

    async with build_engine(config, decode_with=decode_with if drafts else speculate) as engine:
        await engine.load()
        yield engine


def plain_ids(case: Case, plain: Mapping[Kind, Answers]) -> dict[int, tuple[int, ...]]:
    """What a script proposes, by seed; in a first turn also what would follow a stop string."""
    known = {seed_of(*key): answer.ids for key, answer in plain[case.kind].items()}
    if case.kind == "stop strings":
        known |= {seed_of(*key): a.ids for key, a in plain["plain"].items() if key[1] == 0}
    return known


def seed_of(conversation: int, turn: int) -> int:
    """Greedy answers ignore the seed; here it identifies the conversation and turn."""
    return conversation * MAX_TURNS + turn


async def ask_all(
    engine: LocalEngine,
    target: Target,
    case: Case,
    plain: Mapping[Kind, Answers],
    found: Answers,
    turn: int,
) -> None:
    """Ask every conversation's question of this turn, as many at once as there are lanes."""
    slots = asyncio.Semaphore(case.num_lanes)

    async def one(number: int) -> None:
        request = request_of(target, case, plain, found, (number, turn))
        async with slots:
            deltas = [delta async for delta in await engine.open(request)]
        finish = deltas[-1].finish
        assert finish is not None and finish.error is None, finish
        ids = tuple(token for delta in deltas for token in delta.token_ids)
        found[number, turn] = Answer(ids, "".join(delta.words for delta in deltas), finish)

    await asyncio.gather(*map(one, range(len(target.questions))))


def request_of(
    target: Target,
    case: Case,
    plain: Mapping[Kind, Answers],
    found: Answers,
    key: tuple[int, int],
) -> Request:
    """A conversation's turn, given the answers of the turns before."""
    number, turn = key
    messages: list[dict[str, str]] = []
    for earlier in range(turn):
        messages.append({"role": "user", "content": target.questions[number][earlier]})
        messages.append({"role": "assistant", "content": found[number, earlier].text})
    messages.append({"role": "user", "content": target.questions[number][turn]})
    return Request(
        ChatPrompt(messages),
        sampling=sampling_of(case.kind, target, seed_of(number, turn)),
        stop=stop_for(plain["plain"][key]) if case.kind == "stop strings" else (),
        max_tokens=target.max_tokens,
    )


def sampling_of(kind: Kind, target: Target, seed: int) -> Sampling:
    greedy = Sampling(logit_bias=dict(target.logit_bias), seed=seed)
    if kind != "penalties":
        return greedy
    return replace(greedy, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1)


def stop_for(answer: Answer) -> tuple[str, ...]:
    """Two characters somewhere in the answer."""
    place = random.Random(len(answer.text)).randrange(max(1, len(answer.text)))
    return (answer.text[place : place + 2] or "?",)
