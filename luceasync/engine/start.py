"""From a Config to an engine: spec, plan, tokenizer and template now, weights in the engine
thread.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from luceasync.config import Config
from luceasync.dflash.adapt import Shape
from luceasync.dflash.load import LoadedDraft, load_draft
from luceasync.dflash.placement import Drafter, plan_with_drafter
from luceasync.engine.cache_directory import Cabinet
from luceasync.engine.decoding import Decoding, PlainDecoding, SpeculativeDecoding
from luceasync.engine.engine import LocalEngine
from luceasync.engine.limits import held_bytes_of, limits_of, warm_bytes_of
from luceasync.engine.prompts import Language
from luceasync.engine.pump import Pump
from luceasync.engine.rehearsal import in_turns, part_for, rehearse
from luceasync.engine.thread import Loaded
from luceasync.errors import ConfigError, PlacementError
from luceasync.hoststore.memory import HostMemory
from luceasync.keeping.disk_orders import DiskOrders
from luceasync.keeping.draft_features import DraftFeatures
from luceasync.keeping.memory_nodes import Features, MemoryNodes, NoFeatures
from luceasync.keeping.namespace import namespace_of
from luceasync.keeping.node_index import Limits
from luceasync.keeping.prefixes import Prefixes
from luceasync.models.config import read_spec
from luceasync.models.spec import ModelSpec
from luceasync.nodefiles.directory import make_private
from luceasync.nodefiles.disk import DiskTier
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import host_memory
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import open_platform
from luceasync.request import ModelCard
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

MIN_HOST_BYTES = 256 << 20  # of pinned memory, if any is needed
MIN_FREE_BYTES = 1 << 30  # of the disk, that stay free

Progress = Callable[[int, int], None]
DecodeWith = Callable[[LayerSplitBackend, LoadedDraft], Decoding]


def speculate(backend: LayerSplitBackend, draft: LoadedDraft) -> Decoding:
    """How lanes decode where there is a drafter."""
    return SpeculativeDecoding(backend, draft.speculator)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the engine thread loads."""

    model_dir: Path
    spec: ModelSpec
    plan: Plan
    tokenizer: Tokenizer
    drafter: Drafter | None
    limits: Limits
    host: HostMemory
    quiet: threading.Event  # set while there is no work
    progress: Progress | None
    decode_with: DecodeWith


def build_engine(
    config: Config, progress: Progress | None = None, *, decode_with: DecodeWith = speculate
) -> LocalEngine:
    """An engine for the configured model; everything that can be refused now is refused now.

    `progress(bytes_done, bytes_total)` is called from the engine thread while weights are read.
    `decode_with`: only a measurement has a reason to replace it. Raises ConfigError.
    """
    model_dir = config.model.model_dir
    spec = read_spec(model_dir)
    report, drafter = plan_with_drafter(config, spec)
    plan = report.plan
    tokenizer = Tokenizer.load(model_dir)
    language = Language(
        card=ModelCard(
            name=config.model.name or model_dir.resolve().name,
            created=int(time.time()),
            max_ctx_tokens=plan.max_ctx_tokens,
            num_parameters=spec.num_parameters,
            family=spec.family,
        ),
        tokenizer=tokenizer,
        template=ChatTemplate.load(model_dir),
        vocab_size=spec.vocab_size,
        num_lanes=plan.parallel,
    )
    held_bytes = held_bytes_of(config.cache.cache_dir)
    limits = limits_of(config.cache, held_bytes)
    capacity = max(limits.memory_bytes + limits.transit_bytes, MIN_HOST_BYTES)
    quiet = threading.Event()
    host = host_memory(
        [shard.device for shard in plan.shards],
        capacity,
        warm_bytes=warm_bytes_of(limits, held_bytes),
        quiet=quiet,
        lanes_bytes=plan.parallel * sum(plan.lane_bytes(shard) for shard in plan.shards),
    )
    recipe = Recipe(
        model_dir, spec, plan, tokenizer, drafter, limits, host, quiet, progress, decode_with
    )
    cabinet = _cabinet(recipe, config.cache.cache_dir)
    return LocalEngine(language, lambda shelf: load(recipe, shelf), config.engine, cabinet)


