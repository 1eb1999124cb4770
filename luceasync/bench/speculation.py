"""`luceasync bench speculation`: verify passes, whole rounds, and servers with a drafter.

Verify passes and rounds run on random weights; servers answer the bundled model's questions.
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from luceasync.bench.device import at_rest, copy_bandwidth, synchronize
from luceasync.bench.model import (
    BenchModel,
    Decoding,
    load_random,
    plan_for,
    prefill,
    random_prompt,
)
from luceasync.bench.report import (
    NOTHING,
    Cell,
    Report,
    Run,
    figure,
    interleave,
    measure,
    medians,
    ms,
)
from luceasync.bench.servers import Asked, Client, Messages, ask, read_questions, server, tau_of
from luceasync.bench.shapes import Shape, step_bytes
from luceasync.engine.acceptance import Acceptance
from luceasync.engine.decoding import (
    LaneDecoding,
    PlainDecoding,
    SpeculativeDecoding,
    anchors_of,
    choose_next,
)
from luceasync.engine.prepare import PreparedChoice
from luceasync.engine.sampling.choose import nothing
from luceasync.engine.sequence import Generation
from luceasync.models.encodings import WeightPlacement
from luceasync.models.files import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.models.precision import ITEM_BYTES, Dtype, torch_dtype
from luceasync.models.trees import ROOT
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.platform import open_platform
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import BEST
from luceasync.request import Request, TokenPrompt
from luceasync.speculation.choice import RoundPlan, RoundShape, StepCosts
from luceasync.speculation.dflash.draft import DraftNetwork, draft_ops_on
from luceasync.speculation.dflash.draft_config import parse_draft_spec
from luceasync.speculation.dflash.load import LoadedDraft, join
from luceasync.speculation.dflash.placement import footprint_of
from luceasync.speculation.dflash.weights import read_weights
from luceasync.speculation.drafter import BlockDrafter
from luceasync.speculation.speculator import Speculator
from luceasync.text.detokenizer import SafeText
from luceasync.text.prompt import RenderedPrompt

NUM_ACCEPTED = 6  # rows of a committed path, if the proposal is that deep
DECODE = "decode"
NUM_WARMUPS = 6  # rounds until graphs are captured
FORCED_ROWS = (5, 6)  # rows that rounds accept, alternating: 6.5 tokens per round
ROUND_SHAPES = (RoundShape(16), RoundShape(8), RoundShape(16, 22), RoundShape(16, 60))
ROW_SHAPES = ROUND_SHAPES[:2]
NUM_IN_A_ROW = 12
DRAFT_LAYERS = 5
ROOM_TOKENS = 4096  # for the tokens that rounds generate
TURN_QUESTIONS = 10  # alternating after each question would cool CPU caches


# --- verify passes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowSchedule:
    """Rows to verify: a chain, or a tree whose rows hang on random earlier ones."""

    name: str
    parents: tuple[int, ...]

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    @property
    def path(self) -> list[int]:
        """The first rows of the deepest path."""
        paths: list[list[int]] = []
        for row, parent in enumerate(self.parents):
            paths.append([row] if parent == ROOT else [*paths[parent], row])
        return max(paths, key=len)[:NUM_ACCEPTED]


def chain_of(num_rows: int) -> RowSchedule:
    return RowSchedule(f"chain of {num_rows}", tuple(range(ROOT, num_rows - 1)))


def tree_of(num_rows: int) -> RowSchedule:
    """Bushy at its root, as trees of the most probable continuations are."""
    choose = random.Random(num_rows)
    parents = (ROOT, *(min(row - 1, choose.randrange(12)) for row in range(1, num_rows)))
    return RowSchedule(f"tree of {num_rows}", parents)


PROPOSALS = (chain_of(8), chain_of(16), tree_of(22), tree_of(60))


@torch.inference_mode()
def bench_verify(
    report: Report,
    model: BenchModel,
    device: str,
    *,
    contexts: Sequence[int],
    lanes: Sequence[int],
    dtype: Dtype,
    rounds: int,
) -> None:
    """The cost of a round in the target beside a decode step: verify a proposal, copy the best
    tokens to the host, commit a path.
    """
    bandwidth = copy_bandwidth(device)
    columns = ("lanes, context", DECODE, "limit", *(each.name for each in PROPOSALS))
    table = report.table(columns, f"{model.name}, verify and commit; ratios to a decode step")
    plan = model.plan(
        [device],
        parallel=max(lanes),
        max_ctx_tokens=max(contexts) + 256,
        dtype=dtype,
        verify_rows=[len(each.parents) for each in PROPOSALS],
    )
    backend = model.load(plan)
    for context, count in itertools.product(contexts, lanes):
        for lane in range(count):
            prefill(backend, lane, random_prompt(context))
        runs: dict[str, Run] = {DECODE: Decoding(backend, count, context)}
        for rows in PROPOSALS:
            runs[rows.name] = verify_run(rows, backend, device, count, context)
        seconds = medians(measure(runs, rounds, num_warmups=3))
        num_bytes = step_bytes(model.spec, plan, count, context, model.encoding_of)
        decode_s = seconds.pop(DECODE)
        cells = [beside(each, decode_s) for each in seconds.values()]
        limit = ms(num_bytes / bandwidth, 2)
        table.add(f"{count} at {context}", ms(decode_s, 2), limit, *cells)
    backend.close()


def verify_run(
    rows: RowSchedule, backend: LayerSplitBackend, device: str, num_lanes: int, context: int
) -> Run:
    """Verify and commit; the next call starts at the same position."""
    lanes, begins = list(range(num_lanes)), [context] * num_lanes
    place = open_platform(device).device
    shape = (num_lanes, len(rows.parents))
    tokens = torch.randint(10, 1000, shape, device=place)
    parents = None
    if not rows.is_chain:
        parents = torch.tensor(rows.parents, dtype=torch.int32, device=place)
        parents = parents.expand(shape).contiguous()

    def run() -> None:
        logits = backend.verify(lanes, begins, tokens, parents)
        _ = logits.rank(BEST).candidates().best.tolist()
        backend.commit([rows.path] * num_lanes)
        synchronize()

    return run


def beside(seconds: float, base_s: float) -> Cell:
    """Milliseconds for readers, with their ratio, which is the value for programs."""
    return Cell(seconds / base_s, f"{seconds * 1e3:.2f} ms, {seconds / base_s:.2f}")


# --- rounds ---------------------------------------------------------------------------------------


class NoText:
    """A detokenizer for tokens without meaning."""

    has_stops = stopped = False

    def push(self, token: int) -> SafeText:
        return SafeText("", False)

    def flush(self) -> str:
        return ""


class ForcedAcceptance:
    """Accepts a given number of rows, regardless of their contents: a function for
    `speculator.walk`.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = itertools.cycle(counts)
        self._count = 0

    def next_round(self) -> None:
        self._count = next(self._counts)

    def __call__(
        self, tokens: Sequence[int], parents: Sequence[int] | None, path: Sequence[int], token: int
    ) -> int | None:
        row = path[-1]
        if len(path) > self._count:
            return None
        if parents is None:
            return row + 1 if row + 1 < len(tokens) else None
        return next((r for r in range(row + 1, len(tokens)) if parents[r] == row), None)


