"""Decode and prefill of a small model of experts in Q4_K_M's types, beside llama.cpp.

    python -m tests.acceptance.bench_experts [--context 512] [--threads 2] [--peer PYTHON]

Random weights: 4 layers of 64 experts. `--peer` is an interpreter with llama-cpp-python; the two
take turns. `paired` is the median of each turn's ratio, with its quartiles.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does, before torch

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import gguf
import numpy as np
import torch

from luceasync.bench.report import median
from luceasync.models.files import ModelFiles
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from tests.acceptance.quantised.processes import Peer
from tests.gguf.blocks import random_blocks
from tests.gguf.tiny_files import QWEN2, VOCAB, add_tokenizer, save_tokenizer

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 2048, 32, 4, 128
EXPERTS, CHOSEN, INNER = 64, 8, 768
SLICE_TOKENS, NUM_SLICES = 4, 24  # decoded in a turn; turns behind a prompt
Samples = list[list[Sequence[float]]]  # of each turn: ours, the peer's; each by both clocks
SCALES = {"Q4_K": 2e-4, "Q6_K": 1e-5}


def write(folder: Path, num_layers: int = LAYERS) -> Path:
    """The model as a GGUF file."""
    folder.mkdir(exist_ok=True)
    path = folder / "experts.gguf"
    blocks_of = cache(random_blocks)  # layers that are alike may be the same
    writer = gguf.GGUFWriter(path, "qwen3moe", use_temp_file=False)
    writer.add_block_count(num_layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(INNER)
    add_tokenizer(writer, save_tokenizer(folder / "tokenizer", QWEN2), "qwen3moe")
    for name, shape, kind in tensors(num_layers):
        if kind == "F32":
            random = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
            numbers = 1 + 0.1 * random if len(shape) == 1 else random * HIDDEN**-0.5
            writer.add_tensor(name, numbers.astype(np.float32))
            continue
        blocks = blocks_of(kind, int(np.prod(shape[:-1])), shape[-1], scale=SCALES[kind])
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(num_layers: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of each tensor: as in a Q4_K_M file, in which half of the layers have
    more bits where it matters most.
    """
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found: list[tuple[str, tuple[int, ...], str]] = [
        ("token_embd.weight", (VOCAB, HIDDEN), "Q4_K"),
        ("output_norm.weight", (HIDDEN,), "F32"),
        ("output.weight", (VOCAB, HIDDEN), "Q6_K"),
    ]
    for layer in range(num_layers):
        more = "Q6_K" if layer % 2 else "Q4_K"
        found += [
            (f"blk.{layer}.{name}.weight", shape, kind)
            for name, shape, kind in (
                ("attn_norm", (HIDDEN,), "F32"),
                ("attn_q", (query, HIDDEN), "Q4_K"),
                ("attn_k", (kv, HIDDEN), "Q4_K"),
                ("attn_v", (kv, HIDDEN), more),
                ("attn_output", (HIDDEN, query), "Q4_K"),
                ("attn_q_norm", (HEAD_DIM,), "F32"),
                ("attn_k_norm", (HEAD_DIM,), "F32"),
                ("ffn_norm", (HIDDEN,), "F32"),
                ("ffn_gate_inp", (EXPERTS, HIDDEN), "F32"),
                ("ffn_gate_exps", (EXPERTS, INNER, HIDDEN), "Q4_K"),
                ("ffn_up_exps", (EXPERTS, INNER, HIDDEN), "Q4_K"),
                ("ffn_down_exps", (EXPERTS, HIDDEN, INNER), more),
            )
        ]
    return found


