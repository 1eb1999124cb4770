"""Time to the first token after a restart with a kept prefix, beside what it cannot be faster than.

    python scripts/bench_restart.py [--shape qwen3.5-27b] [--device cuda:0] [--tokens 32768]

Random weights. A prompt is prefilled and kept; then engines that know nothing start over the same
directory and are asked again. Beside them: the same bytes read, by one thread or as many as ours,
and copied to the device, and one decode step. With files in the page cache, and without.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from luceasync.bench import command
from luceasync.bench.lives import make_machine
from luceasync.bench.restarts import compare_restarts
from luceasync.bench.shapes import SHAPES


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=6, device="cuda:0")
    parser.add_argument("--shape", default="qwen3.5-27b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    with tempfile.TemporaryDirectory() as root:
        shape, room = SHAPES[options.shape], options.tokens + 1024
        machine = make_machine(shape, options.device, room, Path(root), dtype="bf16", parallel=2)
        compare_restarts(report, machine, options.tokens, options.rounds)
        machine.backend.close()


if __name__ == "__main__":
    main()
