"""Compiles every Triton kernel for a GPU that is not there, as that GPU would request it:
`python -m tests.kernels.offline sm_86` prints, as JSON, what resources each kernel takes.

Triton keeps what it has compiled in its own folder, by the kernel's source and constants, the card
and the compiler, so that a kernel is compiled again only if one of these has changed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from luceasync.kernels import (
    block_attention,
    draft_attention,
    experts_order,
    experts_product,
    experts_prompt,
    experts_prompt_quant,
    experts_quant,
    experts_routing,
    experts_rows,
    gemv,
    overlap,
    prefill_attention,
    quant_dequantize,
    quant_gemv,
    rows,
    small_gemm,
)
from luceasync.kernels.best_token import accept_best, best_tokens, feed_best
from luceasync.kernels.chunk_scores import add_scores
from luceasync.kernels.commit import commit_attention, commit_delta, commit_recent
from luceasync.kernels.draft_context import write_context
from luceasync.kernels.draft_rows import draft_rows
from luceasync.kernels.experts_slots import SlotCopies, SlotTable
from luceasync.kernels.feature_ring import gather_features
from luceasync.kernels.highest_tokens import highest_tokens
from luceasync.kernels.kernel import Kernel
from luceasync.kernels.positions import rotation, row_indices, trees
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_sizes import HeadNorms
from luceasync.models.mixers.attention_triton import TritonAttention
from luceasync.models.mixers.delta import DeltaSpec
from luceasync.models.mixers.delta_triton import TritonDelta
from luceasync.models.mixers.sliding import SlidingSpec
from luceasync.models.mixers.sliding_triton import TritonSliding
from luceasync.models.pass_rows import Rows
from luceasync.models.quant.ggml import ENCODINGS
from luceasync.models.quant.random import random_packed
from luceasync.models.quant.tiles import tile
from tests.kernels import cases

KIB = 1024
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPE = torch.bfloat16
CPU = torch.device("cpu")
ATTENTION = AttentionSpec(16, 4, 256, 64, 1e7, gated=True)  # Qwen3.5-27B's sizes
DELTA = DeltaSpec(16, 48, 128, 128, 4)
NUM_ROWS = 16


@dataclass(frozen=True)
class Card:
    """A kind of GPU, as its vendor specifies it."""

    name: str
    target: GPUTarget
    shared_kib: int
    num_multiprocessors: int

    @property
    def is_nvidia(self) -> bool:
        return self.target.backend == "cuda"


CARDS = {
    card.name: card
    for card in (
        Card("sm_80", GPUTarget("cuda", 80, 32), 163, 108),  # A100
        Card("sm_86", GPUTarget("cuda", 86, 32), 99, 82),  # RTX 3090
        Card("sm_89", GPUTarget("cuda", 89, 32), 99, 128),  # RTX 4090
        Card("sm_90", GPUTarget("cuda", 90, 32), 227, 132),  # H100, H200
        Card("sm_100", GPUTarget("cuda", 100, 32), 227, 148),  # B200
        Card("sm_120", GPUTarget("cuda", 120, 32), 99, 170),  # RTX 5090
        Card("gfx942", GPUTarget("hip", "gfx942", 64), 64, 304),  # MI300X
        Card("gfx1100", GPUTarget("hip", "gfx1100", 32), 64, 96),  # RX 7900 XTX
        Card("gfx1201", GPUTarget("hip", "gfx1201", 32), 64, 64),  # RX 9070 XT
    )
}


@dataclass(frozen=True)
class Taken:
    """The resources of a compiled kernel: bytes of shared memory, registers of a thread, and
    spilled bytes.
    """

    kernel: str
    threads: int
    shared_bytes: int
    registers: int
    spilled_bytes: int


class FakeDriver:
    """A driver of one GPU that loads and launches nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def on(card: Card) -> Iterator[list[Any]]:
    """Present `card` as the GPU; yield the kernels, which are compiled instead of launched. Needs a
    process of its own.
    """
    compiled: list[Any] = []

    def compile_only(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            compiled.append(kernel._jit.warmup(*args, grid=grid, **options))

        return launch

    properties = SimpleNamespace(
        shared_memory_per_block_optin=card.shared_kib * KIB,
        shared_memory_per_block=card.shared_kib * KIB,
        multi_processor_count=card.num_multiprocessors,
    )
    arch = card.target.arch
    capability = divmod(arch, 10) if isinstance(arch, int) else (9, 4)
    driver.set_active(FakeDriver(card.target))
    with ExitStack() as told:
        for place, name, value in (
            (torch.Tensor, "is_cuda", True),
            (torch.version, "hip", None if card.is_nvidia else "6.4"),
            (torch.cuda, "get_device_properties", lambda index: properties),
            (torch.cuda, "get_device_capability", lambda index: capability),
            (Kernel, "__getitem__", compile_only),
        ):
            told.enter_context(mock.patch.object(place, name, value, create=True))
        for cached in (overlap._shared_bytes, overlap._num_multiprocessors, overlap.can_overlap):
            cached.cache_clear()
        yield compiled


# --- what is launched -----------------------------------------------------------------------------


def dense_products() -> None:
    """Decode, verify, with a residual, SwiGLU, and divided sums."""
    weight, gate_up = torch.empty(2560, 4096, dtype=DTYPE), torch.empty(19456, 2560, dtype=DTYPE)
    gemv.linear(weight.new_empty(1, 4096), weight, weight.new_empty(1, 2560))
    gemv.swiglu(weight.new_empty(16, 2560), gate_up)
    small_gemm.linear(weight.new_empty(60, 4096), weight)
    small_gemm.swiglu(weight.new_empty(22, 2560), gate_up)


def quantised_products() -> None:
    """One of each coding, of one in the tiles of few rows and of more, paired and divided too."""
    quantised("Q4_K", 1, in_all_forms=True)
    for name, num_rows in (("Q4_K", 16), ("Q6_K", 1), ("Q8_0", 1), ("IQ4_XS", 1)):
        quantised(name, num_rows)


def quantised(name: str, num_rows: int, *, in_all_forms: bool = False) -> None:
    """Products with a matrix of this type, and lookups."""
    tiled = tile(random_packed(ENCODINGS[name], (1024, 2560), torch.Generator()))
    x = torch.empty(num_rows, 2560, dtype=DTYPE)
    quant_gemv.linear(x, tiled, x.new_empty(num_rows, 1024))
    if in_all_forms:
        quant_gemv.swiglu(x, tiled)
        divided = quant_gemv.QuantTile(row_blocks=1, strides=4, steps=1, num_splits=2)
        quant_gemv.linear(x, tiled, chosen=divided)
    quant_dequantize.lookup(tiled, torch.zeros(4, dtype=torch.long), DTYPE)
    quant_dequantize.numbers(tiled, 0, 64, x.new_empty(64, 2560))


def rows_of_prefill() -> None:
    rows.rms_norm(torch.empty(64, 5120, dtype=DTYPE), torch.empty(5120), 1e-6)
    x = torch.empty(64, 5120, dtype=DTYPE)
    rows.rms_norm(x, torch.empty(5120), 1e-6, x)
    rows.rms_norm(x, torch.empty(5120), 1e-6, x, torch.empty(1))
    rows.norm_values(x, 3072, 4096, 512, 1e-6)
    rows.swiglu(torch.empty(64, 2 * 17408, dtype=DTYPE))
    rows.geglu(torch.empty(64, 2 * 21504, dtype=DTYPE))


def ends_of_a_step() -> None:
    """The kernels of positions and logits."""
    positions, lanes = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    rotation(positions, torch.ones(32))
    row_indices(positions, lanes, torch.zeros(3, dtype=torch.int32))
    best_tokens(torch.zeros(32, 248320), torch.zeros(32, 2, dtype=torch.int64), -1)
    for num_ranked, mass_at in ((1024, (1.0,)), (4096, (0.5, 1.0))):
        highest_tokens(torch.zeros(2, 248320), None, num_ranked, mass_at, -1)
    given, place = torch.zeros(32, 1, dtype=torch.int64), torch.zeros(2, 32, dtype=torch.int32)
    feed_best(torch.zeros(32, 248320), given, place, torch.zeros(32, dtype=torch.int64), -1)
    place, tokens = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 17, dtype=torch.int64)
    accepted = tokens[:, :16].contiguous(), place, tokens[:, :8].contiguous(), tokens[:, 0], place
    accept_best(torch.zeros(32, 248320), *accepted, tokens, -1)


