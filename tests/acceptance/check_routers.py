"""Conversations over several servers behind routers of the field, while one of them is killed.

    python -m tests.acceptance.check_routers FOLDER [--servers 3] [--conversations 100] [--turns 10]

FOLDER has smg/bin/smg, sglang-router/bin/sglang-router, vllm-router/bin/vllm-router (virtual
environments), root/usr/sbin/{nginx,haproxy}; the recommended one must keep what one server finds.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from luceasync.bench.report import Report, figure
from tests.acceptance import command
from tests.acceptance.hostile.server import ROOT

RECOMMENDED = "smg, cache_aware"
LEAST_KEPT, MOST_AGAIN = 0.95, 0.10
NUM_CLIENTS = 8
MODEL = "stdlib-15m"
WORDS = (
    "list dict file path json read write parse sort merge split join open close loop call".split()
)
DEADLINE_S = 120.0
NGINX_RULE = "hash $http_x_session_id consistent;"
NUM_STREAMS, STREAM_TOKENS = 8, 96
FLAGS = ["--draft", "none", "--target-devices", "cpu:0", "--parallel", "4", "--max-queue", "64"]
FLAGS += ["--prefix-cache-memory", "512M"]
SHARED = ["--kv-cache-min-tokens", "1", "--kv-cache-shared", "--kv-cache-budget", "2G"]


class Replica:
    """A server on a port of its own, which can be killed and started again there."""

    def __init__(self, folder: Path, *, shares: bool) -> None:
        self._shared = [*SHARED, "--kv-cache-dir", str(folder / "prefixes")] if shares else []
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port: int = found.getsockname()[1]
        self._folder = folder
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = [sys.executable, "-m", "luceasync", "serve", "--port", str(self.port)]
        words += [*FLAGS, *self._shared]
        log = (self._folder / f"{self.port}.log").open("ab")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(words, env=env, stderr=log, cwd=self._folder)

    def wait(self) -> None:
        _wait_for(self.port, "/ready")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def _wait_for(port: int, path: str) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"port {port}: {path} is not answered with 200")


# --- routers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Router:
    """A program before the servers. `words`: its command; `config`: what it is configured with;
    `takes_servers`: it is told of others by POST /workers.
    """

    name: str
    words: Callable[[int, Sequence[Replica], Path], list[str]]
    config: Callable[[int, Sequence[Replica]], str] | None = None
    libraries: str = ""
    takes_servers: bool = False


def routers_in(folder: Path) -> list[Router]:
    """Those whose program is there."""
    root = folder / "root/usr/sbin"
    gateways = {
        "smg, cache_aware": ("smg/bin/smg", ["launch", "--policy", "cache_aware"]),
        "smg, sticky": (
            "smg/bin/smg",
            [
                *("launch", "--policy", "cache_aware", "--routing-key-override"),
                *("--routing-key-headers", "x-session-id"),
            ],
        ),
        "sglang-router, cache_aware": (
            "sglang-router/bin/sglang-router",
            ["launch", "--policy", "cache_aware"],
        ),
        "vllm-router, cache_aware": ("vllm-router/bin/vllm-router", ["--policy", "cache_aware"]),
        "vllm-router, consistent_hash": (
            "vllm-router/bin/vllm-router",
            ["--policy", "consistent_hash"],
        ),
    }
    found = [
        Router(name, _gateway(folder / program, flags), takes_servers=name.startswith("smg"))
        for name, (program, flags) in gateways.items()
        if (folder / program).exists()
    ]
    if (root / "nginx").exists():
        words = _with_config([str(root / "nginx"), "-c"])
        found += [
            Router(
                "nginx, hash of x-session-id", words, _nginx("hash $http_x_session_id consistent;")
            ),
            Router("nginx, in turn", words, _nginx("")),
        ]
    if (root / "haproxy").exists():
        libraries = str(folder / "root/usr/lib/x86_64-linux-gnu")
        words = _with_config([str(root / "haproxy"), "-db", "-f"])
        found.append(Router("haproxy, hash of x-session-id", words, _haproxy, libraries))
    return found


def _gateway(
    program: Path, flags: Sequence[str]
) -> Callable[[int, Sequence[Replica], Path], list[str]]:
    def words(port: int, replicas: Sequence[Replica], _: Path) -> list[str]:
        urls = [replica.url for replica in replicas]
        health = ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"]
        ports = ["--port", str(port), "--prometheus-port", str(_free_port())]
        return [
            str(program),
            *flags,
            "--host",
            "127.0.0.1",
            *ports,
            *health,
            "--worker-urls",
            *urls,
        ]

    return words


def _with_config(
    words: Sequence[str],
) -> Callable[[int, Sequence[Replica], Path], list[str]]:
    return lambda port, replicas, config: [*words, str(config)]


def _nginx(rule: str) -> Callable[[int, Sequence[Replica]], str]:
    def config(port: int, replicas: Sequence[Replica]) -> str:
        servers = " ".join(
            f"server 127.0.0.1:{r.port} max_fails=1 fail_timeout=3s;" for r in replicas
        )
        folder = tempfile.mkdtemp(prefix="nginx-")
        paths = " ".join(
            f"{kind}_temp_path {folder}/{kind};"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        return (
            f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;\n"
            "events {}\n"
            f"http {{ access_log off; {paths}\n"
            f"upstream replicas {{ {rule} {servers} keepalive 32; }}\n"
            f"server {{ listen 127.0.0.1:{port}; client_max_body_size 32m;\n"
            "location / { proxy_pass http://replicas; proxy_http_version 1.1;\n"
            'proxy_set_header Host $http_host; proxy_set_header Connection "";\n'
            "proxy_buffering off; proxy_read_timeout 600s;\n"
            "proxy_next_upstream error timeout http_503 non_idempotent; } } }\n"
        )

    return config


def _haproxy(port: int, replicas: Sequence[Replica]) -> str:
    servers = "\n".join(
        f"  server s{i} 127.0.0.1:{r.port} check inter 1s fall 2 rise 1"
        for i, r in enumerate(replicas)
    )
    return (
        "defaults\n  mode http\n  timeout connect 2s\n  timeout client 600s\n"
        "  timeout server 600s\n  retries 2\n  option redispatch\n"
        "  retry-on conn-failure empty-response 503\n"
        f"frontend all\n  bind 127.0.0.1:{port}\n  default_backend replicas\n"
        "backend replicas\n  balance hdr(x-session-id)\n  hash-type consistent\n"
        f"  option httpchk GET /ready\n{servers}\n"
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def running(router: Router, replicas: Sequence[Replica], folder: Path) -> Iterator[tuple[int, int]]:
    """Its port and its process."""
    port, config = _free_port(), folder / "router.conf"
    if router.config is not None:
        config.write_text(router.config(port, replicas), encoding="utf-8")
    log = (folder / f"{router.name.replace(' ', '-')}.log").open("ab")
    env = os.environ | ({"LD_LIBRARY_PATH": router.libraries} if router.libraries else {})
    words = router.words(port, replicas, config)
    process = subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for(port, "/v1/models")
        time.sleep(2.5)  # until it has seen all servers
        yield port, process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cpu_s(pid: int) -> float:
    """Processor time of a process and its children."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


