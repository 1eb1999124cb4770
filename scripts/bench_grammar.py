"""Tokens a second with a grammar and without, beside each other, in one engine, in turns.

    python -m scripts.bench_grammar [MODEL_DIR] [--draft DIR] [--device cuda:0] [--no-draft]

"any text" and "own form" have the tokens of "free": what masks cost. "schema" has others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from luceasync.config import (
    BUNDLED_MODEL_DIR,
    Config,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.constraint import Constraint
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.request import ChatPrompt, Request

SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"type": "string", "maxLength": 24},
        "module": {"enum": ["os", "os.path", "json", "re", "asyncio"]},
        "summary": {"type": "string", "maxLength": 120},
        "arguments": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 8}}
                | {"required": {"type": "boolean"}},
                "required": ["name", "required"],
                "additionalProperties": False,
            },
            "minItems": 2,
            "maxItems": 4,
        },
    },
    "required": ["function", "module", "summary", "arguments"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "free": None,
    "any text": Constraint("regex", "(?s:.*)", "regex"),
    "own form": Constraint("regex", "`[a-z._]+\\([^`]*\\)`\n\n(?s:.{1,2000})", "regex"),
    "schema": Constraint("json_schema", json.dumps(SCHEMA), "schema"),
}
Rate = tuple[float, float, float]  # tokens a second, and a second of CPU time; tau
QUESTION = "What does os.path.join do?"


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_dir", nargs="?", type=Path, default=BUNDLED_MODEL_DIR)
    parser.add_argument("--draft", type=Path, help="of the bundled model its own")
    parser.add_argument("--no-draft", action="store_true")
    parser.add_argument("--device", help="default: the best one here")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=160)
    options = parser.parse_args()
    config = Config(
        model=ModelConfig(model_dir=options.model_dir),
        placement=PlacementConfig((options.device,) if options.device else ()),
        engine=EngineConfig(max_ctx_tokens=2048, parallel=1),
        draft=DraftConfig(draft_dir="none" if options.no_draft else options.draft),
    )
    rates = asyncio.run(measure(config, options.rounds, options.max_tokens))
    header = "answer", "tokens/s", "of free", "CPU ms a token", "of free", "tau"
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    free = rates["free"]
    for name, found in rates.items():
        wall, cpu, tau = (statistics.median(one) for one in zip(*found, strict=True))
        of_wall, of_cpu = (_ratio(found, free, place) for place in (0, 1))
        print(
            f"| {name} | {wall:.1f} | {of_wall:.3f} | {1e3 / cpu:.2f} | {of_cpu:.3f} | {tau:.2f} |"
        )


def _ratio(found: Sequence[Rate], free: Sequence[Rate], place: int) -> float:
    pairs = zip(found, free, strict=True)
    return statistics.median(one[place] / other[place] for one, other in pairs)


async def measure(config: Config, num_rounds: int, max_tokens: int) -> dict[str, list[Rate]]:
    """Rates of each kind of answer, in turns."""
    rates: dict[str, list[Rate]] = {name: [] for name in CONSTRAINTS}
    async with build_engine(config) as engine:
        await engine.load()
        for name in CONSTRAINTS:
            await rate(engine, name, max_tokens)
        for _ in range(num_rounds):
            for name, found in rates.items():
                found.append(await rate(engine, name, max_tokens))
    return rates


async def rate(engine: LocalEngine, name: str, max_tokens: int) -> Rate:
    """Of one answer, from the first tokens on."""
    request = Request(
        ChatPrompt([{"role": "user", "content": QUESTION}]),
        max_tokens=max_tokens,
        constraint=CONSTRAINTS[name],
    )
    num_tokens, begin, spent = 0, 0.0, 0.0
    async for delta in await engine.open(request):
        if not begin and delta.token_ids:
            begin, spent = time.perf_counter(), time.process_time()
            num_tokens -= len(delta.token_ids)
        num_tokens += len(delta.token_ids)
    seconds, used = time.perf_counter() - begin, time.process_time() - spent
    assert delta.finish is not None
    tau = delta.finish.speculation.tau if delta.finish.speculation else 1.0
    return num_tokens / seconds, num_tokens / used, tau


if __name__ == "__main__":
    main()