def _cabinet(recipe: Recipe, cache_dir: Path | None) -> Cabinet | None:
    if cache_dir is None:
        return None

    @asynccontextmanager
    async def open_disk() -> AsyncIterator[DiskTier]:
        await asyncio.to_thread(_check_directory, cache_dir)  # hashing weights may take long
        namespace = await asyncio.to_thread(
            namespace_of, recipe.model_dir, recipe.spec, recipe.plan.precision, cache_dir
        )
        async with DiskTier(
            cache_dir,
            namespace,
            recipe.spec.end_kinds,
            min_free_bytes=MIN_FREE_BYTES,
            allocate=recipe.host.allocate,
        ) as disk:
            yield disk

    return Cabinet(open_disk, tuple(shard.begin for shard in recipe.plan.shards))


def _check_directory(cache_dir: Path) -> None:
    """Raise ConfigError unless the directory, which is made, can be written to."""
    try:
        make_private(cache_dir)
        if not os.access(cache_dir, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"--kv-cache-dir {cache_dir}: {error.strerror}; expected a directory to write to"
        ) from None


def load(recipe: Recipe, shelf: DiskOrders) -> Loaded:
    """Read the weights; runs in the engine thread. Raises ModelError, and PlacementError where a
    device has less memory than it had when the plan was made.
    """
    try:
        return _load(recipe, shelf)
    except torch.OutOfMemoryError as error:
        told = ". ".join(str(error).split(". ")[:3])  # then come torch's hints for programs
        raise PlacementError(
            f"a device ran out of memory while the model was loaded: {told}. "
            "Free some of it, or lower --max-ctx or --parallel"
        ) from error


def _load(recipe: Recipe, shelf: DiskOrders) -> Loaded:
    spec, plan, drafter = recipe.spec, recipe.plan, recipe.drafter
    reading = _Reading(recipe)
    if plan.suits_one_thread:
        # Measured with the bundled model and 16 streams on 2 cores: almost three times the tokens.
        torch.set_num_threads(1)  # of this thread, which is the engine's
    with ExitStack() as closing:
        closing.callback(recipe.host.close)
        taps = drafter.spec.taps if drafter else ()
        backend = LayerSplitBackend.open(
            recipe.model_dir, spec, plan, reading.advance, memory=recipe.host, taps=taps
        )
        closing.callback(backend.close)
        ways = _ways(recipe, backend, reading, closing)
        reading.end()
        computes_beside = _computes_beside(plan, drafter)
        part = part_for(
            plan.prefill_chunk_tokens,
            plan.max_ctx_tokens,
            spec.vocab_size,
            ways.shapes,
            computes_beside=computes_beside,
        )
        rehearse(backend, ways.rehearsed, recipe.tokenizer, part)
        prefixes = Prefixes(
            MemoryNodes(backend.nodes, ways.features, spec.vocab_size),
            shelf,
            recipe.limits,
            recurrent=spec.has_end_state,
            chunk_tokens=plan.prefill_chunk_tokens,
            num_shards=backend.num_shards,
        )
        pump = Pump(
            backend,
            ways.decoding,
            prefixes,
            num_lanes=plan.parallel,
            chunk_tokens=plan.prefill_chunk_tokens,
            computes_beside=computes_beside,
            synchronize=open_platform(plan.shards[-1].device).synchronize,
            quiet=recipe.quiet,
        )
        return Loaded(pump, closing.pop_all().close)


@dataclass(frozen=True, slots=True)
class _Ways:
    """How lanes decode, how they do so when they rehearse, and what is kept of a drafter."""

    decoding: Decoding
    rehearsed: Decoding
    shapes: tuple[Shape, ...]
    features: Features


def _ways(
    recipe: Recipe, backend: LayerSplitBackend, reading: _Reading, closing: ExitStack
) -> _Ways:
    if recipe.drafter is None:
        plain = PlainDecoding(backend)
        return _Ways(plain, plain, (), NoFeatures())
    draft = load_draft(recipe.drafter, recipe.plan, backend, reading.advance)
    closing.callback(draft.close)
    speculator = draft.speculator
    forced = in_turns(speculator.shapes)
    return _Ways(
        recipe.decode_with(backend, draft),
        SpeculativeDecoding(backend, speculator.rehearsing(), force=forced),
        speculator.shapes,
        DraftFeatures(draft.ring, speculator, recipe.host),
    )


def _computes_beside(plan: Plan, drafter: Drafter | None) -> bool:
    """Whether all work is queued on devices, so that the host is free while they compute."""
    return plan.computes_beside and (drafter is None or drafter.device.computes_beside)


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
