"""What a run of the warm command comes to, in words, in JSON and as an exit code."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from luceasync.cli.warm.client import Counters, Outcome
from luceasync.cli.warm.entries import WarmEntry
from luceasync.cli.warm.run import WarmReport, as_json, as_text

ENTRY = WarmEntry("chats.jsonl:1", [])
NEW = Outcome(ENTRY, 2.0, num_tokens=1000, num_cached=200, num_found=1000)
KNOWN = Outcome(ENTRY, 0.1, num_tokens=500, num_cached=500)
FAILED = Outcome(replace(ENTRY, origin="chats.jsonl:7"), 0.1, error="status 400: no")
GOOD = WarmReport([NEW, KNOWN], Counters(written_bytes=3 * 2**20), "", 4.0)


def test_the_sums_add_up():
    sums = GOOD.summary()
    assert (sums["prefixes"], sums["kept"], sums["already_there"], sums["failed"]) == (2, 1, 1, 0)
    assert (sums["prefilled_tokens"], sums["cached_tokens"]) == (800, 700)
    assert (sums["written_bytes"], sums["seconds"], sums["tokens_per_s"]) == (3 * 2**20, 4.0, 200.0)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"outcomes": [NEW, FAILED]}, "chats.jsonl:7: FAILED: status 400: no"),
        ({"degraded": "the disk is full"}, "has a fault: the disk is full"),
        ({"counters": Counters(unwritten_nodes=3)}, "still to be written: 3 nodes"),
    ],
)
def test_what_is_not_kept_is_told_and_fails(fault, words):
    report = replace(GOOD, **fault)
    assert GOOD.is_good and not report.is_good
    assert words in as_text(report) and words not in as_text(GOOD)


def test_what_was_there_already_has_no_pace():
    words = as_text(replace(GOOD, outcomes=[KNOWN]))
    assert "1 prompt: 0 kept, 1 there already" in words
    assert "tokens/s" in as_text(GOOD) and "tokens/s" not in words


def test_an_eviction_is_told():
    report = replace(GOOD, counters=Counters(evicted_nodes=2))
    assert "evicted from the disk meanwhile: 2 nodes" in as_text(report)


def test_json_has_the_sums_and_every_entry():
    told = json.loads(as_json(replace(GOOD, outcomes=[NEW, FAILED])))
    assert told["failed"] == 1
    assert [entry["error"] for entry in told["entries"]] == [None, "status 400: no"]
    assert told["entries"][0]["found_tokens"] == 1000


def test_only_what_was_added_counts():
    before, after = Counters(10, 1, 5), Counters(25, 4, 2)
    assert after.since(before) == Counters(15, 3, 2)
