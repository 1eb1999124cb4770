"""Engines say what transformers says of each family: computed, from memory, and from disk after a
restart, in two and three processes, four lanes at once, with trees of drafts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from luceasync.config import DraftConfig
from luceasync.engine.engine import LocalEngine
from luceasync.models.files import read_spec
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.request import Finish, Request, TokenPrompt
from tests import engines, tiny
from tests.engine.test_processes import running as arranged
from tests.engines import written
from tests.families import OWN_WAYS, answer_of, build

if TYPE_CHECKING:  # else only tests that build a model pay for it
    from transformers import PreTrainedModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_backends")]

# Windows beside whole contexts and experts, keys of other layers, gates, windows alone, no window.
# What the others add is within a shard: see tests/pipeline/test_dense_families.py.
FEW = ("gemma 4, 26B-A4B", "gemma 4, E2B", "laguna XS", "mistral, windows alone", "llama 3.2")
FAMILIES = [pytest.param(n, marks=[] if n in FEW else pytest.mark.thorough) for n in OWN_WAYS]
NUM_TOKENS = 6


@pytest.fixture(scope="module", params=FAMILIES)
def peer(request: pytest.FixtureRequest) -> PreTrainedModel:
    """The model as transformers runs it."""
    return build(request.param)


@pytest.fixture(scope="module")
def model_dir(peer: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(peer, tmp_path_factory.mktemp("family"))


@asynccontextmanager
async def started(
    model_dir: Path, folder: Path, arrangement: str, cache_dir: Path, **draft
) -> AsyncIterator[LocalEngine]:
    """In several processes, unless no layer can be on another device than the others."""
    if read_spec(model_dir).layer_inputs:
        engine = engines.running(model_dir, cache_dir, parallel=4, draft=DraftConfig(**draft))
    else:
        engine = arranged(model_dir, folder, arrangement, cache_dir=cache_dir, **draft)
    async with engine as running:
        yield running


async def ask(engine: LocalEngine, prompt: list[int]) -> tuple[list[int], Finish]:
    """A greedy answer, and how it ended."""
    request = Request(
        TokenPrompt(tuple(prompt)), max_tokens=NUM_TOKENS, ignore_eos=True, keep_prefix=True
    )
    deltas = [delta async for delta in await engine.open(request)]
    assert deltas[-1].finish is not None
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].finish


async def test_prompts_that_go_on_after_any_number_of_tokens_are_continued_as_by_the_peer(
    peer: PreTrainedModel, model_dir: Path, tmp_path: Path
):
    """After one token more, a window more, and one less and one more than that."""
    attentions = [each for each in read_spec(model_dir).mixers if isinstance(each, AttentionSpec)]
    window = max(each.window for each in attentions) or 24
    lengths = [40]
    for num_tokens in (1, window - 1, window, window + 1):
        lengths.append(lengths[-1] + num_tokens)
    tokens = [(11 * i) % 500 + 3 for i in range(lengths[-1])]
    prompts = [tokens[:length] for length in lengths]
    expected = [answer_of(peer, prompt, NUM_TOKENS) for prompt in prompts]
    cache_dir = tmp_path / "cache"
    async with started(model_dir, tmp_path / "two", "two", cache_dir) as engine:
        first = [await ask(engine, prompt) for prompt in prompts]
        again = [await ask(engine, prompt) for prompt in prompts]
        await written(engine)
    drafts = {"draft_dir": tiny.save_draft(tmp_path / "draft", tiny.draft_config())}
    drafts |= {"ddtree": True, "ddtree_budget": 12}
    async with started(model_dir, tmp_path / "three", "three", cache_dir, **drafts) as engine:
        later = await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
        assert engine.status().speculation.rounds_total > 0
    assert [[ids for ids, _ in answers] for answers in (first, again, later)] == [expected] * 3
    assert [end.usage.cached_tokens for _, end in first] == [0, *lengths[:-1]]
    assert [end.usage.cached_tokens for _, end in again] == lengths
    assert [end.usage.cached_tokens for _, end in later] == lengths
    assert {end.restore.tier for _, end in again} == {"memory"}
    assert "disk" in {end.restore.tier for _, end in later}
