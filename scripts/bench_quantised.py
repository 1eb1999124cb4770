"""Decode, verify and prefill of quantised models with random weights on one GPU.

    python -m scripts.bench_quantised [--models qwen3.5-27b:Q4_K_M,qwen3-4b:Q4_K,qwen3-4b:Q8_0]

The limit of a step is its bytes / the copy bandwidth. `step`: SPAN in a row, whose tokens the host
reads; `queued`: none is waited for; verify rounds in a row bring their best tokens and commit.
"""

from __future__ import annotations

import argparse

import torch

from luceasync.bench import command
from luceasync.bench.device import at_rest, by_events, copy_bandwidth, synchronize
from luceasync.bench.figures import median, medians
from luceasync.bench.mixes import form_of
from luceasync.bench.model import SPAN, Decoding, load_random, plan_for, prefill, random_prompt
from luceasync.bench.report import Report, figure, ms, share
from luceasync.bench.rounds import measure
from luceasync.bench.shapes import SHAPES
from luceasync.models.config import parse_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.plan import Plan
from scripts.bench_verify import chain_of, round_of

CONTEXT, PROMPT = 1024, 8192
NUM_VERIFIED = 16
NUM_STEPS, NUM_QUEUED, NUM_ROUNDS, NUM_PREFILLS = 40, 10, 4, 3
MODELS = "qwen3.5-27b:Q4_K_M,qwen3-4b:Q4_K,qwen3-4b:Q8_0"


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, device="cuda:0")
    parser.add_argument("--models", type=command.names, default=MODELS)
    parser.add_argument("--plain", action="store_true", help="each shape in bfloat16 too")
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    names = list(options.models)
    if options.plain:
        names += dict.fromkeys(f"{name.partition(':')[0]}:plain" for name in names)
    copy_bytes_per_s = copy_bandwidth(options.device)
    report.say(f"Copy bandwidth {copy_bytes_per_s / 1e9:.0f} GB/s.")
    for name in names:
        bench_model(report, name, copy_bytes_per_s, options)
        torch.cuda.empty_cache()


@torch.inference_mode()
def bench_model(
    report: Report, name: str, copy_bytes_per_s: float, options: argparse.Namespace
) -> None:
    """One model's row."""
    shape_name, _, mix = name.partition(":")
    shape = SHAPES[shape_name]
    forms = form_of(mix, shape["num_hidden_layers"])
    plan = plan_for(
        shape,
        [options.device],
        parallel=1,
        max_ctx_tokens=PROMPT + 256,
        verify_rows=[NUM_VERIFIED],
        form_of=forms,
    )
    backend = load_random(shape, plan, form_of=forms)
    table = report.table(
        ("model", "weights", "step", "queued", "tokens/s", "limit", "limit / step",
         f"verify {NUM_VERIFIED}", "verify / step", f"prefill {PROMPT}"),
        name,
    )  # fmt: skip
    prompt = random_prompt(PROMPT)
    prefill(backend, 0, prompt[:CONTEXT])
    num_bytes = read_bytes(shape_name, mix, plan)
    limit_s = num_bytes / copy_bytes_per_s
    queued = measure({"": lambda: queue(backend)}, NUM_STEPS // NUM_QUEUED, clock=by_events)
    queued_s = median(queued[""]) / NUM_QUEUED
    verify = round_of(chain_of(NUM_VERIFIED), backend, options.device, 1, CONTEXT)
    decoding = Decoding(backend, 1, CONTEXT)
    runs = {
        "steps": lambda: decoding.steps(SPAN),
        "verify": lambda: ([verify() for _ in range(NUM_ROUNDS)], synchronize()),
    }
    seconds = medians(measure(runs, NUM_STEPS, num_warmups=3))
    prefill_s = median(
        measure({"": lambda: prefill(backend, 0, prompt)}, NUM_PREFILLS, clock=at_rest)[""]
    )
    step_s, verify_s = seconds["steps"] / SPAN, seconds["verify"] / NUM_ROUNDS
    table.add(
        name,
        figure(sum(shard.weight_bytes for shard in plan.shards) / 1e9, "GB"),
        ms(step_s, 3),
        ms(queued_s, 3),
        figure(1 / step_s, digits=1),
        ms(limit_s, 3),
        share(limit_s / step_s),
        ms(verify_s, 3),
        figure(verify_s / step_s),
        figure(PROMPT / prefill_s, "tokens/s", 0),
    )
    backend.close()


def read_bytes(shape_name: str, mix: str, plan: Plan) -> int:
    """What a step cannot avoid to read: of an untied embedding only a row."""
    shape = SHAPES[shape_name]
    weights = sum(shard.weight_bytes for shard in plan.shards)
    if not shape["tie_word_embeddings"]:
        spec = parse_spec(dict(shape))
        form = form_of(mix, spec.num_layers)("embed_tokens")
        weights -= form.num_bytes((spec.vocab_size, spec.hidden_size), Precision.of("bf16"))
    state = 2 * sum(shard.lane_state_bytes for shard in plan.shards)
    return weights + state + CONTEXT * sum(shard.token_bytes for shard in plan.shards)


def queue(backend: LayerSplitBackend) -> None:
    """Steps one after the other, none waited for."""
    for _ in range(NUM_QUEUED):
        backend.decode([0], [CONTEXT], [1]).whole()


if __name__ == "__main__":
    main()
