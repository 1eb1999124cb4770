"""`luceasync bench serve --only beside,question,request,start`: a stream while another conversation
takes turns, a one-line question while long prompts are prefilled, the cost of a request besides its
tokens, and the cost of a start.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import luceasync
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
from luceasync.bench.servers import Client, Messages, processor_s, server
from luceasync.config import BUNDLED_MODEL_DIR

T = TypeVar("T")

PATH = "/v1/chat/completions"
SYSTEM_SENTENCES, MESSAGE_SENTENCES = 40, 8
STREAM_TOKENS = 2048
ONE_TOKEN = {"max_tokens": 1, "temperature": 0}
NUM_REQUESTS = 100  # per sample: processor time is counted in hundredths of a second
LEAD_S = 0.3  # from the long prompts to the question: they are being prefilled then
THIS, OTHER = "this", "other"


@dataclass(frozen=True, slots=True)
class Beside:
    """Figures of one conversation: seconds between parts of the stream beside it, seconds to the
    first token of each turn except the first, and prompt tokens of its turns that were not
    restored.
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


class PromptsRead(NamedTuple):
    """Seconds until long prompts were prefilled, and processor time of the server."""

    seconds: float
    processor_s: float


@dataclass(frozen=True, slots=True)
class QuestionWaits:
    """Seconds to the first token of a question and until all long prompts were prefilled, by the
    number of long prompts; `alone`: three long prompts without the question.
    """

    firsts_s: Mapping[int, float]
    prompts: Mapping[int, PromptsRead]
    alone: PromptsRead


WAITS: Mapping[str, Callable[[QuestionWaits], float]] = {
    "first token, alone": lambda sample: sample.firsts_s[0],
    "first token, beside one long prompt": lambda sample: sample.firsts_s[1],
    "first token, beside three": lambda sample: sample.firsts_s[3],
    "one long prompt, beside the question": lambda sample: sample.prompts[1].seconds,
    "three long prompts": lambda sample: sample.alone.seconds,
    "three long prompts, beside the question": lambda sample: sample.prompts[3].seconds,
    "the same in processor time, without it": lambda sample: sample.alone.processor_s,
    "the same in processor time, with it": lambda sample: sample.prompts[3].processor_s,
}
# Within one server and one round: other work on the machine affects both values alike.
RATIOS: Mapping[str, Callable[[QuestionWaits], float]] = {
    "first token, beside three over beside one": lambda s: s.firsts_s[3] / s.firsts_s[1],
    "three long prompts and the question, together over apart": lambda s: (
        s.prompts[3].seconds / (s.alone.seconds + s.firsts_s[0])
    ),
    "the same, processor time": lambda s: (
        s.prompts[3].processor_s / (s.alone.processor_s + s.prompts[0].processor_s)
    ),
}


class Costs(NamedTuple):
    """Wall time, and processor time of the server, in seconds."""

    seconds: float
    processor_s: float


