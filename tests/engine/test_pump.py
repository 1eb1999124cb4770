"""What a step does, with a target that counts instead of computing."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest

from luceasync.engine.pump import DELIVERY_PAUSE_S, IDLE_PAUSE_S
from luceasync.host_cache.nodes import Span
from luceasync.prefix_cache import cache as prefixes_module
from luceasync.text.detokenizer import Detokenizer
from tests.engine.pumps import CountingTarget, letters, make_pump, run
from tests.host_cache.late import LateTicket


def test_a_prompt_is_prefilled_in_chunks_that_end_at_fixed_positions(make_prepared):
    target = CountingTarget()
    pump = make_pump(target)
    pump.submit([make_prepared(0, [0] * 150, max_tokens=1)])
    run(pump)
    assert target.calls == [
        ("reset", 0),
        ("prefill", 0, 0, 64),
        ("prefill", 0, 64, 64),
        ("prefill", 0, 128, 22),
    ]


def test_each_step_feeds_the_last_token_at_its_position(make_prepared):
    target = CountingTarget()
    pump = make_pump(target)
    pump.submit([make_prepared(0, [0, 1], max_tokens=3)])
    emitted = run(pump)
    assert [d.token_ids for _, d in emitted] == [(2,), (3,), (4,)]
    assert target.calls[2:] == [("decode", (0,), (2,)), ("decode", (0,), (3,))]


def test_tokens_of_a_step_are_delivered_while_the_device_works_on_the_next(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, runs_async=True)
    pump.submit([make_prepared(0, [0, 1], max_tokens=4)])
    delivered: list[tuple] = []

    def tell(emitted: list) -> None:
        delivered.extend((target.calls[-1], delta.token_ids) for _, delta in emitted)

    returned = [[delta.token_ids for _, delta in pump.step(tell)] for _ in range(4)]
    assert returned == [[], [], [], [(5,)]]  # the last token is not held back
    assert delivered == [(("decode", (0,), (token,)), (token,)) for token in (2, 3, 4)]


def test_the_target_runs_ahead_if_a_step_is_likely_to_follow(make_prepared):
    target = CountingTarget()
    pump = make_pump(target)
    pump.submit([make_prepared(0, [0], max_tokens=4), make_prepared(1, [0, 1], max_tokens=6)])
    run(pump)
    together = [("decode", (0, 1), (1 + i, 2 + i)) for i in range(3)]
    alone = [("decode", (1,), (5 + i,)) for i in range(2)]
    assert target.calls[-5:] == together + alone
    assert target.run_ahead_after == [*together[:-1], *alone[:-1]]


def test_the_target_does_not_run_ahead_while_a_prompt_is_prefilled(make_prepared):
    target = CountingTarget()
    pump = make_pump(target)
    pump.submit([make_prepared(0, [0], max_tokens=9)])
    pump.step()
    pump.submit([make_prepared(1, [0] * 300, max_tokens=1)])
    run(pump)
    is_read = target.calls.index(("prefill", 1, 256, 44))
    decodes = [call for call in target.calls[:is_read] if call[0] == "decode"]
    assert decodes and not set(decodes) & set(target.run_ahead_after)
    assert target.run_ahead_after


def test_nothing_is_held_back_without_a_later_delivery(make_prepared):
    pump = make_pump(CountingTarget(), runs_async=True)
    pump.submit([make_prepared(0, [0, 1], max_tokens=4)])
    assert [[d.token_ids for _, d in pump.step()] for _ in range(4)] == [
        [(2,)],
        [(3,)],
        [(4,)],
        [(5,)],
    ]


def test_held_back_tokens_are_delivered_before_a_prefill(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, runs_async=True)
    pump.submit([make_prepared(0, [0, 1], max_tokens=50)])
    emitted: list = []
    assert pump.step(emitted.extend) == pump.step(emitted.extend) == []
    assert [delta.token_ids for _, delta in emitted] == [(2,)]
    pump.submit([make_prepared(1, [0] * 100, max_tokens=50)])
    assert [delta.token_ids for _, delta in pump.step(emitted.extend)] == [(3,)]
    assert target.calls[-1] == ("reset", 1)


def test_held_back_tokens_are_delivered_when_the_choice_is_cancelled(make_prepared):
    pump = make_pump(CountingTarget(), runs_async=True)
    pump.submit([make_prepared(0, [0, 1], max_tokens=50)])
    emitted: list = []
    assert pump.step(emitted.extend) == pump.step(emitted.extend) == []
    assert [delta.token_ids for _, delta in emitted] == [(2,)]
    held, end = (delta for _, delta in pump.cancel(0))
    assert held.token_ids == (3,) and end.finish.reason == "cancelled"


class NoSpeller(Detokenizer):
    """Of a tokenizer that has a fault."""

    def push(self, token_id: int):
        raise ZeroDivisionError("no text")


@pytest.mark.parametrize("runs_async", [False, True])
def test_a_failing_detokenizer_does_not_stop_other_deliveries(make_prepared, runs_async):
    pump = make_pump(CountingTarget(), num_lanes=3, runs_async=runs_async)
    pump.submit([make_prepared(0, [0, 1], max_tokens=50)])
    emitted = pump.step()
    spellers = [replace(make_prepared(i, [3]), detokenizer=NoSpeller(letters())) for i in (1, 2)]
    pump.submit(spellers)
    with pytest.raises(ZeroDivisionError):
        for _ in range(10):
            emitted += pump.step(emitted.extend)
    ended = [(stream, d.finish.reason) for stream, d in pump.fail_all("broken") if d.finish]
    assert sorted(ended) == [(0, "error"), (1, "error"), (2, "error")]


def test_the_host_waits_for_a_prompts_last_logits_and_for_nothing_else(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, synchronize=lambda: target.calls.append(("wait",)))
    pump.submit([make_prepared(0, [0] * 100, max_tokens=3)])
    run(pump)
    assert [call[0] for call in target.calls[1:]] == "prefill prefill wait decode decode".split()


def test_only_after_a_second_without_work_it_is_quiet(make_prepared):
    quiet = threading.Event()
    pump = make_pump(CountingTarget(), quiet=quiet)
    pump.submit([make_prepared(0, [0], max_tokens=2)])
    while not pump.is_idle:
        pump.step()
    assert not quiet.is_set()
    pump.step(), pump.step()
    assert quiet.is_set()
    pump.submit([make_prepared(1, [0], max_tokens=2)])
    assert not quiet.is_set()


def test_an_answers_end_goes_out_before_its_prefix_is_kept(make_prepared):
    pump = make_pump(CountingTarget())
    pump.submit([make_prepared(0, [0], max_tokens=1)])
    pump.step()
    assert pump.pause_s == DELIVERY_PAUSE_S
    pump.lanes.delivered()
    assert pump.pause_s == 0.0
    pump.step()
    assert pump.is_idle


def test_decoding_lanes_advance_in_one_batch(make_prepared):
    target = CountingTarget()
    pump = make_pump(target)
    pump.submit([make_prepared(0, [0], max_tokens=4), make_prepared(1, [3], max_tokens=4)])
    run(pump)
    assert ("decode", (0, 1), (1, 1)) in target.calls


def test_lanes_go_to_the_waiting_in_order(make_prepared):
    pump = make_pump(CountingTarget(), num_lanes=1)
    pump.submit([make_prepared(stream, [0], max_tokens=2) for stream in range(3)])
    ended = [stream for stream, delta in run(pump) if delta.finish]
    assert ended == [0, 1, 2]


def test_a_long_prompt_does_not_starve_the_streams(make_prepared):
    """Between two chunks of one prompt the other lane decodes, however long the prompt is."""
    target = CountingTarget()
    pump = make_pump(target)
    pump.submit([make_prepared(0, [0], max_tokens=5000)])
    for _ in range(3):
        pump.step()
    pump.submit([make_prepared(1, [0] * 640, max_tokens=1)])
    while any(call[:2] != ("prefill", 1) for call in target.calls[-1:]):
        pump.step()
    before = len(target.calls)
    while sum(call[:2] == ("prefill", 1) for call in target.calls) < 10:
        pump.step()
    kinds = [call[0] for call in target.calls[before - 1 :]]
    assert all(a != b for a, b in itertools.pairwise(kinds) if a == "prefill")


def test_what_opens_an_answer_is_no_pass_of_its_own_and_waits_for_no_stream(make_prepared):
    """The state before it is taken within the chunk: the first token does not come later for it."""

    class Marked(CountingTarget):
        def __init__(self) -> None:
            super().__init__()
            self.marks: list[int | None] = []

        def prefill(self, lane, begin, tokens, *, project, mark=None, scores=False):
            self.marks.append(mark)
            return super().prefill(lane, begin, tokens, project=project, mark=mark)

    target = Marked()
    pump = make_pump(target, memory_bytes=10_000, recurrent=True)
    pump.submit([make_prepared(0, [0], max_tokens=5000)])
    for _ in range(3):
        pump.step()
    begin = len(target.calls)
    pump.submit([make_prepared(1, [1] * 128, max_tokens=1, boundaries=(120,))])
    while ("save", 1, 120, 128) not in target.calls:
        pump.step()
    calls = target.calls[begin:]
    assert [call for call in calls if call[0] == "prefill"] == [
        ("prefill", 1, 0, 64),
        ("prefill", 1, 64, 64),
    ]
    assert target.marks == [None, None, 120]
    last = calls.index(("prefill", 1, 64, 64))
    assert calls[last + 1 : last + 3] == [("save", 1, 0, 120), ("save", 1, 120, 128)]


def test_a_stop_token_ends_without_text_of_its_own(make_prepared):
    pump = make_pump(CountingTarget())
    pump.submit([make_prepared(0, [0], max_tokens=9, stop=3)])
    emitted = run(pump)
    assert "".join(delta.text for _, delta in emitted) == "bc"
    assert emitted[-1][1].finish.reason == "stop"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_cancel_frees_the_lane_wherever_the_choice_is(make_prepared, num_steps: int):
    pump = make_pump(CountingTarget(), num_lanes=1)
    pump.submit([make_prepared(7, [0] * 100, max_tokens=50)])
    for _ in range(num_steps):
        pump.step()
    [(stream, delta)] = pump.cancel(7)
    assert (stream, delta.finish.reason) == (7, "cancelled")
    assert repr(pump) == "Pump(0 waiting, 0 prefilling, 0 decoding, 1 lanes free)"


def test_cancel_leaves_the_others_alone(make_prepared):
    pump = make_pump(CountingTarget())
    pump.submit([make_prepared(0, [0], max_tokens=6), make_prepared(1, [0], max_tokens=6)])
    pump.step()
    pump.cancel(0)
    assert [stream for stream, delta in run(pump) if delta.finish] == [1]


def test_a_row_without_numbers_ends_with_an_error_and_the_others_go_on(make_prepared):
    class Sick(CountingTarget):
        def decode(self, lanes, positions, tokens):
            logits = super().decode(lanes, positions, tokens)
            if len(lanes) == 2:
                logits.whole()[0, 3] = float("nan")
            return logits

    pump = make_pump(Sick())
    pump.submit([make_prepared(0, [0], max_tokens=4), make_prepared(1, [0], max_tokens=4)])
    ended = {stream: delta.finish for stream, delta in run(pump) if delta.finish}
    assert (ended[0].reason, ended[1].reason) == ("error", "length")
    assert "not finite numbers" in ended[0].error


def test_what_gave_no_numbers_is_not_taken_up_again(make_prepared):
    class SickOnce(CountingTarget):
        def prefill(self, lane, begin, tokens, **asked):
            logits = super().prefill(lane, begin, tokens, **asked)
            return logits if logits is None or len(self.calls) > 3 else logits * float("nan")

    target = SickOnce()
    pump = make_pump(target, memory_bytes=10_000)
    for stream in range(3):
        pump.submit([make_prepared(stream, [0] * 100, max_tokens=2)])
        run(pump)
    restored = [call for call in target.calls if call[0] == "restore"]
    assert restored == [("restore", 0, 100)]  # by the third, of the second


def test_a_choice_whose_lane_cannot_be_prepared_ends_too(make_prepared):
    class Broken(CountingTarget):
        def reset(self, lane: int) -> None:
            raise RuntimeError("no lane")

    pump = make_pump(Broken())
    pump.submit([make_prepared(5, [0])])
    with pytest.raises(RuntimeError, match="no lane"):
        pump.step()
    assert [(stream, d.finish.reason) for stream, d in pump.fail_all("broken")] == [(5, "error")]


def test_a_failed_save_ends_every_choice_once(make_prepared):
    class Full(CountingTarget):
        def save(self, lane: int, node: str, span: Span) -> None:
            raise ZeroDivisionError("the device is gone")

    pump = make_pump(Full(), memory_bytes=10_000)
    pump.submit([make_prepared(0, [0], max_tokens=1), make_prepared(1, [3], max_tokens=9)])
    emitted = pump.step()
    with pytest.raises(ZeroDivisionError):
        pump.step()
    emitted += pump.fail_all("the device is gone")
    assert [(s, d.finish.reason) for s, d in emitted if d.finish] == [(0, "length"), (1, "error")]
    assert pump.is_idle


def test_deltas_made_before_a_failure_are_delivered(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, memory_bytes=10_000)
    pump.submit([make_prepared(0, [0], max_tokens=1)])
    run(pump)
    pump.submit([make_prepared(stream, [0], max_tokens=1) for stream in (1, 2)])
    target.restores[1] = LateTicket()
    target.restores[1].arrive(ZeroDivisionError("the device is gone"))
    with pytest.raises(ZeroDivisionError):
        pump.step()  # the first one's answer is there, the other's copies have failed
    emitted = [(stream, delta.finish.reason) for stream, delta in pump.fail_all("broken")]
    assert emitted == [(1, "length"), (2, "error")]


def test_a_prompt_that_is_restored_whole_outlives_its_node(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, memory_bytes=10_000)
    pump.submit([make_prepared(0, [0], max_tokens=1)])
    run(pump)
    ticket = target.restores[0] = LateTicket()
    pump.submit([make_prepared(1, [0], max_tokens=1), make_prepared(2, [5], max_tokens=9)])
    pump.step()
    [node] = next(iter(pump.lanes.prefixes._leases)).path
    pump.lanes.prefixes.index.drop(node, "memory")
    ticket.arrive()
    assert [stream for stream, delta in run(pump) if delta.finish] == [1, 2]


def test_a_restore_that_has_not_arrived_is_not_asked_for_and_wakes_the_pump(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, memory_bytes=10_000)
    pump.submit([make_prepared(0, [0] * 100, max_tokens=1)])
    run(pump)
    ticket = target.restores[0] = LateTicket()
    pump.submit([make_prepared(1, [*[0] * 100, 1], max_tokens=1)])
    pump.step()
    assert pump.pause_s == IDLE_PAUSE_S
    ticket.arrive()
    assert pump.pause_s == 0.0
    assert [stream for stream, delta in run(pump) if delta.finish] == [1]


def test_a_restore_does_not_delay_other_choices(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, num_lanes=1, memory_bytes=10_000)
    pump.submit([make_prepared(0, [0] * 100, max_tokens=1)])
    run(pump)
    target.restores[0] = LateTicket()
    pump.submit([make_prepared(1, [*[0] * 100, 1], max_tokens=1)])
    pump.step()
    pump.submit([make_prepared(2, [5], max_tokens=1)])
    assert pump.pause_s == 0.0
    pump.step()  # there is no lane
    assert pump.pause_s == IDLE_PAUSE_S
    pump.cancel(1)
    assert pump.pause_s == 0.0
    assert [stream for stream, delta in run(pump) if delta.finish] == [2]


def test_a_restore_that_never_arrives_is_an_error(make_prepared, monkeypatch):
    target = CountingTarget()
    pump = make_pump(target, memory_bytes=10_000)
    pump.submit([make_prepared(0, [0] * 100, max_tokens=1)])
    run(pump)
    ticket = target.restores[0] = LateTicket()
    ticket.error = TimeoutError("copies: not over within 60 s")
    pump.submit([make_prepared(1, [*[0] * 100, 1], max_tokens=1)])
    pump.step()
    monkeypatch.setattr(prefixes_module, "COPY_TIMEOUT_S", 0.0)
    with pytest.raises(TimeoutError, match="not over"):
        pump.step()


def order_of_prefills(target: CountingTarget) -> list[int]:
    return [call[1] for call in target.calls if call[0] == "prefill"]


def test_a_short_prompt_waits_for_one_chunk_of_its_clients_long_ones(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, num_lanes=4)
    pump.submit([make_prepared(i, [i] * 640, max_tokens=1) for i in range(3)])
    pump.step()
    pump.submit([make_prepared(3, [3], max_tokens=1)])
    run(pump)
    assert order_of_prefills(target) == [0, 3, *[0] * 9, *[1] * 10, *[2] * 10]


def test_clients_prompts_take_turns(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, num_lanes=3)
    long = [make_prepared(i, [i] * 256, max_tokens=1, client="a") for i in range(2)]
    pump.submit([*long, make_prepared(2, [2] * 200, max_tokens=1, client="b")])
    run(pump)
    assert order_of_prefills(target) == [*[0, 1] * 4, *[2] * 4]


def test_short_prompts_that_keep_coming_do_not_stop_a_long_one_of_their_client(make_prepared):
    target = CountingTarget()
    pump = make_pump(target, num_lanes=2)
    pump.submit([make_prepared(0, [0] * 192, max_tokens=1)])
    for number in range(1, 40):
        pump.submit([make_prepared(number, [number % 8], max_tokens=1)])
        pump.step()
    run(pump)
    order = order_of_prefills(target)
    assert [i for i, lane in enumerate(order) if lane == 0][:3] == [8, 17, 26]
