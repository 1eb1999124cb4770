"""Files that another server has just written are looked for by name, each name once in a while."""

from __future__ import annotations

import pytest

from luceasync.prefix_cache import lookup
from tests.prefix_cache.token_target import Bench

PROMPT = [1] * 300
NEXT = [*PROMPT, *[2] * 300]


def shared_bench(**limits) -> Bench:
    bench = Bench(is_shared=True, interval_tokens=128, **limits)
    bench.prefixes.begin_lookups()
    return bench


@pytest.mark.parametrize("recurrent", [True, False])
def test_what_another_server_has_written_is_found_before_a_scan(recurrent: bool) -> None:
    theirs, ours = (shared_bench(recurrent=recurrent) for _ in range(2))
    theirs.serve(PROMPT, 294, num_generated=6)
    theirs.disk.deliver_all(theirs.prefixes)
    ours.disk.files = theirs.disk.files  # and no scan has told of them
    assert ours.serve(NEXT, 294, 306, 594) >= 128
    assert len(ours.disk.sought) > 1  # what continues the first one, too


def test_a_name_that_was_not_there_is_not_asked_for_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = shared_bench(memory_bytes=0)
    bench.serve(PROMPT, 294)
    (asked,) = bench.disk.sought
    bench.serve(PROMPT, 294)
    assert bench.disk.sought == [asked]
    monkeypatch.setattr(lookup, "ABSENT_S", 0.0)
    bench.serve(PROMPT, 294)
    assert [sorted(keys) for keys in bench.disk.sought] == [sorted(asked)] * 2


def test_a_directory_that_is_not_open_yet_is_not_waited_for() -> None:
    bench = Bench(is_shared=True)
    bench.serve(PROMPT, 294)
    assert bench.disk.sought == []


def test_a_prompt_that_is_soon_run_is_not_worth_a_look() -> None:
    bench = shared_bench(min_disk_tokens=512)
    bench.serve(PROMPT, 294)
    assert bench.disk.sought == []