def bench_rounds(
    report: Report,
    name: str,
    shape: Shape,
    device: str,
    *,
    contexts: Sequence[int],
    lanes: Sequence[int],
    dtype: Dtype,
    rounds: int,
) -> None:
    """Whole rounds beside decode steps: propose, verify, accept, commit, take up. The number of
    accepted rows is forced. Then the same as greedy lanes are served: steps and rounds in a row,
    each of which starts before the host has the tokens of the previous one; nothing is forced.
    """
    names = [f"block {s.block}" + (f", tree {s.budget}" if s.budget else "") for s in ROUND_SHAPES]
    table = report.table(("lanes, context", DECODE, *names), f"{name}, rounds; ratios to a step")
    room = max(contexts) + ROOM_TOKENS
    backend, draft = load_pair(shape, device, dtype, max(lanes), room)
    for context, count in itertools.product(contexts, lanes):
        choices = started(backend, draft.speculator, count, context)
        runs: dict[str, Callable[[], float]] = {}
        runs[DECODE] = partial(step_s, backend, draft.speculator, choices)
        for of, round_shape in zip(names, ROUND_SHAPES, strict=True):
            runs[of] = round_run(draft.speculator, choices, round_shape)
        seconds = medians(interleave(runs, rounds, num_warmups=NUM_WARMUPS))
        decode_s = seconds.pop(DECODE)
        cells = [beside(each, decode_s) for each in seconds.values()]
        table.add(f"{count} at {context}", ms(decode_s, 2), *cells)
    bench_rows(report, backend, draft, contexts=contexts, lanes=lanes, rounds=rounds)
    draft.close()
    backend.close()