# --- conversations --------------------------------------------------------------------------------


@dataclass
class Conversation:
    """One client's messages so far."""

    name: str
    messages: list[dict[str, str]]

    @classmethod
    def of(cls, salt: str, number: int) -> Conversation:
        name = f"{salt}-{number}"
        draws = random.Random(name)
        rules = f"Session {name}. " + " ".join(draws.choices(WORDS, k=150))
        return cls(name, [{"role": "system", "content": rules}])

    def ask(self, turn: int) -> None:
        words = " ".join(random.Random(f"{self.name} {turn}").choices(WORDS, k=20))
        self.messages.append({"role": "user", "content": f"{words}?"})


@dataclass
class Seen:
    """What answers said of their prompts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    again_tokens: int = 0  # that an earlier turn had prefilled
    ends: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, before_tokens: int, usage: dict[str, object]) -> int:
        """Returns the tokens of the prompt."""
        prompt, details = int(str(usage["prompt_tokens"])), usage.get("prompt_tokens_details")
        cached = int(details["cached_tokens"]) if isinstance(details, dict) else 0
        with self.lock:
            self.ends["right"] += 1
            self.prompt_tokens += prompt
            self.cached_tokens += cached
            self.again_tokens += max(0, before_tokens - cached)
        return prompt


@dataclass
class Talk:
    """All conversations, turn after turn, NUM_CLIENTS at a time."""

    conversations: list[Conversation]
    seen: Seen = field(default_factory=Seen)
    prompts: dict[str, int] = field(default_factory=dict)  # tokens of the last turn's prompt

    def turns(self, port: int, turns: Sequence[int], max_tokens: int) -> None:
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            for turn in turns:
                asked = [(port, each, turn, max_tokens) for each in self.conversations]
                list(clients.map(lambda words: self._turn(*words), asked))

    def _turn(self, port: int, talk: Conversation, turn: int, max_tokens: int) -> None:
        talk.ask(turn)
        body = {"messages": talk.messages, "max_tokens": max_tokens, "temperature": 0}
        body |= {"model": MODEL}
        try:
            status, answer = _post(port, body, talk.name)
        except (OSError, http.client.HTTPException) as error:
            status, answer = 0, {"error": type(error).__name__}
        if status != 200:
            with self.seen.lock:
                self.seen.ends[f"{status or answer['error']}"] += 1
            talk.messages.pop()  # the client asks again at the next turn
            return
        tokens = self.seen.count(self.prompts.get(talk.name, 0), answer["usage"])
        self.prompts[talk.name] = tokens
        text = answer["choices"][0]["message"]["content"]
        talk.messages.append({"role": "assistant", "content": text})


def _post(port: int, body: dict[str, object], session: str) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    headers = {"content-type": "application/json", "x-session-id": session}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if response.status == 200 else {}


def _tell(port: int, replica: Replica) -> None:
    """Tell a router of a server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/workers", json.dumps({"url": replica.url}), headers)
    response = connection.getresponse()
    if response.status >= 300:
        raise SystemExit(f"POST /workers: {response.status} {response.read()!r}")


