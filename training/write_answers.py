"""Write a model's own answers about the standard library's source, to train its drafter on.

The model edits and explains functions, and writes what docstrings describe, greedily, as many at
once as there are lanes. Modules that `luceasync bench speculation --only edits` uses are left out.
A line is {"ids": [...], "begin": n}: the prompt's tokens, and from n on the answer's.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import random
import sysconfig
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TextIO

import torch

from luceasync.bench.edits import ANSWERS, MODULES
from luceasync.text.tokenizer import Tokenizer
from training.draft.lanes import Lanes
from training.draft.target import FrozenTarget
from training.draft.texts import Layout

LEAST_LINES, MOST_LINES = 5, 45
PROMPTS_PER_TASK = 64
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
NEW = (
    "Write a Python {kind} `{name}`: {purpose}",
    "Write a {kind} in Python. {purpose} Explain nothing.",
    "Write a {kind} in Python, {purpose} Explain nothing.",
    "Implement this in Python, with type hints: {purpose}",
    "Write a Python program that shows how this can be done, with a main function: {purpose}",
    "Write a class in Python for this, with a few methods: {purpose} Explain nothing.",
)
LEAST_WORDS, MOST_WORDS = 5, 40  # of a docstring's first paragraph that is a task
NEW_SHARE, EDITS_SHARE = 0.6, 0.2  # of all questions


def main() -> None:
    args = _arguments()
    questions = questions_of(*read(library()), args.seed)[: args.most]
    room = args.row_tokens - args.answer_tokens
    lay = partial(_prompt, args.model, args.row_tokens)
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.workers) as pool, args.out.open("w", encoding="utf-8") as out:
        prompts = pool.imap(lay, questions, chunksize=PROMPTS_PER_TASK)
        write(args, (ids for ids in prompts if len(ids) <= room), out)


@lru_cache(maxsize=1)
def _layout(model: Path, row_tokens: int) -> Layout:
    """One a process: it takes longer to read than a prompt to lay out."""
    return Layout(model, Tokenizer.load(model).eos_ids, row_tokens)


def _prompt(model: Path, row_tokens: int, text: str) -> list[int]:
    """Lay out a question, in a worker process."""
    return _layout(model, row_tokens).prompt({"messages": [{"role": "user", "content": text}]})


def library() -> list[Path]:
    """The modules of the standard library that the benchmark does not use."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = [p for p in folder.rglob("*.py") if not {"test", "site-packages"} & {*p.parts}]
    tops = {path: path.relative_to(folder).parts[0].removesuffix(".py") for path in found}
    return sorted(path for path, top in tops.items() if top not in MODULES)


def read(paths: Sequence[Path]) -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    """(source, name) of the functions and methods of moderate length in files; (kind, name,
    purpose) of the functions and classes whose docstring is a task.
    """
    functions, purposes = [], []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # lib2to3 has files of old syntax
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.end_lineno is None:
                continue
            is_function = isinstance(node, ast.FunctionDef)
            purpose = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if LEAST_WORDS <= purpose.count(" ") + 1 <= MOST_WORDS:
                end = "" if purpose[-1] in ".?!:" else "."
                purposes.append(("function" if is_function else "class", node.name, purpose + end))
            own = lines[node.lineno - 1 : node.end_lineno]
            if is_function and LEAST_LINES <= len(own) <= MOST_LINES:
                indent = len(own[0]) - len(own[0].lstrip())
                functions.append(("\n".join(line[indent:] for line in own), node.name))
    return functions, purposes


def questions_of(
    functions: Sequence[tuple[str, str]], purposes: Sequence[tuple[str, str, str]], seed: int
) -> list[str]:
    """Each function with three tasks and each purpose with every wording, in an order determined by
    the seed, most of them new code as long as all kinds last.
    """
    rng = random.Random(seed)
    new = [
        wording.format(kind=kind, name=name, purpose=purpose)
        for kind, name, purpose in purposes
        for wording in NEW
    ]
    edits, others = [], []
    for source, name in functions:
        for change in rng.sample(CHANGES, 2):
            task = change.format(name=name) + " " + rng.choice([*ANSWERS.values()])
            edits.append(FUNCTION.format(source=source, task=task))
        others.append(FUNCTION.format(source=source, task=rng.choice(OTHERS)))
    found = []
    for questions, share in (
        (new, NEW_SHARE),
        (edits, EDITS_SHARE),
        (others, 1 - NEW_SHARE - EDITS_SHARE),
    ):
        rng.shuffle(questions)
        # Places as if spread evenly: a run that ends early has had the same mixture.
        found += [((at + rng.random()) / share, text) for at, text in enumerate(questions)]
    return [text for _, text in sorted(found)]


def write(args: argparse.Namespace, prompts: Iterable[Sequence[int]], out: TextIO) -> None:
    """Answer in order until `args.seconds` have passed or no prompt is left."""
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    target = FrozenTarget(args.model, dtype, torch.device(args.device))
    lanes = Lanes(target, args.parallel, args.row_tokens)
    num_answers, num_tokens, began_s = 0, 0, time.monotonic()
    for prompt, ids in lanes.answers(prompts, args.answer_tokens, args.seconds):
        out.write(json.dumps({"ids": [*prompt, *ids], "begin": len(prompt)}) + "\n")
        num_answers, num_tokens = num_answers + 1, num_tokens + len(ids)
    seconds = time.monotonic() - began_s
    print(f"{num_answers} answers of {num_tokens} tokens in {seconds:.0f} s", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a directory or a GGUF file")
    add("--out", type=Path, required=True)
    add("--most", type=int, default=100_000, help="questions")
    add("--seconds", type=float, default=200.0, help="answers end then")
    add("--answer-tokens", type=int, default=256)
    add("--row-tokens", type=int, default=1024, help="of prompt and answer")
    add("--parallel", type=int, default=512, help="answers at once")
    add("--workers", type=int, default=4, help="processes that lay prompts out")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--seed", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
