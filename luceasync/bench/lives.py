"""Engines that begin anew over the same weights and the same directory, without a process each.

Owns what outlives them. Knows no figures: what an engine is asked, and when, is for scripts to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luceasync.bench.model import load_random, plan_for
from luceasync.bench.shapes import Shape
from luceasync.config import BUNDLED_MODEL_DIR, EngineConfig
from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.names import parse_file_name
from luceasync.engine.cache_directory import Cabinet, held_bytes_of, warm_bytes_of
from luceasync.engine.decoding import PlainDecoding
from luceasync.engine.engine import LocalEngine
from luceasync.engine.prompts import Language
from luceasync.engine.pump import Pump
from luceasync.engine.thread import Loaded
from luceasync.host_cache.arena import Arena, HostMemory, WarmMemory
from luceasync.models.config import parse_spec
from luceasync.models.precision import Dtype
from luceasync.models.spec import ModelSpec
from luceasync.nodes import NodeKey
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import host_memory
from luceasync.prefix_cache.cache import Prefixes
from luceasync.prefix_cache.disk_orders import DiskOrders
from luceasync.prefix_cache.index import Limits
from luceasync.prefix_cache.memory import MemoryNodes, UnreadFeatures
from luceasync.request import ChatPrompt, Finish, ModelCard, Request, Sampling
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

NAMESPACE = "bench"
MEMORY_BYTES = 12 << 30
LIMITS = Limits(MEMORY_BYTES, disk_bytes=1 << 40)
WRITE_DEADLINE_S = 120.0
NUM_QUIET = 20  # looks at an engine that find it idle
SENTENCE = "The prefix of this conversation has been read before and need not be read again. "


@dataclass(frozen=True)
class Machine:
    """What outlives a restart here: the weights, lanes and pinned memory. The rest starts anew."""

    spec: ModelSpec
    backend: LayerSplitBackend
    memory: HostMemory
    root: Path

    @property
    def files(self) -> list[Path]:
        """The nodes on disk, their rows and their ends."""
        found = self.root.glob(f"{NAMESPACE}/*")
        return sorted(path for path in found if parse_file_name(path.name) is not None)


def make_machine(
    shape: Shape, device: str, num_tokens: int, root: Path, *, dtype: Dtype, parallel: int
) -> Machine:
    """Random weights of the shape, and a directory that is empty yet."""
    plan = plan_for(shape, [device], parallel=parallel, max_ctx_tokens=num_tokens, dtype=dtype)
    memory = host_memory([device], MEMORY_BYTES)
    backend = load_random(shape, plan, memory=memory)
    return Machine(parse_spec(dict(shape)), backend, memory, root)


@asynccontextmanager
async def life(machine: Machine, limits: Limits = LIMITS) -> AsyncIterator[LocalEngine]:
    """An engine that knows of nothing but the weights and the directory."""
    plan, backend = machine.backend.plan, machine.backend
    tokenizer = Tokenizer.load(BUNDLED_MODEL_DIR)
    card = ModelCard("bench", 0, plan.max_ctx_tokens, machine.spec.num_parameters, "bench")
    template = ChatTemplate.load(BUNDLED_MODEL_DIR)
    language = Language(card, tokenizer, template, machine.spec.vocab_size, plan.parallel)
    memory = memory_of(machine)
    chunk_tokens = plan.prefill_chunk_tokens

    def load(disk: DiskOrders) -> Loaded:
        prefixes = Prefixes(
            MemoryNodes(backend.nodes, UnreadFeatures(), machine.spec.vocab_size, backend.lanes),
            disk,
            limits,
            recurrent=machine.spec.has_end_state,
            chunk_tokens=chunk_tokens,
        )
        pump = Pump(
            backend,
            PlainDecoding(backend),
            prefixes,
            num_lanes=plan.parallel,
            chunk_tokens=chunk_tokens,
            synchronize=backend.synchronize,
            lanes=backend.lanes,
        )
        return Loaded(pump, lambda: None)

    def open_disk() -> DiskTier:
        return DiskTier(machine.root, NAMESPACE, machine.spec.end_kinds, allocate=memory.allocate)

    cabinet = Cabinet(open_disk, tuple(shard.begin for shard in plan.shards))
    async with LocalEngine(language, load, EngineConfig(), cabinet) as engine:
        await engine.load()
        yield engine
    forget(machine)


def forget(machine: Machine) -> None:
    """Let memory hold none of the nodes that the disk has."""
    for file in machine.files:
        machine.backend.nodes.drop(NodeKey(bytes.fromhex(file.stem)))


def memory_of(machine: Machine) -> HostMemory:
    """Memory for nodes as a server has it when its weights are read: what is prepared meanwhile is
    there.
    """
    if isinstance(machine.memory, Arena):
        return machine.memory
    warm_bytes = warm_bytes_of(LIMITS, held_bytes_of(machine.root))
    devices = [shard.device for shard in machine.backend.plan.shards]
    memory = host_memory(devices, MEMORY_BYTES, warm_bytes=warm_bytes)
    assert not isinstance(memory, WarmMemory) or memory.wait(60)
    return memory


@dataclass(frozen=True)
class Asked:
    """An answer: `first_s` from the request to its first token."""

    first_s: float
    finish: Finish
    text: str


async def ask(
    engine: LocalEngine,
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int,
    sampling: Sampling | None = None,
) -> Asked:
    """One answer of `max_tokens` tokens, whatever they are."""
    started, first_s, text = time.perf_counter(), 0.0, ""
    stream = await engine.open(
        Request(
            ChatPrompt([dict(message) for message in messages]),
            sampling=sampling or Sampling(),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
    )
    async for delta in stream:
        if delta.token_ids and not first_s:
            first_s = time.perf_counter() - started
        text += delta.words
        if delta.finish is not None:
            return Asked(first_s, delta.finish, text)
    raise AssertionError("a stream ends with a finish")


async def written(engine: LocalEngine) -> None:
    """Wait until the disk has what it is to have of what was answered, and nothing else is ordered
    for a moment: of an answer that has just been told, nothing may be ordered yet.
    """
    num_quiet = 0
    async with asyncio.timeout(WRITE_DEADLINE_S):
        await engine.flush()
        while num_quiet < NUM_QUIET:
            await asyncio.sleep(0.005)
            status = engine.status()
            is_busy = status.num_running or status.cache is None or status.cache.num_unwritten
            num_quiet = 0 if is_busy else num_quiet + 1


def user(text: str) -> list[dict[str, Any]]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def text_of(num_tokens: int, head: str = "") -> str:
    """A text of about so many tokens; `head` makes it another one from its beginning."""
    tokenizer = Tokenizer.load(BUNDLED_MODEL_DIR)
    per_sentence = len(tokenizer.encode(SENTENCE * 64)) / 64
    return head + SENTENCE * int(num_tokens / per_sentence)
