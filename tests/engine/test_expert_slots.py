"""Experts that wait in host memory: at every budget, after every history of slots, an engine says
what one says that has all of them on its device.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.models.feed_forward.feed_forward import RoutedFeedForward
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.expert_plan import ExpertRequest, expert_layers
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.remote import fleet
from luceasync.request import Finish, Request, Sampling, TokenPrompt
from luceasync.status import ExpertsStatus
from tests import tiny
from tests.children import children
from tests.engines import written
from tests.kernels.experts_double import SlottedPlatform
from tests.pipeline.slotted_backend import have_slots
from tests.processes import placed

NUM_EXPERTS, NUM_CHOSEN, NUM_LANES, INNER = 12, 2, 2, 32
EXPERTS = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": INNER}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
SHARED = EXPERTS | {"num_experts_per_tok": NUM_CHOSEN, "shared_expert_intermediate_size": 48}
# By model type: softmax with a gated shared expert; sigmoids with a bias behind a dense layer;
# a network beside the experts, whose router has a norm of its own.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": SHARED | DELTA,
    "laguna": SHARED | WINDOWS | {"moe_routed_scaling_factor": 2.5},
    "gemma4_text": EXPERTS
    | WINDOWS
    | {"top_k_experts": NUM_CHOSEN, "enable_moe_block": True, "global_head_dim": 32}
    | {"hidden_size_per_layer_input": 0},
}
POOL_TOKENS = 512  # of the lanes' contexts: the long prompt exceeds it
# Slots of a layer, and how many devices share the layers: one start after the other.
BUDGETS = [(NUM_EXPERTS, 1), (NUM_EXPERTS // 2, 2), (NUM_CHOSEN * NUM_LANES, 3)]


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = tiny.COMMON | {"num_hidden_layers": 4, "pad_token_id": 0}
    config = AutoConfig.for_model(request.param, **sizes | MODELS[request.param])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return tiny.save(model, tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_draft(tmp_path_factory.mktemp("draft"), tiny.draft_config())


@pytest.fixture
def slots() -> Iterator[pytest.MonkeyPatch]:
    """Devices have slots within the context of this patch."""
    with pytest.MonkeyPatch.context() as patch:
        have_slots(patch)
        yield patch


@asynccontextmanager
async def running(
    model_dir: Path,
    draft_dir: Path,
    cache_dir: Path | None = None,
    num_slots: int | None = None,
    num_devices: int = 1,
    elsewhere: PlacementConfig | None = None,
) -> AsyncIterator[LocalEngine]:
    """`elsewhere`: the devices, in place of `num_devices` of this process."""
    spec = read_spec(model_dir)
    num_layers = sum(isinstance(each.feed_forward, RoutedFeedForward) for each in spec.layers)
    expert_bytes = 4 * 3 * INNER * spec.hidden_size
    num_bytes = None if num_slots is None else num_layers * num_slots * expert_bytes
    engine = build_engine(
        Config(
            model=ModelConfig(model_dir=model_dir, dtype="fp32"),
            placement=replace(
                elsewhere or PlacementConfig(tuple(f"cpu:{i}" for i in range(num_devices))),
                expert_bytes=num_bytes,
            ),
            engine=EngineConfig(parallel=NUM_LANES, max_ctx_tokens=1024, prefill_chunk_tokens=128),
            cache=CacheConfig(
                cache_dir=cache_dir,
                budget_bytes=1 << 30 if cache_dir else None,
                memory_bytes=1 << 28,
                min_tokens=1,
            ),
            draft=DraftConfig(draft_dir=draft_dir),
            kvflash=KvFlashConfig(pool_tokens=POOL_TOKENS, policy="lru"),
        )
    )
    async with engine:
        await engine.load()
        yield engine


def tokens(num_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, tiny.VOCAB_SIZE), k=num_tokens))


async def said(
    engine: LocalEngine, prompt: tuple[int, ...], num_tokens: int = 10
) -> tuple[tuple[int, ...], Finish]:
    """A greedy answer of that many tokens."""
    asked = Request(
        TokenPrompt(prompt), Sampling(temperature=0), max_tokens=num_tokens, ignore_eos=True
    )
    deltas = [delta async for delta in await engine.open(asked)]
    assert deltas[-1].finish is not None
    return tuple(token for delta in deltas for token in delta.token_ids), deltas[-1].finish


async def conversation(engine: LocalEngine, start: int) -> list[tuple[int, ...]]:
    """What is answered at a start: to a prompt of many rows, to two of few at once, to two turns
    that exceed the pool, of which the first tokens are exact, and to two that do not. What other
    starts have asked, too, is there after the first one.
    """
    found = [(await said(engine, tokens(90, start)))[0]]
    both = await asyncio.gather(*(said(engine, tokens(n, start + n), 16) for n in (20, 31)))
    found += [answer for answer, _ in both]
    long = tokens(700, 3)
    found += [(await said(engine, prompt, 1))[0] for prompt in (long, long + tokens(40, start))]
    turn = tokens(150, 7)
    answer, _ = await said(engine, turn)
    return [*found, answer, (await said(engine, turn + answer + tokens(30, start + 8)))[0]]


@pytest.mark.slow
@pytest.mark.covered(0)
async def test_every_budget_and_history_of_slots_gives_the_same_tokens(
    model_dir: Path, draft_dir: Path, tmp_path: Path, slots: pytest.MonkeyPatch
) -> None:
    """With a drafter's trees and a pool; each start has another budget and split than the one
    before, and takes up what that has written.
    """
    expected = []
    async with running(model_dir, draft_dir) as engine:
        assert engine.status().experts is None
        for start in range(len(BUDGETS)):
            expected.append(await conversation(engine, start))
    for start, (num_slots, num_devices) in enumerate(BUDGETS):
        async with running(model_dir, draft_dir, tmp_path, num_slots, num_devices) as engine:
            answer, finish = await said(engine, tokens(150, 7))
            assert answer == expected[0][-2]
            assert finish.speculation is not None and finish.speculation.rounds > 0
            assert finish.usage.cached_tokens >= (128 if start else 0)
            assert await conversation(engine, start) == expected[start], (num_slots, num_devices)
            await written(engine)
            met = engine.status().experts
            assert met is not None and met.hits_total > 0 and met.copied_bytes_total > 0
            assert (met.read_through_total > 0) == (num_slots < NUM_EXPERTS)


async def counted(engine: LocalEngine, are: Callable[[ExpertsStatus], bool]) -> ExpertsStatus:
    """What became of experts, once that is so; an engine asks for it between steps."""
    async with asyncio.timeout(60):
        while True:
            met = engine.status().experts
            assert met is not None
            if are(met):
                return met
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_backends")
@pytest.mark.parametrize("model_dir", ["qwen3_5_moe_text"], indirect=True)
async def test_experts_of_another_process_are_counted_over_its_lives(
    model_dir: Path,
    draft_dir: Path,
    tmp_path: Path,
    slots: pytest.MonkeyPatch,
) -> None:
    slots.setattr(fleet, "COUNT_S", 0.0)
    placement = placed(tmp_path, "two", module="tests.pipeline.slotted_backend")
    async with running(model_dir, draft_dir, None, NUM_EXPERTS // 2) as engine:
        expected, _ = await said(engine, tokens(20, 1))
    async with running(model_dir, draft_dir, None, NUM_EXPERTS // 2, elsewhere=placement) as engine:
        assert (await said(engine, tokens(20, 1)))[0] == expected
        before = await counted(engine, lambda met: min(met.hits_total, met.misses_total) > 0)
        assert before.copied_bytes_total > 0
        [process] = children("--layers")
        process.kill()
        after = await counted(engine, lambda met: engine.status().processes.all[0].num_starts == 2)
        assert after.hits_total >= before.hits_total
        assert (await said(engine, tokens(20, 1)))[0] == expected
        await counted(engine, lambda met: met.hits_total > after.hits_total)


def test_slots_take_the_bytes_that_were_planned(model_dir: Path, slots: pytest.MonkeyPatch) -> None:
    files = ModelFiles(model_dir)
    spec, precision = files.spec, Precision.of("fp32")
    layers = expert_layers(spec, 0, spec.num_layers, precision, files.weights.encoding)
    asked = sum(layer.slots_bytes(5) for layer in layers)
    plan = make_plan(
        spec,
        [SlottedPlatform("cpu:0").offer()],
        precision=precision,
        weights=None,
        parallel=NUM_LANES,
        max_ctx_tokens=256,
        prefill_chunk_tokens=None,
        encoding_of=files.weights.encoding,
        experts=ExpertRequest(asked, 1 << 30),
    )
    backend = LayerSplitBackend.open(files, plan)
    [shard], [stage_here] = plan.shards, backend._stages
    assert shard.expert_slots == 5
    assert stage_here.device_bytes == {"cpu:0": plan.device_bytes(shard)}
    backend.close()
