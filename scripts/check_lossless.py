"""Greedy answers with speculation beside those without, token by token, in float32 on this CPU.

    python -m scripts.check_lossless [--targets bundled,scripted] [--others 200]

Every round has the shape that its row names: nothing is left to what pays. Prints a table in
Markdown; exit code 1 if a token differs. The tiny targets need the packages of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import string
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

from luceasync.config import (
    BUNDLED_DRAFT_DIR,
    BUNDLED_MODEL_DIR,
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.dflash.adapt import Plan, Shape
from luceasync.dflash.decode import Speculator
from luceasync.dflash.load import LoadedDraft
from luceasync.dflash.passes import DraftPasses
from luceasync.engine.decoding import Decoding, SpeculativeDecoding
from luceasync.engine.engine import LocalEngine
from luceasync.engine.generation import Generation
from luceasync.engine.start import build_engine, speculate
from luceasync.request import Delta, Finish, Request, Sampling, Speculation
from luceasync.target.backend import LayerSplitBackend

Kind = Literal["plain", "penalties", "stop strings"]
Origin = Literal["cold", "memory", "disk", "disk, other split"]
KINDS: tuple[Kind, ...] = ("plain", "penalties", "stop strings")
MAX_TURNS = 2
MAX_CTX_TOKENS = 512
SHARE_WRONG = 0.15  # of a scripted draft's tokens


@dataclass(frozen=True)
class Target:
    """A model with its drafter, and what it is asked: a first and a second message of each
    conversation. `is_scripted`: the right tokens are proposed, with mistakes at random places.
    """

    name: str
    model_dir: Path
    draft_dir: Path
    block: int
    questions: tuple[tuple[str, str], ...]
    max_tokens: int
    logit_bias: Mapping[int, float]
    is_scripted: bool = False


@dataclass(frozen=True)
class Case:
    """A row of the table. What is not cold continues a kept conversation by a second turn."""

    budget: int | None  # None: the chain
    origin: Origin = "cold"
    kind: Kind = "plain"
    num_shards: int = 1
    num_lanes: int = 1

    @property
    def proposal(self) -> str:
        return "chain" if self.budget is None else f"tree of {self.budget}"

    @property
    def is_restarted(self) -> bool:
        return self.origin.startswith("disk")

    @property
    def num_turns(self) -> int:
        return 1 if self.origin == "cold" else 2


@dataclass(frozen=True)
class Answer:
    """One turn of one conversation."""

    ids: tuple[int, ...]
    text: str
    finish: Finish


Answers = dict[tuple[int, int], Answer]  # by conversation and turn

# Every two values of different columns meet in a row. The first four are the plainest.
CASES = (
    Case(None),
    Case(8),
    Case(22),
    Case(60),
    Case(None, "memory", "penalties", 3, 4),
    Case(8, "memory", "stop strings", 1, 4),
    Case(22, "memory", "plain", 3, 1),
    Case(60, "memory", "penalties", 1, 1),
    Case(None, "disk", "stop strings", 3, 1),
    Case(8, "disk", "penalties", 3, 1),
    Case(22, "disk", "penalties", 1, 4),
    Case(60, "disk", "plain", 3, 4),
    Case(None, "disk, other split", "plain", 1, 4),
    Case(8, "disk, other split", "plain", 3, 4),
    Case(22, "disk, other split", "stop strings", 3, 4),
    Case(60, "disk, other split", "stop strings", 1, 1),
    Case(None, "cold", "penalties", 3, 4),
    Case(60, "cold", "stop strings", 3, 4),
    Case(22, "disk, other split", "penalties", 1, 1),
)


def main() -> None:
    """Ask, compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(MAKERS))
    parser.add_argument("--prompts", type=int, default=200, help="of the first four rows")
    parser.add_argument("--others", type=int, default=40, help="conversations of the other rows")
    options = parser.parse_args()
    header = "proposals", "prompt from", "sampling", "shards", "lanes", "answers", "restored"
    header += "tokens", "rounds", "tau", "different", "s"
    num_different = 0
    with tempfile.TemporaryDirectory() as root:
        for name in options.targets.split(","):
            target = MAKERS[name](Path(root) / name, max(options.prompts, options.others))
            print(f"\n{target.name}\n\n| {' | '.join(header)} |\n{'|---' * len(header)}|")
            for cases, num in ((CASES[:4], options.prompts), (CASES[4:], options.others)):
                asked = replace(target, questions=target.questions[:num])
                if num:
                    num_different += asyncio.run(check(asked, cases, Path(root)))
    sys.exit(1 if num_different else 0)


