"""Random models over devices of one process or of several, and what a step and a prompt take.

Owns how they are opened. Knows no table.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from luceasync.bench.device import synchronize
from luceasync.bench.model import prefill, random_prompt
from luceasync.models.config import read_spec
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.plan import Plan, stages_of
from luceasync.pipeline.remote.fleet import Fleet
from luceasync.ranking.logits import Wanted

ROOT = Path(__file__).parents[2]
PARALLEL = 4
NODE_BYTES = 64 << 20


def random_program(folder: Path, script: str) -> Path:
    """A luceasync-backend that draws its weights."""
    path = folder / "random-backend"
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={ROOT}\nexec {sys.executable} -P "
        f'{ROOT / "scripts" / script} "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def in_two(plan: Plan) -> Plan:
    """The plan with each device but the first in a process of its own."""
    devices = tuple(replace(each, process=i) for i, each in enumerate(plan.devices))
    stages = stages_of([device.process for device in devices])
    return replace(plan, devices=devices, stages=stages)


@contextmanager
def opened(
    folder: Path, plan: Plan, script: str = "random_backend.py"
) -> Iterator[LayerSplitBackend]:
    """The model over the processes of the plan, others of which run `script`."""
    spec = read_spec(folder)
    program = random_program(folder, script)
    programs = {each.process: program for each in plan.devices if not each.is_here}
    with ExitStack() as closing:
        fleet = Fleet(folder, spec, plan, programs, "shared", NODE_BYTES)
        closing.callback(fleet.close)
        backend = LayerSplitBackend.open(folder, spec, plan, open_remote=fleet.open_group)
        closing.callback(backend.close)
        yield backend


def decode_s(backend: LayerSplitBackend, num_lanes: int, position: int, num_steps: int) -> float:
    """Seconds a step, greedily, as the engine runs it."""
    lanes, tokens = list(range(num_lanes)), [1] * num_lanes
    begun = time.perf_counter()
    for step in range(num_steps):
        logits = backend.decode(lanes, [position + step] * num_lanes, tokens)
        tokens = logits.rank(Wanted()).candidates().best.tolist()
    return (time.perf_counter() - begun) / num_steps


def prefill_s(backend: LayerSplitBackend, num_tokens: int) -> float:
    prompt = random_prompt(num_tokens)
    synchronize()
    begun = time.perf_counter()
    prefill(backend, 0, prompt)
    return time.perf_counter() - begun
