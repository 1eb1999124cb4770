"""One at each turn of the loop goes on, in order of their coming."""

from __future__ import annotations

import asyncio

from luceasync.server.http.connection import LoopThrottle

NUM = 20


async def test_one_goes_on_at_each_turn_of_the_loop():
    throttle, passed = LoopThrottle(), list[int]()

    async def work(number: int) -> None:
        await throttle.wait()
        passed.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(NUM)]
    num_before = 0
    while len(passed) < NUM:
        await asyncio.sleep(0)
        assert len(passed) <= num_before + 1
        num_before = len(passed)
    assert passed == list(range(NUM))
    await asyncio.gather(*tasks)


async def test_who_gives_up_holds_up_nobody():
    throttle = LoopThrottle()
    tasks = [asyncio.create_task(throttle.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[1].cancel()
    async with asyncio.timeout(10):
        await tasks[2]
        await throttle.wait()
