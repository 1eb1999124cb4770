"""Loads what the engine thread runs: weights, a drafter, the prefix cache, and the pump over them.

Owns the order in which they are made and freed, and the rehearsal before the first request. All
choices were made before: see Recipe.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from luceasync.config import BUNDLED_DRAFT_DIR
from luceasync.engine.decoding import LaneDecoding, PlainDecoding, SpeculativeDecoding, choose_next
from luceasync.engine.prepare import PreparedChoice
from luceasync.engine.pump import Pump
from luceasync.engine.sampling.choose import nothing
from luceasync.engine.sequence import Generation
from luceasync.engine.thread import LoadedEngine
from luceasync.errors import PlacementError
from luceasync.host_cache.arena import HostMemory
from luceasync.models.files import ModelFiles
from luceasync.models.spec import ModelSpec
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
from luceasync.speculation.dflash.load import LoadedDraft, load_draft, load_mtp, start_draft
from luceasync.speculation.dflash.placement import DFlashPlacement
from luceasync.speculation.dflash.process import DraftProcessResources
from luceasync.speculation.lookup import LookupDrafter
from luceasync.speculation.mtp import MtpPlacement
from luceasync.speculation.speculator import Speculator
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.history import History
from luceasync.text.prompt import RenderedPrompt, Tenant
from luceasync.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

REHEARSAL_LANE = 0
# Of each kind of step; the measured time then stays valid for long, see StepCosts.is_due.
NUM_TURNS = 5
NUM_COPY_TURNS = 3  # if some rounds only copy; these are measured again whenever they occur
REHEARSAL_LIMIT_S = 2.0
# A drafter with a lower share of right tokens was made for another model, or is misread.
NOISE_SHARE = 0.2
# Where lookup alone drafts: what a plain step takes less if a device begins it ahead of the host,
# which it may not while a copy may come.
AHEAD_S = 0.25e-3
KNOWN_TEXT = '''def add(a, b):
    """Return the sum of a and b."""
    return a + b

def multiply(a, b):
    """Return the product of a and b."""
    return'''
MEASURE_LIMIT_S = 0.3  # of the prefill that is measured, as estimated from a shorter one

Progress = Callable[[int, int], None]
DecodeWith = Callable[[LayerSplitBackend, Speculator], LaneDecoding]


def speculate(backend: LayerSplitBackend, speculator: Speculator) -> LaneDecoding:
    """How lanes decode with drafters."""
    return SpeculativeDecoding(backend, speculator)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the engine thread loads."""

    model: ModelFiles
    plan: Plan
    tokenizer: Tokenizer
    drafter: DFlashPlacement | None
    draft_process: DraftProcessResources | None  # None: the drafter runs in this process
    mtp: MtpPlacement | None  # the model's own head drafts; there is no drafter then
    # Of rounds that copy from the text; none: there are no such rounds.
    copied_shapes: tuple[RoundShape, ...]
    limits: Limits
    host: HostMemory
    open_remote: OpenRemote
    quiet: threading.Event  # set while there is no work
    progress: Progress | None
    decode_with: DecodeWith

    @property
    def taps(self) -> tuple[int, ...]:
        """The model's layers whose rows are drafted from."""
        if self.drafter is not None:
            return self.drafter.spec.taps
        return () if self.mtp is None else self.mtp.taps

    @property
    def runs_async(self) -> bool:
        """Whether all work is queued on devices, so that the host is free meanwhile."""
        drafter = self.drafter
        return self.plan.runs_async and (drafter is None or drafter.device.runs_async)


def load(recipe: Recipe, orders: DiskOrders) -> LoadedEngine:
    """Load an engine, in its thread. Raises ModelError, and PlacementError if a device has less
    memory than when the plan was made.
    """
    try:
        return _load(recipe, orders)
    except torch.OutOfMemoryError as error:
        # What follows are torch's hints to programmers.
        words = ". ".join(str(error).split(". ")[:3])
        raise PlacementError(
            f"a device ran out of memory while the model was loaded: {words}. "
            "Free some of it, or lower --max-ctx or --parallel"
        ) from error


