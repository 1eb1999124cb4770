"""Finds or starts a server, and runs an agent with it.

Owns the processes and the messages about them. The settings of each agent are in agents.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

import httpx
import psutil
from rich.console import Console

from luceasync.cli.flags import config_of
from luceasync.cli.health import reachable_host, running_servers
from luceasync.cli.launch.agents import AGENTS, KEY_VARIABLE, AgentSettings, CodingAgent, Served
from luceasync.cli.output import one_line
from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.errors import ConfigError, LuceasyncError, Unavailable
from luceasync.ipc.launcher import LEASH
from luceasync.server_config import ServerConfig

ASK_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 3600.0  # for loading a model from a slow disk
END_TIMEOUT_S = 60.0  # for a server that is writing its cache
POLL_S = 0.2
NUM_LOG_LINES = 8  # of a server that has failed
LISTENING = re.compile(r"^Listening on (https?://\S+)", re.MULTILINE)
READY = re.compile(r"^Ready: ", re.MULTILINE)
FOLDER = "$dir"  # in the printed script


def run_launch(
    agent: str,
    words: Sequence[str],
    server_words: Sequence[str],
    url: str | None,
    api_key: str | None,
    *,
    only_print: bool,
) -> int:
    """Run an agent with `words`. Returns its exit status. `server_words` are the arguments of a
    server to start. Raises LuceasyncError.
    """
    chosen = _agent(agent)
    if url is not None and server_words:
        raise ConfigError(f"{server_words[0]}: not allowed with --url, whose server runs already")
    program = chosen.program if only_print else _found(chosen)
    with ExitStack() as stack:
        if url is None:
            url, api_key = stack.enter_context(
                _found_or_started(server_words, api_key, may_start=not only_print)
            )
        served, warnings = ask(url.rstrip("/").removesuffix("/v1"), api_key or "", chosen)
        if only_print:
            print(script(chosen, served, words), end="")
            return 0
        for line in warnings:
            print(f"luceasync: {line}", file=sys.stderr)
        print(script(chosen, served, words), end="", file=sys.stderr, flush=True)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="luceasync-"))
        settings = chosen.settings(served, folder)
        for name, text in settings.files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        return run_agent([program, *settings.flags, *words], environment(settings, os.environ))


def _agent(name: str) -> CodingAgent:
    if name not in AGENTS:
        raise ConfigError(f"no such agent: {name}; expected one of {', '.join(AGENTS)}")
    return AGENTS[name]


def _found(agent: CodingAgent) -> str:
    program = shutil.which(agent.program)
    if program is None:
        raise ConfigError(
            f"{agent.program}: not found on PATH; {agent.install!r} installs {agent.title}"
        )
    return program


# The agent


def script(agent: CodingAgent, served: Served, words: Sequence[str]) -> str:
    """A shell script that does the same, without the key."""
    shown = Served(
        served.url,
        served.model,
        served.max_ctx_tokens,
        served.thinks,
        f"${KEY_VARIABLE}" if served.key else "",
    )
    settings = agent.settings(shown, FOLDER)
    lines = [f"# {agent.title} with {served.model}, {served.max_ctx_tokens:,} tokens of context"]
    if settings.files:
        lines.append("dir=$(mktemp -d)")
    for name, text in settings.files.items():
        lines += [f"cat > \"{FOLDER}/{name}\" <<'EOF'", text.rstrip("\n"), "EOF"]
    lines += [f"unset {name}" for name in settings.unset]
    exported = {name: text for name, text in settings.environ.items() if name != KEY_VARIABLE}
    lines += [f"export {name}={_quoted(text)}" for name, text in exported.items()]
    lines.append(" ".join([agent.program, *map(_quoted, [*settings.flags, *words])]))
    return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    """A word for a shell, in which the variables of the script are replaced."""
    if FOLDER not in word and word != f"${KEY_VARIABLE}":
        return shlex.quote(word)
    return '"' + re.sub(r'(["\\`])', r"\\\1", word) + '"'


def environment(settings: AgentSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the agent's process."""
    kept = {name: value for name, value in environ.items() if name not in settings.unset}
    return kept | dict(settings.environ)


