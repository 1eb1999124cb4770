"""`luceasync bench restore --only killed`: what of a turn a kill loses.

A killed engine is a process that runs this file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from luceasync.bench.engines import (
    EngineSetup,
    Messages,
    ask,
    engine_of,
    text_of,
    user,
    wait_until_written,
    write_random_model,
)
from luceasync.bench.report import Report, figure, interleave, median
from luceasync.bench.shapes import SMALL, Shape
from luceasync.models.precision import Dtype

DEVICE = "cpu:0"
DTYPE: Dtype = "fp32"
STEP_TOKENS = 160  # at most: an answer, and what a tool gives back
SYSTEM_SENTENCES, RESULT_SENTENCES, NUM_ANSWER_TOKENS = 60, 7, 32
NUM_SUB_STEPS = 4
DEADLINE_S = 600.0

# A state of 150 MB, as many bytes as the rows of 2,300 tokens: the proportions of Qwen3.5-27B.
KILLED_SHAPE = SMALL["qwen3_5"] | {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "linear_key_head_dim": 256,
    "linear_value_head_dim": 512,
    "linear_num_key_heads": 24,
    "linear_num_value_heads": 48,
}
ALL, NEXT = "all written", "next"
KILLED_TOKENS = 160  # of a turn


def setup_in(root: Path, shape: Shape, num_tokens: int) -> EngineSetup:
    """An engine's setup over a model and a cache directory in `root`."""
    model_dir = root / "model"
    write_random_model(model_dir, shape, DTYPE, num_tokens + 4096)
    return EngineSetup(model_dir, DEVICE, DTYPE, num_tokens, root / "cache")


def bench_killed(report: Report, *, delays: Sequence[float], rounds: int) -> None:
    """A chat's second turn is answered and its process is killed after each delay; a new process
    is asked the third turn. Lost is what it would have found, had all been written.
    """
    columns = ("kill -9 after", "found of the next turn's", "lost tokens", "written before, MB")
    table = report.table((*columns, "of", "left unfinished"))
    names = [*map(str, delays), ALL]
    runs = {name: partial(killed_after, name) for name in names}
    samples = interleave(runs, rounds, num_warmups=0)
    full = samples[ALL][0]
    for name in names:
        found = samples[name]
        table.add(
            name if name == ALL else f"{name} s",
            f"{min(sample['cached'] for sample in found):.0f} of {full['prompt']:.0f}",
            int(max(full["cached"] - sample["cached"] for sample in found)),
            figure(median([sample["bytes"] for sample in found]) / 1e6, digits=0),
            figure(full["bytes"] / 1e6, digits=0),
            int(max(sample["unfinished"] for sample in found)),
        )
    seconds = median([sample["seconds"] for sample in samples[ALL]])
    report.say(f"\nAll is written {seconds:.2f} s after the answer (median of {rounds}).")


def killed_after(delay: str) -> dict[str, float]:
    """One sample: bytes in the directory after the kill, and what the next process found."""
    with tempfile.TemporaryDirectory() as root:
        with started(delay, root) as process:
            seconds = line(process, "written")["seconds"] if delay == ALL else 0.0
            assert process.wait(DEADLINE_S) == -signal.SIGKILL
        files = [path for path in Path(root, "cache").rglob("*") if path.is_file()]
        unfinished = [path for path in files if path.suffix == ".tmp"]
        num_bytes = sum(path.stat().st_size for path in files) - sum(
            path.stat().st_size for path in unfinished
        )
        with started(NEXT, root) as process:
            found = line(process, "found")
        left = [path for path in Path(root).rglob("*") if path.suffix == ".tmp"]
        assert not left, f"{len(left)} temporary files outlive the next start"
    return found | {"bytes": num_bytes, "unfinished": len(unfinished), "seconds": seconds}


def started(part: str, root: str) -> subprocess.Popen[str]:
    """A process that does the part."""
    command = [sys.executable, "-m", "luceasync.bench.killed", part, root]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str], word: str) -> dict[str, float]:
    """The fields that the process prints after that word."""
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(word):
            fields: dict[str, float] = json.loads(text.removeprefix(word))
            return fields
    raise SystemExit(f"the process ended before it had {word}")


def say(word: str, fields: Mapping[str, float]) -> None:
    print(word, json.dumps(fields), flush=True)


async def be_killed(setup: EngineSetup, root: Path, delay: str) -> None:
    """Two turns, the first of which is written before the second; then this process kills itself,
    which no other load delays.
    """
    messages: Messages = []
    async with engine_of(setup) as engine:
        for number in range(2):
            messages += user(text_of(KILLED_TOKENS, f"{number}. "))
            answered = await ask(engine, messages, NUM_ANSWER_TOKENS // 2)
            answered_at = time.perf_counter()
            messages.append({"role": "assistant", "content": answered.text})
            (root / "chat.json").write_text(json.dumps(messages))
            if number == 0:
                await wait_until_written(engine)
        if delay == ALL:
            await wait_until_written(engine)
            say("written", {"seconds": time.perf_counter() - answered_at})
        else:
            await asyncio.sleep(float(delay))
        os.kill(os.getpid(), signal.SIGKILL)


async def ask_next(setup: EngineSetup, root: Path) -> None:
    """The third turn, by a process that knows the files alone."""
    messages: Messages = json.loads((root / "chat.json").read_text())
    async with engine_of(setup) as engine:
        usage = (await ask(engine, [*messages, *user("And now?")], 1)).finish.usage
        say("found", {"cached": usage.cached_tokens, "prompt": usage.prompt_tokens})


def run_part(part: str, root: Path) -> None:
    """What a killed process, or the next one, does."""
    setup = setup_in(root, KILLED_SHAPE, 2048)
    asyncio.run(ask_next(setup, root) if part == NEXT else be_killed(setup, root, part))


if __name__ == "__main__":
    run_part(sys.argv[1], Path(sys.argv[2]))
