"""`luceasync bench paging`: lanes that hold a part of their context beside lanes that hold all of
it.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from luceasync.bench.device import at_rest, host_bandwidth, is_gpu
from luceasync.bench.engines import EngineSetup, ask, engine_of, write_random_model
from luceasync.bench.model import Decoding, load_random, plan_for
from luceasync.bench.report import (
    NOTHING,
    BenchTable,
    Report,
    figure,
    measure,
    median,
    ms,
    paired_ratio,
    share,
)
from luceasync.bench.shapes import Shape
from luceasync.engine.engine import LocalEngine
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copy_stream import copy_beside
from luceasync.host_cache.nodes import Span
from luceasync.kv.cache import total_bytes
from luceasync.models.files import parse_spec, read_spec
from luceasync.models.precision import ITEM_BYTES, Dtype, Precision
from luceasync.models.spec import ModelSpec
from luceasync.nodes import NodeKey
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.capacity import Policy, Pool, PoolRequest
from luceasync.pipeline.devices import host_memory
from luceasync.pipeline.platform import open_platform
from luceasync.request import Sampling, TokenPrompt

CHUNK = 64
TAU = 64  # tokens between probes
NODE = NodeKey(b"context")
ROOM_TOKENS = 4096  # for tokens after the context
HOST_BYTES = 1 << 40  # that plans may assume: all lanes share one node
NUM_MOVED = (4, 16, 120)  # chunks
NUM_QUEUED = 8  # moves in a row, without waiting
NUM_SAID, NUM_ADDED = 48, 80  # tokens of an answer, and of the next message
READING_S = 3.0  # between an answer and the next message, while host memory is prepared
PINNING_DEADLINE_S = 300.0


@dataclass(frozen=True)
class PagingSetup:
    """The subject of a measurement: a shape on a device, with `context` tokens, of which `pool`
    stay there.
    """

    shape: Shape
    device: str
    dtype: Dtype
    context: int
    pool: int
    lanes: int = 4

    @property
    def spec(self) -> ModelSpec:
        return parse_spec(dict(self.shape) | {"max_position_embeddings": 4 * self.context + 8192})

    def load(self, policy: Policy | None, memory: HostMemory) -> LayerSplitBackend:
        """A backend with random weights. `policy` None: its lanes hold their whole context."""
        pool = None if policy is None else PoolRequest(self.pool, Pool(policy, TAU), HOST_BYTES)
        plan = plan_for(
            self.shape,
            [self.device],
            parallel=self.lanes,
            max_ctx_tokens=self.context + ROOM_TOKENS,
            dtype=self.dtype,
            pool=pool,
        )
        return load_random(self.shape, plan, memory=memory)

    def node_bytes(self, num_tokens: int) -> int:
        """Bytes of a node of `num_tokens` tokens, and of the state at its end."""
        precision = Precision.of(self.dtype)
        sizes = [
            (t.shape, precision.torch_dtype(t.role), num_tokens if t in mixer.rows else 1)
            for mixer in self.spec.mixers
            for t in (*mixer.rows, *mixer.end)
        ]
        return sum(total_bytes([(of, kind)]) * count + 8192 for of, kind, count in sizes)


@contextmanager
def memory_of(device: str, num_bytes: int) -> Iterator[HostMemory]:
    """Host memory for nodes, fully prepared; no node may be left in it on exit."""
    memory = host_memory([device], num_bytes + (64 << 20))
    wait = getattr(memory, "wait", None)
    assert wait is None or wait(PINNING_DEADLINE_S), "host memory is not ready in time"
    try:
        yield memory
    finally:
        open_platform(device).synchronize()
        memory.close()


def random_node(
    backend: LayerSplitBackend, span: Span, memory: HostMemory, device: str
) -> dict[str, torch.Tensor]:
    """Tensors of a node, generated on the device, with values small enough for a softmax."""
    platform = open_platform(device)
    tensors = {}
    for name, (shape, dtype) in backend.nodes.shapes(span).items():
        region = memory.allocate(total_bytes([(shape, dtype)]))
        tensors[name] = torch.frombuffer(region, dtype=torch.uint8).view(dtype).view(shape)
        source = (torch.randn(shape, device=platform.device) * 0.3).to(dtype)
        target = tensors[name].view(-1).view(torch.uint8)
        copy_beside([(target, source.view(-1).view(torch.uint8))])
        platform.synchronize()
    return tensors


def restore_all(
    backend: LayerSplitBackend, tensors: Mapping[str, torch.Tensor], span: Span, num_lanes: int
) -> None:
    """Restore the node into each lane."""
    backend.nodes.adopt(NODE, span, tensors)
    for lane in range(num_lanes):
        backend.nodes.restore(lane, [NODE], span.end).wait()


# --- decode steps --------------------------------------------------------------------------------


@torch.inference_mode()
def bench_decode(report: Report, setup: PagingSetup, *, steps: int, rounds: int) -> None:
    """Decode steps with the whole context, with a pool, and with a pool that probes."""
    policies: dict[str, Policy | None] = {"whole": None, "lru": "lru", "qk": "qk"}
    columns = ("step", *policies, "whole / lru", "qk / lru", "pages", "probes", "recalled")
    table = report.table(columns, "decode steps")
    said = setup.lanes * (rounds + 1) * steps  # saved for each lane when evicted
    num_bytes = setup.node_bytes(setup.context) + 3 * setup.node_bytes(said)
    with memory_of(setup.device, num_bytes) as memory:
        backends = {name: setup.load(policy, memory) for name, policy in policies.items()}
        span = Span(0, setup.context, with_state=True)
        tensors = random_node(backends["qk"], span, memory, setup.device)
        for num_lanes in sorted({1, setup.lanes}):
            for backend in backends.values():
                restore_all(backend, tensors, span, num_lanes)
            add_steps(table, backends, num_lanes, setup.context, steps, rounds)
        for backend in backends.values():
            for lane in range(setup.lanes):
                backend.reset(lane)
            backend.close()
        del tensors, backend, backends


def add_steps(
    table: BenchTable,
    backends: Mapping[str, LayerSplitBackend],
    num_lanes: int,
    context: int,
    steps: int,
    rounds: int,
) -> None:
    """Add a row; lanes continue from one sample to the next."""

    def advance(decoding: Decoding) -> None:
        decoding.steps(steps)
        decoding.position += steps

    runs = {
        name: partial(advance, Decoding(backend, num_lanes, context))
        for name, backend in backends.items()
    }
    seconds = measure(runs, rounds, clock=at_rest)
    counts = [backends["qk"].lanes.residence(lane) for lane in range(num_lanes)]
    pages = [backends[name].plan.num_pages for name in ("lru", "whole")]
    table.add(
        f"{num_lanes} lanes at {context}",
        *(ms(median(taken) / steps, 3) for taken in seconds.values()),
        figure(paired_ratio(seconds["whole"], seconds["lru"])),
        figure(paired_ratio(seconds["qk"], seconds["lru"]), digits=3),
        share(pages[0] / pages[1]),
        sum(each.looks for each in counts if each is not None),
        sum(each.recalled for each in counts if each is not None),
    )


# --- turns of a conversation ----------------------------------------------------------------------


def bench_turns(
    report: Report, setup: PagingSetup, *, turns: int, memory_bytes: int, restart: bool
) -> None:
    """Turns of a conversation whose context is many times as long as a lane's pages, and the same
    turns with all pages. With `restart`, there is one more turn, by an engine that starts from the
    files.

    The limit is the minimum time of a first token: the longer of the transfer of keys and values
    from host memory and the pass over new tokens, then the reading of what stays on the device, and
    a step.
    """
    columns = ("pages for", "turn", "prompt", "restored", "restore", "first token", "line")
    table = report.table((*columns, "first / line", "absent"), "turns")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        positions = 2 * setup.context + ROOM_TOKENS
        model_dir = write_random_model(root / "model", setup.shape, setup.dtype, positions)
        engines = EngineSetup(
            model_dir, setup.device, setup.dtype, setup.context + ROOM_TOKENS,
            memory_bytes=memory_bytes,
        )  # fmt: skip
        rows = [tensor for mixer in read_spec(model_dir).mixers for tensor in mixer.rows]
        row_bytes = sum(torch.Size(row.shape).numel() for row in rows) * ITEM_BYTES[setup.dtype]
        token_s = row_bytes / host_bandwidth(setup.device)
        talks = [
            Talk(table, replace(engines, pool_tokens=pool, cache_dir=root / f"nodes-{pool}"
                                if restart else None), setup.context, token_s)
            for pool in (None, setup.pool)
        ]  # fmt: skip
        asyncio.run(hold(talks, turns, restart=restart))


class Talk:
    """A conversation with one engine; each turn is a row."""

    def __init__(self, table: BenchTable, setup: EngineSetup, context: int, token_s: float) -> None:
        self.setup = setup
        self._table = table
        self._token_s = token_s
        self._random = random.Random(1)
        self._history = self._words(context)

    async def turn(self, engine: LocalEngine, name: str, pass_s: float) -> float:
        """A turn. `pass_s` is the time of the pass over new tokens if all pages are present.
        Returns the time that it took here.
        """
        history = self._history
        answered = await ask(engine, TokenPrompt(tuple(history)), NUM_SAID, Sampling(temperature=0))
        finish = answered.finish
        line, held = (NOTHING, NOTHING), finish.residence
        if held is not None:
            seconds = max(len(history) * self._token_s, pass_s)
            seconds += held.resident_tokens * self._token_s
            seconds += finish.timings.decode_s / (NUM_SAID - 1)
            line = figure(seconds, "s", 3), figure(answered.first_s / seconds)
        self._table.add(
            str(self.setup.pool_tokens or "all"),
            name,
            len(history),
            share(finish.usage.cached_tokens / len(history)),
            ms(finish.restore.restore_s),
            figure(answered.first_s, "s", 3),
            *line,
            held.absent_tokens if held else 0,
        )
        self._history += [*answered.token_ids, *self._words(NUM_ADDED)]
        await asyncio.sleep(READING_S if is_gpu(self.setup.device) else 0.0)
        return finish.timings.prefill_s

    def _words(self, count: int) -> list[int]:
        return [self._random.randrange(10, 500) for _ in range(count)]


async def hold(talks: list[Talk], turns: int, *, restart: bool) -> None:
    """Run the turns of each conversation, alternating between them."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine_of(talk.setup)) for talk in talks]
        for turn in range(1, turns + 1):
            pass_s = 0.0
            for talk, engine in zip(talks, engines, strict=True):
                pass_s = await talk.turn(engine, str(turn), pass_s)
    pass_s = 0.0
    for talk in talks if restart else ():
        async with engine_of(talk.setup) as engine:
            pass_s = await talk.turn(engine, "restart", pass_s)
