"""Whole servers with and without speculation, on the bundled model's evaluation questions.

    python scripts/bench_speculation.py [--device cpu:0] [--questions 100] [--ddtree | --restart 40]

All servers run at once and are asked in turns, greedily, over HTTP; with --alone each runs when
the one before has ended. With --restart: second turns.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

QUESTIONS = Path(__file__).parents[1] / "luceasync" / "assets" / "stdlib-15m" / "eval.jsonl"
DEADLINE_S = 300.0
TURN_QUESTIONS = 10  # servers that take turns at each question cool each other's caches


@dataclass(frozen=True)
class Asked:
    """One answer: `seconds` from the request to its end, of which the server says `prompt_s` went
    into reading the prompt and `decode_s` from the first token to the last.
    """

    text: str
    num_tokens: int
    seconds: float
    prompt_s: float
    decode_s: float
    speculation: dict[str, Any]
    restore: dict[str, Any]


class Client:
    """One connection to a server. Of the standard library, whose share of a request is small."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)

    def close(self) -> None:
        """The connection ends."""
        self._connection.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON that a POST gives. Raises HTTPException unless that is a 200."""
        headers = {"content-type": "application/json"}
        self._connection.request("POST", path, json.dumps(body).encode(), headers)
        response = self._connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status}: {content!r}")
        return json.loads(content)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--ddtree", action="store_true", help="trees too, as a third server")
    parser.add_argument("--alone", action="store_true", help="one server after the other")
    parser.add_argument("--restart", type=int, metavar="CONVERSATIONS")
    options = parser.parse_args()
    modes = {"plain": ["--draft", "none"], "chain": []}
    if options.ddtree:
        modes["tree"] = ["--ddtree"]
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    messages = [json.loads(line)["messages"] for line in lines]
    common = ["--target-device", options.device, "--dtype", options.dtype]
    if options.restart:
        common += modes["tree"] if options.ddtree else []
        report_restart(restart(messages[: options.restart], common, options.max_tokens))
        return
    servers = {mode: [*common, *flags] for mode, flags in modes.items()}
    ask_all = ask_alone if options.alone else ask_in_turns
    report(ask_all(servers, messages, options.questions, options.max_tokens))


def ask_in_turns(
    servers: dict[str, list[str]], messages: list[list[dict]], num_questions: int, max_tokens: int
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
    servers: dict[str, list[str]], messages: list[list[dict]], num_questions: int, max_tokens: int
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


@contextmanager
def server(flags: list[str]) -> Iterator[Client]:
    """A server in a process of its own, ready."""
    command = [sys.executable, "-m", "luceasync", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None
            url = ""
            for line in iter(process.stdout.readline, b""):
                text = line.decode(errors="replace")
                found = re.search(r"http://[\d.]+:\d+", text)
                url = url or (found[0] if found else "")
                if text.startswith("Ready"):
                    break
            else:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            with closing(Client(url)) as client:
                yield client
        except http.client.HTTPException:
            process.terminate()
            print(process.stdout.read().decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def ask(client: Client, messages: list[dict], max_tokens: int) -> Asked:
    """One question, greedily."""
    body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens}
    started = time.perf_counter()
    answer = client.post("/v1/chat/completions", body)
    seconds = time.perf_counter() - started
    return Asked(
        text=answer["choices"][0]["message"]["content"],
        num_tokens=answer["usage"]["completion_tokens"],
        seconds=seconds,
        prompt_s=answer["timings"]["prompt_ms"] / 1000,
        decode_s=answer["timings"]["predicted_ms"] / 1000,
        speculation=answer["luceasync"].get("speculation", {}),
        restore=answer["luceasync"],
    )


def restart(
    questions: list[list[dict]], flags: list[str], max_tokens: int
) -> dict[str, list[Asked]]:
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


def followed(question: list[dict], answer: Asked, after: list[dict]) -> list[dict]:
    """The conversation that goes on with another question."""
    return [*question, {"role": "assistant", "content": answer.text}, *after]


def report_restart(asked: dict[str, list[Asked]]) -> None:
    """A row for each server."""
    print("| server | second turns | from memory | from disk | restored in | tau | equal texts |")
    print("|---|---|---|---|---|---|---|")
    for name, answers in asked.items():
        tiers = [answer.restore["tier"] for answer in answers]
        restore_ms = statistics.median(answer.restore["restore_ms"] for answer in answers)
        pairs = zip(answers, asked["uninterrupted"], strict=True)
        equal = sum(a.text == b.text for a, b in pairs)
        print(
            f"| {name} | {len(answers)} | {tiers.count('memory')} | {tiers.count('disk')} "
            f"| {restore_ms:.1f} ms | {tau_of(answers)[1]} | {equal} of {len(answers)} |"
        )


def tau_of(answers: list[Asked]) -> tuple[int, str]:
    """Rounds, and tokens for each."""
    rounds = sum(a.speculation.get("rounds", 0) for a in answers)
    accepted = sum(a.speculation.get("accepted", 0) for a in answers)
    return rounds, f"{(accepted + rounds) / rounds:.2f}" if rounds else ""


def report(asked: dict[str, list[Asked]]) -> None:
    """A row for each server; ratios are to the first."""
    plain = asked["plain"]
    columns = "server | tokens/s | ratio | decoding alone | ratio | tau | rounds | equal texts"
    print(f"| {columns} | ms of a request | its prompt | its decoding |")
    print("|---" * 11 + "|")
    for mode, answers in asked.items():
        pairs = list(zip(answers, plain, strict=True))
        rate = sum(a.num_tokens for a in answers) / sum(a.seconds for a in answers)
        decode_rate = sum(a.num_tokens - 1 for a in answers) / sum(a.decode_s for a in answers)
        ratio = statistics.median(
            _per_token(b.seconds, b) / _per_token(a.seconds, a) for a, b in pairs
        )
        decode = sum(b.decode_s for b in plain) / sum(a.decode_s for a in answers)
        rounds, tau = tau_of(answers)
        equal = sum(a.text == b.text for a, b in pairs)
        whole = sum(b.seconds for b in plain) / sum(a.seconds for a in answers)
        print(
            f"| {mode} | {rate:.0f} | {whole:.2f} (median {ratio:.2f}) | {decode_rate:.0f} "
            f"| {decode:.2f} | {tau} | {rounds} | {equal} of {len(pairs)} "
            f"| {_mean_ms(a.seconds for a in answers)} | {_mean_ms(a.prompt_s for a in answers)} "
            f"| {_mean_ms(a.decode_s for a in answers)} |"
        )


def _mean_ms(seconds: Iterable[float]) -> str:
    return f"{1000 * statistics.fmean(seconds):.2f}"


def _per_token(seconds: float, answer: Asked) -> float:
    return seconds / max(1, answer.num_tokens)


if __name__ == "__main__":
    main()
