"""Whole rounds of speculation beside plain decode steps on a GPU, of well-known shapes with random
weights, target and drafter; which rows are accepted is forced.

    python -m scripts.bench_rounds [--shape qwen3-4b] [--contexts 1024,32768] [--lanes 1,4]

A round is all that a step of the engine does: propose, verify, accept, commit, take up. Rounds and
plain steps alternate in one run; ratios are of their medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from luceasync.dflash.adapt import Plan as StepPlan
from luceasync.dflash.adapt import Shape
from luceasync.dflash.decode import Speculator
from luceasync.dflash.draft import DraftNetwork, draft_ops_on
from luceasync.dflash.draft_config import parse_draft_spec
from luceasync.dflash.load import join
from luceasync.dflash.placement import guest_of
from luceasync.dflash.weights import read_weights
from luceasync.engine.acceptance import Acceptance
from luceasync.engine.decoding import anchors_of, choose_next
from luceasync.engine.generation import Generation, Prepared
from luceasync.models.config import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.platform import open_platform
from luceasync.request import Sampling
from luceasync.text.detokenizer import SafeText
from scripts.bench_gpu import SHAPES

NUM_ROUNDS = 40
NUM_DROPPED = 6  # until graphs are captured
ACCEPTED = (5, 6)  # rows, in turn: 6.5 tokens a round
SHAPES_OF_ROUNDS = (Shape(16), Shape(8), Shape(16, 22), Shape(16, 60))
DRAFT_LAYERS = 5
MAX_TOKENS = 4096


class NoText:
    """A detokenizer for tokens that mean nothing."""

    has_stops = stopped = False

    def push(self, token: int) -> SafeText:
        return SafeText("", False)

    def flush(self) -> str:
        return ""


class Forced:
    """Accepts as many rows as its turn says, whatever they propose."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._turns = itertools.cycle(counts)
        self._count = 0

    def next_round(self) -> None:
        self._count = next(self._turns)

    def __call__(
        self, tokens: Sequence[int], parents: Sequence[int] | None, path: Sequence[int], token: int
    ) -> int | None:
        """See luceasync.dflash.accept.walk."""
        row = path[-1]
        if len(path) > self._count:
            return None
        if parents is None:
            return row + 1 if row + 1 < len(tokens) else None
        return next((r for r in range(row + 1, len(tokens)) if parents[r] == row), None)


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen3-4b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
    parser.add_argument("--contexts", default="1024,32768")
    parser.add_argument("--lanes", default="1,4")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = "\n".join(measure(parse_spec(SHAPES[options.shape]), options))
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def draft_config(target: ModelSpec) -> dict[str, object]:
    """A drafter such as those that are published for targets of this size."""
    attention = target.attention
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rope_theta": 1e6,
        "block_size": max(shape.block for shape in SHAPES_OF_ROUNDS),
        "dflash_config": {"mask_token_id": 9},
    }


def measure(spec: ModelSpec, options: argparse.Namespace) -> list[str]:
    """The table."""
    contexts = sorted(int(text) for text in options.contexts.split(","))
    lanes = [int(text) for text in options.lanes.split(",")]
    draft_spec = parse_draft_spec(draft_config(spec), spec)
    [device] = find_devices([options.device])
    plan = make_plan(
        spec,
        [device],
        dtype=options.dtype,
        weights=None,
        parallel=max(lanes),
        max_ctx_tokens=contexts[-1] + MAX_TOKENS,
        prefill_chunk_tokens=None,
        verify_rows=[shape.num_rows for shape in SHAPES_OF_ROUNDS],
        guest=guest_of(draft_spec, device, spec, DTYPE_BYTES[options.dtype]),
    )
    platform, dtype = open_platform(device.name), DTYPES[options.dtype]
    place = platform.device
    source = RandomSource(dtype, place)
    backend = LayerSplitBackend.load(spec, plan, source, taps=draft_spec.taps)
    ops = platform.ops
    with torch.inference_mode():
        network = DraftNetwork(
            draft_spec,
            read_weights(draft_spec, source, ops, dtype, place),
            ops,
            backend.embed,
            num_lanes=plan.parallel,
            max_ctx_tokens=plan.max_ctx_tokens,
            choose=draft_ops_on(platform),
        )
    draft = join(network, device, SHAPES_OF_ROUNDS, plan, backend)
    names = [
        f"block {s.block}" + (f", tree {s.budget}" if s.budget else "") for s in SHAPES_OF_ROUNDS
    ]
    table = [
        "| lanes, context | plain step | " + " | ".join(names) + " |",
        "|---" * (2 + len(names)) + "|",
    ]
    for context, num_lanes in itertools.product(contexts, lanes):
        choices = begin(backend, draft.speculator, num_lanes, context)
        plain_s, *rounds_s = medians(steps(backend, draft.speculator, choices))
        ratios = " | ".join(f"{s * 1e3:.2f} ms, {s / plain_s:.2f}" for s in rounds_s)
        table.append(f"| {num_lanes} at {context} | {plain_s * 1e3:.2f} ms | {ratios} |")
        print(table[-1], flush=True)
    draft.close()
    backend.close()
    return table


def begin(
    backend: LayerSplitBackend, speculator: Speculator, num_lanes: int, context: int
) -> list[Generation]:
    """Greedy choices with a random prompt each, prefilled."""
    choices = []
    for lane in range(num_lanes):
        prompt = torch.randint(10, 500, (context,)).tolist()
        prepared = Prepared(
            lane, 0, tuple(prompt), 2**30, frozenset(), Sampling(), 0, None, None, None, NoText()
        )
        generation = Generation(prepared)
        generation.lane = lane
        backend.reset(lane)
        speculator.start(lane)
        chunk = backend.plan.prefill_chunk_tokens
        for first in range(0, context, chunk):
            part = prompt[first : first + chunk]
            logits = backend.prefill(lane, first, part, project=True)
            speculator.prefilled(lane, first, len(part))
        assert logits is not None
        choose_next([generation], logits[None])
        choices.append(generation)
    return choices


def steps(
    backend: LayerSplitBackend, speculator: Speculator, choices: Sequence[Generation]
) -> list[Callable[[], Callable[[], object] | None]]:
    """A plain step, then a round of each shape, for all. What a step returns is to be done after
    it and takes no time of it: the drafter takes up what was decoded plainly, or it would find a
    gap, and have no context.
    """
    everyone = tuple(range(len(choices)))

    def plain() -> Callable[[], object]:
        anchors = anchors_of(choices)
        columns = zip(*((a.lane, a.position, a.token) for a in anchors), strict=True)
        choose_next(choices, backend.decode(*map(list, columns)))
        return lambda: speculator.decoded(anchors, StepPlan(None, (), False))

    def round_of(shape: Shape) -> Callable[[], None]:
        forced, plan = Forced(ACCEPTED), StepPlan(shape, everyone, False)

        def run() -> None:
            forced.next_round()
            speculator.round(anchors_of(choices), plan, Acceptance(choices, forced))

        return run

    return [plain, *map(round_of, SHAPES_OF_ROUNDS)]


def medians(runs: Sequence[Callable[[], Callable[[], object] | None]]) -> list[float]:
    """Median seconds of each, taken in turns, each until its device has come to rest; see
    `steps`.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(NUM_ROUNDS):
        for run, times in zip(runs, seconds, strict=True):
            started = time.perf_counter()
            after = run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
            if after is not None:
                after()
    return [statistics.median(times[NUM_DROPPED:]) for times in seconds]


if __name__ == "__main__":
    main()
