"""Ask the recall model for facts far back in a context, through a whole engine, by policy and pool.

Owns the questions and the count; what trains the model is train_recall.py. An answer counts where
all of its values are right, free-running. All questions of a depth share their context.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from recall.facts import LANGUAGES, NUM_VALUES, Fact, Writer

from luceasync.config import (
    CacheConfig,
    Config,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.request import Request, Sampling, TokenPrompt

DEPTHS = (0.1, 0.5, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--form", choices=LANGUAGES, default="full")
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--facts", type=int, default=64)
    parser.add_argument("--questions", type=int, default=100, help="of each depth")
    parser.add_argument("--pools", type=int, nargs="*", default=[16384, 6144, 4096])
    parser.add_argument("--policies", nargs="*", default=["qk", "lru"])
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    runs: list[tuple[str, int | None]] = [("full cache", None)]
    runs += [(policy, pool) for policy in args.policies for pool in args.pools]
    print("| kept | by | " + " | ".join(f"depth {depth}" for depth in DEPTHS) + " | all |")
    print("|---|---|" + "---|" * (len(DEPTHS) + 1))
    for policy, pool in runs:
        shares = asyncio.run(_asked(args, policy, pool))
        share = "all" if pool is None else f"{pool / args.context:.0%}"
        told = " | ".join(f"{s:.2f}" for s in (*shares, float(np.mean(shares))))
        print(f"| {share} | {policy} | {told} |", flush=True)


def config_of(args: argparse.Namespace, policy: str, pool: int | None) -> Config:
    """An engine with one lane for the context and a question."""
    return Config(
        model=ModelConfig(model_dir=args.model_dir, dtype=args.dtype),
        placement=PlacementConfig(device=args.device),
        engine=EngineConfig(parallel=1, max_ctx_tokens=args.context + 64),
        cache=CacheConfig(memory_bytes=8 << 30),
        kvflash=KvFlashConfig() if pool is None else KvFlashConfig(pool, policy),
    )


async def _asked(args: argparse.Namespace, policy: str, pool: int | None) -> list[float]:
    """Of each depth the share of questions that were answered."""
    async with build_engine(config_of(args, policy, pool)) as engine:
        await engine.load()
        return [await _at_depth(engine, args, i, depth) for i, depth in enumerate(DEPTHS)]


async def _at_depth(
    engine: LocalEngine, args: argparse.Namespace, seed: int, depth: float
) -> float:
    """Facts lie around the depth, within a tenth of the context, the others anywhere."""
    writer, rng = Writer(LANGUAGES[args.form], 100 + seed), np.random.default_rng(seed)
    facts = writer.facts(args.facts)
    num_asked = min(args.questions, max(args.facts // 4, 1))
    near = np.clip(depth + rng.uniform(-0.05, 0.05, num_asked), 0, 1)
    depths = [*near.tolist(), *rng.uniform(0, 1, args.facts - num_asked).tolist()]
    context = writer.context(args.context, facts, depths)
    chosen = [facts[i % num_asked] for i in range(args.questions)]
    found = [await answered(engine, context, fact) for fact in chosen]
    return float(np.mean(found))


async def answered(engine: LocalEngine, context: Sequence[int], fact: Fact) -> bool:
    """Whether the engine goes on from the question with all of the fact's values."""
    request = Request(
        TokenPrompt((*context, *fact.question)),
        Sampling(temperature=0),
        max_tokens=NUM_VALUES,
        ignore_eos=True,
    )
    said = [token async for delta in await engine.open(request) for token in delta.token_ids]
    return tuple(said) == fact.values


if __name__ == "__main__":
    main()
