"""Tokens a second with a schema and without, of a model that says JSON of that schema by itself.

    python -m training.train_records --out FOLDER
    python -m scripts.bench_grammar FOLDER [--device cuda:0] [--drafts none,chain,tree]

Both answers have the same tokens, so the ratio is what masks cost. Asked in turns, in one engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luceasync.config import Config, DraftConfig, EngineConfig, ModelConfig, PlacementConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.request import ChatPrompt, Constraint, Request, Sampling
from training.records.kinds import KINDS, prompt_of, schema_of

MAX_TOKENS = 250
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"draft_dir": "none"},
    "chain": {},
    "tree": {"ddtree": True},
}


@dataclass(frozen=True, slots=True)
class Told:
    """One answer: from its first tokens on, so many more until `end`, by time.perf_counter."""

    text: str
    begin: float
    end: float
    num_tokens: int
    tau: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Of answers side by side: tokens a second, seconds of CPU time a token."""

    wall: float
    cpu_s: float
    tau: float
    texts: tuple[str, ...]


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="as training/train_records.py writes it")
    parser.add_argument("--device", help="default: the best one here")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--drafts", default="none,chain,tree")
    parser.add_argument("--lanes", default="1,4")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--rounds", type=int, default=8, help="of four answers of each kind")
    options = parser.parse_args()
    header = "drafter", "lanes", "temperature", "free tokens/s", "with a schema", "of free"
    header += "CPU of free", "tau free", "tau", "same answers"
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for draft in options.drafts.split(","):
        asyncio.run(measure(options, draft))


async def measure(options: argparse.Namespace, draft: str) -> None:
    """A row for each number of lanes and each temperature, in one engine."""
    all_lanes = [int(lanes) for lanes in options.lanes.split(",")]
    config = Config(
        model=ModelConfig(model_dir=options.folder / "model", dtype=options.dtype),
        placement=PlacementConfig((options.device,) if options.device else ()),
        engine=EngineConfig(max_ctx_tokens=512, parallel=max(all_lanes)),
        draft=DraftConfig(**{"draft_dir": options.folder / "draft", **DRAFTS[draft]}),
    )
    async with build_engine(config) as engine:
        await engine.load()
        for lanes in all_lanes:
            for temperature in map(float, options.temperatures.split(",")):
                await _rates(engine, 2, lanes, temperature)  # to warm up
                pairs = await _rates(engine, options.rounds, lanes, temperature)
                print(f"| {draft} | {lanes} | {temperature:g} | {_row(pairs)} |", flush=True)


def _row(pairs: Sequence[tuple[Rate, Rate]]) -> str:
    free, schema = zip(*pairs, strict=True)
    wall = [statistics.median(one.wall for one in found) for found in (free, schema)]
    tau = [statistics.mean(one.tau for one in found) for found in (free, schema)]
    ratio = statistics.median(s.wall / f.wall for f, s in pairs)
    cpu = statistics.median(s.cpu_s / f.cpu_s for f, s in pairs)
    texts = [(a, b) for f, s in pairs for a, b in zip(f.texts, s.texts, strict=True)]
    same = f"{sum(a == b for a, b in texts)} of {len(texts)}"
    rates = f"{wall[0]:.0f} | {wall[1]:.0f} | {ratio:.3f} | {cpu:.3f}"
    return f"{rates} | {tau[0]:.2f} | {tau[1]:.2f} | {same}"


async def _rates(
    engine: LocalEngine, num_rounds: int, lanes: int, temperature: float
) -> list[tuple[Rate, Rate]]:
    """Without a schema and with one, in turns."""
    pairs = []
    for number in range(num_rounds):
        free = await _rate(engine, number, lanes, temperature, guided=False)
        pairs.append((free, await _rate(engine, number, lanes, temperature, guided=True)))
    return pairs


async def _rate(
    engine: LocalEngine, number: int, lanes: int, temperature: float, *, guided: bool
) -> Rate:
    """Of a record of each kind, so many at a time as there are lanes."""
    spent, tolds = time.process_time(), []
    seconds = 0.0
    kinds = list(KINDS)
    for first in range(0, len(kinds), lanes):
        asked = kinds[first : first + lanes]
        answers = (_answer(engine, kind, number, temperature, guided=guided) for kind in asked)
        together = await asyncio.gather(*answers)
        seconds += max(one.end for one in together) - min(one.begin for one in together)
        tolds += together
    num_tokens = sum(one.num_tokens for one in tolds)
    cpu_s = (time.process_time() - spent) / num_tokens
    tau = statistics.mean(one.tau for one in tolds)
    return Rate(num_tokens / seconds, cpu_s, tau, tuple(one.text for one in tolds))


async def _answer(
    engine: LocalEngine, kind: str, number: int, temperature: float, *, guided: bool
) -> Told:
    schema = Constraint("json_schema", json.dumps(schema_of(kind)), "schema")
    request = Request(
        ChatPrompt([{"role": "user", "content": prompt_of(kind, number)}]),
        sampling=Sampling(temperature=temperature, seed=number),
        max_tokens=MAX_TOKENS,
        constraint=schema if guided else None,
    )
    num_tokens, begin, text, tau = 0, 0.0, "", 1.0
    async for delta in await engine.open(request):
        text += delta.text
        num_tokens += len(delta.token_ids)
        if not begin and delta.token_ids:
            begin, num_tokens = time.perf_counter(), 0
        if delta.finish is not None and delta.finish.speculation is not None:
            tau = delta.finish.speculation.tau
    return Told(text, begin, time.perf_counter(), num_tokens, tau)


if __name__ == "__main__":
    main()
