"""Write a model's own answers about the standard library's source, to train its drafter on.

The model rewrites, changes, explains and continues functions, greedily, as many at once as there
are lanes. Functions of the modules that `luceasync bench speculation --only edits` uses are left
out. A line is {"ids": [...], "begin": n}: the prompt's tokens, and from n on the answer's.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from luceasync.bench.edits import ANSWERS, MODULES
from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.request import Request, Sampling, TokenPrompt
from luceasync.text.tokenizer import Tokenizer
from training.draft.texts import Layout

LEAST_LINES, MOST_LINES = 5, 45
FUNCTION = "Here is a Python function:\n\n```python\n{source}\n```\n\n{task}"
CHANGES = (
    "Rename the function to `new_{name}`.",
    "Add a docstring of one line.",
    "Add type hints to its parameters.",
    "Raise ValueError if its first argument is None.",
    "Log its arguments with logging.debug at the beginning.",
)
OTHERS = (
    "Explain it in a few sentences.",
    "Write three tests for it with pytest.",
    "Write a function that does the opposite, or undoes what it does.",
    "Which errors can it raise, and when?",
    "Write a shorter version of it.",
    "Write a class with this function as a method, and show how it is used.",
)


def main() -> None:
    args = _arguments()
    layout = Layout(args.model, Tokenizer.load(args.model).eos_ids, args.row_tokens)
    questions = questions_of([*functions_of(library())], args.seed)
    room = args.row_tokens - args.answer_tokens
    asked = [{"messages": [{"role": "user", "content": text}]} for text in questions[: args.most]]
    prompts = [ids for line in asked if len(ids := layout.prompt(line)) <= room]
    with args.out.open("w", encoding="utf-8") as out:
        asyncio.run(write(args, prompts, out))


def library() -> list[Path]:
    """The modules of the standard library that the benchmark does not use."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = [p for p in folder.rglob("*.py") if not {"test", "site-packages"} & {*p.parts}]
    tops = {path: path.relative_to(folder).parts[0].removesuffix(".py") for path in found}
    return sorted(path for path, top in tops.items() if top not in MODULES)


def functions_of(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(source, name) of the functions and methods in files, of moderate length."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # lib2to3 has files of old syntax
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            own = lines[node.lineno - 1 : node.end_lineno]
            if LEAST_LINES <= len(own) <= MOST_LINES:
                indent = len(own[0]) - len(own[0].lstrip())
                yield "\n".join(line[indent:] for line in own), node.name


def questions_of(functions: Sequence[tuple[str, str]], seed: int) -> list[str]:
    """Each function with one task, two thirds of them edits, in an order determined by the seed."""
    rng = random.Random(seed)
    found = []
    for source, name in rng.sample(functions, len(functions)):
        if rng.random() < 2 / 3:
            task = rng.choice(CHANGES).format(name=name) + " " + rng.choice([*ANSWERS.values()])
        else:
            task = rng.choice(OTHERS)
        found.append(FUNCTION.format(source=source, task=task))
    return found


async def write(args: argparse.Namespace, prompts: Sequence[Sequence[int]], out: TextIO) -> None:
    """Answer in order until `args.seconds` have passed or no prompt is left."""
    config = Config(
        model=ModelConfig(model_dir=args.model, dtype=args.dtype),
        placement=PlacementConfig(device=args.device),
        engine=EngineConfig(parallel=args.parallel, max_ctx_tokens=args.row_tokens),
        cache=CacheConfig(memory_bytes=0),
        draft=DraftConfig("none"),
    )
    async with build_engine(config) as engine:
        await engine.load()
        end_at, left = time.monotonic() + args.seconds, iter(prompts)
        num_answers = num_tokens = 0

        async def client() -> None:
            nonlocal num_answers, num_tokens
            for prompt in left:
                ids = await answer(engine, prompt, args.answer_tokens)
                out.write(json.dumps({"ids": [*prompt, *ids], "begin": len(prompt)}) + "\n")
                num_answers, num_tokens = num_answers + 1, num_tokens + len(ids)
                if time.monotonic() > end_at:
                    return

        began_s = time.monotonic()
        await asyncio.gather(*(client() for _ in range(args.parallel)))
        seconds = time.monotonic() - began_s
        print(f"{num_answers} answers of {num_tokens} tokens in {seconds:.0f} s", flush=True)


async def answer(engine: LocalEngine, prompt: Sequence[int], most_tokens: int) -> list[int]:
    """The tokens of a greedy answer, including its end mark."""
    request = Request(TokenPrompt(tuple(prompt)), sampling=Sampling(), max_tokens=most_tokens)
    return [token async for delta in await engine.open(request) for token in delta.token_ids]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a directory or a GGUF file")
    add("--out", type=Path, required=True)
    add("--most", type=int, default=100_000, help="questions")
    add("--seconds", type=float, default=200.0, help="no answer begins later")
    add("--answer-tokens", type=int, default=256)
    add("--row-tokens", type=int, default=1024, help="of prompt and answer")
    add("--parallel", type=int, default=32)
    add("--device")
    add("--dtype", default="bf16")
    add("--seed", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