COSTS: Mapping[str, Callable[[Costs], float]] = {
    "time": lambda sample: sample.seconds,
    "processor time": lambda sample: sample.processor_s,
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
    """A stream while another conversation takes turns. `against` is another checkout, whose server
    is measured in turn with this one's; ratios are the times of this one over the other's.
    """
    flags = [str(model), "--target-device", device, "--dtype", dtype]
    flags += ["--draft", "none", "--parallel", "2"]
    roots = checkouts(against)
    with ExitStack() as stack:
        variants = {}
        for name, root in roots.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            client = stack.enter_context(server([*flags, "--kv-cache-dir", folder], root))
            topics = (f"topic {number}" for number in count())
            variants[name] = partial(converse, client.url, topics, turns, tokens)
        samples = interleave(variants, rounds)
    show(report, "a stream beside a conversation", FIGURES, samples)
    cached = {name: sum(sample.num_cached for sample in samples[name]) for name in roots}
    report.say(f"\nprompt tokens of turns that were not run again: {cached}")
    report.keep({"cached": cached})


def bench_question(
    report: Report,
    model: Path,
    device: str,
    *,
    dtype: str,
    sentences: int,
    rounds: int,
    against: Path | None,
) -> None:
    """How long a one-line question waits beside long prompts of the same client, each of the given
    number of `sentences`, with its own lane. `against`: see bench_beside.
    """
    flags = [str(model), "--target-device", device, "--dtype", dtype, "--draft", "none"]
    flags += ["--parallel", "4", "--prefix-cache-memory", "0"]
    with ExitStack() as stack:
        variants = {}
        for name, root in checkouts(against).items():
            client = stack.enter_context(server(flags, root))
            topics = (f"topic {number}" for number in count())
            variants[name] = partial(ask_beside, client, topics, sentences)
        samples = interleave(variants, rounds)
    show(report, "a one-line question beside long prompts", WAITS, samples)
    show_ratios(report, "of one round", samples)


def bench_requests(
    report: Report, model: Path, device: str, *, dtype: str, rounds: int, against: Path | None
) -> None:
    """The cost of a chat of one token whose prompt is completely restored. `against`: see
    bench_beside.
    """
    flags = ["--target-device", device, "--dtype", dtype, "--parallel", "1"]
    with ExitStack() as stack:
        variants = {}
        for name, root in checkouts(against).items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            asked = [str(model_of(root, model)), *flags, "--kv-cache-dir", folder]
            variants[name] = partial(ask_again, stack.enter_context(server(asked, root)))
        samples = interleave(variants, rounds)
    show(report, "a request of one token whose prompt is cached", COSTS, samples)


def bench_starts(
    report: Report, model: Path, device: str, *, dtype: str, rounds: int, against: Path | None
) -> None:
    """The cost of a server until it is ready. `against`: see bench_beside."""
    flags = ["--target-device", device, "--dtype", dtype]
    with ExitStack() as stack:
        variants = {}
        for name, root in checkouts(against).items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            asked = [str(model_of(root, model)), *flags, "--kv-cache-dir", folder]
            variants[name] = partial(start, asked, root)
        samples = interleave(variants, rounds)  # after a start that compiles for later ones
    show(report, "a start", COSTS, samples)


def checkouts(against: Path | None) -> dict[str, Path | None]:
    """The checkouts whose servers are measured, by name; None: this one."""
    return {THIS: None} if against is None else {OTHER: against.resolve(), THIS: None}


def model_of(checkout: Path | None, model: Path) -> Path:
    """The model for a checkout's server. For the bundled model, the checkout's own copy: only that
    one has a drafter by default.
    """
    if checkout is None or model != BUNDLED_MODEL_DIR:
        return model
    return checkout / BUNDLED_MODEL_DIR.relative_to(Path(luceasync.__file__).parents[1])


def show(
    report: Report,
    title: str,
    figures: Mapping[str, Callable[[T], float]],
    samples: Mapping[str, Sequence[T]],
) -> None:
    """A table of the medians of each figure, in ms; for two checkouts their ratio too."""
    is_compared = len(samples) > 1
    columns = ("what", *samples, *(("ratio", "spread of ratios") if is_compared else ()))
    table = report.table(columns, title)
    for what, of in figures.items():
        values = {name: [of(sample) for sample in found] for name, found in samples.items()}
        cells = [ms(median(each), 2) for each in values.values()]
        if is_compared:
            ratios = pair_ratios(values[THIS], values[OTHER])
            cells += [figure(median(ratios), digits=3), figure(spread(ratios), digits=3)]
        table.add(what, *cells)


def show_ratios(report: Report, title: str, samples: Mapping[str, Sequence[QuestionWaits]]) -> None:
    """A table of the medians and the spread of ratios."""
    columns = ("what", *(f"{name}{what}" for name in samples for what in ("", ", spread")))
    table = report.table(columns, title)
    for what, of in RATIOS.items():
        cells = []
        for found in samples.values():
            ratios = [of(sample) for sample in found]
            cells += [figure(median(ratios), digits=3), figure(spread(ratios), digits=3)]
        table.add(what, *cells)


class RunningStream:
    """An answer that is requested repeatedly in a thread, within a `with` block."""

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
    """The answer, seconds to its first token, and prompt tokens that were not restored."""
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


def ask_again(server: Client) -> Costs:
    """The cost of one of NUM_REQUESTS requests."""
    assert server.pid is not None
    body = {"messages": [{"role": "user", "content": "What is a tuple?"}], **ONE_TOKEN}
    server.post(PATH, body)
    seconds, used_s = [], processor_s(server.pid)
    for _ in range(NUM_REQUESTS):
        started = time.perf_counter()
        server.post(PATH, body)
        seconds.append(time.perf_counter() - started)
    return Costs(median(seconds), (processor_s(server.pid) - used_s) / NUM_REQUESTS)


def start(flags: Sequence[str], checkout: Path | None) -> Costs:
    """The cost of a server's process until it is ready."""
    started = time.perf_counter()
    with server(flags, checkout) as client:
        assert client.pid is not None
        return Costs(time.perf_counter() - started, processor_s(client.pid))


def ask_beside(server: Client, topics: Iterator[str], num_sentences: int) -> QuestionWaits:
    """A question alone, beside one long prompt and beside three, and the prompts without it."""
    _, alone = read_prompts(server, topics, num_sentences, 3, lambda: 0.0)
    firsts_s, prompts = {}, {}
    for number in (0, 1, 3):
        ask = partial(ask_first, server.url, next(topics))
        firsts_s[number], prompts[number] = read_prompts(server, topics, num_sentences, number, ask)
    return QuestionWaits(firsts_s, prompts, alone)


def read_prompts(
    server: Client,
    topics: Iterator[str],
    num_sentences: int,
    num_prompts: int,
    meanwhile: Callable[[], float],
) -> tuple[float, PromptsRead]:
    """The result of `meanwhile`, called while long prompts are prefilled, and the cost of the
    prompts.
    """
    assert server.pid is not None

    def read(topic: str) -> None:
        content = lines_about(topic, num_sentences)
        with closing(Client(server.url)) as client:
            client.post(PATH, {"messages": [{"role": "user", "content": content}], **ONE_TOKEN})

    readers = [threading.Thread(target=read, args=(next(topics),)) for _ in range(num_prompts)]
    started, used_s = time.perf_counter(), processor_s(server.pid)
    for reader in readers:
        reader.start()
    time.sleep(LEAD_S)
    found = meanwhile()
    for reader in readers:
        reader.join()
    seconds = time.perf_counter() - started
    return found, PromptsRead(seconds, processor_s(server.pid) - used_s)


def ask_first(url: str, topic: str) -> float:
    """Seconds to the first token of the answer to one line."""
    messages = [{"role": "user", "content": f"{topic}?"}]
    with closing(Client(url)) as client:
        started = time.perf_counter()
        client.post(PATH, {"messages": messages, **ONE_TOKEN})
        return time.perf_counter() - started
