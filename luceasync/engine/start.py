"""From a Config to an engine: spec, plan, tokenizer and template now, weights in the engine
thread.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from luceasync.config import CacheConfig, Config
from luceasync.dflash.load import LoadedDraft, load_draft
from luceasync.dflash.placement import Drafter, plan_with_drafter
from luceasync.engine.decoding import Decoding, PlainDecoding, SpeculativeDecoding
from luceasync.engine.engine import Cabinet, Language, LocalEngine
from luceasync.engine.pump import Pump
from luceasync.engine.thread import Loaded
from luceasync.errors import ConfigError
from luceasync.keeping.draft_state import DraftFeatures
from luceasync.keeping.holdings import Limits
from luceasync.keeping.namespace import namespace_of
from luceasync.keeping.prefixes import Prefixes
from luceasync.keeping.shelf import Shelf
from luceasync.keeping.state import Features, NoFeatures, StateMover
from luceasync.kv.host import HostMemory
from luceasync.models.spec import ModelSpec, read_spec
from luceasync.prefix.directory import make_private
from luceasync.prefix.disk import DiskTier
from luceasync.prefix.upkeep import Upkeep
from luceasync.request import ModelCard
from luceasync.target.backend import LayerSplitBackend
from luceasync.target.devices import host_memory
from luceasync.target.plan import Plan
from luceasync.target.shard_plan import DTYPE_BYTES
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

TRANSIT_BYTES = 1 << 30  # of memory, for nodes on their way to and from the disk
MIN_HOST_BYTES = 256 << 20  # of pinned memory, if any is needed
WARM_SHARE = 4  # of the prefix cache's memory one part has its pages before it is needed
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
    limits = limits_of(config.cache)
    capacity = max(limits.memory_bytes + limits.transit_bytes, MIN_HOST_BYTES)
    warm_bytes = warm_bytes_of(config.cache, limits)
    quiet = threading.Event()
    host = host_memory(
        [shard.device for shard in plan.shards],
        capacity,
        warm_bytes=warm_bytes,
        quiet=quiet,
        lanes_bytes=plan.parallel * sum(plan.lane_bytes(shard) for shard in plan.shards),
    )
    recipe = Recipe(model_dir, spec, plan, drafter, limits, host, quiet, progress, decode_with)
    cabinet = _cabinet(recipe, config.cache.cache_dir)
    return LocalEngine(language, lambda shelf: load(recipe, shelf), config.engine, cabinet)


def limits_of(config: CacheConfig) -> Limits:
    """The sizes of the prefix cache; what was left open follows from this machine."""
    memory_bytes = config.memory_bytes
    if memory_bytes is None:
        memory_bytes = psutil.virtual_memory().available // 4
    disk_bytes = config.budget_bytes
    if disk_bytes is None and config.cache_dir is not None:
        # With what is there already: else every start would want less than the one before it.
        disk_bytes = (_free_bytes(config.cache_dir) + _held_bytes(config.cache_dir)) // 2
    return Limits(
        memory_bytes=memory_bytes,
        transit_bytes=0 if disk_bytes is None else TRANSIT_BYTES,
        disk_bytes=disk_bytes,
        min_disk_tokens=config.min_tokens,
        interval_tokens=config.interval_tokens,
    )


def warm_bytes_of(config: CacheConfig, limits: Limits) -> int:
    """How much memory is prepared for what lies on the disk and may be read soon."""
    held_bytes = 0 if config.cache_dir is None else _held_bytes(config.cache_dir)
    return min(held_bytes, limits.memory_bytes // WARM_SHARE)


def _free_bytes(directory: Path) -> int:
    """Of the file system that the directory is, or will be, on."""
    existing = next(path for path in (directory, *directory.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _held_bytes(directory: Path) -> int:
    """Of the nodes in it, whatever model they are of; none where it cannot be looked at now."""
    try:
        return sum(total.num_bytes for total in Upkeep(directory).totals())
    except (ConfigError, OSError):
        return 0


def _cabinet(recipe: Recipe, cache_dir: Path | None) -> Cabinet | None:
    if cache_dir is None:
        return None

    @asynccontextmanager
    async def open_disk() -> AsyncIterator[DiskTier]:
        await asyncio.to_thread(_check_directory, cache_dir)  # hashing weights may take long
        namespace = await asyncio.to_thread(
            namespace_of, recipe.model_dir, recipe.spec, recipe.plan.dtype, cache_dir
        )
        async with DiskTier(
            cache_dir, namespace, min_free_bytes=MIN_FREE_BYTES, allocate=recipe.host.allocate
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


def load(recipe: Recipe, shelf: Shelf) -> Loaded:
    """Read the weights; runs in the engine thread."""
    spec, plan, drafter = recipe.spec, recipe.plan, recipe.drafter
    reading = _Reading(recipe)
    if plan.is_small_on_cpu:
        # Measured with the bundled model and 16 streams on 2 cores: almost three times the tokens.
        torch.set_num_threads(1)  # of this thread, which is the engine's
    with ExitStack() as closing:
        closing.callback(recipe.host.close)
        taps = drafter.spec.taps if drafter else ()
        backend = LayerSplitBackend.open(
            recipe.model_dir, spec, plan, reading.advance, memory=recipe.host, taps=taps
        )
        closing.callback(backend.close)
        decoding: Decoding = PlainDecoding(backend)
        features: Features = NoFeatures()
        if drafter is not None:
            draft = load_draft(drafter, plan, backend, reading.advance)
            closing.callback(draft.close)
            decoding = recipe.decode_with(backend, draft)
            features = DraftFeatures(draft.ring, draft.speculator, recipe.host)
        reading.end()
        prefixes = Prefixes(
            StateMover(backend, features, spec.vocab_size),
            shelf,
            recipe.limits,
            recurrent=spec.delta is not None,
            chunk_tokens=plan.prefill_chunk_tokens,
            num_shards=backend.num_shards,
        )
        pump = Pump(
            backend,
            decoding,
            prefixes,
            num_lanes=plan.parallel,
            chunk_tokens=plan.prefill_chunk_tokens,
            computes_beside=_computes_beside(plan, drafter),
            quiet=recipe.quiet,
        )
        return Loaded(pump, closing.pop_all().close)


def _computes_beside(plan: Plan, drafter: Drafter | None) -> bool:
    """Whether all work is queued on devices, so that the host is free while they compute."""
    names = [shard.device for shard in plan.shards]
    names += [] if drafter is None else [drafter.device.name]
    return not any(name.startswith("cpu:") for name in names)


class _Reading:
    """Tells how far the reading of weights has come."""

    def __init__(self, recipe: Recipe) -> None:
        self._progress = recipe.progress or (lambda done, total: None)
        self._done = 0
        self._total = sum(shard.weight_bytes for shard in recipe.plan.shards)
        if recipe.drafter is not None:
            size = DTYPE_BYTES[recipe.plan.dtype]
            self._total += recipe.drafter.spec.num_parameters * size

    def advance(self, num_bytes: int) -> None:
        """So many bytes more are read."""
        self._done += num_bytes
        self._progress(min(self._done, self._total), self._total)

    def end(self) -> None:
        """All are."""
        self._progress(self._total, self._total)
