"""Clients of a server whose backends misbehave: what each received, and when.

An answer may be whole, an error, or a stream that ends in an error after the beginning of the right
text.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

CHAT = "/v1/chat/completions"
TIMEOUT_S = 150.0  # a client that is told nothing for so long was forgotten
WHOLE, REFUSED, BROKEN, CLOSED = "whole", "503", "error event", "closed"


@dataclass(frozen=True)
class Told:
    """How an answer ended, its text so far, and the error message. `ended_s`: when, by
    time.perf_counter.
    """

    end: str
    text: str
    words: str
    ended_s: float


class Client(threading.Thread):
    """Sends one request, in a thread."""

    def __init__(
        self,
        port: int,
        question: str,
        salt: str,
        max_tokens: int,
        *,
        is_streamed: bool,
        goes_on: bool = False,
    ) -> None:
        """`goes_on`: the answer has all its tokens, whatever the model says."""
        super().__init__(daemon=True)
        self.question = question
        self.told: Told | None = None
        self.has_begun = threading.Event()
        self._port = port
        self._body = json.dumps(
            {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": is_streamed,
                "cache_salt": salt,
                "ignore_eos": goes_on,
            }
        ).encode()
        self._text = ""

    def run(self) -> None:
        """Send the request and record the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            end, words = self._ask(connection)
        except TimeoutError:
            raise  # without an answer `told` stays empty, which the report shows
        except (OSError, http.client.HTTPException) as error:
            end, words = CLOSED, str(error)
        finally:
            connection.close()
        self.told = Told(end, self._text, words, time.perf_counter())

    def _ask(self, connection: http.client.HTTPConnection) -> tuple[str, str]:
        connection.request("POST", CHAT, self._body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return f"{response.status}", response.read().decode()
        if response.headers["content-type"].startswith("application/json"):
            self._text = json.loads(response.read())["choices"][0]["message"]["content"]
            return WHOLE, ""
        while line := response.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    return BROKEN, event["error"]["message"]
                for choice in event["choices"]:
                    self._text += choice["delta"].get("content") or ""
                self.has_begun.set()
            elif line.startswith(b"data: [DONE]"):
                return WHOLE, ""
        return CLOSED, "the stream ended"


def ask_all(port: int, questions: Sequence[str], salt: str, max_tokens: int) -> list[Client]:
    """Send all requests at once, every other one streamed, and wait for the answers."""
    clients = begin_all(port, questions, salt, max_tokens)
    wait_for(clients)
    return clients


def begin_all(port: int, questions: Sequence[str], salt: str, max_tokens: int) -> list[Client]:
    """Send all requests at once, every other one streamed."""
    clients = [
        Client(port, question, salt, max_tokens, is_streamed=number % 2 == 0)
        for number, question in enumerate(questions)
    ]
    for client in clients:
        client.start()
    return clients


def wait_for(clients: Sequence[Client]) -> None:
    """Wait for all answers. Exits with a message if one does not come."""
    for client in clients:
        client.join(2 * TIMEOUT_S)
        if client.told is None:
            raise SystemExit(f"{client.question!r} was never answered")
