"""What it costs to copy and hash a node's tensors, beside this machine's plain copy.

    python scripts/bench_flatten.py [--rounds 15] [--span 2048]

Prints medians over interleaved rounds: a node shaped as a 27B model's, and chunk hashes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from luceasync.bench import command
from luceasync.bench.figures import medians
from luceasync.bench.report import Report, figure, ms, share
from luceasync.bench.rounds import measure
from luceasync.cyext.chunk_hash import ROOT, chain, span_key, tenant_key
from luceasync.cyext.flatten import checksums, fill, fill_with_checksums, layout, views
from luceasync.cyext.names import format_name

ALIGNMENT_BYTES = 64
NUM_LAYERS = 64  # every fourth attends, the others keep a recurrent state
STATE_BYTES = 48 * 128 * 128 * 4  # [value_heads, key_dim, value_dim], float32
CONV_BYTES = 10240 * 3 * 2  # [channels, taps - 1], bf16
ROW_BYTES = 4 * 256 * 2  # [kv_heads, head_dim] of one token, bf16
CHUNK_TOKENS = 64
NUM_TOKENS = 32 * 1024


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=15)
    parser.add_argument("--span", type=int, default=2048, help="tokens of K/V in the node")
    options = parser.parse_args()
    report = command.begin(options)
    copy_node(report, node_tensors(options.span), options.rounds)
    hash_tokens(report, options.rounds)


def node_tensors(span_tokens: int) -> dict[str, np.ndarray]:
    """The tensors that one node saves, as bytes: random, each in memory of its own."""
    sizes: dict[str, int] = {}
    for layer in range(NUM_LAYERS):
        if layer % 4 == 3:
            sizes[format_name(0, "attn_k", layer)] = span_tokens * ROW_BYTES
            sizes[format_name(0, "attn_v", layer)] = span_tokens * ROW_BYTES
        else:
            sizes[format_name(0, "conv", layer)] = CONV_BYTES
            sizes[format_name(0, "delta", layer)] = STATE_BYTES
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 256, size, dtype=np.uint8) for name, size in sizes.items()}


def copy_node(report: Report, tensors: dict[str, np.ndarray], num_rounds: int) -> None:
    """Rates of each way to fill one buffer with `tensors`, and their part of a plain copy."""
    sources = list(tensors.values())
    specs = [(name, tensor.nbytes) for name, tensor in tensors.items()]
    offsets, total = layout(specs, ALIGNMENT_BYTES)
    target = np.zeros(total, np.uint8)
    plain = np.ones(total, np.uint8)
    table = [(name, begin, size) for (name, size), begin in zip(specs, offsets, strict=True)]

    def fill_then_hash() -> None:
        fill(target, offsets, sources)
        checksums(list(views(target, table).values()))

    base = "plain copy of one buffer (numpy)"
    runs: dict[str, Callable[[], object]] = {
        base: lambda: np.copyto(target, plain),
        "fill": lambda: fill(target, offsets, sources),
        "fill_with_checksums": lambda: fill_with_checksums(target, offsets, sources),
        "fill, then checksums": fill_then_hash,
        "checksums alone": lambda: checksums(sources),
    }
    seconds = medians(measure(runs, num_rounds))
    busy = "fill_with_checksums, Python busy in a thread"
    with busy_thread():
        seconds |= medians(measure({busy: runs["fill_with_checksums"]}, num_rounds))
    columns = ("what", "GB/s", "time", "of a plain copy")
    shown = report.table(columns, f"{total / 1e6:.0f} MB a node")
    for name, spent in seconds.items():
        rate = figure(total / spent / 1e9, digits=1)
        shown.add(name, rate, ms(spent), share(seconds[base] / spent))


def hash_tokens(report: Report, num_rounds: int) -> None:
    """Rates of chunk hashes and span keys."""
    tokens = np.random.default_rng(0).integers(0, 150_000, NUM_TOKENS, dtype=np.int32)
    key = tenant_key(b"")
    runs = {
        f"chain, {CHUNK_TOKENS} tokens a chunk": lambda: chain(tokens, key, ROOT, CHUNK_TOKENS),
        "span_key of them all": lambda: span_key(tokens, key, ROOT),
    }
    shown = report.table(("what", "M tokens/s", "time"), f"{NUM_TOKENS} tokens")
    for name, spent in medians(measure(runs, num_rounds)).items():
        shown.add(name, figure(NUM_TOKENS / spent / 1e6, digits=0), ms(spent, 2))


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that computes in Python all the while, and so wants the GIL."""
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()
