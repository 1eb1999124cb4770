"""Layers that see a window: what is kept of them goes on anywhere, and does not grow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.host_cache.nodes import Span
from luceasync.models.files import parse_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import Plan, make_plan
from tests import tiny
from tests.engine.test_processes import running as arranged
from tests.engines import ask, running, written

WINDOW = 24
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
QUESTION = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 3


@pytest.fixture(scope="module", params=["some layers", "all layers"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import MinistralConfig, MinistralForCausalLM

    torch.manual_seed(0)
    kinds = MIXED if request.param == "some layers" else ["sliding_attention"] * 4
    sizes = tiny.COMMON | {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": WINDOW}
    model = MinistralForCausalLM(MinistralConfig(**sizes)).eval()
    return tiny.save(model, tmp_path_factory.mktemp("windows"))


def prompt(num_tokens: int) -> list[int]:
    return [(7 * i) % 500 + 3 for i in range(num_tokens)]


def decoded(backend: LayerSplitBackend, lane: int, begin: int, num_tokens: int = 4) -> Tensor:
    """Logits of tokens that are given."""
    steps = range(begin, begin + num_tokens)
    return torch.stack([backend.decode([lane], [at], [at % 97 + 3]).whole()[0] for at in steps])


@pytest.mark.parametrize("num_tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("before", [0, 40])
def test_a_span_of_any_length_goes_on_in_another_lane_and_under_another_split(
    model_dir: Path, make_backend, before: int, num_tokens: int
):
    source, target = make_backend(model_dir), make_backend(model_dir, num_shards=3)
    end = before + num_tokens
    spans = {"first": Span(0, before, True), "last": Span(before, end, True)}
    spans = {name: span for name, span in spans.items() if span.end > span.begin}
    for name, span in spans.items():
        source.prefill(0, span.begin, prompt(end)[span.begin : span.end], project=False)
        source.nodes.save(0, name, span)
        target.nodes.adopt(name, span, source.nodes.export(name))
    expected = decoded(source, 0, end)
    source.nodes.restore(2, [*spans], end)
    assert torch.equal(decoded(source, 2, end), expected)
    target.nodes.restore(1, [*spans], end)
    assert torch.equal(decoded(target, 1, end), expected)


@pytest.mark.slow
async def test_what_memory_disk_and_a_restart_give_back_is_what_was_computed(
    model_dir: Path, tmp_path: Path
):
    async with running(model_dir, memory_bytes=0) as engine:
        cold = await ask(engine, QUESTION, 40)
    async with running(model_dir, tmp_path) as engine:
        first = await ask(engine, QUESTION, 40, keep_prefix=True)
        again = await ask(engine, QUESTION, 40)
        await written(engine)
    assert again.finish.restore.tier == "memory" and again.num_prefilled == 0
    async with running(model_dir, tmp_path, shards=3) as engine:
        restarted = await ask(engine, QUESTION, 40)
    assert restarted.finish.restore.tier == "disk" and restarted.num_prefilled == 0
    assert [each.ids for each in (first, again, restarted)] == [cold.ids] * 3


@pytest.mark.slow
@pytest.mark.covered(0)
@pytest.mark.usefixtures("forked_backends")
async def test_several_processes_with_trees_of_drafts_say_and_keep_what_one_does(
    model_dir: Path, tmp_path: Path
):
    async with arranged(model_dir, tmp_path / "one", "one") as engine:
        cold = await ask(engine, QUESTION, 40)
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config())
    drafts = {"draft_dir": draft_dir, "ddtree": True, "ddtree_budget": 12}
    cache_dir = tmp_path / "cache"
    async with arranged(
        model_dir, tmp_path / "a", "three", cache_dir=cache_dir, **drafts
    ) as engine:
        several = await ask(engine, QUESTION, 40, keep_prefix=True)
        await written(engine)
        assert engine.status().speculation.rounds_total > 0
    async with arranged(model_dir, tmp_path / "b", "one", cache_dir=cache_dir) as engine:
        again = await ask(engine, QUESTION, 40)
    assert again.finish.restore.tier == "disk" and again.num_prefilled == 0
    assert several.ids == again.ids == cold.ids


async def test_the_next_turn_goes_on_where_the_opening_of_the_answer_begins(model_dir: Path):
    """The state there is taken although nothing is set aside beside the lanes."""
    question = {"role": "user", "content": QUESTION}
    async with running(model_dir) as engine:
        first = await ask(engine, [question], 8)
        second = await ask(engine, [question, question], 8)
    opening = first.num_prompt_tokens - second.num_cached
    assert second.finish.restore.tier == "memory" and 0 < opening <= 64


def test_windows_are_by_position_while_chunks_of_other_layers_are_absent(
    model_dir: Path, make_backend
):
    """A window that took row indices for positions would hold other tokens."""
    sizes = {"max_ctx_tokens": 1024, "chunk_tokens": 128, "verify_rows": (3,)}
    whole = make_backend(model_dir, **sizes)
    pooled = make_backend(model_dir, pool_tokens=512, **sizes)
    tokens = prompt(700)
    for backend in (whole, pooled):
        for begin in range(0, 700, 128):
            backend.prefill(1, begin, tokens[begin : begin + 128], project=True)
    found, expected = decoded(pooled, 1, 700), decoded(whole, 1, 700)
    rows = torch.tensor([[5, 6, 7]])
    verified = [backend.verify([1], [704], rows).whole() for backend in (pooled, whole)]
    for backend in (pooled, whole):
        backend.commit([[0, 1]])
    after = [decoded(backend, 1, 706) for backend in (pooled, whole)]
    if not whole.plan.shards[0].token_bytes:  # all layers have windows: nothing is left out
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(*verified, rtol=0, atol=1e-4)
        torch.testing.assert_close(*after, rtol=0, atol=1e-4)


# --- bytes --------------------------------------------------------------------------------------


def planned(max_ctx_tokens: int, parallel: int = 1) -> Plan:
    """A model with 5 windows of 1024 to each layer that sees all, on one GPU."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": len(kinds)}
    config = {"model_type": "ministral", "layer_types": kinds, "sliding_window": 1024}
    longest = {"max_position_embeddings": 2**17}
    return make_plan(
        parse_spec(config | sizes | heads | longest),
        [offer_of("cuda:0", 2**34)],
        precision=Precision.of("bf16"),
        weights=None,
        parallel=parallel,
        max_ctx_tokens=max_ctx_tokens,
        prefill_chunk_tokens=2048,
    )


def test_a_lane_keeps_as_much_of_windows_at_any_context():
    short, long = planned(8192), planned(131072)
    row_bytes = 2 * 4 * 64 * 2  # key and value
    assert short.shards[0].lane_state_bytes == 10 * 1024 * row_bytes
    assert long.shards[0].lane_state_bytes == short.shards[0].lane_state_bytes
    grown = long.lane_bytes(long.shards[0]) - short.lane_bytes(short.shards[0])
    assert grown == (131072 - 8192) * 2 * row_bytes


def test_there_are_as_many_windows_as_lanes():
    one, three = planned(8192, 1), planned(8192, 3)
    bytes_of = [plan.device_bytes(plan.shards[0]) for plan in (one, three)]
    spare = one.shards[0].spare_scratch_bytes(1) - three.shards[0].spare_scratch_bytes(3)
    assert bytes_of[1] - bytes_of[0] + spare == 2 * one.lane_bytes(one.shards[0])
    assert one.shards[0].spare_state_bytes == 0