async def check(target: Target, cases: Sequence[Case], root: Path) -> int:
    """Print a row for each case; how many answers differ."""
    num_turns = max(case.num_turns for case in cases)
    num_different, plain = 0, await references(target, {c.kind for c in cases}, num_turns)
    restarted = plain
    if any(case.is_restarted and case.kind == "stop strings" for case in cases):
        restarted = await after_restart(target, plain, root / target.name)
    for number, case in enumerate(cases):
        started = time.perf_counter()
        expected = restarted if case.is_restarted else plain
        found = await answers_of(target, case, expected, root / f"{target.name}-{number}")
        different = [k for k, answer in found.items() if answer.ids != expected[case.kind][k].ids]
        num_different += len(different)
        print_row(case, found, len(different), time.perf_counter() - started)
        for key in different[:3]:
            print(await difference(target, case, key, expected, found))
    return num_different


def print_row(case: Case, found: Answers, num_different: int, seconds: float) -> None:
    told = [answer.finish.speculation or Speculation() for answer in found.values()]
    rounds, accepted = sum(s.rounds for s in told), sum(s.accepted for s in told)
    later = [answer.finish.restore.tier for (_, turn), answer in found.items() if turn]
    num_restored = sum(tier == case.origin.split(",")[0] for tier in later)
    row = (
        *(case.proposal, case.origin, case.kind, case.num_shards, case.num_lanes, len(found)),
        f"{num_restored} of {len(later)}" if later else "",
        *(sum(len(answer.ids) for answer in found.values()), rounds),
        *(f"{(accepted + rounds) / max(rounds, 1):.2f}", num_different, f"{seconds:.0f}"),
    )
    print(f"| {' | '.join(map(str, row))} |", flush=True)


async def difference(
    target: Target, case: Case, key: tuple[int, int], plain: Mapping[Kind, Answers], found: Answers
) -> str:
    """Where two answers part, and what plain decoding thinks of the place."""
    ids, others = plain[case.kind][key].ids, found[key].ids
    pairs = enumerate(zip(ids, others, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(others)))
    request = request_of(target, case, plain, found, key)
    request = replace(request, top_logprobs=2, stop=(), max_tokens=place + 1)
    async with running(target, Case(None), None, drafts=False) as engine:
        deltas = [delta async for delta in await engine.open(request)]
    words = f"  {key}: token {place}, {ids[place:][:4]} became {others[place:][:4]}"
    for chosen in [ranked for delta in deltas for ranked in delta.logprobs][place:]:
        best = ", ".join(f"{other.token!r} {other.logprob:.6f}" for other in chosen.top)
        words += f"; plainly {chosen.token!r} {chosen.logprob:.6f}, before penalties {best}"
    return words


# --- asking -----------------------------------------------------------------------------------