class AlwaysPays(StepCosts):
    """Costs for which every step becomes a round of the only shape there is."""

    def at(self, num_tokens: int) -> StepCosts:
        return self

    def seconds(self, num_lanes: int, shape: RoundShape | None) -> float:
        return 100.0 if shape is None else 1.0

    def is_due(self, num_lanes: int, shape: RoundShape | None, num_waits: int = 1) -> bool:
        return False


def bench_rows(
    report: Report,
    backend: LayerSplitBackend,
    draft: LoadedDraft,
    *,
    contexts: Sequence[int],
    lanes: Sequence[int],
    rounds: int,
) -> None:
    """Rounds in a row beside steps in a row. After the steps, a drafter starts without context, so
    that it has little of it to read.
    """
    passes = draft.speculator.drafters[0].tapped
    names = [f"block {shape.block}" for shape in ROW_SHAPES]
    table = report.table(("lanes, context", DECODE, *names), "in a row; ratios to a step")
    for context, count in itertools.product(contexts, lanes):
        choices = started(backend, draft.speculator, count, context)
        decodings: dict[str, LaneDecoding] = {DECODE: PlainDecoding(backend)}
        for of, shape in zip(names, ROW_SHAPES, strict=True):
            drafter: Any = BlockDrafter(passes, [shape])  # type: ignore[arg-type]
            speculator = Speculator(backend, [drafter], count, AlwaysPays())
            decodings[of] = SpeculativeDecoding(backend, speculator)
        runs = {of: partial(row_step_s, each, choices) for of, each in decodings.items()}
        seconds = medians(interleave(runs, rounds, num_warmups=2))
        decode_s = seconds.pop(DECODE)
        cells = [beside(each, decode_s) for each in seconds.values()]
        table.add(f"{count} at {context}", ms(decode_s, 2), *cells)


def row_step_s(decoding: LaneDecoding, choices: Sequence[Generation]) -> float:
    """Seconds of one of several steps in a row; the last one starts no other."""
    decoding.step(choices, alone=True, meanwhile=nothing)
    begun_at = time.perf_counter()
    for _ in range(NUM_IN_A_ROW):
        decoding.step(choices, alone=True, meanwhile=nothing)
    seconds = (time.perf_counter() - begun_at) / NUM_IN_A_ROW
    decoding.step(choices, alone=False, meanwhile=nothing)
    return seconds


def draft_config(target: Shape) -> dict[str, object]:
    """A drafter like those published for targets of this size; it reads every layer of a target
    that is too shallow for their rule.
    """
    num_layers = target["num_hidden_layers"]
    is_shallow = num_layers - 4 < DRAFT_LAYERS - 1
    taps = {"target_layer_ids": [*range(num_layers)]} if is_shallow else {}
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return {name: target[name] for name in names} | {
        "head_dim": target["head_dim"],
        "num_hidden_layers": DRAFT_LAYERS,
        "rope_theta": 1e6,
        "block_size": max(shape.block for shape in ROUND_SHAPES),
        "dflash_config": {"mask_token_id": 9} | taps,
    }


def load_pair(
    shape: Shape, device: str, dtype: Dtype, num_lanes: int, max_ctx_tokens: int
) -> tuple[LayerSplitBackend, LoadedDraft]:
    """A target and its drafter, both of random weights."""
    spec = parse_spec(dict(shape))
    draft_spec = parse_draft_spec(draft_config(shape), spec)
    [found] = find_devices([device])
    plan = plan_for(
        shape,
        [device],
        parallel=num_lanes,
        max_ctx_tokens=max_ctx_tokens,
        dtype=dtype,
        verify_rows=[each.num_rows for each in ROUND_SHAPES],
        drafter=footprint_of(draft_spec, found, spec, ITEM_BYTES[dtype]),
    )
    backend = load_random(shape, plan, taps=draft_spec.taps)
    platform, kind = open_platform(device), torch_dtype(dtype)
    source = RandomSource(kind, platform.device, seed=1)
    with torch.inference_mode():
        network = DraftNetwork(
            draft_spec,
            read_weights(draft_spec, source, WeightPlacement(platform.ops, platform.device, kind)),
            backend.embed,
            num_lanes=plan.parallel,
            max_ctx_tokens=plan.max_ctx_tokens,
            choose=draft_ops_on(platform),
        )
    return backend, join(network, found, ROUND_SHAPES, plan, backend)


