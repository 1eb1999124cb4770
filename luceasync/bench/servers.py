"""Servers and other commands in separate processes, and greedy requests to servers over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from luceasync.config import BUNDLED_MODEL_DIR

QUESTIONS = BUNDLED_MODEL_DIR / "eval.jsonl"
DEADLINE_S = 300.0
HOST = "127.0.0.1"
MISSING_PACKAGE = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
NUM_ERROR_LINES = 12  # of a command that has failed
Messages = list[dict[str, Any]]


def read_questions() -> list[Messages]:
    """The bundled model's evaluation questions."""
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


@dataclass(frozen=True)
class Asked:
    """One answer. `seconds` is the time from the request to its end; `prompt_s` and `decode_s` are
    the server's figures for prefill, and from the first token to the last.
    """

    text: str
    num_tokens: int
    seconds: float
    prompt_s: float
    decode_s: float
    speculation: dict[str, Any]
    restore: dict[str, Any]


class Client:
    """One connection, using the standard library, which adds little to the time of a request. `pid`
    is that of the server's process, if this process started it.
    """

    def __init__(self, url: str, pid: int | None = None) -> None:
        self.url = url
        self.pid = pid
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST and return the JSON of a 200. Raises HTTPException for any other status."""
        headers = {"content-type": "application/json"}
        self._connection.request("POST", path, json.dumps(body).encode(), headers)
        response = self._connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status}: {content!r}")
        found: dict[str, Any] = json.loads(content)
        return found

    def listen(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Events of a streamed answer with their arrival times. Close the client after an early
        stop. Raises HTTPException for a status other than 200.
        """
        headers = {"content-type": "application/json"}
        content = json.dumps(body | {"stream": True}).encode()
        self._connection.request("POST", path, content, headers)
        response = self._connection.getresponse()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status}: {response.read()!r}")
        while line := response.readline():
            if line.startswith(b"data: {"):
                yield time.perf_counter(), json.loads(line[len(b"data: ") :])


@contextmanager
def server(
    flags: Sequence[str], checkout: Path | None = None, *, env: Mapping[str, str] | None = None
) -> Iterator[Client]:
    """A server that is ready. `checkout` is another checkout whose code it runs; `env` are
    variables to add.
    """
    command = [sys.executable, "-m", "luceasync", "serve", "--port", "0", *flags]
    env = {**os.environ, **(env or {})}
    if checkout is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(checkout), env.get("PYTHONPATH", "")]).rstrip(":")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=checkout, env=env
    ) as process:
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
            with closing(Client(url, process.pid)) as client:
                yield client
        except http.client.HTTPException:
            process.terminate()
            assert process.stdout is not None
            print(process.stdout.read().decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def processor_s(pid: int) -> float:
    """Processor time of a process and of its finished children, which other work on the machine
    hardly affects.
    """
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def ask(client: Client, messages: Messages, max_tokens: int) -> Asked:
    """Send one question, with greedy sampling."""
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


def tau_of(answers: Sequence[Asked]) -> tuple[int, str]:
    """Number of rounds, and tokens per round."""
    rounds = sum(a.speculation.get("rounds", 0) for a in answers)
    accepted = sum(a.speculation.get("accepted", 0) for a in answers)
    return rounds, f"{(accepted + rounds) / rounds:.2f}" if rounds else ""


# --- streams of paced tokens ----------------------------------------------------------------------


async def read_stream(port: int) -> list[float]:
    """Seconds from the generation of each token, the time of which is its text, to its arrival at
    one client.
    """
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    latencies_s = []
    async for line in reader:
        _, found, rest = line.partition(b'"content":"')
        if found and rest[:1] != b'"':
            latencies_s.append(time.perf_counter() - float(rest[: rest.index(b'"')]))
    writer.close()
    return latencies_s


def run_clients(port: int, num_streams: int, results: Connection) -> None:
    """The client process of `num_streams` streams; sends their latencies to `results`."""

    async def run() -> list[list[float]]:
        return await asyncio.gather(*(read_stream(port) for _ in range(num_streams)))

    results.send([one for many in asyncio.run(run()) for one in many])


# --- commands in their own processes --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    """The output of a process. `status` None: it was killed at its deadline."""

    status: int | None
    output: str
    errors: str
    seconds: float

    @property
    def lacks(self) -> str | None:
        """The missing package that the process needs, if it is not one of ours."""
        found = MISSING_PACKAGE.search(self.errors)
        return found[1] if found and found[1].partition(".")[0] != "luceasync" else None

    @property
    def last_errors(self) -> str:
        return "\n".join(self.errors.strip().splitlines()[-NUM_ERROR_LINES:])


def run_python(words: Sequence[str], cwd: Path, deadline_s: float) -> Ended:
    """Run `python -m` with these words. All processes that it has started end with it."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=deadline_s)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        kill_group(process.pid)
        output, errors = process.communicate()
        status = None
    finally:
        kill_group(process.pid)
        process.wait()
    return Ended(status, output, errors, time.perf_counter() - started)


def kill_group(pid: int) -> None:
    """Kill the remaining processes in the process group of this one."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
