"""Which step comes next: a chunk of which prompt, or a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.engine.scheduler import (
    MAX_SKIPPED,
    Scheduler,
    UnfinishedPrompt,
    next_prefill,
    next_step,
)


@pytest.mark.parametrize(
    ("num_prefilling", "num_decoding", "prefill_s", "decode_s", "expected"),
    [
        (0, 0, 0.0, 0.0, "idle"),
        (1, 0, 9.0, 0.0, "prefill"),
        (0, 1, 0.0, 9.0, "decode"),
        (1, 1, 0.0, 0.0, "prefill"),
        (1, 1, 1.0, 0.9, "decode"),
        (1, 1, 1.0, 1.0, "prefill"),
        (5, 1, 1.0, 1.1, "prefill"),
        (1, 5, 1.0, 0.9, "decode"),
    ],
)
def test_next_step(num_prefilling, num_decoding, prefill_s, decode_s, expected):
    assert next_step(num_prefilling, num_decoding, prefill_s, decode_s) == expected


@given(chunk_s=st.floats(0.01, 2.0), token_s=st.floats(0.01, 2.0))
def test_neither_gets_ahead_by_more_than_one_step(chunk_s: float, token_s: float):
    spent = {"prefill": 0.0, "decode": 0.0}
    for _ in range(100):
        step = next_step(1, 1, spent["prefill"], spent["decode"])
        spent[step] += chunk_s if step == "prefill" else token_s
        ahead = spent["prefill"] - spent["decode"]
        assert -token_s - 1e-9 <= ahead <= chunk_s + 1e-9


def test_only_time_while_both_had_work_is_shared():
    scheduler = Scheduler(1)
    scheduler.account("prefill", 9.0, both=False)
    assert scheduler.next_step(1, 1) == "prefill"
    scheduler.account("prefill", 2.0, both=True)
    for _ in range(2):
        assert scheduler.next_step(1, 1) == "decode"
        scheduler.account("decode", 1.0, both=True)
    assert scheduler.next_step(1, 1) == "prefill"


def unfinished(
    client: str = "a",
    num_left: int = 100,
    priority: int = 0,
    num_skipped: int = 0,
    is_resumed: bool = False,
) -> UnfinishedPrompt:
    return UnfinishedPrompt(client, priority, num_left, num_skipped, is_resumed=is_resumed)


def test_the_client_whose_last_chunk_is_longest_ago_gets_the_next():
    prompts = [unfinished("a", 1), unfinished("b", 900), unfinished("c", 5)]
    assert next_prefill(prompts, {"a": 7, "b": 3, "c": 5}, resumes=False) == 1
    assert next_prefill(prompts, {"a": 7, "b": 3}, resumes=False) == 2


def test_the_shortest_rest_of_a_client_comes_first_and_equal_ones_in_order():
    assert next_prefill([unfinished(num_left=n) for n in (90, 7, 7)], {}, resumes=False) == 1


def test_a_lower_priority_comes_first_within_its_client_alone():
    own = [unfinished(num_left=1), unfinished(num_left=900, priority=-1)]
    assert next_prefill(own, {}, resumes=False) == 1
    others = [unfinished("b", num_left=1), unfinished("a", num_left=900, priority=-1)]
    assert next_prefill(others, {"a": 1}, resumes=False) == 0


def test_later_prompts_of_a_client_hold_up_none_for_ever():
    held_up = unfinished(num_left=900, num_skipped=MAX_SKIPPED)
    assert next_prefill([held_up, unfinished(num_left=1)], {}, resumes=False) == 0
    urgent = unfinished(num_left=1, priority=-1)
    assert next_prefill([held_up, urgent], {}, resumes=False) == 1


CHUNK = 256


def waiting(num_tokens: int, client: str = "a") -> Any:
    """As much of a generation as the choice of a chunk looks at."""
    request = SimpleNamespace(priority=0)
    return SimpleNamespace(
        client=client,
        prepared=SimpleNamespace(request=request),
        to_prefill=range(num_tokens),
        num_prefilled=0,
        num_skipped=0,
        has_spoken=False,
    )


def next_chunk(scheduler: Scheduler, prompts: list[Any]) -> Any:
    """The prompt that gets the next chunk; a whole one leaves `prompts`."""
    chosen = scheduler.next_prefill(prompts)
    chosen.num_prefilled += CHUNK
    if chosen.num_prefilled >= len(chosen.to_prefill):
        prompts.remove(chosen)
    return chosen


def chunks_before(lengths: Sequence[int], num_chunks: int, client: str = "a") -> int:
    """How many chunks others get before the only one of a short question of `client`, which comes
    after `num_chunks` chunks of prompts of client a.
    """
    scheduler, prompts = Scheduler(8), [waiting(length) for length in lengths]
    for _ in range(num_chunks):
        next_chunk(scheduler, prompts)
    question = waiting(30, client)
    prompts.append(question)
    return next(n for n in count() if next_chunk(scheduler, prompts) is question)


@pytest.mark.parametrize("lengths", [[7500] * 3, [7500, 7400, 7300], [9000, 4000, 7000, 8000]])
def test_a_question_waits_as_long_beside_several_long_prompts_as_beside_one(lengths):
    """Whenever it comes: for the chunk that runs, and now and then for one that was held up."""
    num_chunks = sum(-(-length // CHUNK) for length in lengths)
    assert {chunks_before(lengths[:1], begin) for begin in range(1, 29)} == {0}
    waits = [chunks_before(lengths, begin) for begin in range(1, num_chunks)]
    assert max(waits) <= 1 and sum(waits) <= num_chunks / MAX_SKIPPED
    assert {chunks_before(lengths, begin, "b") for begin in range(1, num_chunks)} == {0}


def test_long_prompts_are_read_one_after_the_other_beside_short_ones():
    """So that the first of them is read no later than if each had been read in order."""
    scheduler, prompts = Scheduler(8), [waiting(7500) for _ in range(3)]
    first, num_own = prompts[0], 0
    for number in count():
        if number % 10 == 5:
            prompts.append(waiting(30))
        num_own += next_chunk(scheduler, prompts) is first
        if first not in prompts:
            break
    assert num_own == -(-7500 // CHUNK) and number <= 1.3 * num_own


def test_a_long_prompt_gets_chunks_beside_any_number_of_short_ones():
    scheduler, prompts = Scheduler(8), [waiting(7500), waiting(7500)]
    long = prompts[:]
    chosen = []
    for _ in range(300):
        prompts.append(waiting(30))
        chosen.append(next_chunk(scheduler, prompts))
    for each in long:
        assert sum(c is each for c in chosen) >= 300 // (2 * MAX_SKIPPED)
    pairs = pairwise([any(c is each for each in long) for c in chosen])
    assert not any(all(pair) for pair in pairs)


def test_a_chunk_for_a_resumed_answer_goes_to_one_if_there_is_one():
    prompts = [unfinished(num_left=1), unfinished("b", is_resumed=True)]
    assert next_prefill(prompts, {"b": 1}, resumes=True) == 1
    assert next_prefill(prompts, {"a": 1}, resumes=False) == 0
    assert next_prefill(prompts[:1], {}, resumes=True) == 0
    assert next_prefill(prompts[1:], {}, resumes=False) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), min_size=1, max_size=9))
def test_clients_get_chunks_in_turn_while_they_have_prompts(wanted: list[tuple[str, int]]):
    prompts = [unfinished(client, num_left) for client, num_left in wanted]
    last_chunk: dict[str, int] = {}
    for number in range(sum(-(-n // 64) for _, n in wanted)):
        index = next_prefill(prompts, last_chunk, resumes=False)
        client = prompts[index].client
        others = {p.client for p in prompts} - {client}
        assert all(last_chunk.get(c, -1) >= last_chunk.get(client, -1) for c in others)
        last_chunk[client] = number
        prompts[index] = replace(prompts[index], num_left=prompts[index].num_left - 64)
        prompts = [p for p in prompts if p.num_left > 0]
    assert not prompts