def _load(recipe: Recipe, orders: DiskOrders) -> LoadedEngine:
    progress = _WeightProgress(recipe)
    with ExitStack() as closing:
        backend = LayerSplitBackend.open(
            recipe.model,
            recipe.plan,
            progress.advance,
            memory=recipe.host,
            open_remote=recipe.open_remote,
            taps=recipe.taps,
        )
        closing.callback(backend.close)
        began_s = time.monotonic()
        setup = _decoding_setup(recipe, backend, progress, closing)
        progress.end()
        log.debug("start: drafter in %.2f s", time.monotonic() - began_s)
        if recipe.plan.suits_one_thread:  # after reading, since threads unpack weights
            # Measured with the bundled model and 16 streams on 2 cores: almost three times the
            # tokens.
            torch.set_num_threads(1)  # of this thread, which is the engine's
        began_s = time.monotonic()
        _rehearse(recipe, backend, setup)
        log.debug("start: rehearsal in %.2f s", time.monotonic() - began_s)

        def raise_if_failed() -> None:
            backend.raise_if_failed()
            setup.raise_if_failed()

        def check_alive() -> None:
            backend.check_alive()
            setup.check_alive()

        pump = _pump(recipe, backend, setup, orders)
        if recipe.limits.disk_bytes:  # without one, there is no file to compare prefill with
            num_tokens, seconds = measure_prefill(backend, recipe)
            pump.lanes.prefixes.observe_prefill(0, num_tokens, seconds)
            log.debug("start: prefill of %d tokens in %.3f s", num_tokens, seconds)

        def restart_failed() -> None:
            if backend.restart_failed(pump.lanes.prefixes.lost):
                pump.begin_again()
                _rehearse(recipe, backend, setup, num_turns=1)

        return LoadedEngine(
            pump, closing.pop_all().close, raise_if_failed, check_alive, restart_failed
        )


@dataclass(frozen=True, slots=True)
class _DecodingSetup:
    """How lanes decode, in the rehearsal too, and the features of a drafter."""

    decoding: LaneDecoding
    rehearsed: LaneDecoding
    first_share: Callable[[], float | None]  # figures of the rehearsal: see AcceptanceRecord
    shapes: tuple[RoundShape, ...]
    features: FeatureHolder
    raise_if_failed: Callable[[], None]  # see Speculator.refresh
    check_alive: Callable[[], None]


def _decoding_setup(
    recipe: Recipe, backend: LayerSplitBackend, progress: _WeightProgress, closing: ExitStack
) -> _DecodingSetup:
    plan, shapes = recipe.plan, recipe.copied_shapes
    lookup = LookupDrafter(shapes, plan.parallel) if shapes else None
    features: FeatureHolder = UnreadFeatures()
    if recipe.mtp is not None:
        weights = recipe.model.weights
        speculator, close = load_mtp(recipe.mtp, plan, backend, weights.open, progress.advance)
        closing.callback(close)
        speculator = speculator if lookup is None else speculator.beside(lookup)
    elif recipe.drafter is None:
        if lookup is None:
            plain = PlainDecoding(backend)
            return _DecodingSetup(plain, plain, lambda: None, (), features, nothing, nothing)
        ahead_s = AHEAD_S if plan.runs_async else 0.0
        speculator = Speculator(backend, [lookup], plan.parallel, ahead_s=ahead_s)
    else:
        draft = _drafter_of(recipe, recipe.drafter, backend, progress)
        closing.callback(draft.close)
        speculator = draft.speculator if lookup is None else draft.speculator.beside(lookup)
        features = DraftFeatures(draft.features, speculator)
    forced, rehearsing = in_turns(speculator.shapes), speculator.rehearsing()

    def first_share() -> float | None:
        return rehearsing.common.first_share()

    return _DecodingSetup(
        recipe.decode_with(backend, speculator),
        SpeculativeDecoding(backend, rehearsing, force=forced),
        first_share,
        speculator.shapes,
        features,
        speculator.refresh,
        speculator.check_alive,
    )


def _drafter_of(
    recipe: Recipe, drafter: DFlashPlacement, backend: LayerSplitBackend, progress: _WeightProgress
) -> LoadedDraft:
    """The loaded drafter, in this process or its own."""
    plan, draft_process = recipe.plan, recipe.draft_process
    if draft_process is None:
        draft = load_draft(drafter, plan, backend, progress.advance, recipe.host)
    else:
        draft = start_draft(draft_process, drafter, plan, backend, progress.advance)
    if plan.pool is not None and plan.pool.policy == "drafter":
        assert draft.attention_probe is not None, "placement refuses a drafter that is elsewhere"
        backend.lanes.probe_with(draft.attention_probe)
    return draft


