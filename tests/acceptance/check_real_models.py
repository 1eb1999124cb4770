"""Real models on this server, end to end: streams, tool calls, filling in, kills, splits, pools.

    python -m tests.acceptance.fetch_models
    python -m tests.acceptance.check_real_models [qwen2.5-coder-0.5b ...] [--dtype bf16]

Kills within an answer, other splits, an eighth of the context on the devices: in float32 every
answer is the same, wherever it is given. Exit status 1 if something is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from luceasync.bench.report import BenchTable
from luceasync.bench.servers import Client, server
from tests.acceptance import command
from tests.acceptance.fetch_models import FOLDER, MODELS

CONTEXT = 4096
NUM_TOKENS = 32
WRITTEN_DEADLINE_S = 120.0
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": CITY,
    },
}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
WEATHER = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
CALLED = [("get_weather", {"city": "Paris"})]
PROGRAM = "".join(f"def times_{n}(x):\n    return x * {n}\n\n\n" for n in range(2, 26))
EDIT = [{"role": "user", "content": f"{PROGRAM}\nWrite times_26 in the same way."}]
STORY = [{"role": "user", "content": "Explain in many words what a compiler does."}]
FACTS = [f"The code of room {room} is {room * 37 % 1000}." for room in range(50)]
FACTS.insert(20, "The password of Anna is 'sunflower'.")
PASSWORD = [
    {"role": "user", "content": "\n".join([*FACTS, "What is the password of Anna?"])},
]
PREFIX, SUFFIX = f"{PROGRAM}def add(a, b):\n", "\n\nprint(add(1, 2))\n"


class Wrong(Exception):
    """What a server should not have answered."""


@dataclass(frozen=True)
class Answer:
    """`num_cached` of `num_prompt` tokens of the prompt were restored from `tier`."""

    text: str
    calls: list[tuple[str, Any]]
    num_prompt: int
    num_cached: int
    tier: str | None

    @property
    def found(self) -> str:
        return f"{self.num_cached} of {self.num_prompt} tokens from {self.tier}"


@dataclass
class Life:
    """What one model has answered so far, and where its servers keep it."""

    name: str
    path: Path
    flags: list[str]
    table: BenchTable
    edit: str = ""
    begun: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    num_wrong: int = 0

    @property
    def knows_tools(self) -> bool:
        """Whether the model was trained to call tools: its template shows them."""
        return bool(self.meta["tool_format"]) and not self.meta["tools_in_system_message"]

    @contextmanager
    def server(self, *flags: str) -> Iterator[Client]:
        """A server of the model."""
        with server([str(self.path), *self.flags, *flags]) as client:
            yield client

    def check(self, what: str, run: Callable[[], str]) -> None:
        """Add a row with what `run` tells, or with what is wrong."""
        started = time.monotonic()
        try:
            seen = run()
        except Wrong as wrong:
            self.num_wrong += 1
            seen = f"WRONG: {wrong}"
        self.table.add(self.name, what, seen, f"{time.monotonic() - started:.1f}")


def main() -> None:
    """Check the models that are there, and print a table."""
    parser = command.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    parser.add_argument("--dtype", default="fp32", help="answers are the same in fp32 alone")
    options = parser.parse_args()
    if unknown := set(options.names) - MODELS.keys():
        parser.error(f"{min(unknown)}: expected one of {', '.join(MODELS)}")
    report = command.open_report(options)
    table = report.table(("model", "what", "seen", "seconds"), "Real models")
    num_wrong = 0
    for name in options.names or MODELS:
        path = options.folder / MODELS[name].file
        if not path.exists():
            table.add(name, "skipped", f"{path} is not there: see fetch_models", "")
            continue
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--dtype", options.dtype, "--parallel", "2", "--max-ctx", str(CONTEXT)]
            flags += ["--kv-cache-dir", folder, "--kv-cache-min-tokens", "1"]
            num_wrong += live(Life(name, path, flags, table))
    sys.exit(1 if num_wrong else 0)


def live(life: Life) -> int:
    """The life of one model; returns how much of it was wrong."""
    with life.server() as client:
        begin(life, client)
        os.kill(client.pid or 0, signal.SIGKILL)
    for devices in ("cpu:0,cpu:1,cpu:2", "cpu:0,cpu:1"):
        with life.server("--target-devices", devices) as client:
            go_on(life, client, f"on {devices.count(',') + 1} devices")
    with life.server("--kvflash", str(CONTEXT // 8)) as client:
        life.check("with an eighth of its context", lambda: recall(life, client))
    return life.num_wrong


def begin(life: Life, client: Client) -> None:
    """All that a server of one device is asked, until it is to be killed within an answer."""
    life.meta = models(client)
    life.check("streams", lambda: stream(life, client))
    if life.meta["tool_format"]:
        life.check("a forced call", lambda: call(client, tool_choice=FORCED))
    if life.knows_tools:
        life.check("a free call", lambda: call(client))
        life.check("a free call, streamed", lambda: streamed_call(client))
    life.check("fills in", lambda: fill_in(client))
    life.check("what it has told when it is killed", lambda: tell_and_wait(life, client))


def go_on(life: Life, client: Client, where: str) -> None:
    """What the killed server was asked, asked again."""
    life.check(f"goes on from disk {where}", lambda: repeat(life, client, EDIT, life.edit))
    life.check(f"the broken answer again, {where}", lambda: repeat(life, client, STORY, life.begun))
    if life.meta["tool_format"]:
        life.check(f"a forced call {where}", lambda: call(client, tool_choice=FORCED))


def models(client: Client) -> dict[str, Any]:
    """What the server says of its model."""
    listed = httpx.get(f"{client.url}/v1/models", timeout=60).json()
    meta: dict[str, Any] = listed["data"][0]["meta"]
    return meta


def ask(life: Life, client: Client, messages: list[dict[str, Any]], **fields: Any) -> Answer:
    """A greedy answer; models that take no chats continue the last message."""
    body = {"temperature": 0, "max_tokens": NUM_TOKENS, **fields}
    if life.meta["takes_chats"]:
        answer = client.post("/v1/chat/completions", body | {"messages": messages})
        text, calls = told(answer["choices"][0]["message"])
    else:
        answer = client.post("/v1/completions", body | {"prompt": messages[-1]["content"]})
        text, calls = answer["choices"][0]["text"], []
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(text, calls, usage["prompt_tokens"], cached, answer["luceasync"]["tier"])


def told(message: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls of a message."""
    functions = [each["function"] for each in message.get("tool_calls") or []]
    calls = [(each["name"], json.loads(each["arguments"])) for each in functions]
    return message.get("content") or "", calls