def _num_answers(replica: Replica) -> int:
    """How many requests the server has answered since it runs."""
    connection = http.client.HTTPConnection("127.0.0.1", replica.port, timeout=DEADLINE_S)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    found = [line for line in lines if line.startswith("luceasync_http_requests_total{")]
    return sum(
        int(float(line.split()[-1])) for line in found if '"200"' in line and "completions" in line
    )


def _stream(port: int, number: int) -> int:
    """The events of one long answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"What is a list? {number}"}],
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"content-type": "application/json", "x-session-id": f"stream {number}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    num_events = sum(line.startswith(b"data: {") for line in connection.getresponse())
    connection.close()
    return num_events


def streamed(port: int) -> tuple[int, float]:
    """Events, and seconds, of NUM_STREAMS long answers at once."""
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        num_events = sum(clients.map(lambda number: _stream(port, number), range(NUM_STREAMS)))
    return num_events, time.perf_counter() - begun_s


# --- the check ------------------------------------------------------------------------------------


class Check:
    """Runs each router over the same servers."""

    def __init__(self, options: argparse.Namespace, report: Report, folder: Path) -> None:
        self._options, self._report, self._folder = options, report, folder
        self._salts = itertools.count()

    def run(self, replicas: list[Replica], routers: Sequence[Router]) -> bool:
        columns = ("router", "cached", "of one server's", "us a token", "tokens/s")
        columns += ("after a death: answers", "prefilled again")
        title = f"{self._options.conversations} conversations of {self._options.turns} turns"
        table = self._report.table(columns, f"{title} over {len(replicas)} servers")
        one = self._talk(replicas[0].port)
        alone = one.cached_tokens / one.prompt_tokens
        events, seconds = streamed(replicas[0].port)
        table.add("none, one server", f"{alone:.1%}", "", "", f"{events / seconds:.0f}", "", "")
        is_right = True
        for router in routers:
            with running(router, replicas, self._folder) as (port, pid):
                seen = self._talk(port)
                before_s = _cpu_s(pid)
                events, seconds = streamed(port)
                us = (_cpu_s(pid) - before_s) / max(events, 1) * 1e6
                dead = Seen() if self._options.apart else self._killed(router, port, replicas)
            share = seen.cached_tokens / max(seen.prompt_tokens, 1)
            again = dead.again_tokens / max(dead.prompt_tokens, 1)
            ends = ", ".join(f"{n} {end}" for end, n in sorted(dead.ends.items()))
            kept = share / alone
            cells = f"{share:.1%}", f"{kept:.1%}", figure(us, digits=0), f"{events / seconds:.0f}"
            table.add(router.name, *cells, ends, f"{again:.1%}")
            if router.name == RECOMMENDED:
                num_lost = dead.ends.total() - dead.ends["right"]
                is_right = kept >= LEAST_KEPT and again <= MOST_AGAIN and num_lost <= NUM_CLIENTS
        return is_right

    def _talk(self, port: int) -> Seen:
        talk = self._new_talk()
        talk.turns(port, range(self._options.turns), self._options.tokens)
        return talk.seen

    def _new_talk(self) -> Talk:
        salt = f"{next(self._salts)}"
        numbers = range(self._options.conversations)
        return Talk([Conversation.of(salt, number) for number in numbers])

    def _killed(self, router: Router, port: int, replicas: list[Replica]) -> Seen:
        """Conversations of which a server dies after half of the turns. Later it comes back, or
        another one comes to a router that can be told of it, and new conversations begin.
        """
        talk, turns = self._new_talk(), self._options.turns
        half, later = turns // 2, (turns * 3) // 4
        talk.turns(port, range(half), self._options.tokens)
        time.sleep(2.0)  # for the writes
        talk.seen = Seen()
        with ThreadPoolExecutor(1) as beside:
            asking = beside.submit(talk.turns, port, range(half, later), self._options.tokens)
            time.sleep(0.5)  # requests are under way
            replicas[-1].kill()
            asking.result()
        if router.takes_servers:
            replicas[-1] = Replica(self._folder, shares=True)
        else:
            replicas[-1].start()
        replicas[-1].wait()
        if router.takes_servers:
            _tell(port, replicas[-1])
        time.sleep(2.5)
        talk.conversations += self._new_talk().conversations[::4]  # for the new server, too
        talk.turns(port, range(later, turns), self._options.tokens)
        print(f"{router.name}: {_num_answers(replicas[-1])} answers of the new server")
        return talk.seen


def main() -> None:
    """Run the check and print what was seen."""
    parser = command.parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=8, help="of an answer; default: 8")
    parser.add_argument("--only", default="", help="routers whose name matches this expression")
    parser.add_argument(
        "--apart", action="store_true", help="servers that share no directory; none is killed"
    )
    parser.add_argument("--keep", action="store_true", help="logs, in a folder that is printed")
    options = parser.parse_args()
    routers = [each for each in routers_in(options.folder) if re.search(options.only, each.name)]
    folder = Path(tempfile.mkdtemp(prefix="routers-"))
    with ExitStack() as closing:
        if options.keep:
            print(folder, file=sys.stderr)
        else:
            closing.callback(shutil.rmtree, folder, ignore_errors=True)
        replicas: list[Replica] = []
        closing.callback(lambda: [replica.close() for replica in replicas])
        for _ in range(options.servers):
            replicas.append(Replica(folder, shares=not options.apart))
        for replica in replicas:
            replica.wait()
        is_right = Check(options, command.open_report(options), folder).run(replicas, routers)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
