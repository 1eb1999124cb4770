"""Prometheus metrics of one app: requests, latencies, event loop lag, and the engine's counters.

Each app has its own registry. Independent of routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from luceasync.request import Delta, Engine, Speculation
from luceasync.server.answer_stats import RecentAnswers
from luceasync.status import (
    CacheStatus,
    EngineStatus,
    ExpertsStatus,
    ProcessStatus,
    ResidenceStatus,
    SpeculationStatus,
    conversation_label,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LAG_INTERVAL_S = 0.1
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BUCKETS_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1)

CACHE = "luceasync_prefix_cache"
SPECULATION = "luceasync_speculation"
KVFLASH = "luceasync_kvflash"
EXPERTS = "luceasync_experts"
PROCESS = "luceasync_process"


class AnswerClock:
    """Observes the time to the first token of one answer and the times between its tokens; when the
    answer ends, adds it to `recent`.
    """

    def __init__(
        self, first_token: Histogram, next_token: Histogram, recent: RecentAnswers, word: str
    ) -> None:
        """`word` is the label of the conversation."""
        self._first_token = first_token
        self._next_token = next_token
        self._recent = recent
        self._word = word
        self._last_s = time.perf_counter()
        self._begun = False

    def tick(self, delta: Delta) -> None:
        """Record the arrival of `delta`; deltas without tokens do not count."""
        if delta.finish is not None and delta.index == 0:
            self._recent.add(conversation_label(self._word), delta.finish)
        if not delta.token_ids:
            return
        now_s = time.perf_counter()
        if self._begun:
            self._next_token.observe((now_s - self._last_s) / len(delta.token_ids))
        else:
            self._first_token.observe(now_s - self._last_s)
            self._begun = True
        self._last_s = now_s


class Metrics:
    """The registry of one app, and the metrics of the server itself."""

    def __init__(self, engine: Engine) -> None:
        self.recent = RecentAnswers()
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))
        self._requests = Counter(
            "luceasync_http_requests", "Requests by route and status.", ["route", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._first_token = Histogram(
            "luceasync_time_to_first_token_seconds", "From the parsed request to its first token.",
            buckets=TTFT_BUCKETS_S, registry=self._registry,
        )  # fmt: skip
        self._next_token = Histogram(
            "luceasync_inter_token_seconds", "Between two tokens of an answer.",
            buckets=TOKEN_BUCKETS_S, registry=self._registry,
        )  # fmt: skip
        self._lag = Histogram(
            "luceasync_event_loop_lag_seconds", "How late the event loop wakes a sleeper.",
            buckets=LAG_BUCKETS_S, registry=self._registry,
        )  # fmt: skip

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def count(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def clock(self, word: str = "") -> AnswerClock:
        """Start the clock of one answer in the conversation labelled `word`."""
        return AnswerClock(self._first_token, self._next_token, self.recent, word)

    async def watch_lag(self) -> NoReturn:
        """Observe the event loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag.observe(max(0.0, loop.time() - due_s))


