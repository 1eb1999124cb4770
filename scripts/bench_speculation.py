"""Whole servers with and without speculation, on the bundled model's evaluation questions.

    python scripts/bench_speculation.py [--device cpu:0] [--questions 100] [--ddtree | --restart 40]

All servers run at once and are asked in turns, greedily, over HTTP; with --alone each runs when
the one before has ended. With --restart: second turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean

from luceasync.bench import command
from luceasync.bench.figures import median, pair_ratios
from luceasync.bench.report import NOTHING, Report, figure, ms
from luceasync.bench.servers import Asked, Messages, ask, read_questions, server, tau_of

TURN_QUESTIONS = 10  # servers that take turns at each question cool each other's caches


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, device="cpu:0")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--ddtree", action="store_true", help="trees too, as a third server")
    parser.add_argument("--alone", action="store_true", help="one server after the other")
    parser.add_argument("--restart", type=int, metavar="CONVERSATIONS")
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    modes = {"plain": ["--draft", "none"], "chain": []}
    if options.ddtree:
        modes["tree"] = ["--ddtree"]
    messages = read_questions()
    common = ["--target-device", options.device, "--dtype", options.dtype]
    if options.restart:
        common += modes["tree"] if options.ddtree else []
        tell_restart(report, restart(messages[: options.restart], common, options.max_tokens))
        return
    servers = {mode: [*common, *flags] for mode, flags in modes.items()}
    ask_all = ask_alone if options.alone else ask_in_turns
    tell(report, ask_all(servers, messages, options.questions, options.max_tokens))


def ask_in_turns(
    servers: dict[str, list[str]], messages: list[Messages], num_questions: int, max_tokens: int
) -> dict[str, list[Asked]]:
    """The first `num_questions` of `messages`, a few to each server, then to the next."""
    asked: dict[str, list[Asked]] = {mode: [] for mode in servers}
    with ExitStack() as stack:
        clients = {mode: stack.enter_context(server(flags)) for mode, flags in servers.items()}
        for begin in range(0, num_questions, TURN_QUESTIONS):
            turn = messages[begin : min(begin + TURN_QUESTIONS, num_questions)]
            before = messages[-1 - begin // TURN_QUESTIONS]  # another one, to warm up
            for mode, client in clients.items():
                ask(client, before, max_tokens)
                asked[mode] += [ask(client, q, max_tokens) for q in turn]
    return asked


def ask_alone(
    servers: dict[str, list[str]], messages: list[Messages], num_questions: int, max_tokens: int
) -> dict[str, list[Asked]]:
    """All questions to one server, then to the next; after as many others as the turns have."""
    asked: dict[str, list[Asked]] = {}
    before = messages[-len(range(0, num_questions, TURN_QUESTIONS)) :]
    for mode, flags in servers.items():
        with server(flags) as client:
            for question in before:
                ask(client, question, max_tokens)
            asked[mode] = [ask(client, q, max_tokens) for q in messages[:num_questions]]
    return asked


def restart(questions: list[Messages], flags: list[str], max_tokens: int) -> dict[str, list[Asked]]:
    """Second turns of conversations that begin with these questions."""
    second: dict[str, list[Asked]] = {}
    for name in ("uninterrupted", "restarted"):
        with ExitStack() as stack, tempfile.TemporaryDirectory() as cache_dir:
            cache = ["--kv-cache-dir", cache_dir, "--kv-cache-min-tokens", "1"]
            client = stack.enter_context(server([*flags, *cache]))
            first = [ask(client, question, max_tokens) for question in questions]
            if name == "restarted":
                stack.close()  # ends the server
                client = stack.enter_context(server([*flags, *cache]))
            second[name] = [
                ask(client, followed(question, answer, after), max_tokens)
                for question, answer, after in zip(
                    questions, first, [*questions[1:], questions[0]], strict=True
                )
            ]
            stack.close()
    return second


def followed(question: Messages, answer: Asked, after: Messages) -> Messages:
    """The conversation that goes on with another question."""
    return [*question, {"role": "assistant", "content": answer.text}, *after]


def tell_restart(report: Report, asked: Mapping[str, Sequence[Asked]]) -> None:
    """A row for each server."""
    columns = ("second turns", "from memory", "from disk", "restored in", "tau", "equal texts")
    table = report.table(("server", *columns))
    for name, answers in asked.items():
        tiers = [answer.restore["tier"] for answer in answers]
        restore_s = median([answer.restore["restore_ms"] for answer in answers]) / 1e3
        equal = num_equal(answers, asked["uninterrupted"])
        counts = (len(answers), tiers.count("memory"), tiers.count("disk"))
        table.add(name, *counts, ms(restore_s), tau_of(answers)[1], equal)


def num_equal(answers: Sequence[Asked], base: Sequence[Asked]) -> str:
    """How many texts are the same."""
    equal = sum(a.text == b.text for a, b in zip(answers, base, strict=True))
    return f"{equal} of {len(answers)}"


def tell(report: Report, asked: Mapping[str, Sequence[Asked]]) -> None:
    """A row for each server; ratios are to the first. `median`: of the seconds per token."""
    rates = ("tokens/s", "ratio", "median", "decoding alone", "its ratio", "tau", "rounds")
    times = ("ms of a request", "its prompt", "its decoding")
    table = report.table(("server", *rates, "equal texts", *times))
    plain = asked["plain"]
    for mode, answers in asked.items():
        num_rounds, tau = tau_of(answers)
        table.add(
            mode,
            figure(sum(a.num_tokens for a in answers) / total(answers, seconds_of), digits=0),
            figure(total(plain, seconds_of) / total(answers, seconds_of)),
            figure(median(pair_ratios([*map(per_token, plain)], [*map(per_token, answers)]))),
            figure(sum(a.num_tokens - 1 for a in answers) / total(answers, decode_of), digits=0),
            figure(total(plain, decode_of) / total(answers, decode_of)),
            tau or NOTHING,
            num_rounds,
            num_equal(answers, plain),
            *(ms(fmean(map(of, answers)), 2) for of in (seconds_of, prompt_of, decode_of)),
        )


def total(answers: Sequence[Asked], of: Callable[[Asked], float]) -> float:
    return sum(map(of, answers))


def seconds_of(answer: Asked) -> float:
    return answer.seconds


def prompt_of(answer: Asked) -> float:
    return answer.prompt_s


def decode_of(answer: Asked) -> float:
    return answer.decode_s


def per_token(answer: Asked) -> float:
    return answer.seconds / max(1, answer.num_tokens)


if __name__ == "__main__":
    main()
