"""What of a turn is lost where its process is killed after the answer, with large states. CPU.

    python scripts/bench_killed.py [--delays 0,0.5,3] [--rounds 3]

Random weights; a state takes 150 MB, as much as the rows of 2300 tokens, which are the proportions
of Qwen3.5 27B. A chat's second turn is answered, kill -9 follows, and a new process is asked the
third turn. Lost is what it would have found, had all been written. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from luceasync.bench import command
from luceasync.bench.figures import median
from luceasync.bench.lives import Machine, ask, life, make_machine, text_of, user, written
from luceasync.bench.report import figure
from luceasync.bench.rounds import interleave
from luceasync.bench.small import SMALL

SHAPE = SMALL["qwen3_5"] | {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "linear_key_head_dim": 256,
    "linear_value_head_dim": 512,
    "linear_num_key_heads": 24,
    "linear_num_value_heads": 48,
}
MAX_TOKENS = 2048
TURN_TOKENS, ANSWER_TOKENS = 160, 16
DEADLINE_S = 600.0
ALL, NEXT = "all written", "next"
Messages = list[dict[str, Any]]


def main() -> None:
    """Measure and print; with --part do one part, as a process of its own."""
    parser = command.parser(__doc__, rounds=3)
    parser.add_argument("--delays", default="0,0.5,3", help="seconds from the answer to the kill")
    parser.add_argument("--part", nargs=2, metavar=("DELAY", "ROOT"), help="internal")
    options = parser.parse_args()
    if options.part:
        delay, root = options.part
        asyncio.run(next_turn(Path(root)) if delay == NEXT else turns(Path(root), delay))
        return
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """A row for each delay, in turns."""
    delays = [*options.delays.split(","), ALL]
    columns = ("kill -9 after", "found of the next turn's", "lost tokens", "written before, MB")
    table = command.begin(options).table((*columns, "of", "left unfinished"))
    samples = interleave({d: killed_after(d) for d in delays}, options.rounds, num_warmups=0)
    full = samples[ALL][0]
    for delay in delays:
        found = samples[delay]
        lost = max(full["cached"] - sample["cached"] for sample in found)
        table.add(
            delay if delay == ALL else f"{delay} s",
            f"{min(s['cached'] for s in found):.0f} of {full['prompt']:.0f}",
            int(lost),
            figure(median([s["bytes"] for s in found]) / 1e6, digits=0),
            figure(full["bytes"] / 1e6, digits=0),
            int(max(s["unfinished"] for s in found)),
        )
    seconds = figure(median([sample["seconds"] for sample in samples[ALL]]), "s")
    print(f"\nAll is written {seconds.text} after the answer (median of {options.rounds}).")


def killed_after(delay: str) -> Callable[[], dict[str, float]]:
    """One sample: `bytes` that lay there after the kill, and what the next process found."""

    def sample() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as root:
            with started(delay, root) as process:
                seconds = line(process, "written")["seconds"] if delay == ALL else 0.0
                assert process.wait(DEADLINE_S) == -signal.SIGKILL
            files = [path for path in Path(root).rglob("*") if path.is_file()]
            nodes = [path for path in files if path.suffix in (".safetensors", ".end")]
            num_bytes = sum(path.stat().st_size for path in nodes)
            unfinished = sum(path.suffix == ".tmp" for path in files)
            with started(NEXT, root) as process:
                found = line(process, "found")
            left = sum(path.suffix == ".tmp" for path in Path(root).rglob("*"))
            assert not left, f"{left} temporary files outlive the next start"
        return found | {"bytes": num_bytes, "unfinished": unfinished, "seconds": seconds}

    return sample


def started(part: str, root: str) -> subprocess.Popen[str]:
    """A process that does the part."""
    arguments = [sys.executable, __file__, "--part", part, root]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str], word: str) -> dict[str, float]:
    """What the process says after that word, which it waits for."""
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(word):
            fields: dict[str, float] = json.loads(text.removeprefix(word))
            return fields
    raise SystemExit(f"the process ended before it had {word}")


async def turns(root: Path, delay: str) -> None:
    """Two turns, the first of which is on the disk before the second; then the process is killed by
    itself, which nothing holds up.
    """
    messages: Messages = []
    async with life(machine_in(root)) as engine:
        for number in range(2):
            messages += user(text_of(TURN_TOKENS, f"{number}. "))
            asked = await ask(engine, messages, ANSWER_TOKENS)
            answered = time.perf_counter()
            messages.append({"role": "assistant", "content": asked.text})
            (root / "chat.json").write_text(json.dumps(messages))
            if number == 0:
                await written(engine)
        if delay == ALL:
            await written(engine)
            say("written", {"seconds": time.perf_counter() - answered})
        elif delay != "0":
            await asyncio.sleep(float(delay))
        os.kill(os.getpid(), signal.SIGKILL)


async def next_turn(root: Path) -> None:
    """The third turn, by a process that knows the files alone."""
    messages: Messages = json.loads((root / "chat.json").read_text())
    async with life(machine_in(root)) as engine:
        usage = (await ask(engine, [*messages, *user("And now?")], 1)).finish.usage
        say("found", {"cached": usage.cached_tokens, "prompt": usage.prompt_tokens})


def machine_in(root: Path) -> Machine:
    return make_machine(SHAPE, "cpu:0", MAX_TOKENS, root, dtype="fp32", parallel=1)


def say(word: str, fields: Mapping[str, float]) -> None:
    print(word, json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