class EngineCollector(Collector):
    """Reads `engine.status()` on each scrape: lanes, tokens, cache, speculation, processes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        status = self._engine.status()
        yield from _engine(status)
        if status.cache is not None:
            yield from _cache(status.cache)
        if status.speculation is not None:
            yield from _speculation(status.speculation)
        if status.residence is not None:
            yield from _residence(status.residence)
        if status.experts is not None:
            yield from _experts(status.experts)
        if status.processes.all:
            yield from _processes(status.processes.all)


def _engine(status: EngineStatus) -> Iterator[Metric]:
    for name, help_text, value in (
        ("failed", "1 while the engine has failed.", float(status.has_failed)),
        ("ready", "1 when the model is loaded.", float(status.ready)),
        ("lanes", "Sequences that can be decoded together.", status.num_lanes),
        ("running_lanes", "Lanes that hold a sequence.", status.num_running),
        ("queued_requests", "Requests waiting for a lane.", status.num_queued),
    ):
        yield GaugeMetricFamily(f"luceasync_{name}", help_text, value=value)
    for name, help_text, value in (
        ("prefilled_tokens", "Prompt tokens computed.", status.prefilled_tokens_total),
        ("decoded_tokens", "Tokens generated.", status.decoded_tokens_total),
        ("decode_steps", "Steps of the decode batch.", status.decode_steps_total),
        ("engine_restarts", "Times the engine was restarted.", status.restarts_total),
    ):
        yield CounterMetricFamily(f"luceasync_{name}", help_text, value=value)


def _cache(cache: CacheStatus) -> Iterator[Metric]:
    yield _gauges(f"{CACHE}_bytes", "Bytes of all nodes.", "tier", cache.num_bytes)
    yield _gauges(f"{CACHE}_nodes", "Number of nodes.", "tier", cache.num_nodes)
    help_text = "Nodes not yet written to disk."
    yield GaugeMetricFamily(f"{CACHE}_unwritten_nodes", help_text, value=cache.num_unwritten)
    for name, help_text, label, values in (
        ("hits", "Requests that restored a prefix.", "tier", cache.restored_total),
        ("misses", "Requests that could not restore more.", "reason", cache.missed_total),
        ("restored_tokens", "Prompt tokens restored.", "tier", cache.restored_tokens_total),
        ("saved_nodes", "Nodes saved.", "tier", cache.saved_total),
        ("evicted_nodes", "Nodes evicted.", "tier", cache.evicted_total),
    ):
        yield _counters(f"{CACHE}_{name}", help_text, label, values)
    for name, help_text, value in (
        ("written_bytes", "Bytes written to disk.", cache.written_bytes_total),
        ("read_bytes", "Bytes read from disk.", cache.read_bytes_total),
        ("quarantined_nodes", "Damaged files quarantined.", cache.quarantined_total),
    ):
        yield CounterMetricFamily(f"{CACHE}_{name}", help_text, value=value)
    for name, count in cache.store.items():
        help_text = f"Asked of the store behind the disk: {name.replace('_', ' ')}."
        yield CounterMetricFamily(f"luceasync_store_{name}", help_text, value=count)
    help_text = "1 while disk errors keep nodes from being written or read."
    yield GaugeMetricFamily(f"{CACHE}_degraded", help_text, value=float(bool(cache.degraded)))


def _speculation(status: SpeculationStatus) -> Iterator[Metric]:
    yield CounterMetricFamily(
        f"{SPECULATION}_rounds", "Verify steps that had a proposal.", value=status.rounds_total
    )
    for name, help_text, by_slot in (
        ("proposed_tokens", "Draft tokens by position in the proposal.", status.proposed_by_slot),
        ("accepted_tokens", "Draft tokens accepted, by position.", status.accepted_by_slot),
    ):
        values = {str(slot): value for slot, value in enumerate(by_slot)}
        yield _counters(f"{SPECULATION}_{name}", help_text, "slot", values)
    whole = Speculation(
        status.rounds_total, sum(status.proposed_by_slot), sum(status.accepted_by_slot)
    )
    help_text = "Tokens per verify step since the start, bonus included."
    yield GaugeMetricFamily(f"{SPECULATION}_tau", help_text, value=whole.tau)
    help_text = "1 while the drafter is gone and speculation is off."
    yield GaugeMetricFamily(f"{SPECULATION}_off", help_text, value=float(bool(status.off_reason)))
    seconds = {
        "draft": status.draft_s_total,
        "verify": status.verify_s_total,
        "host": status.host_s_total,
    }
    yield _counters(f"{SPECULATION}_seconds", "Time by part of a round.", "part", seconds)
    help_text = "Prompts that lookup copies nothing from, because indexing them failed."
    yield CounterMetricFamily(f"{SPECULATION}_unindexed", help_text, value=status.unindexed_total)
    drafters = status.drafters.items()
    for name, help_text, values in (
        ("rounds", "Verify steps by drafter.", {d: of.rounds_total for d, of in drafters}),
        ("proposed", "Draft tokens by drafter.", {d: of.proposed_total for d, of in drafters}),
        ("accepted", "Accepted by drafter.", {d: of.accepted_total for d, of in drafters}),
    ):
        yield _counters(f"{SPECULATION}_drafter_{name}", help_text, "drafter", values)


def _residence(status: ResidenceStatus) -> Iterator[Metric]:
    tokens = {"resident": status.resident_tokens, "absent": status.absent_tokens}
    yield _gauges(f"{KVFLASH}_tokens", "Tokens of all lanes, in whole chunks.", "where", tokens)
    help_text = "Host memory of lanes for rows that no node holds."
    yield GaugeMetricFamily(f"{KVFLASH}_own_bytes", help_text, value=status.own_bytes)
    for name, help_text, value in (
        ("recalled_chunks", "Chunks recalled to the devices.", status.recalled_total),
        ("evicted_chunks", "Chunks evicted from the devices.", status.evicted_total),
        ("looks", "Times the resident chunks were reselected.", status.looks_total),
    ):
        yield CounterMetricFamily(f"{KVFLASH}_{name}", help_text, value=value)


def _experts(status: ExpertsStatus) -> Iterator[Metric]:
    places = {
        "slot": status.hits_total,
        "copied": status.misses_total,
        "host": status.read_through_total,
    }
    help_text = "Experts of passes by where they were: in a slot, copied to one, in host memory."
    yield _counters(f"{EXPERTS}_met", help_text, "place", places)
    help_text = "Bytes of experts copied or read from host memory."
    yield CounterMetricFamily(f"{EXPERTS}_bytes", help_text, value=status.copied_bytes_total)


def _processes(processes: Sequence[ProcessStatus]) -> Iterator[Metric]:
    """Metrics of the other processes, by name and devices."""
    ages = {p: p.heartbeat_age_s for p in processes if p.heartbeat_age_s is not None}
    for name, help_text, gauges in (
        ("up", "1 while the process works.", {p: float(not p.detail) for p in processes}),
        ("heartbeat_age_seconds", "Time since its last heartbeat.", ages),
        ("resident_bytes", "Its resident memory.", {p: p.resident_bytes for p in processes}),
        ("node_bytes", "Nodes in memory shared with it.", {p: p.node_bytes for p in processes}),
    ):
        yield _of_processes(GaugeMetricFamily, name, help_text, gauges)
    for name, help_text, counters in (
        ("starts", "Times it was started.", {p: p.num_starts for p in processes}),
        ("calls", "Calls to it.", {p: p.calls_total for p in processes}),
        ("call_seconds", "Time waited for its answers.", {p: p.call_s_total for p in processes}),
        ("sent_bytes", "Bytes sent to it.", {p: p.sent_bytes_total for p in processes}),
        (
            "received_bytes",
            "Bytes received from it.",
            {p: p.received_bytes_total for p in processes},
        ),
    ):
        yield _of_processes(CounterMetricFamily, name, help_text, counters)


def _of_processes(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    help_text: str,
    values: Mapping[ProcessStatus, float],
) -> Metric:
    family = kind(f"{PROCESS}_{name}", help_text, labels=["process", "devices"])
    for process, value in values.items():
        family.add_metric([process.name, ",".join(process.devices)], value)
    return family


def _gauges(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counters(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