def _pump(
    recipe: Recipe, backend: LayerSplitBackend, setup: _DecodingSetup, orders: DiskOrders
) -> Pump:
    spec, plan = recipe.model.spec, recipe.plan
    interval_tokens = min(recipe.limits.interval_tokens, plan.most_uncut_tokens)
    prefixes = PrefixCache(
        MemoryNodes(backend.nodes, setup.features, spec.vocab_size, backend.lanes),
        orders,
        replace(recipe.limits, interval_tokens=interval_tokens),
        recurrent=spec.has_end_state,
        chunk_tokens=plan.prefill_chunk_tokens,
        num_shards=backend.num_shards,
        attention_tokens=attention_tokens_of(spec),
    )
    backend.lanes.keep_with(prefixes.try_save)
    return Pump(
        backend,
        setup.decoding,
        prefixes,
        num_lanes=plan.parallel,
        chunk_tokens=plan.prefill_chunk_tokens,
        runs_async=recipe.runs_async,
        synchronize=backend.synchronize,
        quiet=recipe.quiet,
        lanes=backend.lanes,
    )


def attention_tokens_of(spec: ModelSpec) -> float | None:
    """How many tokens a token must see for attention to cost as much as the products with weights;
    None if there is no attention."""
    parameters = sum(map(spec.num_layer_parameters, range(spec.num_layers)))
    query_dims = sum(m.recent.num_heads * m.rows[0].shape[-1] for m in spec.mixers if m.recent)
    return parameters / (2 * query_dims) if query_dims else None