def attention() -> None:
    """A decode step, and the rows of a chunk."""
    body = TritonAttention(ATTENTION)
    case = cases.attention_case(ATTENTION, [1, 0], [300, 5], 1, DTYPE, CPU)
    body.attend(case.projected, case.norms, (case.keys, case.values), case.rows)
    case = cases.attention_case(ATTENTION, [1], [64], 20, DTYPE, CPU)
    rows.write_heads(
        case.projected,
        (case.norms.query, case.norms.key, 1e-6),
        case.keys,
        case.values,
        case.rows.lanes,
        case.rows.row_indices,
        case.rows.tables,
        case.rows.prepared[ATTENTION],
        num_heads=16,
        rotary_dim=64,
    )


def blocks_of_attention() -> None:
    """Attention to absent parts of a prompt."""
    part = torch.empty(32, 16, 256, dtype=DTYPE), torch.empty(16, 32)
    whole = torch.empty(32, 16, 256), torch.empty(16, 32)
    block_attention.merge(whole, part, torch.empty(32, 16, 256, dtype=DTYPE))
    recent = torch.empty(64, 16, 256, dtype=DTYPE)
    scores = torch.empty(16, 64, 8)
    add_scores(recent, torch.empty(200, 4, 256, dtype=DTYPE), 0, 300, 64, scores)


