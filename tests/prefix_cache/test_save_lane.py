"""What becomes a node, and what does not for lack of room."""

from __future__ import annotations

from itertools import pairwise

from luceasync.host_cache.arena import Holes
from tests.prefix_cache.token_target import Bench

PROMPT = [1, 2, 3, 4] * 75


def test_a_cancelled_prefill_saves_what_it_has_done():
    bench = Bench()
    lease = bench.lease(PROMPT)
    bench.start(lease)
    bench.prefill(lease, until=128)
    bench.end(lease)
    assert bench.serve(PROMPT) == 128


def test_what_does_not_fit_is_not_saved():
    bench = Bench(memory_bytes=100)
    assert bench.serve(PROMPT) == bench.serve(PROMPT) == 0


def test_without_memory_nothing_is_saved_or_lost():
    bench = Bench()
    bench.serve(PROMPT[:128])
    bench.target.is_full = True
    bench.serve(PROMPT)
    bench.target.is_full = False
    assert bench.serve(PROMPT) == 128


def test_fragmented_memory_is_made_whole():
    bench = Bench(recurrent=False, memory_bytes=8000, disk_bytes=None)
    bench.target.memory = Holes()
    bench.target.memory.give(0, 8000)
    short = [[i] * 190 for i in range(1, 11)]
    for prompt in short:
        bench.serve(prompt)
    for prompt in short[::2]:
        bench.serve(prompt)  # worth more than those between them
    bench.serve([99] * 500)
    assert bench.serve([99] * 500) == 500


def test_a_refused_save_leaves_no_node_in_the_index():
    """The turn's end was saved without logits, and is to be saved again with them."""
    bench = Bench(disk_bytes=None)
    lease = bench.lease(PROMPT)
    bench.start(lease)
    bench.prefill(lease)
    bench.end(lease, num_generated=20)
    bench.target.is_full = True
    assert bench.serve(lease.sequence) == len(PROMPT)
    bench.target.is_full = False
    assert bench.serve([*lease.sequence, 7]) == len(PROMPT)


def test_thinned_states_are_never_restored_wrong():
    bench = Bench(interval_tokens=64)
    bench.serve([1] * 1200)
    states = sorted(end for end, has_state in bench.ends("memory").items() if has_state)
    assert len(states) < len(bench.ends("memory"))
    gaps = [b - a for a, b in pairwise(states)]
    assert gaps[0] > gaps[-1]  # sparser the further from the tip
    assert bench.serve([*[1] * 700, 2]) == max(end for end in states if end <= 700)
