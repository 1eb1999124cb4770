"""What a hop between two processes is made of, in a running decode.

    python -m scripts.bench_hop [--devices cpu:0,cpu:1 --shapes small] [--lanes 1,4]

Half of the layers are on the second device. A hop there begins when the first has computed, by its
own clock, and ends when the step is queued on the second; one back, from its host to this one.
"""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from luceasync.bench import command
from luceasync.bench.figures import percentile
from luceasync.bench.model import plan_for, random_prompt
from luceasync.bench.random_weights import know_it, write_model
from luceasync.bench.report import Report, figure
from luceasync.bench.shapes import SHAPES, Shape
from luceasync.bench.small import SMALL
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.platform import open_platform
from luceasync.pipeline.remote import link, wire
from luceasync.ranking.logits import Wanted
from scripts.processes.models import PARALLEL, in_two, opened
from scripts.traced_backend import MAX_STEPS, MOMENTS, VARIABLE, Trace

NUM_WARMUPS = 16
# Pieces of a hop, each from one moment to the next: moments of this process, and of the other one.
THERE = {
    "copied to the ring": ("ready", "copied"),
    "sent": ("copied", "sent"),
    "woken": ("sent", "received"),
    "checked": ("received", "checked"),
    "queued on the other device": ("checked", "queued"),
}
BACK = {
    "answered": ("ranked", "answered"),
    "woken, back": ("answered", "came"),
    "taken": ("came", "known"),
}


class Moments:
    """Of each step, in this process."""

    def __init__(self, device: str) -> None:
        self.steps: list[dict[str, float]] = []
        self._platform = open_platform(device)
        self._layers = self._platform.stopwatch()

    def begin_step(self) -> None:
        """The device has nothing to do now."""
        self._layers = self._platform.stopwatch()
        self.steps.append({})
        self.stamp("begun")

    def end_step(self) -> None:
        """Its answer is here."""
        self.stamp("known")
        step = self.steps[-1]
        step["ready"] = step["begun"] + self._layers.seconds()

    def stamp(self, moment: str) -> None:
        if self.steps:
            self.steps[-1][moment] = time.perf_counter()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at every activation that goes there, and every answer that comes."""
        real_put, real_tell, real_answer = link.put, link.Link.tell, link.Link.answer

        def put(room: Any, tensors: Any) -> None:
            self._layers.stop()  # behind the layers; the copy comes after it
            real_put(room, tensors)
            self.stamp("copied")

        def tell(there: link.Link, message: Any, tensors: Any = ()) -> int:
            number = real_tell(there, message, tensors)
            if isinstance(message, wire.Run | wire.Given):
                self.stamp("sent")
            return number

        def answer(there: link.Link, *given: Any) -> Any:
            got = real_answer(there, *given)
            self.stamp("came")
            return got

        link.put, link.Link.tell = put, tell  # type: ignore[method-assign]
        link.Link.answer = answer  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            link.put, link.Link.tell = real_put, real_tell  # type: ignore[method-assign]
            link.Link.answer = real_answer  # type: ignore[method-assign]


def decode(backend: LayerSplitBackend, moments: Moments, num_lanes: int, options: Namespace) -> int:
    """Run steps, greedily; how many there are so far, before the first that counts."""
    lanes, tokens = list(range(num_lanes)), [1] * num_lanes
    first = len(moments.steps) + NUM_WARMUPS
    for step in range(NUM_WARMUPS + options.steps):
        moments.begin_step()
        logits = backend.decode(lanes, [options.context + step] * num_lanes, tokens)
        tokens = logits.rank(Wanted()).candidates().best.tolist()
        moments.end_step()
    return first


def add_rows(
    report: Report, name: str, num_lanes: int, steps: Sequence[dict[str, float]], trace: Any
) -> None:
    """A table of these steps; `trace`: the same, in the other process, [steps, moments]."""
    columns = {each: np.array([step[each] for step in steps]) for each in steps[0]}
    columns |= dict(zip(MOMENTS, trace.T, strict=True))
    took = {what: columns[end] - columns[begin] for what, (begin, end) in (THERE | BACK).items()}
    there, back = (sum((took[what] for what in part), np.zeros(1)) for part in (THERE, BACK))
    took |= {"a hop there": there, "a hop back": back, "there and back": there + back}
    took["the other device's layers"] = columns["ranked"] - columns["queued"]
    took["a step"] = columns["known"] - columns["begun"]
    table = report.table(("what", "p50", "p99"), f"{name}, {num_lanes} lanes, in a running decode")
    for what, seconds in took.items():
        p50, p99 = (percentile([*seconds], p) * 1e6 for p in (50, 99))
        table.add(what, figure(p50, "us", 0), figure(p99, "us", 0))


def measure(report: Report, name: str, shape: Shape, options: Namespace) -> None:
    """All tables of one shape."""
    plan = plan_for(
        shape,
        options.devices,
        parallel=PARALLEL,
        max_ctx_tokens=options.context + NUM_WARMUPS + options.steps + 64,
        dtype=options.dtype,
    )
    if plan.suits_one_thread:  # as the engine runs it
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        write_model(folder, shape, options.dtype)
        trace = Trace(folder / "trace", is_new=True)
        os.environ[VARIABLE] = str(folder / "trace")
        moments = Moments(options.devices[0])
        with opened(folder, in_two(plan), "traced_backend.py") as backend:
            for lane in range(PARALLEL):
                backend.prefill(lane, 0, random_prompt(options.context, lane), project=False)
            with moments.watched():
                for num_lanes in options.lanes:
                    first = decode(backend, moments, num_lanes, options)
                    part = slice(first, first + options.steps)
                    add_rows(report, name, num_lanes, moments.steps[part], trace.times[part])


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__)
    parser.add_argument("--devices", type=command.names, default=["cuda:0", "cuda:1"])
    parser.add_argument("--shapes", type=command.names, default=["qwen3-4b"])
    parser.add_argument("--lanes", type=command.numbers, default=[1, 4])
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step")
    parser.add_argument("--steps", type=int, default=300, help="of decoding, that count")
    options = parser.parse_args()
    num_steps = len(options.lanes) * (NUM_WARMUPS + options.steps)
    if num_steps > MAX_STEPS:
        parser.error(f"{num_steps} steps in all; at most {MAX_STEPS} are written down")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    report = command.begin(options, options.devices)
    know_it()
    shapes = {**SHAPES, "small": SMALL["qwen3_5"]}
    with torch.inference_mode():
        for name in options.shapes:
            measure(report, name, shapes[name], options)


if __name__ == "__main__":
    main()
