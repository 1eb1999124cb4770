"""What the engine thread loads: weights, a drafter, the prefix cache, and the pump over them.

Owns the order in which they are made and freed. Nothing is chosen here: a Recipe says it all.
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from luceasync.engine.decoding import LaneDecoding, PlainDecoding, SpeculativeDecoding, choose_next
from luceasync.engine.prepare import PreparedChoice
from luceasync.engine.pump import Pump
from luceasync.engine.sampling.choose import nothing
from luceasync.engine.sequence import Generation
from luceasync.engine.steps import Prefiller
from luceasync.engine.thread import LoadedEngine
from luceasync.errors import PlacementError
from luceasync.host_cache.arena import HostMemory
from luceasync.models.files import ModelFiles
from luceasync.pipeline.backend import LayerSplitBackend, OpenRemote
from luceasync.pipeline.plan import Plan
from luceasync.prefix_cache.cache import PrefixCache
from luceasync.prefix_cache.disk_orders import DiskOrders
from luceasync.prefix_cache.index import Limits
from luceasync.prefix_cache.memory import FeatureHolder, MemoryNodes, UnreadFeatures
from luceasync.prefix_cache.tenants import NO_TENANT
from luceasync.ranking.local import LocalLogits
from luceasync.request import Request, TokenPrompt
from luceasync.speculation.choice import RoundPlan, RoundShape
from luceasync.speculation.dflash.feature_contents import DraftFeatures
from luceasync.speculation.dflash.load import LoadedDraft, load_draft, start_draft
from luceasync.speculation.dflash.placement import Drafter
from luceasync.speculation.dflash.process import DraftProcessResources
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.history import History
from luceasync.text.prompt import RenderedPrompt, Tenant
from luceasync.text.tokenizer import Tokenizer

# What an engine runs before it is ready, for nobody: a prompt, then steps of every kind.
# Kernels are compiled and rounds of speculation are timed then, and not while somebody waits.
# Has a lane for that long and leaves it empty; knows no queue and nothing of prefixes.


LANE = 0
NUM_TURNS = 5  # what was timed as often is believed for long; see dflash.tally.StepCosts.is_due
LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What is run: a prompt in chunks, then steps until there are `max_tokens` tokens."""

    prompt_ids: tuple[int, ...]
    chunk_tokens: int
    max_tokens: int
    num_steps: int


