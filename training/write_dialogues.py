"""Write conversations like the bundled model's training data, to train its drafter on.

The same seed gives the same lines; the answers are docstrings of the running Python.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from functools import partial
from pathlib import Path

from training.demo.corpus import collect
from training.demo.dialogue import Dialogue

LINES_PER_TASK = 2048


def main() -> None:
    args = _arguments()
    tasks = -(-args.lines // LINES_PER_TASK)
    dialogue = Dialogue(collect(frozenset(args.modules) if args.modules else None))
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:
        draw = partial(draw_lines, dialogue, args.seed)
        lines = [line for part in pool.imap(draw, range(tasks)) for line in part]
    args.out.write_text("".join(lines[: args.lines]), encoding="utf-8")


def draw_lines(dialogue: Dialogue, seed: int, task: int) -> list[str]:
    """One conversation per line: {"messages": [...]}."""
    rng = random.Random(f"{seed} {task}")
    lines = []
    for _ in range(LINES_PER_TASK):
        turns = dialogue.draw(rng)
        messages = [{"role": role, "content": text} for role, text in turns]
        lines.append(json.dumps({"messages": messages}) + "\n")
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--modules", nargs="*", help="only these top-level modules")
    parser.add_argument("--workers", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
