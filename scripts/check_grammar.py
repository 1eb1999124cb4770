"""Answers of random models to random schemas, at temperature 1: each has to be as its schema says.

    python -m scripts.check_grammar [--schemas 200] [--first 0] [--tree] [--groups 1]

Exit code 1 if one is not, or is another one without the drafter. Needs the packages of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from luceasync.config import Config, DraftConfig, EngineConfig, ModelConfig
from luceasync.constraint import Constraint
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.errors import RequestError
from luceasync.request import ChatPrompt, Request, Sampling
from scripts.grammar.schemas import schema_of
from scripts.grammar.validity import is_valid
from tests import tiny
from tests.groups import in_groups

MAX_TOKENS = 900
PARALLEL = 8


def main() -> None:
    """Ask and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--tree", action="store_true", help="proposals are trees, not chains")
    parser.add_argument("--groups", type=int, default=1)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.schemas)
    is_sound = True
    for family in tiny.FAMILIES:
        with in_groups(options.groups) if options.groups > 1 else nullcontext():
            started = time.perf_counter()
            ends = asyncio.run(check(family, seeds, tree=options.tree))
            seconds = time.perf_counter() - started
        told = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
        print(f"{family}: {len(seeds)} schemas: {told} ({seconds:.0f} s)")
        is_sound &= not (ends["NOT VALID"] or ends["another one without a drafter"])
    sys.exit(not is_sound)


async def check(family: str, seeds: Sequence[int], *, tree: bool = False) -> Counter[str]:
    """How many answers ended how, by words."""
    with tempfile.TemporaryDirectory() as root:
        model_dir = tiny.save(tiny.build(family), Path(root) / "model")
        draft_dir = tiny.save_draft(Path(root) / "draft", tiny.draft_config())
        async with running(model_dir) as engine:
            plain = await answers(engine, seeds)
        trees: dict[str, Any] = {"ddtree": True, "ddtree_budget": 12} if tree else {}
        async with running(model_dir, draft_dir=draft_dir, **trees) as engine:
            drafted = await answers(engine, seeds)
    ends = Counter(_end(seed, *answer) for seed, answer in zip(seeds, plain, strict=True))
    pairs = zip(plain, drafted, strict=True)
    ends["another one without a drafter"] += sum(one != other for one, other in pairs)
    return +ends


def _end(seed: int, text: str, reason: str) -> str:
    if reason == "length":
        return "cut off"
    if reason != "stop":
        return f"refused: {reason}"
    try:
        return "valid" if is_valid(json.loads(text), schema_of(seed)) else "NOT VALID"
    except ValueError:
        return "NOT VALID"


@asynccontextmanager
async def running(model_dir: Path, **draft: Any) -> AsyncIterator[LocalEngine]:
    """An engine over the model."""
    config = Config(
        model=ModelConfig(model_dir=model_dir, dtype="fp32"),
        engine=EngineConfig(max_ctx_tokens=1024, parallel=PARALLEL),
        draft=DraftConfig(**draft),
    )
    async with build_engine(config) as engine:
        await engine.load()
        yield engine


async def answers(engine: LocalEngine, seeds: Sequence[int]) -> list[tuple[str, str]]:
    """What is said to each schema, and why it ended; so many at a time as there are lanes."""
    turns = asyncio.Semaphore(PARALLEL)

    async def ask(seed: int) -> tuple[str, str]:
        constraint = Constraint("json_schema", json.dumps(schema_of(seed)), "schema")
        request = Request(
            ChatPrompt([{"role": "user", "content": f"number {seed}"}]),
            sampling=Sampling(temperature=1.0, seed=seed),
            max_tokens=MAX_TOKENS,
            constraint=constraint,
        )
        async with turns:
            try:
                deltas = [delta async for delta in await engine.open(request)]
            except RequestError as error:
                return "", str(error)
        finish = deltas[-1].finish
        assert finish is not None
        return "".join(delta.text for delta in deltas), finish.error or finish.reason

    return list(await asyncio.gather(*map(ask, seeds)))


if __name__ == "__main__":
    main()
