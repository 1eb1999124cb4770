"""Tokens a second with a schema and without, beside each other, in one engine.

    python -m scripts.bench_grammar [MODEL_DIR] [--draft DIR] [--device cuda:0] [--rounds 12]

"free" is the model's answer to a question. "any text" holds the same answer to a grammar that
allows every text: the tokens are the same, so that the ratio says what masks cost. "schema" asks
for an object, whose keys and quotes are proposed. Prints medians, and ratios of neighbours.
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
    BUNDLED_DRAFT_DIR,
    BUNDLED_MODEL_DIR,
    Config,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.request import ChatPrompt, Constraint, Request

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
    "schema": Constraint("json_schema", json.dumps(SCHEMA), "schema"),
}
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
    draft_dir = options.draft
    if draft_dir is None and options.model_dir == BUNDLED_MODEL_DIR and not options.no_draft:
        draft_dir = BUNDLED_DRAFT_DIR
    config = Config(
        model=ModelConfig(model_dir=options.model_dir),
        placement=PlacementConfig((options.device,) if options.device else ()),
        engine=EngineConfig(max_ctx_tokens=2048, parallel=1),
        draft=DraftConfig(draft_dir=draft_dir),
    )
    rates = asyncio.run(measure(config, options.rounds, options.max_tokens))
    print("| answer | tokens/s | of free | CPU ms a token | of free |\n|---|---|---|---|---|")
    free = rates["free"]
    for name, found in rates.items():
        wall, cpu = (statistics.median(one) for one in zip(*found, strict=True))
        of_wall, of_cpu = (_ratio(found, free, place) for place in (0, 1))
        print(f"| {name} | {wall:.1f} | {of_wall:.3f} | {1e3 / cpu:.2f} | {of_cpu:.3f} |")


def _ratio(
    found: Sequence[tuple[float, float]], free: Sequence[tuple[float, float]], place: int
) -> float:
    pairs = zip(found, free, strict=True)
    return statistics.median(one[place] / other[place] for one, other in pairs)


async def measure(
    config: Config, num_rounds: int, max_tokens: int
) -> dict[str, list[tuple[float, float]]]:
    """Of each kind of answer tokens a second, and a second of CPU time, in turns."""
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in CONSTRAINTS}
    async with build_engine(config) as engine:
        await engine.load()
        for name in CONSTRAINTS:
            await rate(engine, name, max_tokens)
        for _ in range(num_rounds):
            for name, found in rates.items():
                found.append(await rate(engine, name, max_tokens))
    return rates


async def rate(engine: LocalEngine, name: str, max_tokens: int) -> tuple[float, float]:
    """Tokens a second from the first one on, by the clock and by CPU time."""
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
    return num_tokens / seconds, num_tokens / used


if __name__ == "__main__":
    main()
