"""One client cannot keep lanes and places from the others: with a real model, on lanes that change
hands.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from luceasync.engine import scheduler as roster_module
from luceasync.engine import streams as stream_module
from luceasync.engine.admission import Capacity
from luceasync.engine.engine import LocalEngine
from luceasync.errors import QueueFull
from luceasync.request import Request, Sampling, Stream
from tests.engine.pumps import CountingTarget, make_pump
from tests.engine.test_engine import DEADLINE_S, ask, read, until_idle

NUM_GREEDY = 68
TURN_TOKENS = 16  # shorter turns than a server's, for shorter answers
SEEDED = Sampling(temperature=1.0, seed=11, frequency_penalty=0.3)


def of(client: str, request: Request) -> Request:
    return replace(request, client=client)


async def until_behind(engine: LocalEngine, num_idle: int) -> None:
    """Step until nothing is decoded any more: running choices are unread."""
    async with asyncio.timeout(DEADLINE_S):
        last, num_same = -1, 0
        while num_same < num_idle:
            await asyncio.sleep(0.02)
            now = engine.status().decoded_tokens_total
            num_same, last = (num_same + 1 if now == last else 0), now


@pytest.mark.slow
@pytest.mark.covered(0)
async def test_one_that_reads_is_served_beside_68_that_do_not(start_engine, monkeypatch):
    monkeypatch.setattr(stream_module, "MAX_UNREAD_TOKENS", 16)
    async with start_engine(parallel=4, max_queue=64) as engine:
        streams = [
            await engine.open(of("greedy", ask(f"no {i}", max_tokens=400)))
            for i in range(NUM_GREEDY)
        ]
        with pytest.raises(QueueFull):
            await engine.open(of("greedy", ask()))
        async with asyncio.timeout(DEADLINE_S):
            _, finish, _ = await read(await engine.open(of("modest", ask(max_tokens=40))))
        assert (finish.reason, finish.usage.completion_tokens) == ("length", 40)
        for stream in streams:
            await stream.aclose()
        await until_idle(engine)
        assert await engine.open(of("modest", ask(max_tokens=1)))


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("num_lanes", [1, 2])
async def test_a_lane_is_had_within_a_bounded_number_of_steps(start_engine, monkeypatch, num_lanes):
    most = 16
    monkeypatch.setattr(stream_module, "MAX_UNREAD_TOKENS", most)
    async with start_engine(parallel=num_lanes) as engine:
        streams = [await engine.open(of("greedy", ask("no", max_tokens=400))) for _ in range(6)]
        await until_behind(engine, 5)
        num_steps = engine.status().decode_steps_total
        assert num_steps <= 6 * (most + 5)  # what is not read is not made
        _, finish, _ = await read(await engine.open(of("modest", ask(max_tokens=40))))
        assert finish.usage.completion_tokens == 40
        assert engine.status().decode_steps_total - num_steps <= 40 + 6 * (most + 5)
        for stream in streams:
            await stream.aclose()


@pytest.mark.covered(0)
@pytest.mark.slow
async def test_an_answer_that_had_to_wait_says_what_it_would_have_said(start_engine, monkeypatch):
    monkeypatch.setattr(roster_module, "MIN_TURN_TOKENS", TURN_TOKENS)
    request = ask(max_tokens=100, sampling=SEEDED)
    async with start_engine(parallel=2) as engine:
        alone, _, _ = await read(await engine.open(request))
        streams: list[Stream] = []
        for _ in range(3):
            streams.append(await engine.open(of("a", request)))
        first = await anext(streams[1])
        while engine.status().decoded_tokens_total < 100 + 2 * TURN_TOKENS:
            await asyncio.sleep(0.005)
        other = asyncio.create_task(read(await engine.open(of("b", request))))
        texts = [await read(stream) for stream in streams]
        assert (await other)[0] == alone
    assert [texts[0][0], first.text + texts[1][0], texts[2][0]] == [alone] * 3
    assert {finish.usage.completion_tokens for _, finish, _ in texts} == {100}


@pytest.mark.slow
@pytest.mark.covered(0)
async def test_of_two_answers_with_one_lane_both_go_on(start_engine, monkeypatch):
    """Beside another client's there is one lane for both: neither waits for the other's end."""
    monkeypatch.setattr(roster_module, "MAX_STANDING_S", 0.0)
    monkeypatch.setattr(roster_module, "MIN_TURN_TOKENS", TURN_TOKENS)
    request = ask(max_tokens=120, sampling=SEEDED)

    async def follow(stream: Stream) -> tuple[str, int]:
        texts, longest, last = list[str](), 0, 0
        async for delta in stream:
            texts.append(delta.text)
            now = engine.status().decode_steps_total
            longest, last = max(longest, now - (last or now)), now
        return "".join(texts), longest

    async with start_engine(parallel=2) as engine:
        alone, _, _ = await read(await engine.open(request))
        num_before = engine.status().decode_steps_total
        both = [await engine.open(of("a", request)) for _ in range(2)]
        following = [asyncio.create_task(follow(stream)) for stream in both]
        while engine.status().decode_steps_total < num_before + 2:
            await asyncio.sleep(0.005)
        other = await engine.open(of("b", ask(max_tokens=120)))
        beside = asyncio.create_task(follow(other))
        for text, longest in await asyncio.gather(*following):
            assert text == alone
            assert longest < 3 * TURN_TOKENS
        await beside


@pytest.mark.covered(0)
@pytest.mark.slow
async def test_an_answer_that_was_not_read_goes_on_when_it_is(start_engine, monkeypatch):
    monkeypatch.setattr(stream_module, "MAX_UNREAD_TOKENS", 16)
    request = ask(max_tokens=120, sampling=SEEDED)
    async with start_engine(parallel=1) as engine:
        alone, whole, _ = await read(await engine.open(request))
        late = await engine.open(of("late", request))
        await until_behind(engine, 5)
        other, _, _ = await read(await engine.open(of("other", request)))
        text, finish, _ = await read(late)
    assert text == other == alone
    assert finish.usage.completion_tokens == whole.usage.completion_tokens
    assert finish.timings.num_prefilled >= 1


@pytest.mark.slow
@pytest.mark.covered(0)
async def test_the_client_that_holds_most_is_evicted_when_another_comes(start_engine):
    async with start_engine(parallel=1, max_queue=2) as engine:
        streams = [await engine.open(of("a", ask(max_tokens=300))) for _ in range(3)]
        modest = await engine.open(of("b", ask(max_tokens=3)))
        _, finish, _ = await read(streams[2])
        assert (finish.reason, finish.error_kind) == ("error", "gave_way")
        assert 1 <= finish.retry_after_s <= 60
        with pytest.raises(QueueFull):
            await engine.open(of("a", ask()))
        assert (await read(modest))[1].reason == "length"
        for stream in streams:
            await stream.aclose()


def test_a_preempted_answer_is_saved_and_restored(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, num_lanes=1, memory_bytes=2**20)
    pump.submit([make_prepared(0, [0, 1], max_tokens=400, client="a")])
    for _ in range(200):
        pump.step()
    pump.set_unread(0, is_unread=True)
    assert pump.is_idle
    pump.submit([make_prepared(1, [5], max_tokens=2, client="b")])
    emitted = []
    while not pump.is_idle:
        emitted += pump.step()
    assert [d.finish.reason for stream, d in emitted if stream == 1 and d.finish] == ["length"]
    assert pump.num_waiting == 1
    pump.set_unread(0, is_unread=False)
    del target.calls[:]
    emitted = []
    while not pump.is_idle:
        emitted += pump.step()
    ids = [i for stream, d in emitted for i in d.token_ids]
    assert len(ids) == 200 and ids == [(202 + i) % 8 for i in range(200)]
    kinds = [call for call in target.calls if call[0] in ("restore", "prefill")]
    assert kinds == [("restore", 0, 201), ("prefill", 0, 201, 1)]


def test_capacity_is_checked_when_a_request_comes(make_prepared):
    pump = make_pump(CountingTarget(), num_lanes=1)
    capacity = Capacity(2, 7)
    assert pump.submit([make_prepared(0, [0], client="a")], capacity) == []
    pump.step()
    assert pump.submit([make_prepared(1, [0], client="a")], capacity) == []
    [(stream, delta)] = pump.submit([make_prepared(2, [0], client="b")], capacity)
    assert (stream, delta.finish.error_kind, delta.finish.retry_after_s) == (1, "gave_way", 7)


def test_an_answer_that_lost_its_lane_goes_on_before_new_prompts(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, num_lanes=2)
    pump.submit([make_prepared(0, [0], max_tokens=400, client="a")])
    for _ in range(100):
        pump.step()
    pump.submit([make_prepared(1, [0] * 640, client="long")])
    pump.step()
    pump.set_unread(0, is_unread=True)
    pump.submit([make_prepared(2, [0] * 640, client="b")])
    pump.step()
    pump.cancel(2)
    pump.set_unread(0, is_unread=False)
    del target.calls[:]
    for _ in range(3):
        pump.step()
    prefills = [call[1:] for call in target.calls if call[0] == "prefill"]
    assert [lane for lane, _, _ in prefills[:2]] == [0, 0]
    assert 64 < sum(num for _, _, num in prefills[:2]) <= 128


def test_a_short_prompt_does_not_wait_for_all_of_an_answer_that_lost_its_lane(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, num_lanes=2)
    pump.submit([make_prepared(0, [0], max_tokens=2000, client="a")])
    for _ in range(1000):
        pump.step()
    pump.submit([make_prepared(1, [0] * 640, client="long")])
    pump.step()
    pump.set_unread(0, is_unread=True)
    pump.submit([make_prepared(2, [0] * 640, client="b")])
    pump.step()
    pump.cancel(1)
    pump.cancel(2)
    pump.set_unread(0, is_unread=False)
    pump.step()
    pump.submit([make_prepared(3, [0], client="short")])
    del target.calls[:]
    for _ in range(3):
        pump.step()
    assert [call[1] for call in target.calls if call[0] == "prefill"] == [0, 0, 1]


def test_without_a_cache_no_prompt_waits_for_another_like_it(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, num_lanes=2, memory_bytes=0)
    prompt = [0, 1] * 200
    for stream in range(2):
        pump.submit([make_prepared(stream, prompt, client=f"{stream}")])
    pump.step()
    assert pump.num_running == 2
