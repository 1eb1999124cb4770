"""A conversation whose context is many times a lane's pages: what its turns restore, and how soon.

A random network of the recall model's small form, on a CPU; the same turns with all pages beside.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from recall.network import Network
from train_recall import FORMS, export

from luceasync.config import CacheConfig, Config, EngineConfig, KvFlashConfig, ModelConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.request import Finish, Request, Sampling, TokenPrompt

NUM_SAID, NUM_ADDED = 48, 80  # tokens of an answer, and of what a user then says


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=16000)
    parser.add_argument("--pool", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    form = FORMS["small"]
    sizes = replace(form.sizes, max_positions=2 * args.context)
    print("| pages for | turn | prompt | restored | restore, ms | first token, s | absent |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        export(Network(sizes), form, Path(folder))
        for pool in (args.pool, None):
            asyncio.run(_talk(Path(folder), args, pool))


async def _talk(model_dir: Path, args: argparse.Namespace, pool: int | None) -> None:
    config = Config(
        model=ModelConfig(model_dir=model_dir, dtype="fp32"),
        engine=EngineConfig(parallel=1, max_ctx_tokens=args.context + 4096),
        cache=CacheConfig(memory_bytes=2 << 30),
        kvflash=KvFlashConfig(pool),
    )
    rng = random.Random(1)
    history = [rng.randrange(5, 60) for _ in range(args.context)]
    async with build_engine(config) as engine:
        await engine.load()
        for turn in range(args.turns):
            said, first_s, finish = await _said(engine, history)
            cached, absent = finish.usage.cached_tokens, finish.residence
            print(
                f"| {pool or 'all'} | {turn + 1} | {len(history)} | {cached / len(history):.1%} | "
                f"{finish.restore.restore_s * 1000:.1f} | {first_s:.2f} | "
                f"{absent.absent_tokens if absent else 0} |",
                flush=True,
            )
            history += [*said, *(rng.randrange(5, 60) for _ in range(NUM_ADDED))]


async def _said(engine: LocalEngine, prompt: list[int]) -> tuple[list[int], float, Finish]:
    begin, first_s, said, finish = time.perf_counter(), 0.0, [], None
    request = Request(
        TokenPrompt(tuple(prompt)), Sampling(temperature=0), max_tokens=NUM_SAID, ignore_eos=True
    )
    async for delta in await engine.open(request):
        if not said and delta.token_ids:
            first_s = time.perf_counter() - begin
        said += delta.token_ids
        finish = delta.finish or finish
    assert finish is not None
    return said, first_s, finish


if __name__ == "__main__":
    main()
