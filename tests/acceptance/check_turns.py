"""Hold conversations with servers over small models, and check how much of each prompt they find.

Owns the rows of the table and how it is printed. Flows are in turns/flows.py, the rules of a cell
in turns/cells.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import get_args

from tests.acceptance.turns.cells import Cell, Row, hold
from tests.acceptance.turns.flow import Flow, Kind, Size
from tests.acceptance.turns.flows import FLOWS
from tests.acceptance.turns.models import (
    MODELS,
    TEMPLATES,
    Model,
    ModelName,
    TemplateName,
    make_model,
)

HELP = """Each row is a flow over a model with a template, and a size of a prefill's chunk. Its
cells are kinds of servers: one, one that is killed before every request once it has written all,
one that is killed in the middle; some with a drafter, or little memory.

A cell tells cached of ideal tokens, and in brackets what the request that found least was short of.
Ideal is the longest beginning that was seen before; a flow's first request is left out. Then come
the bytes written over those of new state, and what is allowed: 1.1, and a state more for each
answer that can come back. Every answer and its log-probabilities must be those of a server that
keeps nothing, in float32. Exits with 1, and names the cells, where a rule is broken.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)
KEEPING: tuple[Kind, ...] = ("memory", "restarts", "one restart")
DRAFTED: tuple[Kind, ...] = ("drafted", "drafted, restarts")
CHUNKS = (256, 2048)
# What the bundled model, ten times as slow, and drafters are tried with.
FEW_FLOWS = ("chat", "thinking", "agent_without_reasoning")


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """The rows that the flags select."""
    for model in args.models:
        for template in args.templates:
            for chunk_tokens in args.chunks:
                for name in args.flows:
                    kinds = kinds_of(FLOWS[name], model, template, chunk_tokens)
                    kinds = tuple(kind for kind in kinds if kind in args.kinds)
                    if kinds:
                        size = Size(num_turns=args.turns, num_steps=args.steps)
                        yield Row(name, model, template, chunk_tokens, kinds, size)


def kinds_of(
    flow: Flow, model: ModelName, template: TemplateName, chunk_tokens: int
) -> tuple[Kind, ...]:
    """The kinds of servers of a row; none if it would only repeat another one."""
    is_first = template == TEMPLATES[0]
    is_plain = is_first and chunk_tokens == CHUNKS[0]
    if flow.name in FEW_FLOWS and is_plain:
        return (*KEEPING, *DRAFTED, *(("little memory",) if model == "hybrid" else ()))
    if model == "bundled" or not (flow.has_template or is_first):
        return ()
    if flow.name in ("ended", "killed_at_once"):
        return ("restarts",)
    return tuple(kind for kind in KEEPING if kind != "memory" or not flow.needs_directory)


def check(args: argparse.Namespace) -> bool:
    """Print the table; returns whether every rule holds."""
    rows, faulty, start_s = list(rows_of(args)), list[Cell](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        models: dict[tuple[ModelName, TemplateName], Model] = {}
        for row in rows:
            key = row.model_name, row.template
            if key not in models:
                models[key] = make_model(*key, Path(folder) / "-".join(key))
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.jobs, spawning) as pool:
            held = [pool.submit(hold, row, models[row.model_name, row.template]) for row in rows]
            for row, future in zip(rows, held, strict=True):
                cells = future.result()
                shown = "".join(f"  {cell.kind}: {cell}" for cell in cells)
                print(f"{row.name:52}{shown}", flush=True)
                for cell in (cell for cell in cells if cell.faults):
                    print(f"  BROKEN, {cell.kind}: {'; '.join(cell.faults)}", flush=True)
                    faulty.append(cell)
    print(f"{len(rows)} rows, {len(faulty)} cells break a rule, {time.monotonic() - start_s:.0f} s")
    return not faulty


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=HELP)
    parser.add_argument("flows", nargs="*", default=list(FLOWS), help=", ".join(FLOWS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--templates", nargs="+", choices=TEMPLATES, default=TEMPLATES)
    parser.add_argument("--chunks", nargs="+", type=int, default=CHUNKS, help="of a prefill")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="of an agent's turn")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    args = parser.parse_args()
    if unknown := set(args.flows) - set(FLOWS):
        parser.error(f"no such flow: {', '.join(sorted(unknown))}; expected {', '.join(FLOWS)}")
    return args


if __name__ == "__main__":
    sys.exit(0 if check(arguments()) else 1)