def run_agent(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the agent in this terminal. Returns its exit status. Ctrl-C is left to the agent; SIGTERM
    is forwarded to it.
    """
    started: list[subprocess.Popen[bytes]] = []
    ends: list[int] = []

    def ignore(signum: int, frame: FrameType | None) -> None:
        """Like SIG_IGN, which the agent would inherit."""

    def end(signum: int, frame: FrameType | None) -> None:
        ends.append(signum)
        for process in started:
            process.terminate()

    before = signal.signal(signal.SIGINT, ignore), signal.signal(signal.SIGTERM, end)
    try:
        with subprocess.Popen(command, env=dict(environ)) as process:
            started.append(process)
            if ends:  # the signal arrived before
                process.terminate()
            status = process.wait()
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    return status if status >= 0 else 128 - status


# The server


def ask(url: str, key: str, agent: CodingAgent) -> tuple[Served, list[str]]:
    """The server once it is ready, and reasons not to use it with `agent`. Raises
    LuceasyncError.
    """
    model = _first_model(url, key)
    meta = model.get("meta") or {}
    if not isinstance(model.get("max_model_len"), int):
        raise LuceasyncError(f"{url}/v1/models: does not say how large the context is")
    served = Served(url, model["id"], model["max_model_len"], bool(meta.get("thinks")), key)
    if not meta.get("takes_chats", True):
        raise LuceasyncError(f"{served.model} has no chat template, so no agent can use it")
    warnings = []
    if served.max_ctx_tokens < 2 * agent.first_tokens + served.output_tokens:
        warnings.append(
            f"a context of {served.max_ctx_tokens:,} tokens is small for {agent.title}, whose "
            f"first prompt has about {agent.first_tokens:,}; serve with --max-ctx 64K"
        )
    if agent.calls_tools and meta.get("tool_format", "") is None:
        warnings.append(
            f"how {served.model} calls tools is not known, so {agent.title} can do nothing with it"
        )
    return served, warnings


def _first_model(url: str, key: str) -> dict[str, Any]:
    """The first entry of the server's model list, once it is loaded."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    end = time.monotonic() + LOAD_TIMEOUT_S
    with httpx.Client(base_url=url, headers=headers, timeout=ASK_TIMEOUT_S) as client:
        while True:
            try:
                answer = client.get("/v1/models")
                if answer.status_code == 200:
                    first: dict[str, Any] = answer.json()["data"][0]
                    return {
                        "id": str(first["id"]),
                        "max_model_len": int(first["max_model_len"]),
                    } | {"meta": first.get("meta")}
            except httpx.HTTPError as error:
                raise Unavailable(f"{url}: {error or type(error).__name__}") from error
            except (ValueError, LookupError, TypeError) as error:
                raise LuceasyncError(f"{url}/v1/models: expected a list of models") from error
            if answer.status_code != 503 or time.monotonic() > end:
                raise LuceasyncError(f"{url}/v1/models: status {answer.status_code}")
            time.sleep(POLL_S)


@contextmanager
def _found_or_started(
    words: Sequence[str], key: str | None, *, may_start: bool
) -> Iterator[tuple[str, str | None]]:
    """URL and key of a server. With `words`, or a model among the settings, a server is started,
    which ends with the block; otherwise it is the one that runs here. Raises ConfigError.
    """
    config = config_of(words, os.environ)
    running = [] if words else running_servers(list(psutil.process_iter()))
    running = [server for server in running if server.port]  # others end with their agent
    if len(running) > 1:
        urls = ", ".join(url_of(server) for server in running)
        raise ConfigError(f"several servers run here ({urls}); name one with --url")
    if running:
        keys = running[0].api_keys
        yield url_of(running[0]), key or (keys[0] if keys else None)
        return
    if not words and config.model.model_dir == BUNDLED_MODEL_DIR:
        raise ConfigError("no server runs here; name a model to serve, or a server with --url")
    if not may_start:
        raise ConfigError("--print: shows the settings for a server that runs; none would then")
    from luceasync.cli.serve import check_load

    check_load(config)
    keys = config.server.api_keys
    with started(words, Console(stderr=True)) as url:
        yield url, key or (keys[0] if keys else None)


def url_of(server: ServerConfig) -> str:
    """The URL at which this machine reaches a server."""
    host = reachable_host(server.host)
    scheme = "http" if server.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


@contextmanager
def started(words: Sequence[str], console: Console) -> Iterator[str]:
    """A new server, on a port that the system chooses; yields its URL once it is ready. It ends
    with the block, or with this process. Raises LuceasyncError with the server's last lines.
    """
    python = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), sys.executable]
    command = [*python, "-m", "luceasync", "serve", "--port", "0", *words]
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as log:
        # In its own session: Ctrl-C in the terminal is for the agent.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            with console.status("Loading the model"):
                url = _url_once_ready(process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url_once_ready(process: subprocess.Popen[bytes], log: IO[str]) -> str:
    """The address at which the server listens, once its model is loaded. Raises LuceasyncError if
    it ends before, or takes too long.
    """
    end = time.monotonic() + LOAD_TIMEOUT_S
    while time.monotonic() < end:
        log.seek(0)
        said = log.read()
        found = LISTENING.search(said)
        if found and READY.search(said):
            return found[1]
        if process.poll() is not None:
            last = [line for line in said.splitlines() if line.strip()][-NUM_LOG_LINES:]
            raise LuceasyncError(f"the server has ended: {one_line(' / '.join(last))}")
        time.sleep(POLL_S)
    raise LuceasyncError(f"the server was not ready after {LOAD_TIMEOUT_S:.0f} s")