def prompts_on_hopper() -> None:
    """Chunks of a prompt with each size of heads, and with a window."""
    begin = torch.zeros(1, dtype=torch.int32)
    for head_dim in prefill_attention.BLOCK_KEYS:
        q, k = (torch.empty(n, h, head_dim, dtype=DTYPE) for n, h in ((300, 16), (900, 4)))
        prefill_attention.attend_rows(q, k, k)
        prefill_attention.attend_rows(q, k, k, window=601, begin=begin)
    x, gate_up = torch.empty(500, 512, dtype=DTYPE), torch.empty(2, 4, 256, 512, dtype=DTYPE)
    rows_of, bounds = torch.zeros(1000, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    tiles, inner = experts_order.tiles_of(bounds, 1000, 128), torch.empty(1000, 256, dtype=DTYPE)
    experts_prompt.multiply(x, gate_up, tiles, inner, rows=rows_of)
    down = gate_up.view(1, 4, 512, 512)[..., :256].contiguous()
    experts_prompt.multiply(inner, down, tiles, inner.new_empty(1000, 512))
    for name in ("Q4_K", "Q6_K"):
        gates, downs = (
            tile(random_packed(ENCODINGS[name], shape, torch.Generator()))
            for shape in ((2 * 4 * 256, 512), (4 * 512, 256))
        )
        experts_prompt_quant.multiply(x, gates, 4, tiles, inner, rows=rows_of)
        experts_prompt_quant.multiply(inner, downs, 4, tiles, inner.new_empty(1000, 512))


def trees_of_attention() -> None:
    trees(cases.random_parents(2, NUM_ROWS), 4)
    case = cases.attention_case(ATTENTION, [1, 0], [300, 5], NUM_ROWS, DTYPE, CPU)
    parents = cases.random_parents(2, NUM_ROWS)
    tree = cases.torch_trees(parents, 1)
    scratch = cases.attention_scratch(case)
    state = (case.keys, case.values)
    tree_rows = cases.tree_rows(case.rows, ATTENTION, parents)
    body = TritonAttention(ATTENTION)
    body.attend_tree(case.projected, case.norms, state, tree_rows, tree, scratch)
    path = [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    rest = torch.zeros(2, NUM_ROWS, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    both = scratch[0][None], scratch[1][None]
    tables = case.rows.tables
    commit_attention(both, case.keys[None], case.values[None], *path, *rest, tables)
    queries = torch.empty(1, 2, NUM_ROWS, 16, 256, dtype=DTYPE)
    commit_recent(queries, torch.empty(1, 3, 64, 16, 256, dtype=DTYPE), *path, *rest)


def windows() -> None:
    """A step and a tree, with Gemma 3's sizes."""
    spec = SlidingSpec(8, 4, 256, 256, 1e4, gated=False, window=1024)
    body, rings = TritonSliding(spec), [torch.empty(2, 1024, 4, 256, dtype=DTYPE)] * 2
    small = HeadNorms(torch.empty(256), torch.empty(256), 1e-6)
    for num_rows in (1, NUM_ROWS):
        projected = torch.empty(2, num_rows, 16 * 256, dtype=DTYPE)
        positions, lanes = torch.zeros(2, num_rows).int(), torch.zeros(2, dtype=torch.int32)
        prepared = {spec: body.prepare(positions)}
        given = Rows((), lanes, positions, torch.zeros(2, 0).int(), prepared)
        if num_rows == 1:
            body.attend(projected, small, tuple(rings), given)
            continue
        tree = cases.torch_trees(cases.random_parents(2, num_rows), 1)
        scratch = tuple(torch.empty(2, num_rows, 4, 256, dtype=DTYPE) for _ in range(2))
        body.attend_tree(projected, small, tuple(rings), given, tree, scratch)


def rings_of_a_prompt() -> None:
    rings, begin = [torch.empty(1024, 4, 256, dtype=DTYPE)] * 2, torch.zeros(1, dtype=torch.int32)
    chunk = [torch.empty(1023 + 300, 4, 256, dtype=DTYPE)] * 2
    rows.unroll(rings, begin, chunk)
    rows.keep_newest(rings, begin, [each[1023:] for each in chunk])


def delta() -> None:
    """A step, a chunk, a tree and its commit."""
    body = TritonDelta(DELTA)
    for count in (1, 128):
        case = cases.delta_case(DELTA, [1, 0], count, DTYPE, CPU)
        case.run(TritonDelta)
    for num_rows in (2 * NUM_ROWS, NUM_ROWS):
        case = cases.delta_case(DELTA, [1, 0], num_rows, DTYPE, CPU)
        scratch = cases.delta_scratch(case)
        tree = cases.torch_trees(cases.random_parents(2, num_rows), DELTA.conv_kernel)
        state = (case.conv_state, case.delta_state)
        body.delta_tree(case.projected, case.parameters, *state, case.rows, tree, scratch)
    inputs, keys, updates, totals = (tensor[None] for tensor in scratch)
    lanes, counts = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    path = (lanes, torch.zeros(2, NUM_ROWS, dtype=torch.int32), counts)
    commit_delta(
        (inputs, keys, updates, totals), case.conv_state[None], case.delta_state[None], *path
    )


def experts() -> None:
    """What routes few rows, with slots and without; products of few and of many rows."""
    num_experts, dim, inner = 256, 2048, 512
    router, gate = torch.empty(num_experts, dim), torch.empty(1, dim)
    table = SlotTable.empty(num_experts, 64, CPU)
    arrivals, options = torch.zeros(1).int(), {"num_chosen": 8, "has_shared": True}
    for num_rows in (1, 4, 16):
        x = torch.empty(num_rows, dim, dtype=DTYPE)
        experts_rows.scores(x, (torch.empty(dim), 1e-6), router, gate)
        logits = torch.empty(num_rows, num_experts)
        found = experts_routing.choose(logits, None, arrivals, **options)
        experts_routing.choose(logits, None, arrivals, table=table, **options)
    weights, rows_of, places, _, tiles, _ = found
    pairs = [(torch.empty(4, 64, dim, dtype=DTYPE), torch.empty(2, 64, dim, dtype=DTYPE))]
    SlotCopies(pairs, CPU).run(torch.zeros(4, 2, dtype=torch.int32))
    gate_up = torch.empty(2, 64, inner, dim, dtype=DTYPE)
    down, shared = gate_up.new_empty(64, dim, inner), gate_up.new_empty(2 * inner, dim)
    results = experts_product.swiglu(x, gate_up, tiles, rows_of, shared=shared, far=gate_up)
    results = experts_product.linear(results, down, tiles, len(results))
    experts_rows.add_weighted(results, weights, places, x, x, torch.empty(16))
    experts_routing.choose_alone(torch.empty(500, num_experts), None, num_chosen=8)
    x, out = torch.empty(500, dim, dtype=DTYPE), torch.empty(4000, inner, dtype=DTYPE)
    rows_of = torch.zeros(4000, dtype=torch.int32)
    experts_product.many(x, gate_up, tiles, out, tile_rows=64, rows=rows_of)
    experts_product.many(out, down[None], tiles, out.new_empty(4000, dim), tile_rows=64)
    order = experts_order.order(torch.zeros(500, 8, dtype=torch.int32), num_experts, 64)
    experts_order.tiles_of(order.bounds, 4000, 64)
    parts = experts_rows.parts_of(router, gate)
    experts_rows.sums_of_parts(torch.empty(500, parts.shape[:2].numel()), 256, has_gate=True)
    for name in ("Q4_K", "Q6_K"):
        for parts, shape in ((2, (2 * 4 * inner, dim)), (1, (4 * dim, inner))):
            own = tile(random_packed(ENCODINGS[name], shape, torch.Generator()))
            x = torch.empty(8, shape[1], dtype=DTYPE)
            if parts == 2:
                experts_quant.swiglu(x, own, 4, tiles, rows_of[:8], shared=own, far=own)
            else:
                experts_quant.linear(x, own, 4, tiles, 8)


def drafts() -> None:
    """A drafter's rows, its context and its block."""
    lanes = torch.zeros(2, dtype=torch.int32)
    block = draft_rows(lanes, lanes, NUM_ROWS, torch.empty(64), torch.tensor([2048]).int())
    norms = torch.empty(5, 128), 1e-6
    rings = torch.empty(5, 2, 2048, 8, 128, dtype=DTYPE)
    projected = torch.empty(2, NUM_ROWS, 5 * 2 * 1024, dtype=DTYPE)
    write_context(projected, norms, torch.arange(5), rings, rings, block, lanes)
    one = torch.zeros(1, dtype=torch.int32)
    taps, store = [torch.zeros(1, 16, 512, dtype=torch.bfloat16)] * 3, torch.zeros(65, 1536)
    gather_features(taps, one, one.long(), one, one.expand(1, 16).contiguous(), store, 64)
    draft_window = draft_attention.DraftWindow(torch.zeros(2, dtype=torch.long), window=2048)
    projected = torch.empty(2, NUM_ROWS, (32 + 16) * 128, dtype=DTYPE)
    small = torch.empty(128), torch.empty(128), 1e-6
    draft_attention.attend_block(
        projected, small, rings[0], rings[0], block, block.spans[0], draft_window, num_heads=32
    )


ALL = (
    dense_products,
    quantised_products,
    rows_of_prefill,
    ends_of_a_step,
    attention,
    blocks_of_attention,
    trees_of_attention,
    windows,
    rings_of_a_prompt,
    delta,
    experts,
    drafts,
)


ONLY_ON = {"sm_90": (prompts_on_hopper,)}


# --- what it takes --------------------------------------------------------------------------------


def taken(compiled: Any, card: Card) -> Taken:
    """Registers and spills as the compiler reports them."""
    if card.is_nvidia:
        registers, spilled = _of_cubin(compiled.asm["cubin"])
    else:
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        spilled = 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
    metadata = compiled.metadata
    threads = metadata.num_warps * card.target.warp_size
    return Taken(metadata.name, threads, metadata.shared, registers, spilled)


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [BINARIES / "cuobjdump", "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", told)
    return int(found[1]), max(int(found[2]), int(found[3]))


def main() -> None:
    card = CARDS[sys.argv[1]]
    with on(card) as compiled:
        for launches in (*ALL, *ONLY_ON.get(card.name, ())):
            launches()
    once = {kernel.hash: kernel for kernel in compiled}
    print(json.dumps([asdict(taken(kernel, card)) for kernel in once.values()]))


if __name__ == "__main__":
    main()