def pieces(
    life: Life, client: Client, messages: list[dict[str, Any]], **fields: Any
) -> Iterator[str]:
    """The text of a streamed answer, as it comes."""
    body = {"temperature": 0, "max_tokens": NUM_TOKENS, **fields}
    if life.meta["takes_chats"]:
        events = client.listen("/v1/chat/completions", body | {"messages": messages})
    else:
        events = client.listen("/v1/completions", body | {"prompt": messages[-1]["content"]})
    for _, event in events:
        for choice in event["choices"]:
            yield choice.get("text") or choice.get("delta", {}).get("content") or ""


def stream(life: Life, client: Client) -> str:
    found = [piece for piece in pieces(life, client, EDIT) if piece]
    plain = ask(life, client, EDIT)
    life.edit = plain.text
    if "".join(found) != plain.text:
        raise Wrong(f"{''.join(found)!r} in a stream, {plain.text!r} at once")
    if len(found) < 4:
        raise Wrong(f"it came in {len(found)} pieces")
    return f"{len(found)} pieces; asked again, {plain.found}"


def call(client: Client, **fields: Any) -> str:
    body = {"messages": WEATHER, "tools": [TOOL], "temperature": 0, "max_tokens": 64, **fields}
    choice = client.post("/v1/chat/completions", body)["choices"][0]
    text, calls = told(choice["message"])
    if (text, calls, choice["finish_reason"]) != ("", CALLED, "tool_calls"):
        raise Wrong(f"{choice}")
    return f"{calls[0][0]}({json.dumps(calls[0][1])})"


