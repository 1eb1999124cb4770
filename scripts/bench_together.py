"""Whole servers with and without the bundled drafter, asked by several clients at once.

    python scripts/bench_together.py [--device cpu:0] [--clients 4] [--questions 60]

Greedy, over HTTP; each server is asked as many other questions first. Tokens of all answers over
the seconds from the first question to the last answer.
"""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from luceasync.bench import command
from luceasync.bench.report import figure
from luceasync.bench.rounds import wall
from luceasync.bench.servers import Asked, Client, Messages, ask, read_questions, server, tau_of

SERVERS = {
    "plain": ["--draft", "none"],
    "drafter": [],
    "`--draft-block 8`": ["--draft-block", "8"],
}


def main() -> None:
    """Measure and print a row for each server."""
    parser = command.parser(__doc__, device="cpu:0")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    table = command.begin(options, [options.device]).table(("server", "tokens/s", "ratio", "tau"))
    messages = read_questions()
    asked, others = messages[: options.questions], messages[-options.questions :]
    plain_rate = 0.0
    for name, flags in SERVERS.items():
        common = ["--target-device", options.device, "--dtype", options.dtype, *flags]
        answers: list[Asked] = []
        with server(common) as first:
            ask_together(first, others, options.clients, options.max_tokens)
            seconds = wall(
                lambda first=first, answers=answers: answers.extend(
                    ask_together(first, asked, options.clients, options.max_tokens)
                )
            )
        rate = sum(answer.num_tokens for answer in answers) / seconds
        plain_rate = plain_rate or rate
        table.add(name, figure(rate, digits=0), figure(rate / plain_rate), tau_of(answers)[1])


def ask_together(
    first: Client, questions: list[Messages], num_clients: int, max_tokens: int
) -> list[Asked]:
    """All questions, by as many clients of the server of `first`; each takes the next one."""
    waiting: queue.SimpleQueue[Messages] = queue.SimpleQueue()
    for question in questions:
        waiting.put(question)

    def work() -> list[Asked]:
        answers = []
        with closing(Client(first.url)) as client:
            while True:
                try:
                    question = waiting.get_nowait()
                except queue.Empty:
                    return answers
                answers.append(ask(client, question, max_tokens))

    with ThreadPoolExecutor(num_clients) as pool:
        parts = [pool.submit(work) for _ in range(num_clients)]
        return [answer for part in parts for answer in part.result()]


if __name__ == "__main__":
    main()
