"""Prometheus metrics of one app: requests, latencies, the event loop's lag.

Owns an own registry, so that two apps in a process never share one. Knows nothing of routes, nor
of what the engine counts.
"""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from luceasync.request import Delta, Engine
from luceasync.server.engine_metrics import EngineCollector

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