def open_backend(path: Path, context: int) -> LayerSplitBackend:
    files = ModelFiles(path)
    plan = make_plan(
        files.spec,
        [offer_of("cpu:0", 2**34)],
        precision=Precision.of("bf16"),
        weights=None,
        parallel=1,
        max_ctx_tokens=context + 256,
        prefill_chunk_tokens=512,
        encoding_of=files.weights.encoding,
    )
    begin = time.perf_counter()
    backend = LayerSplitBackend.open(files, plan)
    seconds, size = time.perf_counter() - begin, path.stat().st_size
    print(f"{size / 1e9:.2f} GB loaded in {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s")
    return backend


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    begin, busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - begin, time.process_time() - busy


class Ours:
    """One lane of a backend, as Peer has llama.cpp's."""

    def __init__(self, backend: LayerSplitBackend) -> None:
        self._backend = backend
        self._at = self._token = 0

    def prefill(self, ids: list[int]) -> tuple[float, float]:
        """Seconds of the ids, see `timed`."""
        self._backend.reset(0)
        return timed(partial(self._prefill, ids))

    def more(self, num_tokens: int) -> tuple[float, float]:
        """Seconds of so many greedy tokens, see `timed`."""
        return timed(partial(self._decode, num_tokens))

    def _prefill(self, ids: list[int]) -> None:
        for begin in range(0, len(ids), 512):
            logits = self._backend.prefill(0, begin, ids[begin : begin + 512], project=True)
        assert logits is not None
        self._at, self._token = len(ids), int(logits.argmax())

    def _decode(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            row = self._backend.decode([0], [self._at], [self._token]).whole()
            self._at, self._token = self._at + 1, int(row.argmax())


def in_turns(ours: Ours, peer: Peer | None, ids: list[int], rounds: int) -> dict[str, Samples]:
    """Seconds of prompts, and of slices of SLICE_TOKENS: ours and the peer's, one after the other,
    each the first one every other time.
    """
    samples: dict[str, Samples] = {"prefill": [], "decode": []}
    for number in range(rounds + 1):
        turns = [lambda: ours.prefill(ids)]
        turns += [] if peer is None else [lambda: peer.timed(ids, 0)[:2]]
        found = both(turns, number % 2 == 1)
        turns = [lambda: ours.more(SLICE_TOKENS)]
        turns += [] if peer is None else [lambda: peer.more(SLICE_TOKENS)]
        slices = [both(turns, i % 2 == 1) for i in range(NUM_SLICES)]
        if number:  # the first one has what is done once
            samples["prefill"].append(found)
            samples["decode"] += slices
    return samples


def both(turns: Sequence[Callable[[], Sequence[float]]], is_turned: bool) -> list[Sequence[float]]:
    """What they return, run in this order or in the other."""
    found = [run() for run in (reversed(turns) if is_turned else turns)]
    return found[::-1] if is_turned else found


def report(what: str, count: int, samples: Samples) -> None:
    """Print rates of `count` tokens by both clocks, and how they compare."""
    for clock, name in enumerate(("clock", "processor")):
        rows = [[seconds[clock] for seconds in row] for row in samples]
        for kind, of in (("median", median), ("best", min)):
            rates = [count / of(column) for column in zip(*rows, strict=True)]
            line = ", ".join(f"{rate:.1f}" for rate in rates)
            if len(rates) == 2:
                line += f", ratio {rates[0] / rates[1]:.2f}"
            print(f"{what}, tokens a second by the {name}, {kind}: {line}")
        if len(rows[0]) == 2:
            ratios = sorted(theirs / own for own, theirs in rows)
            low, high = ratios[len(ratios) // 4], ratios[len(ratios) * 3 // 4]
            print(f"{what}, by the {name}, paired: {median(ratios):.2f} ({low:.2f} to {high:.2f})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ids = [(7 * i) % 400 + 3 for i in range(options.context)]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder))
        backend = open_backend(path, options.context)
        peer = Peer(options.peer, path, options.context) if options.peer else None
        samples = in_turns(Ours(backend), peer, ids, options.rounds)
    report("prefill", options.context, samples["prefill"])
    report("decode", SLICE_TOKENS, samples["decode"])


if __name__ == "__main__":
    main()