def started(
    backend: LayerSplitBackend, speculator: Speculator, num_lanes: int, context: int
) -> list[Generation]:
    """Greedy choices, each with a random prompt that is prefilled on its lane."""
    choices = []
    unused: Any = None  # tenant, tokenizer and counts, which greedy token ids do not need
    text: Any = NoText()
    for lane in range(num_lanes):
        prompt = random_prompt(context, lane)
        rendered = RenderedPrompt(unused, None, array("i", prompt), ())
        request = Request(TokenPrompt(tuple(prompt)))
        generation = Generation(
            PreparedChoice(request, rendered, lane, 0, 2**30, frozenset(), 0, unused, unused, text)
        )
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


def step_s(
    backend: LayerSplitBackend, speculator: Speculator, choices: Sequence[Generation]
) -> float:
    """Seconds of a decode step. The drafter takes up the decoded tokens outside of that time;
    otherwise it would find a gap.
    """
    anchors = anchors_of(choices)
    columns = zip(*((a.lane, a.position, a.token) for a in anchors), strict=True)
    seconds = at_rest(lambda: choose_next(choices, backend.decode(*map(list, columns))))
    speculator.decoded(anchors, RoundPlan(None, (), False))
    return seconds


def round_run(
    speculator: Speculator, choices: Sequence[Generation], shape: RoundShape
) -> Callable[[], float]:
    """Seconds of a round of that shape for all lanes."""
    forced = ForcedAcceptance(FORCED_ROWS)
    plan = RoundPlan(shape, tuple(range(len(choices))), False)

    def run() -> None:
        forced.next_round()
        speculator.round(anchors_of(choices), plan, Acceptance(choices, forced))

    return lambda: at_rest(run)


# --- servers --------------------------------------------------------------------------------------


def bench_servers(
    report: Report,
    device: str,
    *,
    dtype: str,
    questions: int,
    clients: int,
    max_tokens: int,
    has_trees: bool,
) -> None:
    """Servers of the bundled model, without and with a drafter, which get its questions over HTTP,
    with greedy sampling, from `clients` clients at once. Each server gets a few questions, then the
    next one. Ratios are to the server without a drafter.
    """
    common = ["--target-device", device, "--dtype", dtype]
    flags = {"plain": [*common, "--draft", "none"], "chain": common}
    if has_trees:
        flags["tree"] = [*common, "--ddtree"]
    asked: dict[str, list[Asked]] = {name: [] for name in flags}
    seconds = dict.fromkeys(flags, 0.0)
    messages = read_questions()
    with ExitStack() as stack:
        servers = {name: stack.enter_context(server(each)) for name, each in flags.items()}
        for begin in range(0, questions, TURN_QUESTIONS):
            turn = messages[begin : min(begin + TURN_QUESTIONS, questions)]
            before = messages[-1 - begin // TURN_QUESTIONS]  # warms up
            for name, client in servers.items():
                ask(client, before, max_tokens)
                started = time.perf_counter()
                asked[name] += ask_together(client.url, turn, clients, max_tokens)
                seconds[name] += time.perf_counter() - started
    columns = ("server", "tokens/s", "ratio", "decoding alone", "tau", "rounds", "equal texts")
    table = report.table(columns, f"{questions} questions by {clients} clients, servers in turns")
    plain = asked["plain"]
    for name, answers in asked.items():
        num_rounds, tau = tau_of(answers)
        num_equal = sum(a.text == b.text for a, b in zip(answers, plain, strict=True))
        rate = sum(answer.num_tokens for answer in answers) / seconds[name]
        plain_rate = sum(answer.num_tokens for answer in plain) / seconds["plain"]
        decode_s = sum(answer.decode_s for answer in answers)
        decoding = sum(answer.num_tokens - 1 for answer in answers) / decode_s
        rates = figure(rate, digits=0), figure(rate / plain_rate), figure(decoding, digits=0)
        equal = f"{num_equal} of {len(answers)}"
        table.add(name, *rates, tau or NOTHING, num_rounds, equal)


def ask_together(
    url: str, questions: list[Messages], num_clients: int, max_tokens: int
) -> list[Asked]:
    """The answers in order, requested over `num_clients` connections."""

    def work(first: int) -> dict[int, Asked]:
        with closing(Client(url)) as client:
            mine = range(first, len(questions), num_clients)
            return {number: ask(client, questions[number], max_tokens) for number in mine}

    found: dict[int, Asked] = {}
    with ThreadPoolExecutor(num_clients) as pool:
        for part in pool.map(work, range(num_clients)):
            found |= part
    return [found[number] for number in range(len(questions))]
