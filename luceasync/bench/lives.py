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

from torch import Tensor

from luceasync.bench.model import load_random, plan_for
from luceasync.bench.shapes import Shape
from luceasync.config import BUNDLED_MODEL_DIR, EngineConfig
from luceasync.engine.decoding import PlainDecoding
from luceasync.engine.engine import Cabinet, Language, LocalEngine
from luceasync.engine.limits import held_bytes_of, warm_bytes_of
from luceasync.engine.pump import Pump
from luceasync.engine.thread import Loaded
from luceasync.hoststore.arena import Arena, WarmMemory
from luceasync.hoststore.memory import HostMemory
from luceasync.hoststore.node_store import Span
from luceasync.keeping.holdings import Limits
from luceasync.keeping.prefixes import Prefixes
from luceasync.keeping.shelf import Shelf
from luceasync.keeping.state import NoFeatures, StateMover
from luceasync.models.spec import ModelSpec, parse_spec
from luceasync.nodefiles.disk import DiskTier
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import host_memory
from luceasync.request import Finish, ModelCard, Request, Sampling
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

NAMESPACE = "bench"
MEMORY_BYTES = 12 << 30
LIMITS = Limits(MEMORY_BYTES, disk_bytes=1 << 40)
WRITE_DEADLINE_S = 120.0
NUM_QUIET = 20  # looks at an engine that find it idle
SENTENCE = "The prefix of this conversation has been read before and need not be read again. "


class NotingBackend(LayerSplitBackend):
    """Notes which nodes it holds, so that they can be dropped when an engine's life is over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: set[str] = set()

    def save(self, lane: int, node: str, span: Span) -> None:
        self._held.add(node)
        super().save(lane, node, span)

    def adopt(self, node: str, span: Span, tensors: Mapping[str, Tensor]) -> None:
        self._held.add(node)
        super().adopt(node, span, tensors)

    def drop_all(self) -> None:
        """Hold no nodes."""
        for node in self._held:
            self.drop(node)
        self._held.clear()


@dataclass(frozen=True)
class Machine:
    """What outlives a restart here: the weights, lanes and pinned memory. The rest starts anew."""

    spec: ModelSpec
    backend: NotingBackend
    memory: HostMemory
    root: Path

    @property
    def files(self) -> list[Path]:
        """The nodes on disk."""
        return sorted(self.root.glob(f"{NAMESPACE}/*.safetensors"))


def make_machine(
    shape: Shape, device: str, num_tokens: int, root: Path, *, dtype: str, parallel: int
) -> Machine:
    """Random weights of the shape, and a directory that is empty yet."""
    plan = plan_for(shape, [device], parallel=parallel, max_ctx_tokens=num_tokens, dtype=dtype)
    memory = host_memory([device], MEMORY_BYTES)
    backend = load_random(shape, plan, memory=memory, kind=NotingBackend)
    assert isinstance(backend, NotingBackend)
    return Machine(parse_spec(dict(shape)), backend, memory, root)


@asynccontextmanager
async def life(machine: Machine) -> AsyncIterator[LocalEngine]:
    """An engine that knows of nothing but the weights and the directory."""
    plan, backend = machine.backend.plan, machine.backend
    tokenizer = Tokenizer.load(BUNDLED_MODEL_DIR)
    card = ModelCard("bench", 0, plan.max_ctx_tokens, machine.spec.num_parameters, "bench")
    template = ChatTemplate.load(BUNDLED_MODEL_DIR)
    language = Language(card, tokenizer, template, machine.spec.vocab_size, plan.parallel)
    memory = memory_of(machine)
    chunk_tokens = plan.prefill_chunk_tokens

    def load(shelf: Shelf) -> Loaded:
        prefixes = Prefixes(
            StateMover(backend, NoFeatures(), machine.spec.vocab_size),
            shelf,
            LIMITS,
            recurrent=machine.spec.delta is not None,
            chunk_tokens=chunk_tokens,
        )
        pump = Pump(
            backend,
            PlainDecoding(backend),
            prefixes,
            num_lanes=plan.parallel,
            chunk_tokens=chunk_tokens,
        )
        return Loaded(pump, lambda: None)

    def open_disk() -> DiskTier:
        return DiskTier(machine.root, NAMESPACE, allocate=memory.allocate)

    cabinet = Cabinet(open_disk, tuple(shard.begin for shard in plan.shards))
    async with LocalEngine(language, load, EngineConfig(), cabinet) as engine:
        await engine.load()
        yield engine
    backend.drop_all()


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
            [dict(message) for message in messages],
            sampling=sampling or Sampling(),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
    )
    async for delta in stream:
        if delta.token_ids and not first_s:
            first_s = time.perf_counter() - started
        text += delta.text
        if delta.finish is not None:
            return Asked(first_s, delta.finish, text)
    raise AssertionError("a stream ends with a finish")


async def written(engine: LocalEngine) -> None:
    """Wait until the disk has what it is to have, and nothing else is ordered for a moment."""
    num_quiet = 0
    async with asyncio.timeout(WRITE_DEADLINE_S):
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
