"""This checkout beside another one, in one run: passes of the backend and answers of the engine.

    python -m scripts.bench_against PATH_OF_OTHER_CHECKOUT [--device cuda:0] [--models qwen3-4b]

Both run in processes of their own and take turns; a ratio is this checkout's time by the other's,
pair by pair. Small models are faster or slower for a whole process, so `--lives 4` measures four of
each. Beside its own path as the other one it shows what the machine's noise is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from luceasync.bench import command
from luceasync.bench.figures import median, pair_ratios, spread
from luceasync.bench.report import Report, figure, ms
from luceasync.bench.rounds import interleave
from luceasync.bench.shapes import SHAPES
from luceasync.config import BUNDLED_MODEL_DIR

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"  # the program's place, under whose code it may run
OTHER, OURS = "other", "this"
CPU_MODELS, GPU_MODELS = "bundled,engine,qwen3-0.6b", "bundled,engine,qwen3-4b,qwen3.5-27b"
BUNDLED_CONTEXT_TOKENS = 1024

Sample = tuple[float, object]  # seconds, and what both are to say alike
Taken = dict[str, dict[str, list[Sample]]]  # by case and checkout


class Checkout:
    """A process that runs the program under a checkout's code."""

    def __init__(self, root: Path) -> None:
        # The checkout first, then what this process was given besides.
        places = [str(root), str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(places).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "against.program"],
            cwd=root,
            env=os.environ | {"PYTHONPATH": path, "GOMP_SPINCOUNT": "20000"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, what: str, **fields: Any) -> Any:
        """Have something done; what it says."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **fields}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a checkout's process has ended; see above")
        return json.loads(line)

    def sampler(self, case: str) -> Callable[[], Sample]:
        """One sample of the case: seconds, and what both are to say alike."""
        return lambda: tuple(self.order("sample", case=case))

    def close(self) -> None:
        """The process ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=15, device="cpu:0")
    parser.add_argument("other", type=Path, metavar="PATH_OF_OTHER_CHECKOUT")
    parser.add_argument(
        "--models", type=command.names, help=f"default: {CPU_MODELS}; GPU: {GPU_MODELS}"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: as a server")
    parser.add_argument("--context", type=int, help="tokens; default: 512, on a GPU 4096")
    parser.add_argument("--lives", type=int, default=1, help="pairs of processes; default: 1")
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    is_cpu = options.device.partition(":")[0] == "cpu"
    models = options.models or (CPU_MODELS if is_cpu else GPU_MODELS).split(",")
    context = options.context or (512 if is_cpu else 4096)
    for model in models:
        is_small = is_cpu and model == "bundled"
        dtype = options.dtype or ("fp32" if is_small else "bf16")
        order = order_for(model, options.device, dtype, context)
        taken: Taken = {}
        for _ in range(options.lives):
            with ExitStack() as stack:  # what a model pinned is gone with its processes
                checkouts = {}
                for name, root in ((OTHER, options.other.resolve()), (OURS, ROOT)):
                    checkouts[name] = Checkout(root)
                    stack.callback(checkouts[name].close)
                take(taken, checkouts, order, -(-options.rounds // options.lives))
        tell(report, f"{model}, {order['device']}, context {order.get('context', '-')}", taken)


def order_for(model: str, device: str, dtype: str, context: int) -> dict[str, Any]:
    """How a checkout is told to open the model."""
    common = {"device": device, "dtype": dtype}
    if model == "engine":
        return common | {"kind": "engine"}
    if model == "bundled":
        places = {"dir": str(BUNDLED_MODEL_DIR), "context": min(context, BUNDLED_CONTEXT_TOKENS)}
        return common | {"kind": "passes", "threads": 1, **places}  # as the engine runs it
    if model not in SHAPES:
        raise SystemExit(f"--models {model}: expected bundled, engine, {', '.join(SHAPES)}")
    return common | {
        "kind": "passes",
        "config": dict(SHAPES[model]),
        "context": context,
        "threads": 0,
    }


def take(
    taken: Taken, checkouts: dict[str, Checkout], order: dict[str, Any], num_rounds: int
) -> None:
    """Add samples of each case that both have."""
    cases = [checkout.order("open", **order) for checkout in checkouts.values()]
    for case in cases[0]:
        variants = {name: checkout.sampler(case) for name, checkout in checkouts.items()}
        samples = taken.setdefault(case, {OTHER: [], OURS: []})
        for name, new in interleave(variants, num_rounds, num_warmups=2).items():
            samples[name] += new
    for checkout in checkouts.values():
        checkout.order("close")


def tell(report: Report, title: str, taken: Taken) -> None:
    """A row for each case."""
    columns = (
        "case",
        OTHER,
        OURS,
        "ratio",
        "middle half of ratios",
        "ratio of the fastest",
        "same answers",
    )
    table = report.table(columns, title)
    for case, samples in taken.items():
        other, ours = ([seconds for seconds, _ in samples[name]] for name in (OTHER, OURS))
        ratios = pair_ratios(ours, other)
        same = all(a[1] == b[1] for a, b in zip(samples[OTHER], samples[OURS], strict=True))
        table.add(
            case,
            ms(median(other), 3),
            ms(median(ours), 3),
            figure(median(ratios), digits=3),
            figure(spread(ratios), digits=3),
            figure(min(ours) / min(other), digits=3),  # others on the machine only make it slower
            "yes" if same else "NO",
        )


if __name__ == "__main__":
    main()
