"""Rounds of MTP beside plain steps, with 2.6 tokens accepted of 3 rows or more; random weights.

    python -m tests.acceptance.bench_mtp [--shape qwen3.5-27b:Q4_K_M] [--device cuda:0]
        [--lanes 1,4] [--context 1024] [--rounds 12] [--head-rows 32768]

Prints rounds in which the host takes part, by number of rows, then steps and rounds in a row, as
greedy lanes are served. The last line has the costs for tests.acceptance.simulate_choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod

import torch
from torch import Tensor

from luceasync.bench.device import at_rest, open_report
from luceasync.bench.model import parse_model
from luceasync.bench.report import Report, figure, interleave, medians, ms
from luceasync.bench.shapes import shape_of
from luceasync.bench.speculation import (
    DECODE,
    AlwaysPays,
    ForcedAcceptance,
    beside,
    row_step_s,
    started,
    step_s,
)
from luceasync.engine.acceptance import Acceptance
from luceasync.engine.decoding import LaneDecoding, PlainDecoding, SpeculativeDecoding, anchors_of
from luceasync.engine.sequence import Generation
from luceasync.models.files import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.models.precision import Precision, torch_dtype
from luceasync.pipeline import graph
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.captured_round import Accept, CapturedRound
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.plan import Plan, make_plan
from luceasync.pipeline.platform import open_platform
from luceasync.ranking.local import best_tokens
from luceasync.speculation.choice import RoundPlan, RoundShape
from luceasync.speculation.dflash.load import load_mtp
from luceasync.speculation.drafter import BlockDrafter
from luceasync.speculation.lookup import LookupDrafter, lookup_shapes
from luceasync.speculation.mtp import NAME, MtpPlacement
from luceasync.speculation.mtp_network import head_name
from luceasync.speculation.speculator import Speculator

DRAFTED = tuple(RoundShape(block, None, NAME) for block in (4, 3, 2))
COPIED = lookup_shapes((32, 16, 8, 4, 2))
FORCED = (2, 1, 2, 1, 2)  # rows that rounds accept after the first, in turn
NUM_WARMUPS = 6  # rounds until graphs are captured
ROOM_TOKENS = 4096


def forced(accept: Accept) -> Accept:
    """Accept as if so many drafted tokens had been the best ones."""
    counts: list[Tensor] = []

    def run(logits, proposed, place, stops, anchors, path, found, no_token) -> None:
        if not counts:  # made before the capture, in its first run
            counts.extend(torch.tensor(n, device=logits.device) for n in (FORCED, (0,)))
        pattern, turn = counts
        best = best_tokens(logits, None, no_token).view(proposed.shape)
        row = torch.arange(proposed.shape[1] - 1, device=proposed.device)
        is_right = row < pattern[turn % len(FORCED)]
        chain = torch.where(is_right, best[:, :-1], proposed[:, 1:])
        turn += 1
        chain = torch.cat([proposed[:, :1], chain], 1)
        accept(logits, chain, place, stops, anchors, path, found, no_token)

    return run


class ForcedRound(CapturedRound):
    """A round in which the device accepts what is forced."""

    def __init__(self, shard, capture, accept, *rest) -> None:
        super().__init__(shard, capture, forced(accept), *rest)


def load(
    name: str, device: str, num_lanes: int, max_ctx_tokens: int, head_rows: int
) -> tuple[Plan, LayerSplitBackend, Speculator]:
    """A model of random weights, and its head."""
    model, dtype = parse_model(name), "bf16" if device.startswith("cuda") else "fp32"
    spec = parse_spec(dict(shape_of(name.partition(":")[0])) | {"mtp_num_hidden_layers": 1})
    [found] = find_devices([device])
    precision = Precision.of(dtype)
    shapes, head_rows = spec.mtp_shapes(), head_rows if head_rows < spec.vocab_size else 0
    if head_rows:
        shapes[head_name(spec)] = (head_rows, spec.hidden_size)
    num_bytes = sum(map(prod, shapes.values())) * precision.weight_bytes
    mtp = MtpPlacement(spec, found, DRAFTED, num_bytes, head_rows)
    plan = make_plan(
        spec,
        [found],
        precision=precision,
        weights=[1.0],
        parallel=num_lanes,
        max_ctx_tokens=max_ctx_tokens,
        prefill_chunk_tokens=None,
        verify_rows=sorted({shape.num_rows for shape in (*DRAFTED, *COPIED)}),
        drafter=mtp.footprint(precision),
        encoding_of=model.encoding_of,
    )
    place = open_platform(device).device
    source = RandomSource(torch_dtype(precision.weights), place, encoding_of=model.encoding_of)
    backend = LayerSplitBackend.load(spec, plan, source, taps=mtp.taps)

    @contextmanager
    def opened() -> Iterator[RandomSource]:
        yield source

    speculator, _ = load_mtp(mtp, plan, backend, opened)
    return plan, backend, speculator


def round_s(speculator: Speculator, choices: Sequence[Generation], shape: RoundShape) -> float:
    """Seconds of a round in which the host takes part."""
    accepted = ForcedAcceptance(FORCED)
    accepted.next_round()
    plan = RoundPlan(shape, tuple(range(len(choices))), False)

    def run() -> None:
        speculator.round(anchors_of(choices), plan, Acceptance(choices, accepted))

    return at_rest(run)


def run_s(decoding: LaneDecoding, choices: Sequence[Generation], told: list[int]) -> float:
    """Seconds of a step of several in a row; enters how many tokens these gave."""
    before = sum(choice.num_generated for choice in choices)
    seconds = row_step_s(decoding, choices)
    told.append(sum(choice.num_generated for choice in choices) - before)
    return seconds


def bench(report: Report, given: argparse.Namespace) -> dict[str, float]:
    """Tables; returns the costs of one lane, in plain steps, by number of rows."""
    lanes = [int(n) for n in given.lanes.split(",")]
    room = given.context + ROOM_TOKENS
    plan, backend, loaded = load(given.shape, given.device, max(lanes), room, given.head_rows)
    [head] = loaded.drafters
    copies = LookupDrafter(COPIED, plan.parallel)
    both = Speculator(backend, [head, copies], plan.parallel)
    name = f"{given.shape}, {given.context} tokens before"
    shapes = {f"{s.drafter}, {s.num_rows} rows": s for s in (*DRAFTED, *COPIED)}
    columns = ("lanes", DECODE, *shapes)
    table = report.table(columns, f"{name}, rounds with the host; ratios to a step")
    costs: dict[str, float] = {}
    for count in lanes:
        choices = started(backend, both, count, given.context)
        runs = {DECODE: partial(step_s, backend, both, choices)}
        runs |= {of: partial(round_s, both, choices, shape) for of, shape in shapes.items()}
        seconds = medians(interleave(runs, given.rounds, num_warmups=NUM_WARMUPS))
        decode_s = seconds.pop(DECODE)
        table.add(count, ms(decode_s, 2), *(beside(each, decode_s) for each in seconds.values()))
        costs = costs or {of: each / decode_s for of, each in seconds.items()}
    names = [f"{shape.num_rows} rows" for shape in DRAFTED]
    speeds = [f"tokens/s of {of}, beside plain" for of in names]
    table = report.table(("lanes", DECODE, *names, *speeds), f"{name}, in a row")
    for count in lanes:
        choices = started(backend, loaded, count, given.context)
        decodings: dict[str, LaneDecoding] = {DECODE: PlainDecoding(backend)}
        for of, shape in zip(names, DRAFTED, strict=True):
            drafter = BlockDrafter(head.tapped, [shape])  # type: ignore[arg-type]
            one = Speculator(backend, [drafter], count, AlwaysPays())
            decodings[of] = SpeculativeDecoding(backend, one)
        told: dict[str, list[int]] = {of: [] for of in decodings}
        rows = {of: partial(run_s, each, choices, told[of]) for of, each in decodings.items()}
        seconds = medians(interleave(rows, given.rounds, num_warmups=3))
        decode_s = seconds.pop(DECODE)
        taus = [sum(told[of]) / sum(told[DECODE]) for of in names]
        pairs = zip(taus, seconds.values(), strict=True)
        cells = [figure(tau * decode_s / each) for tau, each in pairs]
        table.add(count, ms(decode_s, 2), *(beside(s, decode_s) for s in seconds.values()), *cells)
    backend.close()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen3.5-27b:Q4_K_M")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--lanes", default="1,4")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--head-rows", type=int, default=32768)
    given = parser.parse_args()
    graph.CapturedRound = ForcedRound  # type: ignore[misc]
    with torch.inference_mode():
        costs = bench(open_report([given.device]), given)
    copied = [f"{s.num_rows}:{costs[f'{s.drafter}, {s.num_rows} rows']:.3f}" for s in COPIED]
    drafted = costs[f"{NAME}, 4 rows"] - costs[f"{COPIED[3].drafter}, 4 rows"]
    print(f"\ncosts {','.join(copied)},drafted:{max(drafted / 3, 0.0):.3f}")


if __name__ == "__main__":
    main()
