"""One stream, while another conversation takes turns: this checkout beside another one, in one run.

    python scripts/bench_turns_beside.py PATH_OF_OTHER_CHECKOUT [--device cuda:0] [--model DIR]

Servers with a directory, asked over HTTP in turns; a ratio is this checkout's time by the other's,
pair by pair. Beside its own path as the other one it shows what the machine's noise is.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from luceasync.bench import command
from luceasync.bench.figures import median, pair_ratios, percentile, spread
from luceasync.bench.report import figure, ms
from luceasync.bench.rounds import interleave
from luceasync.bench.servers import Client, Messages, server
from luceasync.config import BUNDLED_MODEL_DIR

ROOT = Path(__file__).parents[1]
OTHER, OURS = "other", "this"
PATH = "/v1/chat/completions"
SYSTEM_SENTENCES, MESSAGE_SENTENCES = 40, 8


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one conversation: seconds between parts of the stream beside it, and from each of its
    requests, but the first, to the first token; tokens of their prompts that were not run again.
    """

    gaps_s: list[float]
    firsts_s: list[float]
    num_cached: int


FIGURES: dict[str, Callable[[Sample], float]] = {
    "between parts, p50": lambda sample: percentile(sample.gaps_s, 50),
    "between parts, p99": lambda sample: percentile(sample.gaps_s, 99),
    "between parts, worst": lambda sample: max(sample.gaps_s),
    "first token of a turn, p50": lambda sample: median(sample.firsts_s),
    "first token of a turn, worst": lambda sample: max(sample.firsts_s),
}


class Stream:
    """An answer that is asked for again and again, until it is told to end."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self._url = url
        self._num_tokens = num_tokens
        self._has_ended = threading.Event()
        self._has_begun = threading.Event()
        self._answers: list[list[float]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Stream:
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
        body = {"messages": messages, "max_tokens": self._num_tokens, "ignore_eos": True}
        for time_s, event in client.listen(PATH, body | {"temperature": 0}):
            if text_of(event):
                times.append(time_s)
                self._has_begun.set()
            if self._has_ended.is_set():
                return


def text_of(event: dict[str, Any]) -> str:
    """What an event adds to the answer."""
    choices = event["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


def said(topic: str, num_sentences: int) -> str:
    return " ".join(f"The {i}. line about {topic} stands here." for i in range(num_sentences))


def converse(url: str, topic: str, num_turns: int, num_tokens: int) -> Sample:
    """A conversation, with a stream beside it."""
    messages: Messages = [{"role": "system", "content": said(topic, SYSTEM_SENTENCES)}]
    firsts_s, num_cached = [], 0
    with Stream(url, 2048) as stream, closing(Client(url)) as client:
        for turn in range(num_turns + 1):
            content = said(f"{topic} {turn}", MESSAGE_SENTENCES)
            messages.append({"role": "user", "content": content})
            answer, first_s, cached = ask(client, messages, num_tokens)
            messages.append({"role": "assistant", "content": answer})
            if turn:
                firsts_s.append(first_s)
                num_cached += cached
    return Sample(stream.gaps_s, firsts_s, num_cached)


def ask(client: Client, messages: Messages, num_tokens: int) -> tuple[str, float, int]:
    """The answer, seconds to its first token, and tokens of the prompt that were not run again."""
    body = {
        "messages": messages,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    heard = list(client.listen(PATH, body))
    first_s = next(time_s for time_s, event in heard if text_of(event)) - started
    usage = next(event["usage"] for _, event in reversed(heard) if event.get("usage"))
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return "".join(text_of(event) for _, event in heard), first_s, cached


def sampler(url: str, options: argparse.Namespace) -> Callable[[], Sample]:
    """Conversations of their own, one after the other, with the server at `url`."""
    numbers = count()
    return lambda: converse(url, f"topic {next(numbers)}", options.turns, options.tokens)


def taken(options: argparse.Namespace) -> dict[str, list[Sample]]:
    """Samples of both checkouts."""
    flags = [str(options.model), "--target-device", options.device]
    flags += ["--dtype", options.dtype, "--draft", "none", "--parallel", "2"]
    with ExitStack() as stack:
        variants = {}
        for name, root in ((OTHER, options.other.resolve()), (OURS, ROOT)):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            directory = [] if options.memory_only else ["--kv-cache-dir", folder]
            client = stack.enter_context(server([*flags, *directory], root))
            variants[name] = sampler(client.url, options)
        return interleave(variants, options.rounds)


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=10, device="cpu:0")
    parser.add_argument("other", type=Path, metavar="PATH_OF_OTHER_CHECKOUT")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL_DIR, metavar="DIR")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=6, help="of a conversation; default: 6")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer; default: 32")
    parser.add_argument("--memory-only", action="store_true", help="without a directory")
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    samples = taken(options)
    columns = ("what", OTHER, OURS, "ratio", "middle half of ratios")
    table = report.table(columns)
    for what, of in FIGURES.items():
        other, ours = ([of(sample) for sample in samples[name]] for name in (OTHER, OURS))
        ratios = pair_ratios(ours, other)
        shown = (ms(median(other), 2), ms(median(ours), 2), figure(median(ratios), digits=3))
        table.add(what, *shown, figure(spread(ratios), digits=3))
    cached = {name: sum(sample.num_cached for sample in samples[name]) for name in (OTHER, OURS)}
    report.say(f"\ntokens of turns that were not run again: {cached}")


if __name__ == "__main__":
    main()