async def references(target: Target, kinds: set[Kind], num_turns: int) -> dict[Kind, Answers]:
    """What plain decoding says in one lane on one device, which keeps nothing."""
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
    """The same, where second turns after a stop string are asked of a server that was restarted: it
    may lay out in other tokens what a client sends back, when that is not all that was generated.
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
    """As the case wants them; a second turn where it wants something kept."""
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
    draft = DraftConfig(target.draft_dir, ddtree=tree, ddtree_budget=case.budget)
    keeps = 0 if case.origin == "cold" else 1 << 28
    config = Config(
        model=ModelConfig(target.model_dir, dtype="fp32"),
        placement=PlacementConfig(devices=tuple(f"cpu:{i}" for i in range(case.num_shards))),
        engine=EngineConfig(parallel=case.num_lanes, max_ctx_tokens=MAX_CTX_TOKENS),
        cache=CacheConfig(memory_bytes=keeps, cache_dir=cache_dir, min_tokens=1),
        draft=draft if drafts else DraftConfig("none"),
    )

    def decode_with(backend: LayerSplitBackend, draft: LoadedDraft) -> Decoding:
        shape = Shape(target.block, case.budget)
        if target.is_scripted and plain is not None:
            return ScriptedDecoding(backend, draft, shape, plain_ids(case, plain), case.num_lanes)
        return SpeculativeDecoding(backend, draft.speculator, force=forced(shape))

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
    """Greedy answers have no use for a seed: here it tells which one is asked for."""
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
        found[number, turn] = Answer(ids, "".join(delta.text for delta in deltas), finish)

    await asyncio.gather(*map(one, range(len(target.questions))))


def request_of(
    target: Target,
    case: Case,
    plain: Mapping[Kind, Answers],
    found: Answers,
    key: tuple[int, int],
) -> Request:
    """A conversation's turn, after what was found in the turns before."""
    number, turn = key
    messages: list[dict[str, str]] = []
    for earlier in range(turn):
        messages.append({"role": "user", "content": target.questions[number][earlier]})
        messages.append({"role": "assistant", "content": found[number, earlier].text})
    messages.append({"role": "user", "content": target.questions[number][turn]})
    return Request(
        messages,
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


# --- rounds of one shape ----------------------------------------------------------------------


def forced(shape: Shape) -> Callable[[Sequence[int]], Plan]:
    """Rounds of `shape` for all lanes at every step."""
    return lambda lanes: Plan(shape, tuple(lanes), False)


class ScriptedDecoding(SpeculativeDecoding):
    """The drafter looks on; what is proposed is what plain decoding has said, by seed, with
    mistakes.
    """

    def __init__(
        self,
        backend: LayerSplitBackend,
        draft: LoadedDraft,
        shape: Shape,
        known: Mapping[int, tuple[int, ...]],
        num_lanes: int,
    ) -> None:
        from tests.dflash.scripted import ScriptedDraft

        def is_wrong(lane: int, position: int) -> bool:
            return random.Random(position * 8 + lane).random() < SHARE_WRONG

        self._scripts: dict[int, tuple[int, ...]] = {}
        self._known = known
        self._draft = draft
        script = ScriptedDraft(self._scripts, is_wrong)
        passes = DraftPasses(script, draft.ring, script)
        super().__init__(
            backend, Speculator(backend, passes, [shape], num_lanes), force=forced(shape)
        )

    def step(self, generations: Sequence[Generation], *, alone: bool) -> list[Delta | None]:
        for g in generations:
            assert g.lane is not None
            self._scripts[g.lane] = (*g.prepared.prompt_ids, *self._known[g.prepared.seed])
        return super().step(generations, alone=alone)


# --- targets ----------------------------------------------------------------------------------


def bundled(folder: Path, num_prompts: int) -> Target:
    """The bundled model with its drafter and its evaluation questions."""
    lines = (BUNDLED_MODEL_DIR / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["messages"][-1]["content"] for line in lines]
    questions = tuple((a, texts[i - 1]) for i, a in enumerate(texts))[:num_prompts]
    return Target(
        "qwen3_5, stdlib-15m with its drafter",
        *(BUNDLED_MODEL_DIR, BUNDLED_DRAFT_DIR, 8, questions, 64, {}),
    )


def tiny_target(folder: Path, num_prompts: int, family: str, *, is_scripted: bool) -> Target:
    """A model of random weights that answers in letters."""
    from luceasync.text.tokenizer import Tokenizer
    from tests import tiny

    model_dir = tiny.save(tiny.build(family), folder / "target")
    draft_dir = tiny.save_draft(folder / "draft", tiny.draft_config())
    choice = random.Random(5)
    words = ["".join(choice.choices(string.ascii_lowercase, k=5)) for _ in range(400)]
    questions = tuple(
        (" ".join(choice.sample(words, 12)), " ".join(choice.sample(words, 4)))
        for _ in range(num_prompts)
    )
    encode = Tokenizer.load(model_dir).encode
    # No more than it takes: sums of large numbers are rounded to steps, and equal within one.
    bias = {encode(letter)[0]: 16.0 for letter in string.ascii_lowercase}
    proposed = "scripted proposals" if is_scripted else "a random drafter"
    return Target(
        f"{family}, random weights with {proposed}",
        *(model_dir, draft_dir, 8, questions, 40 if is_scripted else 16, bias, is_scripted),
    )


MAKERS = {
    "bundled": bundled,
    "random": partial(tiny_target, family="qwen3", is_scripted=False),
    "scripted": partial(tiny_target, family="qwen3", is_scripted=True),
    "scripted-qwen3_5": partial(tiny_target, family="qwen3_5", is_scripted=True),
}


if __name__ == "__main__":
    main()
