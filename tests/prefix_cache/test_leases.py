"""What a lease waits for stays; the rest makes room."""

from __future__ import annotations

from luceasync.host_cache.nodes import NodeSizes
from tests.prefix_cache.token_target import STATE_BYTES, TOKEN_BYTES, Bench

PROMPT = [1, 2, 3, 4] * 75


def test_nodes_on_their_way_reserve_memory():
    """Two prompts, and room for one: the second is run at once."""
    bench, other = Bench(), [5] * len(PROMPT)
    bench.serve(PROMPT, keep=True)
    bench.serve(other, keep=True)
    bench.disk.deliver_all(bench.prefixes)
    room = len(PROMPT) * TOKEN_BYTES + STATE_BYTES + 4 * 8
    after = Bench(disk=bench.disk, memory_bytes=room)
    first, second = after.lease(PROMPT), after.lease(other)
    assert not after.prefixes.prepare(first, [])
    assert after.prefixes.prepare(second, [])
    assert after.prefixes._read_in.num_bytes <= room


def test_what_a_waiting_request_will_need_is_not_evicted():
    size = len(PROMPT) * TOKEN_BYTES
    bench = Bench(memory_bytes=int(1.5 * size), disk_bytes=None)
    bench.serve(PROMPT)
    waiting = bench.lease([*PROMPT, 7])
    bench.serve([5] * len(PROMPT))  # has no room beside it
    assert bench.start(waiting) == len(PROMPT)


def test_memory_is_within_its_budget_when_all_is_done():
    bench = Bench(memory_bytes=0, transit_bytes=1 << 20)
    bench.serve(PROMPT)
    bench.disk.deliver_all(bench.prefixes)
    assert bench.prefixes.status.num_bytes["memory"] == 0
    assert not bench.target.nodes
    assert bench.serve(PROMPT) == len(PROMPT)  # from the disk


def test_a_state_that_a_waiting_request_will_need_is_not_thinned():
    bench = Bench(interval_tokens=64)
    bench.serve([1] * 600)
    waiting = bench.lease([*[1] * 576, 2])
    num_tokens = waiting.match.num_tokens
    bench.serve([1] * 1800)
    assert bench.start(waiting) == num_tokens


def test_a_long_conversation_stays_cached_when_its_states_outgrow_memory():
    """Room for all rows and for a few states: each step finds the end of the one before."""
    turn, num_steps, state_bytes = 90, 30, 1000
    rows = (len(PROMPT) + num_steps * (turn + 25)) * TOKEN_BYTES
    bench = Bench(memory_bytes=rows + 8 * state_bytes, disk_bytes=None)
    bench.target.sizes = NodeSizes(TOKEN_BYTES, state_bytes)
    prompt = [*PROMPT]
    for step in range(num_steps):
        lease = bench.lease(prompt, 100, len(prompt) - 5)
        assert bench.start(lease) == (len(prompt) - turn if step else 0)
        bench.prefill(lease, begin=len(prompt) - turn if step else 0)
        bench.end(lease, num_generated=20)
        prompt = [*lease.sequence, *[step % 8] * turn]
    assert sum(n.has_state for n in bench.index) <= 10  # of 90
