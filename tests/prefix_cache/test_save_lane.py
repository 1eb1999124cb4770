"""What becomes a node, and what does not for want of room."""

from __future__ import annotations

from itertools import pairwise

from luceasync.host_cache.arena import Holes
from tests.prefix_cache.token_target import Bench

PROMPT = [1, 2, 3, 4] * 75


def test_a_cancelled_prefill_keeps_what_it_has_done():
    bench = Bench()
    lease = bench.lease(PROMPT)
    bench.start(lease)
    bench.prefill(lease, until=128)
    bench.end(lease)
    assert bench.serve(PROMPT) == 128


def test_what_fits_nowhere_is_not_kept_and_nobody_minds():
    bench = Bench(memory_bytes=100)
    assert bench.serve(PROMPT) == bench.serve(PROMPT) == 0


def test_refused_memory_keeps_nothing_and_loses_nothing():
    bench = Bench()
    bench.serve(PROMPT[:128])
    bench.target.is_full = True
    bench.serve(PROMPT)
    bench.target.is_full = False
    assert bench.serve(PROMPT) == 128


def test_free_memory_in_pieces_is_made_whole():
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


def test_refused_memory_leaves_no_node_that_is_known_and_not_there():
    """The turn's end was kept without logits, and is to be kept again with them."""
    bench = Bench(disk_bytes=None)
    lease = bench.lease(PROMPT)
    bench.start(lease)
    bench.prefill(lease)
    bench.end(lease, num_generated=20)
    bench.target.is_full = True
    assert bench.serve(lease.sequence) == len(PROMPT)
    bench.target.is_full = False
    assert bench.serve([*lease.sequence, 7]) == len(PROMPT)


def test_thinned_states_do_not_come_back_wrong():
    bench = Bench(interval_tokens=64)
    bench.serve([1] * 1200)
    states = sorted(end for end, has_state in bench.ends("memory").items() if has_state)
    assert len(states) < len(bench.ends("memory"))
    gaps = [b - a for a, b in pairwise(states)]
    assert gaps[0] > gaps[-1]  # sparser the further from the tip
    assert bench.serve([*[1] * 700, 2]) == max(end for end in states if end <= 700)
