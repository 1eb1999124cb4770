"""A server shuts down in time. Each test runs one in a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


class Server:
    """The process, and the URL that it printed first."""

    def __init__(self, options: dict[str, float]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_scripted", json.dumps(options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str, str]:
        """Exit code and the rest of stdout and stderr, when the process has ended."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out.strip(), err


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(**options: float) -> Server:
        servers.append(Server(options))
        return servers[-1]

    yield begin
    for server in servers:
        server.process.kill()
        server.process.communicate()


def test_a_running_stream_finishes_after_sigterm(start):
    server = start(graceful_timeout_s=10, answer_s=0.5)
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=BODY | {"stream": True}
    ) as r:
        lines = r.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert server.end() == (0, "clean True", "")


def test_a_stream_past_the_deadline_ends_with_an_error_event(start):
    server = start(graceful_timeout_s=0.2)
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=BODY | {"stream": True}
    ) as r:
        lines = r.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert server.end()[:2] == (0, "clean True")


def test_a_plain_answer_past_the_deadline_becomes_503(start):
    server = start(graceful_timeout_s=0.2)
    with ThreadPoolExecutor() as pool:
        url = f"{server.url}/v1/chat/completions"
        asking = pool.submit(httpx.post, url, json=BODY, timeout=DEADLINE_S)
        wait_until(lambda: "luceasync_running_lanes 1.0" in httpx.get(f"{server.url}/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        assert asking.result().status_code == 503
    assert server.end()[:2] == (0, "clean True")


def test_new_requests_get_503_while_running_ones_finish(start):
    server = start(graceful_timeout_s=DEADLINE_S)
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=BODY | {"stream": True}
    ) as r:
        chunks = r.iter_raw()
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=BODY)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]


def test_an_idle_connection_does_not_delay_the_end(start):
    server = start(graceful_timeout_s=10)
    with httpx.Client() as client:
        assert client.get(f"{server.url}/health").status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.end() == (0, "clean True", "")


@pytest.mark.slow
def test_a_client_that_never_reads_cannot_keep_the_process(start):
    server = start(graceful_timeout_s=0.1, answer_bytes=64 * 2**20)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(BODY | {"stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with closing(socket.create_connection((host, int(port)))) as client:
        client.sendall(head.encode() + body)
        assert client.recv(10) == b"HTTP/1.1 2"
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[:2] == (0, "stuck True")


def test_a_shutdown_logs_its_deadline_and_how_to_shorten_it(start):
    server = start(graceful_timeout_s=7, answer_s=0.5, verbose=1)
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=BODY | {"stream": True}
    ) as r:
        chunks = r.iter_raw()
        next(chunks)
        server.process.send_signal(signal.SIGINT)
        for _ in chunks:
            pass
    told = server.end()[2]
    assert "Stopping: 1 running requests may finish within 7 s; Ctrl-C ends them now." in told


@pytest.mark.slow
def test_a_thread_that_hangs_cannot_keep_the_process(start):
    server = start(graceful_timeout_s=0.1, hang_s=3600, end_s=0.5)
    httpx.get(f"{server.url}/health")
    server.process.send_signal(signal.SIGTERM)
    code, _, err = server.end()
    assert (code, "something in it hangs" in err) == (1, True)


def test_a_second_sigint_ends_at_once(start):
    server = start(graceful_timeout_s=3600)
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=BODY | {"stream": True}
    ) as r:
        chunks = r.iter_raw()
        next(chunks)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        server.process.send_signal(signal.SIGINT)
        assert server.end()[0] == -signal.SIGINT


def test_the_port_answers_while_the_model_loads(start):
    server = start(graceful_timeout_s=1, load_s=3600)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 503
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=BODY)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == (0, "clean True", "")


def test_ctrl_c_while_the_model_loads_ends_at_once(start):
    server = start(graceful_timeout_s=3600, load_s=3600)
    with httpx.Client() as client:  # whose connection would be waited for
        assert client.get(f"{server.url}/health").status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.end() == (-signal.SIGINT, "", "")


def test_a_failed_load_ends_the_server_with_its_error(start):
    code, _, err = start(graceful_timeout_s=1, load_s=-0.1).end()
    assert code == 1
    assert "ModelError: no weights here" in err


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until `condition` is true, or fail."""
    for _ in range(DEADLINE_S * 50):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("the condition never came true")


HANGING = """
import threading, time
from luceasync.server.serve import exit_process_after
threading.Thread(target=time.sleep, args=[3600]).start()
exit_process_after({seconds})
"""


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_the_process():
    code = HANGING.format(seconds=0.2)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "told to end 0.2 s ago" in done.stderr


@pytest.mark.slow
def test_a_process_that_ends_by_itself_ends_at_once():
    code = "from luceasync.server.serve import exit_process_after; exit_process_after(3600)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 0
