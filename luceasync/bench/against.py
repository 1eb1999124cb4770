"""`luceasync bench against`: this checkout beside another one, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from luceasync.bench.device import is_gpu
from luceasync.bench.report import Report, figure, interleave, median, ms, pair_ratios, spread
from luceasync.bench.shapes import SHAPES, shape_of
from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("checkout.py")
OTHER, THIS = "other", "this"
CPU_MODELS = ("bundled", "engine", "qwen3-0.6b")
GPU_MODELS = ("bundled", "engine", "qwen3-4b", "qwen3.5-27b")
CPU_CONTEXT, GPU_CONTEXT, BUNDLED_CONTEXT = 512, 4096, 1024  # tokens

Sample = tuple[float, object]  # seconds, and a value that must be equal in both checkouts
Taken = dict[str, dict[str, list[Sample]]]  # by case and checkout


class Checkout:
    """A process that runs the program under a checkout's code."""

    def __init__(self, root: Path) -> None:
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            cwd=root,
            env=os.environ | {"PYTHONPATH": path, "GOMP_SPINCOUNT": "20000"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, what: str, **fields: Any) -> Any:
        """Send an order and return its reply."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **fields}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a checkout's process has ended; its traceback is above")
        return json.loads(line)

    def sampler(self, case: str) -> Callable[[], Sample]:
        """A function that takes one sample of the case."""
        return lambda: tuple(self.order("sample", case=case))

    def close(self) -> None:
        """Stop the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def bench_against(
    report: Report,
    other: Path,
    device: str,
    *,
    models: Sequence[str],
    dtype: str | None,
    context: int | None,
    rounds: int,
    lives: int,
) -> None:
    """Passes of the backend and answers of the engine, alternating between both checkouts; a ratio
    is the time of this checkout over that of the other, pair by pair.

    A process may be faster or slower for its whole life, so small models are measured in `lives`
    pairs of processes. If the other checkout is this one, the table shows the noise.
    """
    is_cpu = not is_gpu(device)
    for model in models or (CPU_MODELS if is_cpu else GPU_MODELS):
        kind = dtype or ("fp32" if is_cpu and model == "bundled" else "bf16")
        num_tokens = context or (CPU_CONTEXT if is_cpu else GPU_CONTEXT)
        order = order_for(model, device, kind, num_tokens)
        taken: Taken = {}
        for life in range(lives):
            # The process that starts first may get the better memory: they take turns at it.
            pair = [(OTHER, other.resolve()), (THIS, ROOT)][:: -1 if life % 2 else 1]
            with ExitStack() as stack:
                checkouts = {}
                for name, root in pair:
                    checkouts[name] = Checkout(root)
                    stack.callback(checkouts[name].close)
                take(taken, checkouts, order, -(-rounds // lives))
        tell(report, f"{model}, {device}, context {order.get('context', '-')}", taken)


def order_for(model: str, device: str, dtype: str, context: int) -> dict[str, Any]:
    """The order that tells a checkout which model to open. Raises ConfigError."""
    common = {"device": device, "dtype": dtype}
    if model == "engine":
        return common | {"kind": "engine"}
    if model == "bundled":
        place = {"dir": str(BUNDLED_MODEL_DIR), "context": min(context, BUNDLED_CONTEXT)}
        return common | {"kind": "passes", "threads": 1, **place}  # as in the engine
    try:
        config = dict(shape_of(model))
    except KeyError:
        allowed = ", ".join(("bundled", "engine", *SHAPES, "small", "small-hybrid"))
        raise ConfigError(f"--models {model}: expected one of {allowed}") from None
    return common | {"kind": "passes", "config": config, "context": context, "threads": 0}


def take(
    taken: Taken, checkouts: dict[str, Checkout], order: dict[str, Any], num_rounds: int
) -> None:
    """Add samples of each case."""
    cases = [checkout.order("open", **order) for checkout in checkouts.values()]
    for case in cases[0]:
        variants = {name: checkout.sampler(case) for name, checkout in checkouts.items()}
        samples = taken.setdefault(case, {OTHER: [], THIS: []})
        for name, new in interleave(variants, num_rounds, num_warmups=2).items():
            samples[name] += new
    for checkout in checkouts.values():
        checkout.order("close")


def tell(report: Report, title: str, taken: Taken) -> None:
    """Add a row for each case."""
    columns = ("case", OTHER, THIS, "ratio", "spread of ratios", "ratio of the fastest")
    table = report.table((*columns, "same answers"), title)
    for case, samples in taken.items():
        other, ours = ([seconds for seconds, _ in samples[name]] for name in (OTHER, THIS))
        ratios = pair_ratios(ours, other)
        same = all(a[1] == b[1] for a, b in zip(samples[OTHER], samples[THIS], strict=True))
        table.add(
            case,
            ms(median(other), 3),
            ms(median(ours), 3),
            figure(median(ratios), digits=3),
            figure(spread(ratios), digits=3),
            figure(min(ours) / min(other), digits=3),  # other load can only slow it down
            "yes" if same else "NO",
        )
