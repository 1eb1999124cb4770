"""Whole servers with and without the bundled drafter, asked by several clients at once.

    python scripts/bench_together.py [--device cpu:0] [--clients 4] [--questions 60]

Greedy, over HTTP; each server is asked as many other questions first. Tokens of all answers over
the seconds from the first question to the last answer.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from bench_speculation import QUESTIONS, Asked, Client, ask, server, tau_of

SERVERS = {
    "plain": ["--draft", "none"],
    "drafter": [],
    "`--draft-block 8`": ["--draft-block", "8"],
}


def main() -> None:
    """Measure and print a row for each server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    messages = [json.loads(line)["messages"] for line in lines]
    asked, others = messages[: options.questions], messages[-options.questions :]
    print("| server | tokens/s | ratio | tau |\n|---|---|---|---|")
    plain_rate = 0.0
    for name, flags in SERVERS.items():
        common = ["--target-device", options.device, "--dtype", options.dtype, *flags]
        with server(common) as first:
            for questions in (others, asked):
                begun = time.perf_counter()
                answers = ask_together(first, questions, options.clients, options.max_tokens)
                seconds = time.perf_counter() - begun
        rate = sum(answer.num_tokens for answer in answers) / seconds
        plain_rate = plain_rate or rate
        print(
            f"| {name} | {rate:.0f} | {rate / plain_rate:.2f} | {tau_of(answers)[1]} |", flush=True
        )


def ask_together(
    first: Client, questions: list[list[dict]], num_clients: int, max_tokens: int
) -> list[Asked]:
    """All questions, by as many clients of the server of `first`; each takes the next one."""
    waiting: queue.SimpleQueue[list[dict]] = queue.SimpleQueue()
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
