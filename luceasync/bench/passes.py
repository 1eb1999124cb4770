"""`luceasync bench decode` and `prefill`: passes of a model beside what the hardware allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from luceasync.bench.device import (
    at_rest,
    by_events,
    copy_bandwidth,
    is_gpu,
    matmul_rate,
    synchronize,
)
from luceasync.bench.model import BenchModel, Decoding, prefill, random_prompt
from luceasync.bench.report import (
    NOTHING,
    Cell,
    Report,
    figure,
    measure,
    median,
    medians,
    ms,
    share,
)
from luceasync.bench.shapes import prefill_flops, step_bytes
from luceasync.models.precision import Dtype, torch_dtype
from luceasync.pipeline.backend import LayerSplitBackend

NUM_QUEUED = 8  # steps in a row, without waiting
NUM_PEER_TOKENS = 24
NUM_PROFILED = 14  # kernels that are listed


@torch.inference_mode()
def bench_decode(
    report: Report,
    models: Sequence[BenchModel],
    devices: Sequence[str],
    *,
    contexts: Sequence[int],
    lanes: Sequence[int],
    dtype: Dtype,
    steps: int,
    rounds: int,
    peer: bool = False,
    profile: bool = False,
) -> None:
    """A row for each model, context and number of lanes.

    `step` is one of `steps` in a row whose tokens are copied to the host; `queued` steps are not
    waited for, so that the host has no influence. The limit is the time to read the step's bytes at
    the rate of a plain copy.
    """
    bandwidth = copy_bandwidth(devices[0])
    report.say(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    columns = ("model", "lanes, context", "step", "queued", "tokens/s", "limit", "limit / step")
    table = report.table(columns, f"decode on {','.join(devices)} in {dtype}")
    for model in models:
        num_tokens = max(contexts) + steps + 64
        plan = model.plan(devices, parallel=max(lanes), max_ctx_tokens=num_tokens, dtype=dtype)
        backend = model.load(plan)
        for context in contexts:
            prompt = random_prompt(context)
            for lane in range(max(lanes)):
                prefill(backend, lane, prompt)
            seconds = step_seconds(backend, lanes, context, steps, rounds)
            for count, step_s in seconds.items():
                num_bytes = step_bytes(model.spec, plan, count, context, model.encoding_of)
                limit_s = num_bytes / bandwidth
                queued = queued_cell(backend, devices, count, context)
                rate, part = figure(count / step_s, digits=1), share(limit_s / step_s)
                place = f"{count} at {context}"
                table.add(model.name, place, ms(step_s, 3), queued, rate, ms(limit_s, 3), part)
            if profile:
                report.say(profiled(partial(decode_once, backend, 1, context)))
            if peer:
                step_s = peer_step_s(model, devices[0], dtype, context)
                cells = (ms(step_s, 3), NOTHING, figure(1 / step_s, digits=1), NOTHING, NOTHING)
                table.add(f"{model.name}, transformers", f"1 at {context}", *cells)
        backend.close()


def step_seconds(
    backend: LayerSplitBackend, lanes: Sequence[int], context: int, steps: int, rounds: int
) -> dict[int, float]:
    """Seconds per step, by the number of lanes that decode; the numbers alternate."""
    decodings = {str(count): Decoding(backend, count, context) for count in lanes}
    runs = {name: partial(decoding.steps, steps) for name, decoding in decodings.items()}
    return {int(name): s / steps for name, s in medians(measure(runs, rounds)).items()}


def queued_cell(
    backend: LayerSplitBackend, devices: Sequence[str], num_lanes: int, context: int
) -> Cell:
    """A step by the GPU's clock; empty on CPUs and splits, whose steps the host always
    waits for.
    """
    if len(devices) > 1 or not is_gpu(devices[0]):
        return NOTHING

    def run() -> None:
        for _ in range(NUM_QUEUED):
            decode_once(backend, num_lanes, context)

    seconds = median(measure({"": run}, NUM_QUEUED, clock=by_events)[""])
    return ms(seconds / NUM_QUEUED, 3)


def decode_once(backend: LayerSplitBackend, num_lanes: int, context: int) -> torch.Tensor:
    """A step whose logits stay on the device."""
    return backend.decode(list(range(num_lanes)), [context] * num_lanes, [1] * num_lanes).whole()


def profiled(run: Callable[[], object], repeats: int = 5) -> str:
    """Device time of each kernel, one per line, longest first. Where launches overlap, waiting is
    included.
    """
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    lines = []
    for event in events[:NUM_PROFILED]:
        total_ms, count = event.self_device_time_total / repeats / 1e3, event.count / repeats
        each_us = total_ms / count * 1e3
        lines.append(f"    {total_ms:8.3f} ms {count:6.0f} x {each_us:8.1f} us  {event.key[:70]}")
    return "\n".join(lines)


def peer_step_s(model: BenchModel, device: str, dtype: Dtype, context: int) -> float:
    """Seconds per decode step of transformers' generate, on random weights of the same shape or on
    the model's own.
    """
    import transformers

    library: Any = transformers  # partly typed
    place = "cuda" if is_gpu(device) else "cpu"
    if model.shape is None:
        peer = library.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch_dtype(dtype))
        peer.to(place)
    else:
        config = library.AutoConfig.for_model(**dict(model.shape))
        with torch.device(place):
            peer = library.AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype))
    peer.eval()
    prompt = torch.randint(10, 500, (1, context), device=place)

    def generate(num_tokens: int) -> Any:
        return peer.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )

    seconds = [at_rest(partial(generate, count)) for count in (1, 1, 1 + NUM_PEER_TOKENS)]
    return (seconds[2] - seconds[1]) / NUM_PEER_TOKENS


# --- prefill --------------------------------------------------------------------------------------


@torch.inference_mode()
def bench_prefill(
    report: Report,
    models: Sequence[BenchModel],
    devices: Sequence[str],
    *,
    prompts: Sequence[int],
    dtype: Dtype,
    rounds: int,
    profile: bool = False,
) -> None:
    """A row for each model and length of a prompt, beside the rate of a large matrix product."""
    limit = matmul_rate(devices[0]) * len(devices)
    columns = ("model", "tokens", "time", "tokens/s", "TFLOP/s", "matrix product", "share")
    table = report.table(columns, f"prefill on {','.join(devices)} in {dtype}")
    for model in models:
        plan = model.plan(devices, parallel=1, max_ctx_tokens=max(prompts) + 64, dtype=dtype)
        backend = model.load(plan)
        for num_tokens in prompts:
            run = partial(prefill, backend, 0, random_prompt(num_tokens))
            seconds = median(measure({"": run}, rounds)[""])
            rate = prefill_flops(model.spec, num_tokens) / seconds
            table.add(
                model.name,
                num_tokens,
                ms(seconds),
                figure(num_tokens / seconds, digits=0),
                figure(rate / 1e12),
                figure(limit / 1e12),
                share(rate / limit),
            )
            if profile:
                report.say(profiled(run, 1))
        backend.close()
