"""Requests are admitted until a shutdown begins, and stop when they must."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from luceasync.errors import Unavailable
from luceasync.server.drain import Drain, race


async def test_running_requests_are_counted_on_every_way_out():
    drain = Drain()
    with drain.admit(), drain.admit():
        assert repr(drain) == "Drain(num_running=2, closing=False)"
    with pytest.raises(ZeroDivisionError), drain.admit():
        raise ZeroDivisionError
    assert drain.num_running == 0


async def test_nothing_is_admitted_while_closing():
    drain = Drain()
    drain.begin()
    with pytest.raises(Unavailable, match="shutting down"), drain.admit():
        raise AssertionError("must not be reached")


async def test_waiting_ends_with_the_last_request_or_at_the_deadline():
    drain = Drain()
    assert await drain.wait_idle(timeout_s=60)
    with drain.admit():
        assert not await drain.wait_idle(timeout_s=0)
    assert await drain.wait_idle(timeout_s=60)


async def test_expiry_is_raised_where_it_is_awaited():
    drain = Drain()
    drain.expire()
    with pytest.raises(Unavailable):
        await drain.expired()


async def forever(log: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        log.append("cleaned up")


async def fail() -> None:
    raise KeyError("stop")


async def one() -> int:
    return 1


async def test_expiry_is_raised_where_a_task_waits_until_then():
    drain = Drain()

    async def wait() -> str:
        with drain.until_expired():
            await asyncio.sleep(60)
        return "not stopped"

    waiting = [asyncio.create_task(wait()) for _ in range(2)]
    await asyncio.sleep(0)
    drain.expire()
    found = await asyncio.gather(*waiting, wait(), return_exceptions=True)
    assert [type(each) for each in found] == [Unavailable] * 3
    assert not any(task.cancelling() for task in waiting)


async def test_a_task_that_is_cancelled_before_it_expires_is_cancelled():
    drain = Drain()

    async def wait() -> None:
        with drain.until_expired():
            await asyncio.sleep(60)

    for last in (lambda: None, drain.expire):
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        last()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_task_that_ends_as_it_expires_is_not_stopped_later():
    drain, is_over = Drain(), asyncio.Event()

    async def wait() -> str:
        with drain.until_expired():
            pass
        await is_over.wait()
        return "over"

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    drain.expire(), is_over.set()
    assert await waiting == "over"


async def test_the_result_of_the_work_cancels_the_watchers():
    log: list[str] = []

    async def work() -> int:
        await asyncio.sleep(0)
        return 1

    assert await race(work(), forever(log), forever(log)) == 1
    assert log == ["cleaned up", "cleaned up"]


async def test_the_work_has_a_task_of_its_own():
    async def current() -> asyncio.Task[None] | None:
        return asyncio.current_task()

    assert await race(current(), forever([])) is not asyncio.current_task()


async def test_work_that_cancels_itself_raises_cancelled_error():
    async def work() -> None:
        raise asyncio.CancelledError

    log: list[str] = []
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(race(work(), forever(log)))
    assert not log or log == ["cleaned up"]


async def test_a_watcher_cancels_the_work_and_waits_for_its_cleanup():
    log: list[str] = []
    with pytest.raises(KeyError, match="stop"):
        await race(forever(log), fail())
    assert log == ["cleaned up"]


async def test_the_exception_of_the_work_is_raised_without_a_group():
    with pytest.raises(KeyError, match="stop"):
        await race(fail(), forever([]))


async def test_of_simultaneous_failures_that_of_the_work_is_raised():
    async def fail_too() -> None:
        raise ValueError("beside")

    with pytest.raises(KeyError, match="stop"):
        await race(fail(), fail_too(), fail_too())


async def test_of_watchers_that_fail_simultaneously_one_is_raised():
    log: list[str] = []
    with pytest.raises(KeyError, match="stop"):
        await race(forever(log), fail(), fail())
    assert log == ["cleaned up"]


async def test_a_failed_cleanup_is_raised_together_with_its_cause():
    async def bad_cleanup() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("cleanup")

    with pytest.raises(ExceptionGroup) as caught:
        await race(bad_cleanup(), fail())
    assert {type(error) for error in caught.value.exceptions} == {KeyError, ValueError}


async def test_a_result_counts_though_a_watcher_fails_at_the_same_time():
    assert await race(one(), fail()) == 1


@pytest.mark.parametrize(
    "racers",
    [lambda: (forever([]), fail()), lambda: (fail(), forever([]))],
    ids=["watcher", "work"],
)
async def test_a_failed_race_leaves_its_task_uncancelled(racers):
    """Else asyncio.timeout works no more in it, in Python 3.11.2."""
    with pytest.raises(KeyError, match="stop"):
        await race(*racers())
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_a_race_that_is_cancelled_twice_waits_for_the_cleanup():
    log: list[str] = []

    async def slow_cleanup() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            log.append("cleaned up")

    task = asyncio.create_task(race(slow_cleanup(), forever([])))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["cleaned up"]


async def test_cancelling_the_race_cancels_everything_in_it():
    log: list[str] = []
    task = asyncio.create_task(race(forever(log), forever(log)))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["cleaned up", "cleaned up"]


@pytest.mark.parametrize("watcher", [lambda: forever([]), fail], ids=["the work", "a watcher"])
async def test_a_failed_race_leaves_no_reference_cycle(watcher):
    class Body:
        pass

    def work_on(body: Body) -> None:
        raise KeyError("stop")

    async def work(seen: list[weakref.ref[Body]]) -> None:
        body = Body()
        seen.append(weakref.ref(body))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(work_on, body)

    async def outcome(seen: list[weakref.ref[Body]]) -> str:
        try:
            await race(work(seen), watcher())
        except KeyError as error:
            return str(error)
        return "none"

    seen: list[weakref.ref[Body]] = []
    gc.disable()
    try:
        assert await outcome(seen) == "'stop'"
        await asyncio.sleep(0)
        assert seen and seen[0]() is None
    finally:
        gc.enable()
