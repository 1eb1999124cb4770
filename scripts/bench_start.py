"""What a start costs, and the first prompts after it: on a machine that has compiled nothing yet,
then again.

    python scripts/bench_start.py [--target DIR] [--device cuda:0]

Seconds until the engine is ready, and milliseconds to the first token of prompts of several
lengths, one after the other, each of other words. Every start is a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from luceasync.bench import command
from luceasync.bench.lives import ask, user
from luceasync.bench.report import figure, ms
from luceasync.config import BUNDLED_MODEL_DIR, Config, ModelConfig, PlacementConfig
from luceasync.engine.start import build_engine

NUM_WORDS = (1500, 1501, 800, 130, 2600, 20)
WORDS = ("list", "return", "the", "string", "of", "module", "x")
COMPILED = ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")  # where compiled kernels are kept
DEADLINE_S = 900.0


def main() -> None:
    """Measure and print a row for each start; with --once be one of them."""
    parser = command.parser(__doc__, device="cpu:0")
    parser.add_argument("--target", type=Path, default=BUNDLED_MODEL_DIR)
    parser.add_argument("--once", action="store_true", help="internal")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(asyncio.run(start(options.target, options.device))))
        return
    report = command.begin(options, [options.device])
    table = report.table(("start", "ready after", *(f"prompt of {n} words" for n in NUM_WORDS)))
    with tempfile.TemporaryDirectory() as root:
        kept = {name: f"{root}/{name}" for name in COMPILED}
        command_line = [sys.executable, *sys.argv, "--once"]
        for name in ("first", "second"):
            done = subprocess.run(
                command_line,
                env=os.environ | kept,
                stdout=subprocess.PIPE,
                timeout=DEADLINE_S,
                check=True,
            )
            ready_s, *first_tokens = json.loads(done.stdout.splitlines()[-1])
            table.add(name, figure(ready_s, "s", 1), *(ms(each, 0) for each in first_tokens))


async def start(model_dir: Path, device: str) -> list[float]:
    """Seconds until an engine is ready, then to the first token of each prompt."""
    config = Config(model=ModelConfig(model_dir), placement=PlacementConfig(devices=(device,)))
    begun = time.perf_counter()
    async with build_engine(config) as engine:
        await engine.load()
        ready_s = time.perf_counter() - begun
        asked = [await ask(engine, user(words(count)), 4) for count in NUM_WORDS]
        return [ready_s, *(each.first_s for each in asked)]


def words(num_words: int) -> str:
    """So many, each time others."""
    return " ".join(random.Random(num_words).choices(WORDS, k=num_words))


if __name__ == "__main__":
    main()
