"""Answers of random models to schemas: valid, and the same whatever drafter and placement.

    python -m tests.acceptance.check_grammar [--schemas 200] [--drafts none,chain] [--places one]

--bench FOLDER: data sets of JSONSchemaBench, that many schemas of each (needs jsonschema). Exit
status 1 if an answer is wrong. Needs the packages of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import tiny
from tests.acceptance.grammar import cases, judging
from tests.acceptance.grammar.asking import (
    Answer,
    Asking,
    answers,
    biased,
    placement,
    running,
    save_models,
)

ANOTHER = "ANOTHER ONE WITH A DRAFTER"
WRONG = {judging.WRONG, judging.NO_PREFIX, ANOTHER}


def main() -> None:
    """Run the check and print a table."""
    options = parser().parse_args()
    asked = _cases(options)
    is_sound = True
    for family in options.families.split(","):
        started = time.perf_counter()
        ends = asyncio.run(check(family, asked, options))
        told = f"{family}, {options.drafts}, {options.places}, T {options.temperature:g}"
        print(f"{told}: {len(asked)} schemas ({time.perf_counter() - started:.0f} s)")
        _tell(asked, ends)
        is_sound &= not any(end in WRONG for found in ends for end in found)
    sys.exit(not is_sound)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--schemas", type=int, default=200, help="of all, or of each data set")
    made.add_argument("--first", type=int, default=0, help="seed of the first one")
    made.add_argument("--bench", type=Path, help="data sets of JSONSchemaBench")
    made.add_argument("--families", default=",".join(tiny.FAMILIES))
    made.add_argument("--drafts", default="none,chain,tree", help="the first is the one to equal")
    made.add_argument("--places", default="one", choices=["one", "groups", "remote"])
    made.add_argument("--temperature", type=float, default=1.0)
    made.add_argument("--max-tokens", type=int, default=900)
    made.add_argument("--choices", type=int, default=1)
    made.add_argument("--stop", action="append", default=[])
    made.add_argument("--show", action="store_true", help="why each was refused")
    return made


def _cases(options: argparse.Namespace) -> list[cases.Case]:
    if options.bench is not None:
        return cases.of_bench(options.bench, options.schemas, options.first)
    return cases.made_up(range(options.first, options.first + options.schemas))


async def check(
    family: str, asked: Sequence[cases.Case], options: argparse.Namespace
) -> list[list[str]]:
    """How the choices of each case ended, in words."""
    judge = judging.is_valid if options.bench is None else judging.by_package()
    asking = Asking(
        options.max_tokens, options.temperature, options.choices, stop=tuple(options.stop)
    )
    found: list[list[tuple[Answer, ...]]] = []
    with tempfile.TemporaryDirectory() as root:
        models = save_models(family, Path(root))
        if options.bench is not None:
            asking = replace(asking, words=biased(models[0]))
        with placement(options.places, Path(root)) as where:
            for draft in options.drafts.split(","):
                async with running(models, draft, where) as engine:
                    found.append(await answers(engine, asked, asking))
    ends = []
    for i, case in enumerate(asked):
        first = found[0][i]
        ends.append([_end(case, text, reason, options, judge) for text, reason in first])
        if any(other[i] != first for other in found[1:]):
            ends[-1].append(ANOTHER)
        if options.show or WRONG & set(ends[-1]):
            print(case.name, ends[-1], *(other[i] for other in found if WRONG & set(ends[-1])))
    return ends


def _end(
    case: cases.Case, text: str, reason: str, options: argparse.Namespace, judge: judging.Judge
) -> str:
    """Judge a text that a stop string may have cut both as ended and as cut off."""
    end = judging.end_of(case.schema, text, reason, judge)
    if options.stop and end == judging.WRONG:
        end = judging.end_of(case.schema, text, "length", judge)
    return end


def _tell(asked: Sequence[cases.Case], ends: Sequence[Sequence[str]]) -> None:
    """Print a row for each kind of schema."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for case, found in zip(asked, ends, strict=True):
        for end in found:
            for kind in (case.kind, "all"):
                rows[kind][end.split(":")[0]] += 1
    words = sorted({word for row in rows.values() for word in row})
    print(f"| kind | {' | '.join(words)} |\n{'|---' * (len(words) + 1)}|")
    for kind in sorted(rows, key=lambda kind: (kind == "all", kind)):
        print(f"| {kind} | {' | '.join(str(rows[kind][word]) for word in words)} |")


if __name__ == "__main__":
    main()
