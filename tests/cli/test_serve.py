"""The serve command in a process, with the bundled model."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import httpx
import pytest

from luceasync.cli.serve import is_open_to_others, ready_lines
from luceasync.request import ModelCard
from luceasync.server_config import ServerConfig
from tests.children import line_with

DEADLINE_S = 60


@pytest.mark.slow
def test_serve_answers_and_ends_cleanly():
    command = [sys.executable, "-m", "luceasync", "serve", "--port", "0", "--max-ctx", "512"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = re.search(r"http://[\d.:]+", wait_bound(process))
            assert url
            with httpx.Client(base_url=url[0], timeout=DEADLINE_S) as client:
                wait_ready(client)
                body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
                answer = client.post("/v1/chat/completions", json=body).json()
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
    assert answer["usage"]["completion_tokens"] <= 3
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 0)])
def test_a_signal_while_the_model_loads_ends_the_process(number, code):
    command = [sys.executable, "-m", "luceasync", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_bound(process)
            process.send_signal(number)
            assert process.wait(DEADLINE_S) == code
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("server", "is_open"),
    [
        (ServerConfig(), False),
        (ServerConfig(host="localhost"), False),
        (ServerConfig(host="::1"), False),
        (ServerConfig(host="0.0.0.0"), True),
        (ServerConfig(host="::"), True),
        (ServerConfig(host="0.0.0.0", api_keys=("sesame",)), False),
    ],
)
def test_a_server_is_open_to_others_on_a_public_address_without_keys(server, is_open):
    assert is_open_to_others(server) == is_open


def test_ready_lines_name_the_model_and_the_reasons_for_its_context():
    reason = "--max-ctx 5120: what fits beside the weights; 20480 with --parallel 1"
    card = ModelCard("tiny", 0, 5120, 1, "qwen3", aliases=("*", "small"), reasons=(reason,))
    assert ready_lines(card, 4) == [
        "Ready: tiny or small, 4 lanes of 5120 tokens of context",
        f"- {reason}",
    ]
    assert ready_lines(replace(card, reasons=()), 1) == [
        "Ready: tiny or small, 1 lane of 5120 tokens of context"
    ]
    assert "no chat template" in ready_lines(replace(card, takes_chats=False), 1)[-1]


def wait_bound(process: subprocess.Popen[str]) -> str:
    """The line that names the URL; the log may have lines before it."""
    return line_with("Listening", process)


def wait_ready(client: httpx.Client) -> None:
    for _ in range(DEADLINE_S * 20):
        if client.get("/ready").status_code == 200:
            return
        time.sleep(0.05)
    raise AssertionError("the model did not load in time")
