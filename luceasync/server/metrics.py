"""Prometheus metrics of one app: requests, latencies, the event loop's lag.

Owns an own registry, so that two apps in a process never share one. Knows nothing of routes, nor
of what the engine counts.
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
from luceasync.status import (
    CacheStatus,
    EngineStatus,
    ProcessStatus,
    ResidenceStatus,
    SpeculationStatus,
)

# Prometheus metrics of what the engine counts: lanes, tokens, the prefix cache, speculation.
# Owns their names. Knows nothing of requests, and counts nothing itself.


CACHE = "luceasync_prefix_cache"
SPECULATION = "luceasync_speculation"
KVFLASH = "luceasync_kvflash"
PROCESS = "luceasync_process"


class EngineCollector(Collector):
    """Reads `engine.status()` when somebody scrapes; nothing is counted twice."""

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
        if status.processes.all:
            yield from _processes(status.processes.all)


def _engine(status: EngineStatus) -> Iterator[Metric]:
    for name, words, value in (
        ("failed", "1 while the engine is gone.", float(status.has_failed)),
        ("ready", "1 when the model is loaded.", float(status.ready)),
        ("lanes", "Sequences that can be decoded together.", status.num_lanes),
        ("running_lanes", "Lanes that hold a sequence.", status.num_running),
        ("queued_requests", "Requests waiting for a lane.", status.num_queued),
    ):
        yield GaugeMetricFamily(f"luceasync_{name}", words, value=value)
    for name, words, value in (
        ("prefilled_tokens", "Prompt tokens computed.", status.prefilled_tokens_total),
        ("decoded_tokens", "Tokens generated.", status.decoded_tokens_total),
        ("decode_steps", "Steps of the decode batch.", status.decode_steps_total),
        ("engine_restarts", "Times that the engine was made anew.", status.restarts_total),
    ):
        yield CounterMetricFamily(f"luceasync_{name}", words, value=value)


def _cache(cache: CacheStatus) -> Iterator[Metric]:
    yield _gauges(f"{CACHE}_bytes", "Bytes of the nodes kept.", "tier", cache.num_bytes)
    yield _gauges(f"{CACHE}_nodes", "Nodes kept.", "tier", cache.num_nodes)
    words = "Nodes on their way to the disk."
    yield GaugeMetricFamily(f"{CACHE}_unwritten_nodes", words, value=cache.num_unwritten)
    for name, words, label, values in (
        ("hits", "Requests that took up a prefix.", "tier", cache.restored_total),
        ("misses", "Requests that could take up no more.", "reason", cache.missed_total),
        ("restored_tokens", "Prompt tokens taken up.", "tier", cache.restored_tokens_total),
        ("saved_nodes", "Nodes saved.", "tier", cache.saved_total),
        ("evicted_nodes", "Nodes given up for others.", "tier", cache.evicted_total),
    ):
        yield _counters(f"{CACHE}_{name}", words, label, values)
    for name, words, value in (
        ("written_bytes", "Bytes written to disk.", cache.written_bytes_total),
        ("read_bytes", "Bytes read from disk.", cache.read_bytes_total),
        ("quarantined_nodes", "Damaged files put aside.", cache.quarantined_total),
    ):
        yield CounterMetricFamily(f"{CACHE}_{name}", words, value=value)
    words = "1 while a fault of the disk keeps nodes from being written or read."
    yield GaugeMetricFamily(f"{CACHE}_degraded", words, value=float(bool(cache.degraded)))


def _speculation(status: SpeculationStatus) -> Iterator[Metric]:
    yield CounterMetricFamily(
        f"{SPECULATION}_rounds", "Verify steps that had a proposal.", value=status.rounds_total
    )
    for name, words, by_slot in (
        ("proposed_tokens", "Draft tokens by place in the block.", status.proposed_by_slot),
        ("accepted_tokens", "Those of them that the target chose too.", status.accepted_by_slot),
    ):
        values = {str(slot): value for slot, value in enumerate(by_slot)}
        yield _counters(f"{SPECULATION}_{name}", words, "slot", values)
    whole = Speculation(
        status.rounds_total, sum(status.proposed_by_slot), sum(status.accepted_by_slot)
    )
    words = "Tokens per verify step since the start, bonus included."
    yield GaugeMetricFamily(f"{SPECULATION}_tau", words, value=whole.tau)
    words = "1 while the drafter's process is gone, and all decode plainly."
    yield GaugeMetricFamily(f"{SPECULATION}_off", words, value=float(bool(status.off_reason)))
    seconds = {
        "draft": status.draft_s_total,
        "verify": status.verify_s_total,
        "host": status.host_s_total,
    }
    yield _counters(f"{SPECULATION}_seconds", "Time of the parts of a round.", "part", seconds)


def _residence(status: ResidenceStatus) -> Iterator[Metric]:
    tokens = {"resident": status.resident_tokens, "absent": status.absent_tokens}
    yield _gauges(f"{KVFLASH}_tokens", "Tokens of lanes, in whole chunks.", "where", tokens)
    words = "Bytes of host memory that lanes take for what no node holds."
    yield GaugeMetricFamily(f"{KVFLASH}_own_bytes", words, value=status.own_bytes)
    for name, words, value in (
        ("recalled_chunks", "Chunks that came back to the devices.", status.recalled_total),
        ("evicted_chunks", "Chunks that left them.", status.evicted_total),
        ("looks", "Times that was asked which should be there.", status.looks_total),
    ):
        yield CounterMetricFamily(f"{KVFLASH}_{name}", words, value=value)


def _processes(processes: Sequence[ProcessStatus]) -> Iterator[Metric]:
    """Of each other process: by its name, and the devices that it runs."""
    ages = {p: p.heartbeat_age_s for p in processes if p.heartbeat_age_s is not None}
    for name, words, gauges in (
        ("up", "1 while it does its work.", {p: float(not p.detail) for p in processes}),
        ("heartbeat_age_seconds", "Since its last sign of life.", ages),
        ("resident_bytes", "Memory that it has.", {p: p.resident_bytes for p in processes}),
        ("node_bytes", "Nodes in memory that it shares.", {p: p.node_bytes for p in processes}),
    ):
        yield _of_processes(GaugeMetricFamily, name, words, gauges)
    for name, words, counters in (
        ("starts", "Times that it was started.", {p: p.num_starts for p in processes}),
        ("calls", "Answers that were waited for.", {p: p.calls_total for p in processes}),
        ("call_seconds", "Time of waiting for them.", {p: p.call_s_total for p in processes}),
        ("sent_bytes", "Bytes sent to it.", {p: p.sent_bytes_total for p in processes}),
        ("received_bytes", "Bytes that it sent.", {p: p.received_bytes_total for p in processes}),
    ):
        yield _of_processes(CounterMetricFamily, name, words, counters)


def _of_processes(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    words: str,
    values: Mapping[ProcessStatus, float],
) -> Metric:
    family = kind(f"{PROCESS}_{name}", words, labels=["process", "devices"])
    for process, value in values.items():
        family.add_metric([process.name, ",".join(process.devices)], value)
    return family


def _gauges(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, words, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counters(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, words, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LAG_INTERVAL_S = 0.1
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BUCKETS_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1)


class AnswerClock:
    """Observes when the deltas of one answer come; the first delta ends the time to first token."""

    def __init__(self, first_token: Histogram, next_token: Histogram) -> None:
        self._first_token = first_token
        self._next_token = next_token
        self._last_s = time.perf_counter()
        self._begun = False

    def tick(self, delta: Delta) -> None:
        """Take note that `delta` has come; deltas without tokens say nothing of the pace."""
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
    """The registry of one app and what the server itself observes."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))
        self._requests = Counter(
            "luceasync_http_requests", "Requests by route and status.", ["route", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._first_token = Histogram(
            "luceasync_time_to_first_token_seconds", "From the checked request to its first token.",
            buckets=TTFT_BUCKETS_S, registry=self._registry,
        )  # fmt: skip
        self._next_token = Histogram(
            "luceasync_inter_token_seconds", "Between two tokens of one answer.",
            buckets=TOKEN_BUCKETS_S, registry=self._registry,
        )  # fmt: skip
        self._lag = Histogram(
            "luceasync_event_loop_lag_seconds", "How late the event loop wakes a sleeper.",
            buckets=LAG_BUCKETS_S, registry=self._registry,
        )  # fmt: skip

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def count(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def clock(self) -> AnswerClock:
        """Start the clock of one answer."""
        return AnswerClock(self._first_token, self._next_token)

    async def watch_lag(self) -> NoReturn:
        """Observe the event loop's lag for as long as the app lives."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag.observe(max(0.0, loop.time() - due_s))