def part_for(
    chunk_tokens: int,
    max_ctx_tokens: int,
    vocab_size: int,
    shapes: Sequence[RoundShape],
    *,
    runs_async: bool,
    num_turns: int = NUM_TURNS,
) -> Rehearsal:
    """Where rounds have `shapes` `num_turns` of all kinds of steps, where there are none one plain
    step. Where there are kernels to compile (`runs_async`: see luceasync.engine.pump) the
    prompt is a whole chunk, elsewhere something to start from; half the context is left to decode.
    """
    num_tokens = chunk_tokens if runs_async else 16
    num_tokens = max(1, min(num_tokens, max_ctx_tokens // 2))
    prompt_ids = tuple(i % vocab_size for i in range(num_tokens))
    num_steps = num_turns * (len(shapes) + 1) if shapes else 1
    return Rehearsal(prompt_ids, chunk_tokens, max_ctx_tokens - num_tokens, num_steps)


def in_turns(shapes: Sequence[RoundShape]) -> Callable[[Sequence[int]], RoundPlan]:
    """The plans of steps that take turns: a round of each shape, a plain step, and again."""
    kinds = itertools.cycle((*shapes, None))

    def plan(lanes: Sequence[int]) -> RoundPlan:
        shape = next(kinds)
        return RoundPlan(shape, () if shape is None else tuple(lanes), is_measured=True)

    return plan


def rehearse(
    target: Prefiller,
    decoding: LaneDecoding,
    tokenizer: Tokenizer,
    part: Rehearsal,
    *,
    limit_s: float = LIMIT_S,
) -> None:
    """Run the prompt, then as many of the steps, which are greedy, as begin within `limit_s`.
    Raises what running them raises.
    """
    generation = Generation(_prepared(tokenizer, part))
    target.reset(LANE)
    decoding.start(LANE)
    generation.start(LANE)
    for begin in range(0, len(part.prompt_ids), part.chunk_tokens):
        chunk = part.prompt_ids[begin : begin + part.chunk_tokens]
        logits = target.prefill(LANE, begin, chunk, project=True)
        decoding.prefilled(LANE, begin, len(chunk))
    assert logits is not None, "a prompt has tokens"
    choose_next([generation], LocalLogits(logits[None]))
    end_at = time.monotonic() + limit_s
    for _ in range(part.num_steps):
        if generation.has_ended or time.monotonic() > end_at:
            break
        decoding.step([generation], alone=True, meanwhile=nothing)
    decoding.start(LANE)
    target.reset(LANE)


def _prepared(tokenizer: Tokenizer, part: Rehearsal) -> PreparedChoice:
    prompt = RenderedPrompt(
        Tenant(NO_TENANT, History(tokenizer)), None, array("i", part.prompt_ids), ()
    )
    return PreparedChoice(
        Request(TokenPrompt(part.prompt_ids)),
        prompt,
        stream_id=0,
        index=0,
        max_tokens=part.max_tokens,
        stop_ids=frozenset(),
        seed=0,
        counts=None,
        tokenizer=tokenizer,
        detokenizer=Detokenizer(tokenizer),
    )


Progress = Callable[[int, int], None]
DecodeWith = Callable[[LayerSplitBackend, LoadedDraft], LaneDecoding]


def speculate(backend: LayerSplitBackend, draft: LoadedDraft) -> LaneDecoding:
    """How lanes decode where there is a drafter."""
    return SpeculativeDecoding(backend, draft.speculator)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the engine thread loads."""

    model: ModelFiles
    plan: Plan
    tokenizer: Tokenizer
    drafter: Drafter | None
    draft_process: DraftProcessResources | None  # of the drafter, where it has a process of its own
    limits: Limits
    host: HostMemory
    open_remote: OpenRemote
    quiet: threading.Event  # set while there is no work
    progress: Progress | None
    decode_with: DecodeWith

    @property
    def runs_async(self) -> bool:
        """Whether all work is queued on devices, so that the host is free while they compute."""
        drafter = self.drafter
        return self.plan.runs_async and (drafter is None or drafter.device.runs_async)


def load(recipe: Recipe, orders: DiskOrders) -> LoadedEngine:
    """Read the weights; runs in the engine thread. Raises ModelError, and PlacementError where a
    device has less memory than it had when the plan was made.
    """
    try:
        return _load(recipe, orders)
    except torch.OutOfMemoryError as error:
        told = ". ".join(str(error).split(". ")[:3])  # then come torch's hints for programs
        raise PlacementError(
            f"a device ran out of memory while the model was loaded: {told}. "
            "Free some of it, or lower --max-ctx or --parallel"
        ) from error


def _load(recipe: Recipe, orders: DiskOrders) -> LoadedEngine:
    reading = _Reading(recipe)
    if recipe.plan.suits_one_thread:
        # Measured with the bundled model and 16 streams on 2 cores: almost three times the tokens.
        torch.set_num_threads(1)  # of this thread, which is the engine's
    with ExitStack() as closing:
        backend = LayerSplitBackend.open(
            recipe.model,
            recipe.plan,
            reading.advance,
            memory=recipe.host,
            open_remote=recipe.open_remote,
            taps=recipe.drafter.spec.taps if recipe.drafter else (),
        )
        closing.callback(backend.close)
        ways = _ways(recipe, backend, reading, closing)
        reading.end()
        _rehearse(recipe, backend, ways)

        def notice() -> None:
            backend.notice()
            ways.notice()

        def probe() -> None:
            backend.probe()
            ways.probe()

        pump = _pump(recipe, backend, ways, orders)

        def mend() -> None:
            if backend.mend(pump.lanes.prefixes.lost):
                pump.begin_again()
                _rehearse(recipe, backend, ways, num_turns=1)

        return LoadedEngine(pump, closing.pop_all().close, notice, probe, mend)


@dataclass(frozen=True, slots=True)
class _Ways:
    """How lanes decode, how they do so when they rehearse, and what is kept of a drafter."""

    decoding: LaneDecoding
    rehearsed: LaneDecoding
    shapes: tuple[RoundShape, ...]
    features: FeatureHolder  # of that drafter
    notice: Callable[[], None]  # of a drafter: see DraftPasses
    probe: Callable[[], None]


def _ways(
    recipe: Recipe, backend: LayerSplitBackend, reading: _Reading, closing: ExitStack
) -> _Ways:
    if recipe.drafter is None:
        plain = PlainDecoding(backend)
        return _Ways(plain, plain, (), UnreadFeatures(), nothing, nothing)
    plan, draft_process = recipe.plan, recipe.draft_process
    if draft_process is None:
        draft = load_draft(recipe.drafter, plan, backend, reading.advance, recipe.host)
    else:
        draft = start_draft(draft_process, recipe.drafter, plan, backend, reading.advance)
    closing.callback(draft.close)
    if plan.pool is not None and plan.pool.policy == "drafter":
        assert draft.looks is not None, "placement refuses a drafter that is elsewhere"
        backend.lanes.probe_with(draft.looks)
    speculator = draft.speculator
    forced = in_turns(speculator.shapes)
    return _Ways(
        recipe.decode_with(backend, draft),
        SpeculativeDecoding(backend, speculator.rehearsing(), force=forced),
        speculator.shapes,
        DraftFeatures(draft.features, speculator),
        speculator.passes.notice,
        speculator.passes.probe,
    )


def _rehearse(
    recipe: Recipe, backend: LayerSplitBackend, ways: _Ways, num_turns: int = NUM_TURNS
) -> None:
    """Run steps of each kind before anybody waits for one."""
    plan = recipe.plan
    part = part_for(
        plan.prefill_chunk_tokens,
        plan.max_ctx_tokens,
        recipe.model.spec.vocab_size,
        ways.shapes,
        runs_async=recipe.runs_async,
        num_turns=num_turns,
    )
    rehearse(backend, ways.rehearsed, recipe.tokenizer, part)


def _pump(recipe: Recipe, backend: LayerSplitBackend, ways: _Ways, orders: DiskOrders) -> Pump:
    spec, plan = recipe.model.spec, recipe.plan
    interval_tokens = min(recipe.limits.interval_tokens, plan.most_uncut_tokens)
    prefixes = PrefixCache(
        MemoryNodes(backend.nodes, ways.features, spec.vocab_size, backend.lanes),
        orders,
        replace(recipe.limits, interval_tokens=interval_tokens),
        recurrent=spec.has_end_state,
        chunk_tokens=plan.prefill_chunk_tokens,
        num_shards=backend.num_shards,
    )
    backend.lanes.keep_with(prefixes.try_save)
    return Pump(
        backend,
        ways.decoding,
        prefixes,
        num_lanes=plan.parallel,
        chunk_tokens=plan.prefill_chunk_tokens,
        runs_async=recipe.runs_async,
        synchronize=backend.synchronize,
        quiet=recipe.quiet,
        lanes=backend.lanes,
    )


class _Reading:
    """Tells how far the reading of weights has come."""

    def __init__(self, recipe: Recipe) -> None:
        self._progress = recipe.progress or (lambda done, total: None)
        self._done = 0
        self._total = sum(shard.weight_bytes for shard in recipe.plan.shards)
        if recipe.drafter is not None:
            size = recipe.plan.precision.weight_bytes
            self._total += recipe.drafter.spec.num_parameters * size

    def advance(self, num_bytes: int) -> None:
        """So many bytes more are read."""
        self._done += num_bytes
        self._progress(min(self._done, self._total), self._total)

    def end(self) -> None:
        """All are."""
        self._progress(self._total, self._total)
