"""Greedy answers with speculation beside those without, token by token, in float32 on this CPU.

    python -m tests.acceptance.check_lossless [--targets bundled] [--others 200] [--stages 3]

Every round has the shape that its row names, whether it pays or not. Prints a Markdown table; exit
status 1 if a token differs. The tiny targets need the packages of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from luceasync.request import Speculation
from tests.acceptance.lossless.asking import (
    after_restart,
    answers_of,
    references,
    request_of,
    running,
)
from tests.acceptance.lossless.cases import Answers, Case, Kind, Target
from tests.acceptance.lossless.targets import MAKERS
from tests.stages import in_stages


def main() -> None:
    """Ask, compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(MAKERS))
    parser.add_argument("--prompts", type=int, default=200, help="of the first four rows")
    parser.add_argument("--others", type=int, default=40, help="conversations of the other rows")
    parser.add_argument("--block", type=int, help="rows of a chain; default: as trained")
    parser.add_argument("--stages", type=int, default=1, help="of every plan")
    options = parser.parse_args()
    with in_stages(options.stages) if options.stages > 1 else nullcontext():
        sys.exit(1 if compare(options) else 0)


def compare(options: argparse.Namespace) -> int:
    """Print a table for each target; returns the number of answers that differ."""
    header = "proposals", "prompt from", "sampling", "shards", "lanes", "answers", "restored"
    header += "tokens", "rounds", "tau", "different", "s"
    num_different = 0
    with tempfile.TemporaryDirectory() as root:
        for name in options.targets.split(","):
            target = MAKERS[name](Path(root) / name, max(options.prompts, options.others))
            target = replace(target, block=options.block or target.block)
            print(f"\n{target.name}\n\n| {' | '.join(header)} |\n{'|---' * len(header)}|")
            for cases, num in (
                (target.cases[:4], options.prompts),
                (target.cases[4:], options.others),
            ):
                asked = replace(target, questions=target.questions[:num])
                if num:
                    num_different += asyncio.run(check(asked, cases, Path(root)))
    return num_different


async def check(target: Target, cases: Sequence[Case], root: Path) -> int:
    """Print a row for each case; returns the number of answers that differ."""
    num_turns = max(case.num_turns for case in cases)
    num_different, plain = 0, await references(target, {c.kind for c in cases}, num_turns)
    restarted = plain
    if any(case.is_restarted and case.kind == "stop strings" for case in cases):
        restarted = await after_restart(target, plain, root / target.name)
    for number, case in enumerate(cases):
        started = time.perf_counter()
        expected = restarted if case.is_restarted else plain
        found = await answers_of(target, case, expected, root / f"{target.name}-{number}")
        different = [k for k, answer in found.items() if answer.ids != expected[case.kind][k].ids]
        num_different += len(different)
        print_row(case, found, len(different), time.perf_counter() - started)
        for key in different[:3]:
            print(await difference(target, case, key, expected, found))
    return num_different


def print_row(case: Case, found: Answers, num_different: int, seconds: float) -> None:
    told = [answer.finish.speculation or Speculation() for answer in found.values()]
    rounds, accepted = sum(s.rounds for s in told), sum(s.accepted for s in told)
    later = [answer.finish.restore.tier for (_, turn), answer in found.items() if turn]
    num_restored = sum(tier == case.origin.split(",")[0] for tier in later)
    row = (
        *(case.proposal, case.origin, case.kind, case.num_shards, case.num_lanes, len(found)),
        f"{num_restored} of {len(later)}" if later else "",
        *(sum(len(answer.ids) for answer in found.values()), rounds),
        *(f"{(accepted + rounds) / max(rounds, 1):.2f}", num_different, f"{seconds:.0f}"),
    )
    print(f"| {' | '.join(map(str, row))} |", flush=True)


async def difference(
    target: Target, case: Case, key: tuple[int, int], plain: Mapping[Kind, Answers], found: Answers
) -> str:
    """Where two answers part, and what plain decoding says there."""
    ids, others = plain[case.kind][key].ids, found[key].ids
    pairs = enumerate(zip(ids, others, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(others)))
    request = request_of(target, case, plain, found, key)
    request = replace(request, top_logprobs=2, stop=(), max_tokens=place + 1)
    async with running(target, Case(None), None, drafts=False) as engine:
        deltas = [delta async for delta in await engine.open(request)]
    words = f"  {key}: token {place}, {ids[place:][:4]} became {others[place:][:4]}"
    for chosen in [ranked for delta in deltas for ranked in delta.logprobs][place:]:
        best = ", ".join(f"{other.token!r} {other.logprob:.6f}" for other in chosen.top)
        words += f"; plainly {chosen.token!r} {chosen.logprob:.6f}, before penalties {best}"
    return words


if __name__ == "__main__":
    main()