def measure_prefill(backend: LayerSplitBackend, recipe: Recipe) -> tuple[int, float]:
    """(tokens, seconds) of a prefill, so that the first restore has something to be compared with.
    Measures a chunk that was run before; fewer tokens on a CPU if it would take long, as a restore
    is faster there."""
    plan, vocab_size = recipe.plan, recipe.model.spec.vocab_size
    chunk_tokens, found = plan.prefill_chunk_tokens, (0, 0.0)
    for num_tokens in [chunk_tokens] if recipe.runs_async else [16, 64, chunk_tokens]:
        num_tokens = min(num_tokens, plan.max_ctx_tokens // 2)
        if found[1] * num_tokens > MEASURE_LIMIT_S * found[0]:
            break
        backend.reset(REHEARSAL_LANE)
        began_s = time.perf_counter()
        prompt = [i % vocab_size for i in range(num_tokens)]
        backend.prefill(REHEARSAL_LANE, 0, prompt, project=True)
        backend.synchronize()
        found = num_tokens, time.perf_counter() - began_s
    backend.reset(REHEARSAL_LANE)
    return found


class _WeightProgress:
    """Reports the progress of reading weights."""

    def __init__(self, recipe: Recipe) -> None:
        self._progress = recipe.progress or (lambda done, total: None)
        self._done = 0
        self._began_s = self._last_s = time.monotonic()
        self._total = sum(shard.weight_bytes for shard in recipe.plan.shards)
        if recipe.drafter is not None:
            size = recipe.plan.precision.weight_bytes
            self._total += recipe.drafter.spec.num_parameters * size
        if recipe.mtp is not None:
            self._total += recipe.mtp.weight_bytes

    def advance(self, num_bytes: int) -> None:
        """Report `num_bytes` more."""
        self._done += num_bytes
        self._last_s = time.monotonic()
        self._progress(min(self._done, self._total), self._total)

    def end(self) -> None:
        """Report that all are read, in the log too: the progress bar is shown on terminals only."""
        self._progress(self._total, self._total)
        seconds = self._last_s - self._began_s
        log.info("Read %.3g GB of weights in %.1f s", self._done / 1e9, seconds)


def _rehearse(
    recipe: Recipe, backend: LayerSplitBackend, setup: _DecodingSetup, num_turns: int = NUM_TURNS
) -> None:
    plan = recipe.plan
    rehearsal = rehearsal_for(
        plan.prefill_chunk_tokens,
        plan.max_ctx_tokens,
        recipe.model.spec.vocab_size,
        setup.shapes,
        text_ids=recipe.tokenizer.encode(KNOWN_TEXT) if _is_judged(recipe) else (),
        runs_async=recipe.runs_async,
        num_turns=num_turns if recipe.taps else min(num_turns, NUM_COPY_TURNS),
    )
    rehearse(backend, setup.rehearsed, recipe.tokenizer, rehearsal)
    share = setup.first_share() if _is_judged(recipe) else None
    if share is not None and share < NOISE_SHARE:
        drafter = "the model's head" if recipe.drafter is None else recipe.drafter.draft_dir
        log.warning(
            "%s drafts noise: the model would have chosen %.0f %% of its next tokens in a text at "
            "the start, %.0f %% or more are expected of a drafter that was made for it",
            drafter,
            100 * share,
            100 * NOISE_SHARE,
        )


def _is_judged(recipe: Recipe) -> bool:
    """Whether the rehearsal judges if the drafter fits the model. The bundled drafter does fit; it
    does not know the kind of text used here."""
    drafter = recipe.drafter
    return bool(recipe.taps) and (drafter is None or drafter.draft_dir != BUNDLED_DRAFT_DIR)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What an engine runs before it is ready: a prompt in chunks, then steps of every kind, up to
    `max_tokens` tokens. Kernels are compiled and rounds of speculation timed before the first
    request.
    """

    prompt_ids: tuple[int, ...]
    chunk_tokens: int
    max_tokens: int
    num_steps: int


def rehearsal_for(
    chunk_tokens: int,
    max_ctx_tokens: int,
    vocab_size: int,
    shapes: Sequence[RoundShape],
    *,
    runs_async: bool,
    num_turns: int = NUM_TURNS,
    text_ids: Sequence[int] = (),
) -> Rehearsal:
    """With `shapes` of rounds, `num_turns` of each kind of step; without, one plain step. If there
    are kernels to compile (`runs_async`: see Pump) the prompt is a whole prefill chunk, otherwise
    short. Half the context is left to decode. `text_ids`: repeated to fill the prompt, if drafters
    are to be judged by it; none: any tokens."""
    num_tokens = chunk_tokens if runs_async else max(16, len(text_ids))
    num_tokens = max(1, min(num_tokens, max_ctx_tokens // 2))
    said = text_ids or range(vocab_size)
    prompt_ids = tuple(itertools.islice(itertools.cycle(said), num_tokens))
    num_steps = num_turns * (len(shapes) + 1) if shapes else 1
    return Rehearsal(prompt_ids, chunk_tokens, max_ctx_tokens - num_tokens, num_steps)


def in_turns(shapes: Sequence[RoundShape]) -> Callable[[Sequence[int]], RoundPlan]:
    """The plans of steps: a plain step, then a round of each shape, from the last to the first,
    repeated."""
    kinds = itertools.cycle((None, *reversed(shapes)))

    def plan(lanes: Sequence[int]) -> RoundPlan:
        shape = next(kinds)
        return RoundPlan(shape, () if shape is None else tuple(lanes), is_measured=True)

    return plan


def rehearse(
    target: LayerSplitBackend,
    decoding: LaneDecoding,
    tokenizer: Tokenizer,
    rehearsal: Rehearsal,
    *,
    limit_s: float = REHEARSAL_LIMIT_S,
) -> None:
    """Run the prompt, then greedy steps, as many as begin within `limit_s`. Leaves the lane
    empty."""
    generation = Generation(_prepared(tokenizer, rehearsal))
    target.reset(REHEARSAL_LANE)
    decoding.start(REHEARSAL_LANE)
    generation.start(REHEARSAL_LANE)
    for begin in range(0, len(rehearsal.prompt_ids), rehearsal.chunk_tokens):
        chunk = rehearsal.prompt_ids[begin : begin + rehearsal.chunk_tokens]
        logits = target.prefill(REHEARSAL_LANE, begin, chunk, project=True)
        decoding.prefilled(REHEARSAL_LANE, begin, len(chunk))
    assert logits is not None, "a prompt has tokens"
    choose_next([generation], LocalLogits(logits[None]))
    end_at = time.monotonic() + limit_s
    for _ in range(rehearsal.num_steps):
        if generation.has_ended or time.monotonic() > end_at:
            break
        decoding.step([generation], alone=True, meanwhile=nothing)
    decoding.start(REHEARSAL_LANE)
    target.reset(REHEARSAL_LANE)


def _prepared(tokenizer: Tokenizer, rehearsal: Rehearsal) -> PreparedChoice:
    prompt = RenderedPrompt(
        Tenant(NO_TENANT, History(tokenizer)), None, array("i", rehearsal.prompt_ids), ()
    )
    return PreparedChoice(
        Request(TokenPrompt(rehearsal.prompt_ids)),
        prompt,
        stream_id=0,
        index=0,
        max_tokens=rehearsal.max_tokens,
        stop_ids=frozenset(),
        seed=0,
        counts=None,
        tokenizer=tokenizer,
        detokenizer=Detokenizer(tokenizer),
    )
