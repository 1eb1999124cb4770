"""Whatever comes, and in whatever order: answers are right, budgets hold, no request waits forever.

Requests come, go on and leave, files come late, fail, vanish or are changed by others, memory is
refused. What a request is answered is what a model without any cache says.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from luceasync.disk_cache.codec import NodePart, part_of
from luceasync.engine.decoding import PlainDecoding
from luceasync.engine.pump import Fault, Pump
from luceasync.engine.thread import fault_of
from luceasync.errors import StageFailed
from luceasync.models.mixers import END_KINDS
from luceasync.prefix_cache import index as index_module
from luceasync.prefix_cache.memory import LOGITS
from luceasync.prefix_tree.cost import Rates
from luceasync.prefix_tree.node import tenant_key
from tests.engine.choices import make_choice
from tests.engine.pumps import letters
from tests.prefix_cache.token_target import CHUNK, FAULT, GONE, Bench, FakeDisk, following

NUM_LANES = 3
TENANTS = [tenant_key("one"), tenant_key("two")]
MAX_STEPS = 500
SLOW_DISK = Rates(1e-3, 1e9, 1e9)


def said(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(following(tokens))
    return tuple(tokens[len(prompt) :])


class Server(RuleBasedStateMachine):
    recurrent = True
    tokenizer = None

    @initialize(memory=st.sampled_from([0, 300, 1500, 4000]), disk=st.sampled_from([1500, 6000]))
    def start(self, memory: int, disk: int) -> None:
        self.limits = {
            "memory_bytes": memory,
            "transit_bytes": 1600,
            "disk_bytes": disk,
            "interval_tokens": 128,
        }
        self.histories: list[tuple[int, ...]] = [()]
        self.asked: dict[int, tuple[tuple[int, ...], int]] = {}
        self.answers: dict[int, tuple[int, ...]] = {}
        self.num_streams = 0
        self.others_bytes = 0  # on the disk since it was at rest: their budgets are not ours
        self.open(FakeDisk())

    def open(self, disk: FakeDisk) -> None:
        self.bench = Bench(recurrent=self.recurrent, disk=disk, num_lanes=NUM_LANES, **self.limits)
        self.prefixes, self.disk = self.bench.prefixes, disk
        self.pump = Pump(
            self.bench.target,
            PlainDecoding(self.bench.target),
            self.prefixes,
            num_lanes=NUM_LANES,
            chunk_tokens=CHUNK,
            lanes=self.bench.memory.lanes,
        )

    def hear(self, emitted) -> None:
        for stream, delta in emitted:
            self.answers[stream] = self.answers.get(stream, ()) + delta.token_ids
            if delta.finish is None:
                continue
            prompt, num_tokens = self.asked.pop(stream)
            answer = self.answers.pop(stream)
            assert answer == said(prompt, len(answer))
            if delta.finish.reason == "length":
                assert len(answer) == num_tokens
            self.histories.append(prompt + answer)

    @rule(
        turn=st.integers(0, 100),
        shared=st.integers(0, 400),
        more=st.integers(1, 150),
        token=st.integers(0, 1),
        num_tokens=st.integers(0, 40),
        tenant=st.sampled_from(TENANTS),
        keep=st.booleans(),
    )
    def ask(self, turn, shared, more, token, num_tokens, tenant, keep) -> None:
        before = self.histories[turn % len(self.histories)][:shared]
        prompt = before + (token,) * more
        stream, self.num_streams = self.num_streams, self.num_streams + 1
        self.asked[stream] = (prompt, num_tokens)
        boundaries = tuple(sorted({len(before), len(before) + more // 2} - {0}))
        self.pump.submit(
            [
                make_choice(
                    prompt,
                    stream_id=stream,
                    max_tokens=num_tokens,
                    tokenizer=self.tokenizer,
                    tenant=tenant,
                    boundaries=boundaries,
                    keep_prefix=keep,
                )
            ]
        )

    @rule(num_steps=st.integers(1, 40))
    def go_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.hear(self.pump.step())

    @rule(which=st.integers(0, 10))
    def leave(self, which: int) -> None:
        if self.asked:
            self.hear(self.pump.cancel(sorted(self.asked)[which % len(self.asked)]))

    @rule(count=st.integers(1, 6), fault=st.sampled_from([None, None, None, FAULT, GONE]))
    def hear_of_the_disk(self, count: int, fault) -> None:
        for _ in range(min(count, len(self.disk.jobs))):
            self.disk.deliver(self.prefixes, fault)

    @rule(which=st.integers(0, 20), is_told=st.booleans())
    def lose_a_file(self, which: int, is_told: bool) -> None:
        if self.disk.files:
            key = sorted(self.disk.files)[which % len(self.disk.files)]
            del self.disk.files[key]
            if is_told:
                self.prefixes.files_changed([], [key])

    @rule(which=st.integers(0, 20), is_told=st.booleans())
    def another_server_writes_it_without_its_end(self, which: int, is_told: bool) -> None:
        if self.disk.files:
            key = sorted(self.disk.files)[which % len(self.disk.files)]
            node = self.disk.files[key]
            span = {n: t for n, t in node.tensors.items() if part_of(n, END_KINDS) is NodePart.SPAN}
            self.disk.files[key] = replace(node, tensors=span)
            if is_told:
                before = self.bench.index.num_bytes("disk")
                self.prefixes.files_changed([n for n in self.disk.nodes() if n.key == key], [])
                self.others_bytes += max(0, self.bench.index.num_bytes("disk") - before)

    @rule(is_late=st.booleans(), is_full=st.booleans())
    def copies_are_late_or_memory_is_full(self, is_late: bool, is_full: bool) -> None:
        self.bench.target.is_full = is_full
        self.bench.target.late = ("save", "restore") if is_late else ()
        if not is_late:
            self.bench.target.arrive()

    @rule(num_steps=st.integers(1, 3))
    def what_is_computed_is_no_numbers(self, num_steps: int) -> None:
        self.bench.target.is_sick = True
        self.go_on(num_steps)
        self.bench.target.is_sick = False

    @rule(
        verb=st.sampled_from(["prefill", "decode", "save", "restore", "reset"]),
        num_steps=st.integers(1, 4),
    )
    def a_group_fails(self, verb: str, num_steps: int) -> None:
        """What it has computed by then is there; nothing is saved or restored."""
        real = getattr(self.bench.target, verb)

        def failing(*args, **fields):
            if verb in ("prefill", "decode"):
                real(*args, **fields)
            raise StageFailed(0, "its process is gone")

        setattr(self.bench.target, verb, failing)
        fault: Fault | None = None
        for _ in range(num_steps):
            try:
                self.hear(self.pump.step())
            except StageFailed as error:
                fault = fault_of(error, self.pump.doing)
                break
        delattr(self.bench.target, verb)
        if fault is not None:
            self.hear(self.pump.recover(fault))
            self.pump.begin_again()
            assert self.pump.num_running == 0

    @rule(is_slow=st.booleans())
    def reading_is_slower_than_running(self, is_slow: bool) -> None:
        self.prefixes._decision.rates = SLOW_DISK if is_slow else Rates()

    @rule()
    def restart(self) -> None:
        self.bench.target.arrive()
        self.hear(self.pump.end_all("shutting down"))
        self.disk.deliver_all(self.prefixes)
        self.open(self.disk)

    @rule()
    def come_to_rest(self) -> None:
        self.bench.target.is_full = False
        self.bench.target.arrive()
        for _ in range(MAX_STEPS):
            if self.pump.is_idle and not self.disk.jobs:
                break
            self.hear(self.pump.step())
            if self.disk.jobs:
                self.disk.deliver(self.prefixes)
        assert not self.asked, f"a request waits forever: {self.pump}"
        self.others_bytes = 0
        for tier, most in (("memory", "memory_bytes"), ("disk", "disk_bytes")):
            is_within = self.bench.index.num_bytes(tier) <= self.limits[most]
            assert is_within or not self.may_go(tier)

    def may_go(self, tier: str) -> list[bytes]:
        """Keys of nodes that nothing needs in the tier."""
        held = self.bench.index
        below = {n.parent for n in held if tier in n.tiers}
        return [
            n.key
            for n in held
            if tier in n.tiers
            and n.key not in below
            and (len(n.tiers) > 1 or not held.children(n.key))
        ]

    @invariant()
    def memory_and_tree_agree(self) -> None:
        target, held = self.bench.target, self.bench.index
        in_memory = {node.key: node for node in held if "memory" in node.tiers}
        assert target.nodes.keys() == in_memory.keys() == self.bench.memory._nodes.keys()
        for name, (span, _, _) in target.nodes.items():
            assert span.with_state == ("memory" in in_memory[name].state_tiers)
            has_logits = LOGITS in self.bench.memory._nodes[name].end
            assert has_logits == ("memory" in in_memory[name].logits_tiers)

    @invariant()
    def bytes_are_counted_and_bounded(self) -> None:
        held = self.bench.index
        for tier in ("memory", "disk"):
            ownerless = sum(n.bytes_in(tier) for n in held._ownerless)
            assert held.num_bytes(tier) == sum(n.bytes_in(tier) for n in held) + ownerless
        most = self.limits["memory_bytes"] + self.limits["transit_bytes"]
        assert held.num_bytes("memory") + self.prefixes._read_in.num_bytes <= most
        under_way = self.prefixes._write_back.num_bytes_under_way
        most = self.limits["disk_bytes"] + self.others_bytes
        assert held.num_bytes("disk") + under_way <= most

    @invariant()
    def a_lane_is_not_given_while_something_is_awaited(self) -> None:
        assert not any(g.lease.awaited for g in self.pump.scheduler.running)

    @invariant()
    def tenants_stay_apart(self) -> None:
        for generation in [*self.pump.scheduler.waiting, *self.pump.scheduler.running]:
            lease = generation.lease
            tree = self.bench.index.tree(lease.tenant)
            assert all(key in tree for key in lease.path if key in self.bench.index)

    def teardown(self) -> None:
        self.come_to_rest()


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [True, False])
def test_whatever_comes(recurrent: bool, monkeypatch):
    monkeypatch.setattr(index_module, "MIN_AGE_S", 0.0)
    kind = type("Kind", (Server,), {"recurrent": recurrent, "tokenizer": letters()})
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
