"""Decode and prompts beside llama.cpp on one GPU, from one file of random weights in Q4_K_M.

python -m tests.acceptance.bench_llama_cpp --llama-bench PATH [--shape qwen3-4b] [--slots 25,64]
    [--rounds 3] [--limit-s 120]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from luceasync.bench.device import at_rest, open_report, release_memory
from luceasync.bench.model import prefill, random_prompt
from luceasync.bench.report import median
from luceasync.bench.shapes import Shape, shape_of
from luceasync.gguf.vocabulary import QWEN2, QWEN35
from luceasync.models.files import ModelFiles
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.expert_plan import ExpertRequest, expert_layers
from luceasync.pipeline.plan import make_plan
from tests.gguf.blocks import random_blocks
from tests.gguf.tiny_files import save_tokenizer
from tests.tiny import CHATML

STEPS = 64
SCALES = {"Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 1e-5, "Q8_0": 2e-4}
PEER_LIMIT_S = 240
Tensors = Iterator[tuple[str, tuple[int, ...], str]]


def write(folder: Path, shape: Shape) -> Path:
    """The model as a GGUF file. Layers that are alike have the same numbers."""
    path, arch = folder / "model.gguf", _architecture(shape)
    writer = gguf.GGUFWriter(path, arch, use_temp_file=False)
    _add_keys(writer, arch, shape)
    _add_tokenizer(writer, arch, shape["vocab_size"], folder / "tokenizer")
    blocks_of = cache(random_blocks)
    for name, size, kind in tensors(shape):
        if kind == "F32":
            numbers = np.random.default_rng(len(name)).normal(size=size)
            numbers = 1 + 0.1 * numbers if len(size) == 1 else numbers * size[-1] ** -0.5
            if name.endswith("ssm_a"):
                numbers = -np.abs(numbers)
            writer.add_tensor(name, numbers.astype(np.float32))
            continue
        blocks = blocks_of(kind, prod(size[:-1]), size[-1], scale=SCALES[kind])
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, blocks.reshape(*size[:-1], -1), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(shape: Shape) -> Tensors:
    """Name, shape and type of each tensor: as in a Q4_K_M file, in which half of the layers have
    more bits where it matters most.
    """
    hidden, vocab, count = (
        shape[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers")
    )
    is_tied = shape["tie_word_embeddings"]
    yield "token_embd.weight", (vocab, hidden), "Q6_K" if is_tied else "Q4_K"
    yield "output_norm.weight", (hidden,), "F32"
    if not is_tied:
        yield "output.weight", (vocab, hidden), "Q6_K"
    interval, eighth = shape.get("full_attention_interval", 1), count // 8
    for layer in range(count):
        is_fine = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        more = "Q6_K" if is_fine else "Q4_K"
        is_linear = (layer + 1) % interval != 0
        parts = _linear(shape) if is_linear else _attention(shape, more)
        for name, size, kind in (*parts, *_feed_forward(shape, more)):
            is_bias = name in ("ssm_dt", "ssm_a")
            own = {"ssm_dt": "ssm_dt.bias", "ssm_a": "ssm_a"}[name] if is_bias else f"{name}.weight"
            yield f"blk.{layer}.{own}", size, kind


def _attention(shape: Shape, more: str) -> Tensors:
    hidden, head = shape["hidden_size"], shape["head_dim"]
    query, kv = (shape[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    gates = 2 if "linear_num_value_heads" in shape else 1
    yield "attn_norm", (hidden,), "F32"
    yield "attn_q", (gates * query, hidden), "Q4_K"
    yield "attn_k", (kv, hidden), "Q4_K"
    yield "attn_v", (kv, hidden), more
    yield "attn_output", (hidden, query), "Q4_K"
    yield "attn_q_norm", (head,), "F32"
    yield "attn_k_norm", (head,), "F32"


def _linear(shape: Shape) -> Tensors:
    hidden, heads = shape["hidden_size"], shape["linear_num_value_heads"]
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    values = heads * shape["linear_value_head_dim"]
    yield "attn_norm", (hidden,), "F32"
    yield "attn_qkv", (2 * keys + values, hidden), "Q5_K"
    yield "attn_gate", (values, hidden), "Q4_K"
    yield "ssm_conv1d", (2 * keys + values, shape["linear_conv_kernel_dim"]), "F32"
    yield "ssm_dt", (heads,), "F32"
    yield "ssm_a", (heads,), "F32"
    yield "ssm_beta", (heads, hidden), "Q8_0"
    yield "ssm_alpha", (heads, hidden), "Q8_0"
    yield "ssm_norm", (shape["linear_value_head_dim"],), "F32"
    yield "ssm_out", (hidden, values), "Q4_K"


def _feed_forward(shape: Shape, more: str) -> Tensors:
    hidden = shape["hidden_size"]
    is_hybrid = "linear_num_value_heads" in shape
    yield "post_attention_norm" if is_hybrid else "ffn_norm", (hidden,), "F32"
    if "num_experts" not in shape:
        inner = shape["intermediate_size"]
        yield "ffn_gate", (inner, hidden), "Q4_K"
        yield "ffn_up", (inner, hidden), "Q4_K"
        yield "ffn_down", (hidden, inner), more
        return
    experts, inner = shape["num_experts"], shape["moe_intermediate_size"]
    shared = shape["shared_expert_intermediate_size"]
    yield "ffn_gate_inp", (experts, hidden), "F32"
    yield "ffn_gate_exps", (experts, inner, hidden), "Q4_K"
    yield "ffn_up_exps", (experts, inner, hidden), "Q4_K"
    yield "ffn_down_exps", (experts, hidden, inner), more
    yield "ffn_gate_inp_shexp", (hidden,), "F32"
    yield "ffn_gate_shexp", (shared, hidden), "Q4_K"
    yield "ffn_up_shexp", (shared, hidden), "Q4_K"
    yield "ffn_down_shexp", (hidden, shared), more


def _architecture(shape: Shape) -> str:
    """Raises SystemExit for a shape that is not written here."""
    names = {"qwen3": "qwen3", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
    if shape["model_type"] not in names:
        raise SystemExit(f"--shape of {shape['model_type']}: one of {', '.join(names)} is expected")
    return names[shape["model_type"]]


def _add_keys(writer: gguf.GGUFWriter, arch: str, shape: Shape) -> None:
    head = shape["head_dim"]
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape["rope_parameters"]["rope_theta"])
    if "num_experts" in shape:
        writer.add_expert_count(shape["num_experts"])
        writer.add_expert_used_count(shape["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(shape["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(shape["shared_expert_intermediate_size"])
    else:
        writer.add_feed_forward_length(shape["intermediate_size"])
    if arch == "qwen3":
        return
    pairs = head // 8
    writer.add_rope_dimension_count(head // 4)
    writer.add_rope_dimension_sections([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
    writer.add_ssm_conv_kernel(shape["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(shape["linear_key_head_dim"])
    writer.add_ssm_group_count(shape["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(shape["linear_num_value_heads"])
    writer.add_ssm_inner_size(shape["linear_num_value_heads"] * shape["linear_value_head_dim"])
    writer.add_uint32(f"{arch}.full_attention_interval", shape["full_attention_interval"])


def _add_tokenizer(writer: gguf.GGUFWriter, arch: str, num_vocab: int, folder: Path) -> None:
    """A small one, and unused tokens up to the number of rows."""
    tokenizer = save_tokenizer(folder, QWEN35 if arch.startswith("qwen35") else QWEN2)
    names = {i: token for token, i in tokenizer.get_vocab().items()}
    used, unused = gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35" if arch.startswith("qwen35") else "qwen2")
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(num_vocab)])
    writer.add_token_types([used if i in names else unused for i in range(num_vocab)])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHATML)


def ours(
    path: Path,
    device: str,
    context: int,
    prompts: Sequence[int],
    num_slots: int | None,
    num_rounds: int,
) -> dict[str, float]:
    """Tokens a second, by what is run, as `theirs` has them. `num_slots`: of each layer's experts;
    None: all are on the device.
    """
    files, precision = ModelFiles(path), Precision.of("bf16")
    encoding = files.weights.encoding
    layers = expert_layers(files.spec, 0, files.spec.num_layers, precision, encoding)
    asked = None
    if num_slots is not None:
        asked = ExpertRequest(sum(layer.slots_bytes(num_slots) for layer in layers), 1 << 40)
    plan = make_plan(
        files.spec,
        find_devices([device]),
        precision=precision,
        weights=None,
        parallel=1,
        max_ctx_tokens=max(context + 4 * STEPS, *prompts, 512) + 64,
        prefill_chunk_tokens=None,
        encoding_of=encoding,
        experts=asked,
    )
    begin = time.perf_counter()
    backend = LayerSplitBackend.open(files, plan)
    took = time.perf_counter() - begin
    print(f"{path.stat().st_size / 1e9:.2f} GB loaded in {took:.1f} s", flush=True)
    found: dict[str, float] = {}
    try:
        prefill(backend, 0, random_prompt(context))
        steps = partial(decode, backend, context, random_prompt(context + STEPS)[context:])
        runs = [at_rest(steps) for _ in range(num_rounds + 1)]
        found[f"decode at {context}"] = STEPS / median(runs[1:])
        for count in prompts:
            ids = random_prompt(count)
            runs = [at_rest(partial(prefill, backend, 0, ids)) for _ in range(num_rounds + 1)]
            found[f"prompt of {count}"] = count / median(runs[1:])
    finally:
        backend.close()
    del backend, steps, runs
    release_memory()
    return found


def decode(backend: LayerSplitBackend, position: int, tokens: Sequence[int]) -> None:
    """Steps over these tokens, random as llama-bench has them, since a model of random numbers
    repeats itself and its experts. Each step's best token is read, as greedy decoding does.
    """
    for at, token in enumerate(tokens, position):
        int(backend.decode([0], [at], [token]).whole().argmax())


def theirs(
    program: Path,
    path: Path,
    context: int,
    prompts: Sequence[int],
    num_cpu_layers: int,
    num_rounds: int,
) -> dict[str, float]:
    """Tokens a second, by what is run. Raises subprocess.SubprocessError."""
    command = [program, "-m", path, "-ngl", 999, "-o", "json", "-r", num_rounds, "-ub", 2048]
    command += ["-fa", "on", "-n", STEPS, "-d", context, "-p", 0]
    command += ["--n-cpu-moe", num_cpu_layers] if num_cpu_layers else []
    found = {f"decode at {context}": _rates(command)[0]["avg_ts"]}
    if prompts:
        at = command.index("-n")
        sizes = ",".join(map(str, prompts))
        command = [*command[:at], "-n", 0, "-p", sizes, "-d", 0, *command[at + 6 :]]
        for each in _rates(command):
            found[f"prompt of {each['n_prompt']}"] = each["avg_ts"]
    return found


def _rates(command: Sequence[object]) -> list[dict[str, Any]]:
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=PEER_LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-600:]}")
    rates: list[dict[str, Any]] = json.loads(done.stdout)
    return rates


def show(what: str, own: dict[str, float], peer: dict[str, float]) -> None:
    """Print rates beside each other."""
    for name, rate in own.items():
        ratio = f"{peer[name]:.1f}, ratio {rate / peer[name]:.2f}" if name in peer else "-"
        print(f"{what}, {name}, tokens a second: {rate:.1f}, llama.cpp {ratio}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompts", default="8192,512")
    parser.add_argument(
        "--slots",
        default="",
        help="experts of each layer on the device, beside --n-cpu-moe with no fewer bytes there",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--limit-s", type=float, default=3600, help="begin no more --slots after this long"
    )
    given = parser.parse_args()
    begin = time.monotonic()
    shape = shape_of(given.shape)
    open_report([given.device])
    prompts = [int(count) for count in given.prompts.split(",") if count]
    budgets = [None, *(int(count) for count in given.slots.split(",") if count)]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = write(Path(folder), shape)
        print(f"written after {time.monotonic() - begin:.0f} s", flush=True)
        for num_slots in budgets:
            all_resident = num_slots is None
            if time.monotonic() - begin > given.limit_s:
                print(f"{num_slots} slots a layer: left out, --limit-s", flush=True)
                continue
            asked = prompts if all_resident else []
            own = ours(path, given.device, given.context, asked, num_slots, given.rounds)
            peer: dict[str, float] = {}
            if given.llama_bench is not None:
                num_layers, count = shape["num_hidden_layers"], shape.get("num_experts", 1)
                # Rounded down: llama.cpp has at least our bytes on the device.
                on_cpu = 0 if num_slots is None else num_layers * (count - num_slots) // count
                peer = theirs(given.llama_bench, path, given.context, asked, on_cpu, given.rounds)
            what = given.shape if all_resident else f"{given.shape}, {num_slots} slots a layer"
            show(what, own, peer)
            print(f"after {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
