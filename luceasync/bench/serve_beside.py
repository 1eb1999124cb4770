"""`luceasync bench serve --only beside`: a stream while another conversation takes turns."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from luceasync.bench.report import (
    Report,
    figure,
    interleave,
    median,
    ms,
    pair_ratios,
    percentile,
    spread,
)
from luceasync.bench.servers import Client, Messages, server

PATH = "/v1/chat/completions"
SYSTEM_SENTENCES, MESSAGE_SENTENCES = 40, 8
STREAM_TOKENS = 2048
THIS, OTHER = "this", "other"


@dataclass(frozen=True, slots=True)
class Beside:
    """Of one conversation: seconds between parts of the stream beside it, seconds to the first
    token of each turn but the first, and prompt tokens of its turns that were not run again.
    """

    gaps_s: list[float]
    firsts_s: list[float]
    num_cached: int


FIGURES: Mapping[str, Callable[[Beside], float]] = {
    "between parts, p50": lambda sample: percentile(sample.gaps_s, 50),
    "between parts, p99": lambda sample: percentile(sample.gaps_s, 99),
    "between parts, worst": lambda sample: max(sample.gaps_s),
    "first token of a turn, p50": lambda sample: median(sample.firsts_s),
    "first token of a turn, worst": lambda sample: max(sample.firsts_s),
}


def bench_beside(
    report: Report,
    model: Path,
    device: str,
    *,
    dtype: str,
    turns: int,
    tokens: int,
    rounds: int,
    against: Path | None,
) -> None:
    """A stream while another conversation takes turns. `against`: another checkout, whose server is
    asked in turns with this one's; ratios are this one's times over the other's.
    """
    flags = [str(model), "--target-device", device, "--dtype", dtype]
    flags += ["--draft", "none", "--parallel", "2"]
    roots = {THIS: None} if against is None else {OTHER: against.resolve(), THIS: None}
    with ExitStack() as stack:
        variants = {}
        for name, root in roots.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            client = stack.enter_context(server([*flags, "--kv-cache-dir", folder], root))
            topics = (f"topic {number}" for number in count())
            variants[name] = partial(converse, client.url, topics, turns, tokens)
        samples = interleave(variants, rounds)
    columns = ("what", *roots, *(() if against is None else ("ratio", "spread of ratios")))
    table = report.table(columns, "a stream beside a conversation")
    for what, of in FIGURES.items():
        values = {name: [of(sample) for sample in samples[name]] for name in roots}
        cells = [ms(median(each), 2) for each in values.values()]
        if against is not None:
            ratios = pair_ratios(values[THIS], values[OTHER])
            cells += [figure(median(ratios), digits=3), figure(spread(ratios), digits=3)]
        table.add(what, *cells)
    cached = {name: sum(sample.num_cached for sample in samples[name]) for name in roots}
    report.say(f"\nprompt tokens of turns that were not run again: {cached}")
    report.keep({"cached": cached})


class RunningStream:
    """An answer that is asked for again and again in a thread, within a `with` block."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._has_ended = threading.Event()
        self._has_begun = threading.Event()
        self._answers: list[list[float]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> RunningStream:
        self._thread.start()
        self._has_begun.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._has_ended.set()
        self._thread.join()

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between parts of one answer."""
        return [after - before for times in self._answers for before, after in pairwise(times)]

    def _run(self) -> None:
        try:
            while not self._has_ended.is_set():
                with closing(Client(self._url)) as client:
                    self._listen(client)
        finally:
            self._has_begun.set()

    def _listen(self, client: Client) -> None:
        times: list[float] = []
        self._answers.append(times)
        messages = [{"role": "user", "content": f"{len(self._answers)}: what is a tuple?"}]
        body = {"messages": messages, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        for time_s, event in client.listen(PATH, body | {"temperature": 0}):
            if content_of(event):
                times.append(time_s)
                self._has_begun.set()
            if self._has_ended.is_set():
                return


def content_of(event: dict[str, Any]) -> str:
    """The text that an event adds to the answer."""
    choices = event["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


def converse(url: str, topics: Any, num_turns: int, num_tokens: int) -> Beside:
    """A conversation about the next topic, with a stream beside it."""
    topic = next(topics)
    messages: Messages = [{"role": "system", "content": lines_about(topic, SYSTEM_SENTENCES)}]
    firsts_s, num_cached = [], 0
    with RunningStream(url) as stream, closing(Client(url)) as client:
        for turn in range(num_turns + 1):
            content = lines_about(f"{topic} {turn}", MESSAGE_SENTENCES)
            messages.append({"role": "user", "content": content})
            answer, first_s, cached = ask_streamed(client, messages, num_tokens)
            messages.append({"role": "assistant", "content": answer})
            if turn:
                firsts_s.append(first_s)
                num_cached += cached
    return Beside(stream.gaps_s, firsts_s, num_cached)


def lines_about(topic: str, count: int) -> str:
    return " ".join(f"The {i}. line about {topic} stands here." for i in range(count))


def ask_streamed(client: Client, messages: Messages, num_tokens: int) -> tuple[str, float, int]:
    """The answer, seconds to its first token, and prompt tokens that were not run again."""
    body = {
        "messages": messages,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    heard = list(client.listen(PATH, body))
    first_s = next(time_s for time_s, event in heard if content_of(event)) - started
    usage = next(event["usage"] for _, event in reversed(heard) if event.get("usage"))
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return "".join(content_of(event) for _, event in heard), first_s, cached
