"""`luceasync bench kernels`: kernels of a GPU in CUDA graphs, and node copies on the CPU.

A kernel runs as a chain of launches over more data than fits into a cache, at the sizes of known
models.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.bench.device import (
    by_events,
    captured,
    copy_bandwidth,
    matmul_rate,
    num_copies,
    release_memory,
)
from luceasync.bench.report import Report, Run, figure, measure, medians, ms, share, us
from luceasync.cyext.chunk_hash import ROOT, chain, span_key, tenant_key
from luceasync.cyext.flatten import checksums, fill, fill_with_checksums, layout, views
from luceasync.cyext.names import format_name
from luceasync.kernels import (
    attention,
    attention_cuda,
    gemv,
    prefill_attention,
    quant_gemv,
    quant_gemv_cuda,
    small_gemm,
)
from luceasync.kernels import rows as row_kernels
from luceasync.models.mixers.attention_torch import masked_attention
from luceasync.models.mixers.attention_triton import attend_causally
from luceasync.models.precision import Precision
from luceasync.models.quant.ggml import ENCODINGS
from luceasync.models.quant.random import random_packed
from luceasync.models.quant.tiles import tile
from luceasync.models.triton_ops import DECODE_ROWS

# --- products of a few rows -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [outputs, dim], and the operation that follows: none, a residual to add,
    or SwiGLU.
    """

    name: str
    outputs: int
    dim: int
    after: str = ""

    def library(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """The product by torch."""
        if self.after == "residual":
            return residual.addmm_(x, weight.t())
        out = F.linear(x, weight)
        return row_kernels.swiglu(out) if self.after == "swiglu" else out

    def ours(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """The product by the kernel that models use for this number of rows."""
        kernels = gemv if len(x) <= DECODE_ROWS else small_gemm
        if self.after == "swiglu":
            swiglu: Tensor = kernels.swiglu(x, weight)
            return swiglu
        product: Tensor = kernels.linear(x, weight, residual if self.after == "residual" else None)
        return product


PRODUCTS = (
    Product("attention projection", 6144, 2560),
    Product("gated attention projection", 10240, 2560),
    Product("delta projection", 12352, 2560),
    Product("attention output", 2560, 4096, "residual"),
    Product("mlp gate and up", 19456, 2560, "swiglu"),
    Product("mlp down", 2560, 9728, "residual"),
    Product("head", 151936, 2560),
)


@torch.inference_mode()
def bench_gemv(report: Report, *, rows: Sequence[int], rounds: int) -> None:
    """Products of 1 to a few dozen rows in bf16, by the library and by our kernels."""
    columns = ("product", "rows", "library", "ours", "library / ours", "of copy bandwidth")
    table = report.table(columns, "products of few rows")
    bandwidth = copy_bandwidth("cuda:0")
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    for product, count in itertools.product(PRODUCTS, rows):
        weight_bytes = 2 * product.outputs * product.dim
        copies = num_copies(weight_bytes)
        weights = [
            torch.randn(product.outputs, product.dim, **kind).mul_(product.dim**-0.5)
            for _ in range(copies)
        ]
        x, residual = (torch.randn(count, n, **kind) for n in (product.dim, product.outputs))

        ways = {"library": product.library, "ours": product.ours}
        chains = {
            name: captured(partial(multiply_all, multiply, x, weights, residual))
            for name, multiply in ways.items()
        }
        found = medians(measure(chains, rounds, num_warmups=2, clock=by_events))
        library_s, ours_s = (found[name] / copies for name in ("library", "ours"))
        name = f"{product.name} {product.outputs} x {product.dim}"
        cells = (us(library_s), us(ours_s), figure(library_s / ours_s))
        table.add(name, count, *cells, share(weight_bytes / ours_s / bandwidth))


def multiply_all(
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    residual: Tensor,
) -> None:
    for weight in weights:
        multiply(x, weight, residual)


# --- quantised products ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuantProduct:
    """A weight [outputs, dim] of a GGUF type; `paired`: twice the outputs, followed by SwiGLU."""

    type: str
    outputs: int
    dim: int
    paired: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs * (2 if self.paired else 1), self.dim

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight on the device."""
        return ENCODINGS[self.type].num_bytes(self.shape, Precision.of("bf16"))


QUANT_PRODUCTS = (
    QuantProduct("Q5_K", 10240, 5120),
    QuantProduct("Q4_K", 5120, 6144),
    QuantProduct("Q4_K", 17408, 5120, paired=True),
    QuantProduct("Q4_K", 5120, 17408),
    QuantProduct("Q6_K", 5120, 17408),
    QuantProduct("Q6_K", 248320, 5120),
    QuantProduct("Q8_0", 6144, 2560),
    QuantProduct("Q8_0", 151936, 2560),
)


@torch.inference_mode()
def bench_quant(report: Report, *, rows: Sequence[int], rounds: int) -> None:
    """Products with quantised weights, by the Triton and the CUDA C++ kernels."""
    columns = ("product", "rows", "Triton", "CUDA C++", "Triton / CUDA C++", "of copy bandwidth")
    table = report.table(columns, "products with quantised weights")
    bandwidth = copy_bandwidth("cuda:0")
    generator = torch.Generator("cuda")
    for product, count in itertools.product(QUANT_PRODUCTS, rows):
        copies = num_copies(product.num_bytes)
        weights = [
            tile(random_packed(ENCODINGS[product.type], product.shape, generator))
            for _ in range(copies)
        ]
        x = torch.randn(count, product.dim, device="cuda", dtype=torch.bfloat16)
        ways = {
            name: kernels.swiglu if product.paired else kernels.linear
            for name, kernels in (("Triton", quant_gemv), ("CUDA C++", quant_gemv_cuda))
        }
        chains = {name: captured(partial(each_of, way, x, weights)) for name, way in ways.items()}
        found = medians(measure(chains, rounds, num_warmups=2, clock=by_events))
        triton_s, cuda_s = (found[name] / copies for name in ways)
        name = f"{product.type} {product.shape[0]} x {product.dim}"
        name += ", paired" if product.paired else ""
        cells = us(triton_s), us(cuda_s), figure(triton_s / cuda_s)
        table.add(name, count, *cells, share(product.num_bytes / cuda_s / bandwidth))


def each_of(multiply: Callable[..., object], x: Tensor, weights: Sequence[object]) -> None:
    for weight in weights:
        multiply(x, weight)


# --- attention of a decode step -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The attention of a model: `count` layers of one shape."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    count: int

    def num_bytes(self, context: int, num_lanes: int) -> int:
        """Bytes of the keys and values that a launch reads, in bf16."""
        return num_lanes * context * self.num_kv_heads * self.head_dim * 4


ATTENTION = (
    AttentionCase("Qwen3-4B", 32, 8, 128, count=36),
    AttentionCase("Qwen3-0.6B", 16, 8, 128, count=28),
)


@torch.inference_mode()
def bench_attention(
    report: Report, *, contexts: Sequence[int], lanes: Sequence[int], rounds: int
) -> None:
    """Triton's two launches beside CUDA C++'s one, in as many layers as the model has."""
    columns = ("model", "lanes, context", "Triton", "CUDA C++", "limit", "limit / CUDA C++")
    table = report.table(columns, "attention of a decode step, a layer")
    bandwidth = copy_bandwidth("cuda:0")
    ours = partial(
        attention_cuda.attend, arrivals=attention_cuda.new_arrivals(torch.device("cuda"))
    )
    bodies: dict[str, Callable[..., Tensor]] = {"Triton": attention.attend, "CUDA C++": ours}
    for case, count, context in itertools.product(ATTENTION, lanes, contexts):
        run = attend_all(case, context, count)
        graphs = {name: captured(partial(run, body)) for name, body in bodies.items()}
        found = medians(measure(graphs, rounds, clock=by_events))
        triton_s, ours_s = (found[name] / case.count for name in bodies)
        limit_s = case.num_bytes(context, count) / bandwidth
        times = us(triton_s, 2), us(ours_s, 2), us(limit_s, 2)
        table.add(case.name, f"{count} at {context}", *times, share(limit_s / ours_s))
        release_memory()


def attend_all(
    case: AttentionCase, context: int, num_lanes: int
) -> Callable[[Callable[..., Tensor]], None]:
    """A function that runs attention in every layer with the given body."""
    num_pages = context // attention.PAGE_TOKENS + 1
    new = partial(torch.randn, device="cuda")
    shape = (num_lanes, num_pages * attention.PAGE_TOKENS, case.num_kv_heads, case.head_dim)
    stores = [
        (new(shape, dtype=torch.bfloat16), new(shape, dtype=torch.bfloat16))
        for _ in range(case.count)
    ]
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    projected = new(num_lanes, width, dtype=torch.bfloat16)
    norms = (new(case.head_dim), new(case.head_dim), 1e-6)
    turn = new(num_lanes, case.head_dim // 2), new(num_lanes, case.head_dim // 2)
    lanes = torch.arange(num_lanes, dtype=torch.int32, device="cuda")
    pages = [torch.randperm(num_pages, device="cuda") for _ in range(num_lanes)]
    tables, ranks = torch.stack(pages).int(), torch.full_like(lanes, context)
    rest: dict[str, Any] = {"num_heads": case.num_heads, "rotary_dim": case.head_dim}

    def run(body: Callable[..., Tensor]) -> None:
        for keys, values in stores:
            body(projected, norms, keys, values, lanes, ranks, tables, turn, gated=False, **rest)

    return run


# --- attention of a prompt's chunk ----------------------------------------------------------------

CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class ChunkCase:
    """Attention of a layer over `context` rows before a chunk, or over a window."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def flops(self, before: int) -> int:
        """Operations of both products, for the keys visible to each row."""
        num_seen = (before + 1 + row for row in range(CHUNK_ROWS))
        seen = sum(min(num, self.window) if self.window else num for num in num_seen)
        return 4 * self.num_heads * self.head_dim * seen


CHUNKS = (
    ChunkCase("Qwen3-4B", 32, 8, 128),
    ChunkCase("Llama 3.2 1B", 32, 8, 64),
    ChunkCase("Qwen3.5-27B", 24, 4, 256),
    ChunkCase("Gemma 3 27B, window", 32, 16, 128, 1024),
    ChunkCase("Gemma 3 12B, window", 16, 8, 256, 1024),
)


@torch.inference_mode()
def bench_chunks(report: Report, *, contexts: Sequence[int], rounds: int) -> None:
    """Attention of the rows of a prefill chunk, by the library and by the kernel for Hopper."""
    if not prefill_attention.can_attend(
        torch.empty(1, 1, 128, dtype=torch.bfloat16, device="cuda")
    ):
        report.say("attention of a chunk: this GPU runs the library's alone")
        return
    columns = ("model", "rows before", "library", "ours", "library / ours", "TFLOP/s")
    table = report.table((*columns, "of a matrix product"), "attention of a chunk of 2048 rows")
    rate = matmul_rate("cuda:0")
    for case, context in itertools.product(CHUNKS, contexts):
        before = min(context, case.window - 1) if case.window else context
        graphs = {name: captured(run) for name, run in chunk_bodies(case, before).items()}
        found = medians(measure(graphs, rounds, num_warmups=2, clock=by_events))
        library_s, ours_s = found["library"], found["ours"]
        flops_rate = case.flops(before) / ours_s
        times = us(library_s), us(ours_s), figure(library_s / ours_s)
        table.add(case.name, before, *times, figure(flops_rate / 1e12), share(flops_rate / rate))
        release_memory()


def chunk_bodies(case: ChunkCase, before: int) -> dict[str, Run]:
    """Both implementations, on random rows."""
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    shape = (before + CHUNK_ROWS, case.num_kv_heads, case.head_dim)
    q, k, v = new(CHUNK_ROWS, case.num_heads, case.head_dim), new(shape), new(shape)
    if case.window is None:
        ours = partial(prefill_attention.attend_rows, q, k, v)
        return {"library": partial(attend_causally, q, k, v), "ours": ours}
    begin = torch.full((1,), before, dtype=torch.int32, device="cuda")
    apart = torch.arange(CHUNK_ROWS, device="cuda")[:, None] + before
    apart = apart - torch.arange(shape[0], device="cuda")
    mask = (apart >= 0) & (apart < case.window)
    ours = partial(prefill_attention.attend_rows, q, k, v, window=case.window, begin=begin)
    return {"library": partial(masked_attention, q, k, v, mask), "ours": ours}


# --- copies and hashes of nodes, on the CPU -------------------------------------------------------

ALIGNMENT_BYTES = 64
NUM_LAYERS = 64  # of a 27B model: every fourth attends, the others keep a recurrent state
STATE_BYTES = 48 * 128 * 128 * 4  # [value_heads, key_dim, value_dim], float32
CONV_BYTES = 10240 * 3 * 2  # [channels, taps - 1], bf16
ROW_BYTES = 4 * 256 * 2  # [kv_heads, head_dim] of one token, bf16
CHUNK_TOKENS, NUM_HASHED = 64, 32 * 1024


def bench_copies(report: Report, *, tokens: int, rounds: int) -> None:
    """The cost of copying and hashing a node of `tokens` tokens in the shape of a 27B model, and of
    hashing token chunks.
    """
    tensors = node_tensors(tokens)
    sources = list(tensors.values())
    specs = [(name, tensor.nbytes) for name, tensor in tensors.items()]
    offsets, total = layout(specs, ALIGNMENT_BYTES)
    target, plain = np.zeros(total, np.uint8), np.ones(total, np.uint8)
    parts = [(name, begin, size) for (name, size), begin in zip(specs, offsets, strict=True)]

    def fill_then_hash() -> None:
        fill(target, offsets, sources)
        checksums(list(views(target, parts).values()))

    runs: dict[str, Run] = {
        "plain copy of one buffer (numpy)": lambda: np.copyto(target, plain),
        "fill": lambda: fill(target, offsets, sources),
        "fill_with_checksums": lambda: fill_with_checksums(target, offsets, sources),
        "fill, then checksums": fill_then_hash,
        "checksums alone": lambda: checksums(sources),
    }
    seconds = medians(measure(runs, rounds))
    with busy_thread():
        busy = {"fill_with_checksums, Python busy in a thread": runs["fill_with_checksums"]}
        seconds |= medians(measure(busy, rounds))
    plain_s = next(iter(seconds.values()))
    table = report.table(
        ("what", "GB/s", "time", "of a plain copy"), f"{total / 1e6:.0f} MB a node"
    )
    for name, spent in seconds.items():
        table.add(name, figure(total / spent / 1e9, digits=1), ms(spent), share(plain_s / spent))
    ids = np.random.default_rng(0).integers(0, 150_000, NUM_HASHED, dtype=np.int32)
    key = tenant_key(b"")
    hashes: dict[str, Run] = {
        f"chain, {CHUNK_TOKENS} tokens a chunk": lambda: chain(ids, key, ROOT, CHUNK_TOKENS),
        "span_key of them all": lambda: span_key(ids, key, ROOT),
    }
    table = report.table(("what", "M tokens/s", "time"), f"{NUM_HASHED} tokens")
    for name, spent in medians(measure(hashes, rounds)).items():
        table.add(name, figure(NUM_HASHED / spent / 1e6, digits=0), ms(spent, 2))


def node_tensors(num_tokens: int) -> dict[str, np.ndarray]:
    """The tensors of one node as random bytes, each in separate memory."""
    sizes: dict[str, int] = {}
    for layer in range(NUM_LAYERS):
        if layer % 4 == 3:
            for kind in ("keys", "values"):
                sizes[format_name(0, kind, layer)] = num_tokens * ROW_BYTES
        else:
            sizes[format_name(0, "window", layer)] = CONV_BYTES
            sizes[format_name(0, "state", layer)] = STATE_BYTES
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 256, size, dtype=np.uint8) for name, size in sizes.items()}


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that constantly runs Python code, and so competes for the GIL."""
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