def streamed_call(client: Client) -> str:
    body = {"messages": WEATHER, "tools": [TOOL], "temperature": 0, "max_tokens": 64}
    deltas = [
        choice["delta"]
        for _, event in client.listen("/v1/chat/completions", body)
        for choice in event["choices"]
    ]
    text = "".join(delta.get("content") or "" for delta in deltas)
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or []]
    name = "".join(part.get("name") or "" for part in parts)
    arguments = "".join(part.get("arguments") or "" for part in parts)
    if text or (name, json.loads(arguments or "null")) != CALLED[0]:
        raise Wrong(f"text {text!r}, call {name}({arguments})")
    return f"{name}({arguments}), and no text before it"


def fill_in(client: Client) -> str:
    """A line between two texts, and again after more of it was typed."""
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 16, "n_indent": 4}
    answers, lines = [], []
    for typed in ("    ", "    return"):
        response = httpx.post(f"{client.url}/infill", json=body | {"prompt": typed}, timeout=300)
        if response.status_code == 400 and "no tokens" in response.text:
            return f"refused: {response.json()['error']['message']}"
        answers.append(response.json())
        lines.append(typed + answers[-1]["content"])
    first, second = answers
    if any(line.split("\n")[0].split() != ["return", "a", "+", "b"] for line in lines):
        raise Wrong(f"{lines}")
    if second["tokens_cached"] < first["tokens_evaluated"] - 2:
        raise Wrong(f"{second['tokens_cached']} tokens cached of {second['tokens_evaluated']}")
    return (
        f"{lines[0].strip()!r}; while typing, {second['tokens_cached']} of "
        f"{second['tokens_evaluated']} tokens cached"
    )


def tell_and_wait(life: Life, client: Client) -> str:
    """The beginning of an answer that goes on, once the directory has what was asked before."""
    folder = Path(life.flags[life.flags.index("--kv-cache-dir") + 1])
    deadline = time.monotonic() + WRITTEN_DEADLINE_S
    while len(list(folder.glob("*/*.safetensors"))) < 2:
        if time.monotonic() > deadline:
            raise Wrong(f"nothing was written within {WRITTEN_DEADLINE_S:.0f} s")
        time.sleep(0.1)
    answer = pieces(life, client, STORY, max_tokens=512)
    while len(life.begun.split()) < 12:
        life.begun += next(answer)
    return f"{life.begun!r}"


def repeat(life: Life, client: Client, messages: list[dict[str, Any]], expected: str) -> str:
    answer = ask(life, client, messages)
    common = min(len(answer.text), len(expected))
    if answer.text[:common] != expected[:common] or not common:
        raise Wrong(f"{answer.text!r}, where {expected!r} was said")
    if messages is EDIT and answer.num_cached < answer.num_prompt // 2:
        raise Wrong(f"only {answer.found}")
    return f"the same text; {answer.found}"


def recall(life: Life, client: Client) -> str:
    answer = ask(life, client, PASSWORD)
    if answer.num_prompt <= CONTEXT // 8:
        raise Wrong(f"the prompt has only {answer.num_prompt} tokens")
    if not life.knows_tools:  # the others are too small to find a fact in any case
        return f"{answer.num_prompt} tokens of prompt: {answer.text!r}"
    if "sunflower" not in answer.text:
        raise Wrong(f"{answer.text!r}")
    return f"{answer.num_prompt} tokens of prompt, the fact among them found"


if __name__ == "__main__":
    main()
