"""A prefill chunk attends to all earlier tokens, resident or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.models.pass_rows import NO_LANE
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.passes import Batch
from tests import tiny

POOL, NUM_PROMPT, CHUNK = 512, 2048, 192


def prompt(num_tokens: int = NUM_PROMPT) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, tiny.VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def prefilled(backend: LayerSplitBackend, tokens: list[int], chunk: int = CHUNK) -> Tensor:
    """Logits at the end of each chunk."""
    found = []
    for begin in range(0, len(tokens), chunk):
        logits = backend.prefill(1, begin, tokens[begin : begin + chunk], project=True)
        assert logits is not None
        found.append(logits.clone())
    return torch.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_prompt_of_four_pools_is_what_it_is_without(make_backend, tiny_dir: Path, num_shards):
    sizes = {"max_ctx_tokens": NUM_PROMPT, "chunk_tokens": CHUNK, "num_shards": num_shards}
    whole = prefilled(make_backend(tiny_dir, **sizes), prompt())
    paged = prefilled(make_backend(tiny_dir, **sizes, pool_tokens=POOL), prompt())
    assert (paged - whole).abs().max() < 1e-4


def test_a_chunk_of_one_token_sees_everything_too(make_backend, tiny_dir: Path):
    sizes = {"max_ctx_tokens": NUM_PROMPT, "chunk_tokens": CHUNK}
    found = []
    for pool in (None, POOL):
        backend = make_backend(tiny_dir, **sizes, pool_tokens=pool)
        prefilled(backend, prompt(1000))
        found.append(backend.prefill(1, 1000, [7], project=True))
    assert (found[0] - found[1]).abs().max() < 1e-4


@pytest.mark.slow
def test_where_chunks_lie_changes_no_bit(make_backend, tiny_dir: Path):
    sizes = {"max_ctx_tokens": NUM_PROMPT, "chunk_tokens": CHUNK, "pool_tokens": POOL}
    found = [
        prefilled(make_backend(tiny_dir, **sizes, page_order=order), prompt(1300))
        for order in (None, [5, 2, 0, 7, 1, 6, 3, 4])
    ]
    assert found[0].equal(found[1])


def test_a_pool_of_the_whole_context_keeps_the_bits(make_backend, tiny_dir: Path):
    sizes = {"max_ctx_tokens": 1024, "chunk_tokens": CHUNK}
    found = [
        prefilled(make_backend(tiny_dir, **sizes, pool_tokens=pool), prompt(1024))
        for pool in (None, 1024)
    ]
    assert found[0].equal(found[1])


def poison_free_pages(backend: LayerSplitBackend) -> None:
    """Fill pages without a chunk of the lane with NaN."""
    for shard in (shard for stage in backend._stages for shard in stage._shards):
        used = set(shard.cache._residents[1].pages)
        for page in set(range(backend.plan.num_pages)) - used:
            for stack in shard.cache.row_stacks:
                stack[:, 1, page * 64 : page * 64 + 64] = torch.nan


@torch.inference_mode()
def test_pages_that_were_freed_and_old_blocks_are_never_read(make_backend, tiny_dir: Path):
    sizes = {"max_ctx_tokens": NUM_PROMPT, "chunk_tokens": CHUNK, "pool_tokens": POOL}
    expected = prefilled(make_backend(tiny_dir, **sizes), prompt(1300))
    backend, found = make_backend(tiny_dir, **sizes), []
    for begin in range(0, 1300, CHUNK):
        found.append(backend.prefill(1, begin, prompt(1300)[begin : begin + CHUNK], project=True))
        poison_free_pages(backend)
        for shard in (shard for stage in backend._stages for shard in stage._shards):
            for room in shard.past._staging._rooms.values():
                room.fill_(torch.nan)
    assert torch.stack(found).equal(expected)


def looked(backend: LayerSplitBackend, num_tokens: int) -> Tensor:
    for stage in backend._stages:
        stage.passes.start_probe(1, num_tokens)
    return sum(stage.passes.attention_mass(1).of_chunks for stage in backend._stages)


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, 3])
def test_what_comes_by_in_the_last_pass_says_what_a_look_does(
    make_backend, tiny_dir: Path, num_shards: int
):
    sizes = {"max_ctx_tokens": NUM_PROMPT, "chunk_tokens": CHUNK, "num_shards": num_shards}
    backend = make_backend(tiny_dir, **sizes, pool_tokens=POOL)
    whole = make_backend(tiny_dir, **sizes, pool_tokens=NUM_PROMPT)
    for stage in backend._stages:
        for shard in stage._shards:
            shard.past._staging.is_in_place = False  # as if rows had to be copied first
    prefilled(backend, prompt(1300))
    prefilled(whole, prompt(1300))
    passed = looked(backend, 1300)
    again = looked(backend, 1300)
    assert passed.shape == (21,)
    assert (passed > 0).any()
    assert (passed - again).abs().max() < 1e-4
    assert (looked(whole, 1300) - again).abs().max() < 1e-4
    backend.reset(1)
    prefilled(backend, prompt(5))
    assert looked(backend, 5).shape == (1,)


def test_a_look_is_of_the_moment_at_which_it_was_begun(make_backend, tiny_dir: Path):
    """It continues behind the following steps, a layer each."""
    sizes = {"max_ctx_tokens": NUM_PROMPT, "chunk_tokens": CHUNK, "pool_tokens": POOL}
    plain = make_backend(tiny_dir, **sizes)
    prefilled(plain, prompt(1300))
    expected = looked(plain, 1300)
    [stage] = plain._stages
    stage.passes.start_probe(1, 1300)
    for position in range(1300, 1303):
        batch = Batch((1, NO_LANE, NO_LANE, NO_LANE), (position, 0, 0, 0), 1)
        stage.passes.decode(batch, torch.full((4, 1), 7))
    assert stage.passes.attention_mass(1).of_chunks.equal(expected)


@pytest.mark.parametrize("device", ["cpu:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@torch.inference_mode()
def test_a_look_sees_a_chunk_that_leaves_meanwhile(make_backend, tiny_dir: Path, device: str):
    """The page is then written while the probe still runs."""
    sizes = {"max_ctx_tokens": NUM_PROMPT, "chunk_tokens": CHUNK, "pool_tokens": POOL}
    backend = make_backend(tiny_dir, **sizes, devices=[device])
    prefilled(backend, prompt(1300))
    looked(backend, 1300)  # by the probe inside the last pass
    expected = looked(backend, 1300)
    [stage] = backend._stages
    [shard] = stage._shards
    stage.passes.start_probe(1, 1300)
    probe = shard.past._probes._running[1]
    if device != "cpu:0":
        with shard.platform.side_stream():
            torch.cuda._sleep(10**9)
    probe.advance()
    in_pages = {*probe._in_pages}  # host memory lacks them
    for num_chunks in (24, 27):
        backend.lanes.make_room(1, num_chunks * 64)
    residents = shard.cache._residents[1]
    pages = dict(zip(residents._chunks, residents._pages, strict=True))
    assert in_pages - set(pages), "one of them has left"
    shard.use([1])
    for page in (
        page for chunk, page in pages.items() if chunk > 20
    ):  # the probe does not read those
        for stack in shard.cache.row_stacks:
            stack[:, 1, page * 64 : page * 64 + 64] = torch.nan
    assert stage.passes.attention_mass(1).of_chunks.equal(expected)


@pytest.mark.gpu
def test_a_gpu_sees_what_the_cpu_sees(make_backend, tiny_dir: Path):
    """Absent chunks are copied on another stream, and the probe runs on a third one."""
    sizes = {"max_ctx_tokens": NUM_PROMPT, "chunk_tokens": CHUNK}
    found, found_mass = [], []
    for place in ({}, {"pool_tokens": POOL, "devices": ["cuda:0"]}):
        backend = make_backend(tiny_dir, **sizes, **place)
        found.append(prefilled(backend, prompt(1300)).cpu())
    found_mass = [looked(backend, 1300) for _ in range(2)]
    assert (found[0] - found[1]).abs().max() < 1e-3
    assert (found_mass[0] - found_mass[1]).abs().max() < 1e-3
    assert (found_mass[0] > 0).all()


@pytest.mark.gpu
def test_what_a_look_reads_is_nobody_elses_until_it_has_read_it(make_backend, tiny_dir: Path):
    """Even if it is freed while its stream is held up and memory is allocated."""
    sizes = {"max_ctx_tokens": NUM_PROMPT, "chunk_tokens": CHUNK, "pool_tokens": POOL}
    backend = make_backend(
        tiny_dir, **sizes, devices=["cuda:0"], page_order=[5, 2, 0, 7, 1, 6, 3, 4]
    )
    prefilled(backend, prompt(1300))
    looked(backend, 1300)  # by the probe inside the last pass
    expected = looked(backend, 1300)
    [stage] = backend._stages
    [shard] = stage._shards
    with shard.platform.side_stream():
        torch.cuda._sleep(10**9)
    stage.passes.start_probe(1, 1300)
    probe = shard.past._probes._running[1]
    while probe.advance():
        pass
    shard.past._staging._held.clear()
    others = [torch.full((num,), 2**40, device="cuda") for num in [*range(64, 1400, 32)] * 8]
    torch.cuda.current_stream().synchronize()
    assert stage.passes.attention_mass(1).of_chunks.equal(expected)
    del others
