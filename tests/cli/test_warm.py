"""Prompts are computed before anybody asks: by an engine in this process, or by a server."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from luceasync.cli.app import app
from luceasync.cli.warm.client import Counters, WarmClient, WarmRefused, keep, open_directory, warm
from luceasync.cli.warm.entries import WarmEntry
from luceasync.cli.warm.run import EXIT_INTERRUPTED, Job, run
from luceasync.config import CacheConfig, Config, EngineConfig, ModelConfig
from luceasync.errors import ConfigError, QueueFull, RequestError, Unavailable
from luceasync.request import Request
from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig
from luceasync.status import CacheStatus
from tests.children import url_of
from tests.server.scripted import ScriptedEngine, ScriptedStream

SCRIPT = Path(__file__).parents[2] / "scripts" / "warm_cache.py"
RULES = WarmEntry("rules", [{"role": "system", "content": "to be or not to be, " * 20}])
QUESTION = WarmEntry(
    "question", [*RULES.messages, {"role": "user", "content": "that is the question"}]
)


class BusyEngine(ScriptedEngine):
    """Refuses the first requests with `refusals`, in order."""

    def __init__(self, *refusals: Exception) -> None:
        super().__init__()
        self.refusals = list(refusals)

    async def open(self, request: Request) -> ScriptedStream:
        self.opening = self.refusals.pop(0) if self.refusals else None
        return await super().open(request)


@asynccontextmanager
async def client_of(engine: ScriptedEngine, *, patience_s: float = 60.0):
    transport = httpx.ASGITransport(create_app(engine, ServerConfig()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield WarmClient(client, cache_salt=None, patience_s=patience_s)


@pytest.fixture
def config(tiny_dir, tmp_path) -> Config:
    return Config(
        model=ModelConfig(model_dir=tiny_dir, dtype="fp32"),
        engine=EngineConfig(max_ctx_tokens=512, parallel=2),
        cache=CacheConfig(memory_bytes=2**26, cache_dir=tmp_path / "cache", min_tokens=16),
    )


async def outcomes_of(config: Config, *entries: WarmEntry, **options):
    outcomes = []
    async with open_directory(config, options.pop("api_key", None), None) as server:
        await warm(entries, server, outcomes.append, parallel=2, **options)
        counters = await server.written(10.0)
    return sorted(outcomes, key=lambda outcome: outcome.entry.origin), counters


@pytest.mark.any_family
@pytest.mark.slow
async def test_what_a_client_asks_next_is_found(config):
    (question, rules), counters = await outcomes_of(config, RULES, QUESTION, verify="all")
    assert (rules.error, question.error) == ("", "")
    assert rules.num_found == rules.num_tokens > 0
    assert question.num_found == question.num_tokens > rules.num_tokens
    assert counters.written_bytes > 0 and counters.unwritten_nodes == 0


@pytest.mark.any_family
@pytest.mark.slow
async def test_a_second_run_computes_nothing(config):
    first, _ = await outcomes_of(config, RULES, QUESTION)
    again, _ = await outcomes_of(config, RULES, QUESTION)
    assert not any(outcome.was_there for outcome in first)
    assert all(outcome.was_there for outcome in again)


@pytest.mark.slow
async def test_a_run_that_was_cut_short_goes_on(config):
    await outcomes_of(config, RULES)
    (question, rules), _ = await outcomes_of(config, RULES, QUESTION)
    assert rules.was_there and not question.was_there
    assert 0 < question.num_prefilled < question.num_tokens


@pytest.mark.slow
async def test_what_is_kept_for_one_key_is_not_there_for_another(config):
    await outcomes_of(config, RULES, api_key="one")
    (other,), _ = await outcomes_of(config, RULES, api_key="other")
    (same,), _ = await outcomes_of(config, RULES, api_key="one")
    assert (other.num_cached, same.was_there) == (0, True)


async def test_a_prompt_too_short_for_a_file_is_an_error(config):
    (outcome,), _ = await outcomes_of(config, RULES, verify="none", min_tokens=10**6)
    assert "--kv-cache-min-tokens is 1000000" in outcome.error


@pytest.mark.any_family
async def test_a_prompt_that_does_not_fit_fails_alone(config):
    long = WarmEntry("long", [{"role": "system", "content": "to be " * 2000}])
    (failed, fine), _ = await outcomes_of(config, RULES, long)
    assert "maximum context length" in failed.error and not fine.error


@pytest.mark.slow
@pytest.mark.parametrize("refusal", [QueueFull(3, 0), Unavailable("loading the model")])
async def test_a_busy_server_is_asked_again(refusal):
    engine = BusyEngine(refusal, refusal)
    async with client_of(engine) as server:
        told = await server.keep(RULES)
    assert (told.num_tokens, told.num_cached, len(engine.requests)) == (10, 4, 3)


async def test_patience_ends(config):
    async with client_of(BusyEngine(QueueFull(3, 5)), patience_s=1.0) as server:
        with pytest.raises(WarmRefused, match="status 429"):
            await server.keep(RULES)


async def test_what_no_retry_mends_is_not_asked_again():
    engine = BusyEngine(RequestError("messages: no", param="messages"))
    async with client_of(engine) as server:
        outcome = await keep(RULES, server, is_verified=True)
    assert (outcome.error, len(engine.requests)) == ("status 400: messages: no", 1)


async def test_the_counters_are_read_from_the_metrics():
    engine = ScriptedEngine()
    engine.cache = CacheStatus(
        written_bytes_total=7, evicted_total={"memory": 5, "disk": 3}, num_unwritten=2, degraded="x"
    )
    async with client_of(engine) as server:
        assert await server.counters() == Counters(7, 3, 2)
        assert await server.fault() == "x"


async def test_a_prefix_that_the_next_request_does_not_find_is_an_error():
    async with client_of(
        ScriptedEngine()
    ) as server:  # whatever is asked, 4 of 10 tokens are cached
        outcome = await keep(RULES, server, is_verified=True)
    assert "found 4 of 10 tokens" in outcome.error


async def test_at_most_so_many_are_asked_at_a_time():
    engine, gate, outcomes = ScriptedEngine(), asyncio.Event(), []
    engine.opening = gate
    async with client_of(engine) as server, asyncio.TaskGroup() as tasks:
        running = warm([RULES] * 5, server, outcomes.append, parallel=2, verify="none")
        tasks.create_task(running)
        await engine.opened.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(engine.requests) == 2
        gate.set()
    assert len(outcomes) == 5


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where a shell has started the tests in the background, and let them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_told_in_a_line(capsys, interruptible):
    class Interrupted(ScriptedEngine):
        async def open(self, request: Request) -> ScriptedStream:
            if self.requests:
                signal.raise_signal(signal.SIGINT)
            return await super().open(request)

    job = Job([RULES] * 3, client_of(Interrupted()), 1, "none")
    assert run(job, is_json=False) == EXIT_INTERRUPTED
    assert "1 of 3 prefixes are done" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "expected --url of a running server, or --kv-cache-dir"),
        (["--url", "http://127.0.0.1:1"], "--url http://127.0.0.1:1: "),
        (["--url", "nonsense"], "--url nonsense: "),
        (["--url", "http://127.0.0.1:1", "--max-ctx", "4K"], "not allowed with flags of model"),
        (["--kv-cache-dir", "x", "--api-key", "a,b"], "--api-key: several keys"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(tmp_path, monkeypatch, flags, words):
    monkeypatch.delenv("LUCEASYNC_API_KEY", raising=False)
    (tmp_path / "rules.txt").write_text("Be brief.")
    result = CliRunner().invoke(app, ["warm", "--file", str(tmp_path / "rules.txt"), *flags])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception) and "\n" not in str(result.exception)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["-m", "luceasync", "warm"], [str(SCRIPT)]])
def test_a_refusal_is_one_line_and_exit_code_2(words):
    command = [sys.executable, *words, "--file", "no-such-file"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "luceasync: --file no-such-file: cannot be read: " + (
        "No such file or directory\n"
    )


@contextmanager
def serving():
    """The URL of a server of the bundled model, loading yet."""
    command = [sys.executable, "-m", "luceasync", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield url_of(server)
        finally:
            server.terminate()
            server.communicate(timeout=60)


def report(*flags: str) -> dict:
    ran = CliRunner().invoke(app, ["warm", "--json", *flags], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_what_was_written_without_a_server_a_server_finds(tmp_path, monkeypatch):
    monkeypatch.setenv("LUCEASYNC_KV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LUCEASYNC_API_KEY", "key")
    rules = tmp_path / "rules.txt"
    rules.write_text("Say what a name of the standard library does. " * 30)
    offline = report("--file", str(rules))
    with serving() as url:
        online = report("--file", str(rules), "--url", url)
    assert (offline["kept"], online["already_there"]) == (1, 1)
    assert offline["written_bytes"] > 0 == online["prefilled_tokens"]
    assert online["entries"][0]["found_tokens"] == offline["prefilled_tokens"]
