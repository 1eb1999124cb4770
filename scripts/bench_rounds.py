"""Whole rounds of speculation beside plain decode steps on a GPU, of well-known shapes with random
weights, target and drafter; which rows are accepted is forced.

    python -m scripts.bench_rounds [--shape qwen3-4b] [--contexts 1024,32768] [--lanes 1,4]

A round is all that a step of the engine does: propose, verify, accept, commit, take up. Rounds and
plain steps alternate in one run; ratios are of their medians.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from luceasync.bench import command
from luceasync.bench.device import at_rest
from luceasync.bench.model import DTYPES, load_random, plan_for, random_prompt
from luceasync.bench.report import Cell, interleave, medians, ms
from luceasync.bench.shapes import SHAPES
from luceasync.bench.shapes import Shape as Config
from luceasync.engine.acceptance import Acceptance
from luceasync.engine.decoding import anchors_of, choose_next
from luceasync.engine.prepare import PreparedChoice
from luceasync.engine.sequence import Generation
from luceasync.models.config import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.models.precision import ITEM_BYTES, Dtype, torch_dtype
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.platform import open_platform
from luceasync.ranking.local import LocalLogits
from luceasync.request import Request, TokenPrompt
from luceasync.speculation.adapt import RoundPlan as StepPlan
from luceasync.speculation.adapt import Shape
from luceasync.speculation.dflash.draft import DraftNetwork, draft_ops_on
from luceasync.speculation.dflash.draft_config import parse_draft_spec
from luceasync.speculation.dflash.load import LoadedDraft, join
from luceasync.speculation.dflash.placement import guest_of
from luceasync.speculation.dflash.weights import read_weights
from luceasync.speculation.speculator import Speculator
from luceasync.text.detokenizer import SafeText
from luceasync.text.prompt import RenderedPrompt

NUM_WARMUPS = 6  # until graphs are captured
ACCEPTED = (5, 6)  # rows, in turn: 6.5 tokens a round
SHAPES_OF_ROUNDS = (Shape(16), Shape(8), Shape(16, 22), Shape(16, 60))
NAMES = [f"block {s.block}" + (f", tree {s.budget}" if s.budget else "") for s in SHAPES_OF_ROUNDS]
PLAIN = "plain step"
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
        """See luceasync.speculation.speculator.walk."""
        row = path[-1]
        if len(path) > self._count:
            return None
        if parents is None:
            return row + 1 if row + 1 < len(tokens) else None
        return next((r for r in range(row + 1, len(tokens)) if parents[r] == row), None)


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=34, device="cuda:0")
    parser.add_argument("--shape", default="qwen3-4b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--contexts", type=command.numbers, default="1024,32768")
    parser.add_argument("--lanes", type=command.numbers, default="1,4")
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    table = report.table(["lanes, context", PLAIN, *NAMES])
    contexts = sorted(options.contexts)
    room = contexts[-1] + MAX_TOKENS
    pair = load(SHAPES[options.shape], options.device, options.dtype, max(options.lanes), room)
    for context, num_lanes in itertools.product(contexts, options.lanes):
        choices = started(pair.backend, pair.draft.speculator, num_lanes, context)
        runs = steps(pair.backend, pair.draft.speculator, choices)
        seconds = medians(interleave(runs, options.rounds, num_warmups=NUM_WARMUPS))
        plain_s = seconds.pop(PLAIN)
        cells = [
            Cell(s / plain_s, f"{s * 1e3:.2f} ms, {s / plain_s:.2f}") for s in seconds.values()
        ]
        table.add(f"{num_lanes} at {context}", ms(plain_s, 2), *cells)
    pair.draft.close()
    pair.backend.close()


def draft_config(target: Config) -> dict[str, object]:
    """A drafter such as those that are published for targets of this size."""
    return {
        "hidden_size": target["hidden_size"],
        "intermediate_size": target["intermediate_size"],
        "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target["head_dim"],
        "rope_theta": 1e6,
        "block_size": max(shape.block for shape in SHAPES_OF_ROUNDS),
        "dflash_config": {"mask_token_id": 9},
    }


@dataclass(frozen=True)
class Pair:
    """A target and its drafter."""

    backend: LayerSplitBackend
    draft: LoadedDraft


def load(config: Config, device: str, dtype: Dtype, num_lanes: int, max_ctx_tokens: int) -> Pair:
    """Random weights of both."""
    spec = parse_spec(dict(config))
    draft_spec = parse_draft_spec(draft_config(config), spec)
    [found] = find_devices([device])
    plan = plan_for(
        config,
        [device],
        parallel=num_lanes,
        max_ctx_tokens=max_ctx_tokens,
        dtype=dtype,
        verify_rows=[shape.num_rows for shape in SHAPES_OF_ROUNDS],
        guest=guest_of(draft_spec, found, spec, ITEM_BYTES[dtype]),
    )
    backend = load_random(config, plan, taps=draft_spec.taps)
    platform = open_platform(device)
    source = RandomSource(torch_dtype(dtype), platform.device, seed=1)
    with torch.inference_mode():
        network = DraftNetwork(
            draft_spec,
            read_weights(draft_spec, source, platform.ops, torch_dtype(dtype), platform.device),
            backend.embed,
            num_lanes=plan.parallel,
            max_ctx_tokens=plan.max_ctx_tokens,
            choose=draft_ops_on(platform),
        )
    return Pair(backend, join(network, found, SHAPES_OF_ROUNDS, plan, backend))


def started(
    backend: LayerSplitBackend,
    speculator: Speculator,
    num_lanes: int,
    context: int,
    first_lane: int = 0,
) -> list[Generation]:
    """Greedy choices with a random prompt each, prefilled, on lanes from `first_lane` on."""
    choices = []
    for lane in range(first_lane, first_lane + num_lanes):
        prompt = random_prompt(context, lane)
        rendered = RenderedPrompt(None, None, array("i", prompt), ())
        prepared = PreparedChoice(
            Request(TokenPrompt(tuple(prompt))),
            rendered, lane, 0, 2**30, frozenset(), 0, None, None, NoText()
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
        choose_next([generation], LocalLogits(logits[None]))
        choices.append(generation)
    return choices


def steps(
    backend: LayerSplitBackend, speculator: Speculator, choices: Sequence[Generation]
) -> dict[str, Callable[[], float]]:
    """Seconds of a plain step, and of a round of each shape, for all.

    After a plain step, and in no time of it, the drafter takes up what was decoded: or it would
    find a gap, and have no context.
    """
    everyone = tuple(range(len(choices)))

    def plain() -> float:
        anchors = anchors_of(choices)
        columns = zip(*((a.lane, a.position, a.token) for a in anchors), strict=True)
        seconds = at_rest(lambda: choose_next(choices, backend.decode(*map(list, columns))))
        speculator.decoded(anchors, StepPlan(None, (), False))
        return seconds

    def round_of(shape: Shape) -> Callable[[], float]:
        forced, plan = Forced(ACCEPTED), StepPlan(shape, everyone, False)

        def run() -> None:
            forced.next_round()
            speculator.round(anchors_of(choices), plan, Acceptance(choices, forced))

        return lambda: at_rest(run)

    rounds = zip(NAMES, map(round_of, SHAPES_OF_ROUNDS), strict=True)
    return {PLAIN: plain, **dict(rounds)}


if __name__ == "__main__":
    main()
