"""Agents are set up for a server by variables, flags and files of one run, and started with it."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luceasync.cli.flags import UsageError, usage_words
from luceasync.cli.launch.agents import AGENTS, Served
from luceasync.cli.launch.run import ask, run_agent, run_launch, script, url_of
from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.errors import ConfigError, LuceasyncError
from luceasync.request import ModelCard
from luceasync.server_config import ServerConfig
from tests.server.scripted import ScriptedEngine

SERVED = Served("http://127.0.0.1:9999", "luce", 65536, thinks=True)
WITH_KEY = replace(SERVED, key="sesame")
# An agent that tells what it was given, and fails with 3.
TELLS = """
import json, os, sys, urllib.request
given = {"words": sys.argv[1:], "environ": dict(os.environ), "files": {}}
for word in sys.argv[1:]:
    if os.path.exists(word):
        given["files"][word] = open(word).read()
key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
models = urllib.request.Request(os.environ["OPENAI_API_BASE"] + "/models", headers=key)
with urllib.request.urlopen(models) as answer:
    given["models"] = json.load(answer)
print(json.dumps(given))
sys.exit(3)
"""


@pytest.fixture
def fake_agent(tmp_path):
    """A folder for PATH with an agent that tells what it was given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "aider").write_text(f"#!{sys.executable}\n{TELLS}")
    (folder / "aider").chmod(0o755)
    return folder


async def launched(folder: Path, *words: str, **environ: str) -> tuple[int, dict[str, Any], str]:
    """Exit status of `luceasync launch`, what its agent told, and what was printed before."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "luceasync", "launch", *words),
        env={"PATH": str(folder), "HOME": str(folder), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, json.loads(out or "{}"), errors.decode()


async def test_an_agent_gets_its_words_and_the_servers_settings(on_port, fake_agent):
    engine = ScriptedEngine()
    engine.card = replace(engine.card, max_ctx_tokens=65536)
    config = ServerConfig(api_keys=("sesame",))
    async with on_port(engine, config) as client:
        status, given, printed = await launched(
            fake_agent,
            *("aider", "--url", f"{client.base_url}/v1", "--", "--help", "two words", "--", "-x"),
            LUCEASYNC_API_KEY="sesame",
        )
    assert status == 3
    assert given["words"][-4:] == ["--help", "two words", "--", "-x"]
    assert given["words"][:2] == ["--model", "openai/tiny"]
    assert given["environ"]["OPENAI_API_KEY"] == "sesame"
    [(path, text)] = given["files"].items()
    assert json.loads(text)["openai/tiny"]["max_input_tokens"] == 65536
    assert not Path(path).exists()
    assert "sesame" not in printed
    assert 'export OPENAI_API_KEY="$LUCEASYNC_API_KEY"' in printed


@pytest.mark.slow
async def test_a_server_starts_with_the_agent_and_ends_with_it(fake_agent):
    status, given, printed = await launched(
        fake_agent, "aider", str(BUNDLED_MODEL_DIR), "--max-ctx", "1K", "--model-name", "mine"
    )
    assert status == 3, printed
    [model] = given["models"]["data"]
    assert (model["id"], model["max_model_len"]) == ("mine", 1024)
    assert "a context of 1,024 tokens is small for aider" in printed
    with pytest.raises(LuceasyncError, match="refused"):
        ask(given["environ"]["OPENAI_API_BASE"].removesuffix("/v1"), "", AGENTS["aider"])


@pytest.mark.parametrize("name", AGENTS)
def test_settings_are_printed_as_a_script_that_runs_and_has_no_key(name, tmp_path):
    program = tmp_path / AGENTS[name].program
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; env; cat "${dir:-$HOME}"/* 2>&1; true\n')
    program.chmod(0o755)
    printed = script(AGENTS[name], WITH_KEY, ["-p", "it's $HOME"])
    assert "sesame" not in printed
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/none", "LUCEASYNC_API_KEY": "sesame"}
    ran = subprocess.run(
        ["bash", "-eu", "-c", f"export dir; {printed}"],
        env={**environ, "ANTHROPIC_API_KEY": "other", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "\n-p\nit's $HOME\n" in f"\n{ran.stdout}"
    assert SERVED.url in ran.stdout
    assert "luce" in ran.stdout and "65536" in ran.stdout
    assert "=sesame" in ran.stdout
    assert "ANTHROPIC_API_KEY" not in ran.stdout or name != "claude"


@pytest.mark.parametrize("served", [SERVED, WITH_KEY], ids=["no key", "a key"])
def test_codex_gets_a_provider_and_a_catalog(served):
    settings = AGENTS["codex"].settings(served, "/folder")
    config = tomllib.loads("\n".join(settings.flags[1::2]))
    assert set(settings.flags[::2]) == {"-c"}
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == f"{SERVED.url}/v1"
    assert ("env_key" in provider) == bool(served.key)
    [model] = json.loads(settings.files["catalog.json"])["models"]
    assert (model["slug"], model["context_window"]) == (config["model"], 65536)
    assert config["model_catalog_json"] == "/folder/catalog.json"
    assert config["model_auto_compact_token_limit"] + served.output_tokens < 65536


def test_the_room_for_an_answer_leaves_room_for_a_prompt():
    assert SERVED.output_tokens == 8192
    small = replace(SERVED, max_ctx_tokens=16384)
    assert small.output_tokens == 4096
    assert small.compact_tokens + small.output_tokens < 16384


def refused(*, agent: str = "codex", server: tuple[str, ...] = (), url: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        run_launch(agent, [], server, url, None, only_print=False)
    return str(caught.value)


def test_what_cannot_be_started_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refused(agent="cursor") == (
        "no such agent: cursor; expected one of claude, codex, opencode, aider, qwen-code, pi"
    )
    assert refused() == ("codex: not found on PATH; 'npm install -g @openai/codex' installs Codex")
    shutil.copy("/bin/true", tmp_path / "codex")
    assert refused(url="http://localhost", server=("--max-ctx", "64K")) == (
        "--max-ctx: not allowed with --url, whose server runs already"
    )
    assert refused(server=("/no/model",)).startswith("/no/model: does not exist")


def test_a_script_is_not_printed_for_a_server_that_would_be_gone(monkeypatch):
    monkeypatch.setattr("psutil.process_iter", lambda: iter(()))
    with pytest.raises(ConfigError, match="--print: shows the settings for a server that runs"):
        run_launch("codex", [], [str(BUNDLED_MODEL_DIR)], None, None, only_print=True)


@pytest.mark.parametrize(
    ("does", "status"),
    [
        ("exit 5", 5),
        ("kill -INT $PPID; kill -INT $PPID; exit 6", 6),  # Ctrl-C goes to both
        ("trap 'exit 7' TERM; kill -TERM $PPID; for i in $(seq 999); do sleep 0.01; done", 7),
        ("kill -KILL $$", 128 + signal.SIGKILL),
    ],
)
def test_signals_and_the_exit_status_are_the_agents(does, status):
    assert run_agent(["/bin/sh", "-c", does], {"PATH": "/usr/bin:/bin"}) == status


def test_without_a_server_and_a_model_there_is_nothing_to_use(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.process_iter", lambda: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path))
    shutil.copy("/bin/true", tmp_path / "codex")
    assert refused() == "no server runs here; name a model to serve, or a server with --url"


class FakeProcess:
    def __init__(self, *flags: str, **environ: str) -> None:
        self._flags, self._environ = flags, environ

    def cmdline(self) -> list[str]:
        return ["luceasync", "serve", *self._flags]

    def environ(self) -> dict[str, str]:
        return self._environ


def test_the_server_that_runs_here_is_used_with_its_key(monkeypatch, capsys):
    asked: list[tuple[str, str]] = []

    def ask(url: str, key: str, agent: object) -> tuple[Served, list[str]]:
        asked.append((url, key))
        return replace(SERVED, url=url, key=key), []

    def run(*processes: FakeProcess) -> None:
        monkeypatch.setattr("psutil.process_iter", lambda: iter(processes))
        run_launch("claude", [], (), None, None, only_print=True)

    monkeypatch.setattr("luceasync.cli.launch.run.ask", ask)
    elsewhere = FakeProcess("--port", "0")  # of another agent, with which it ends
    keyed = FakeProcess("--host", "::", "--port", "9000", LUCEASYNC_API_KEY="sesame")
    run(elsewhere, keyed)
    assert asked == [("http://[::1]:9000", "sesame")]
    assert "ANTHROPIC_BASE_URL='http://[::1]:9000'" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"several servers run here \(.*9000, .*8000\); name one"):
        run(keyed, FakeProcess())


@pytest.mark.parametrize(
    ("config", "url"),
    [
        (ServerConfig(host="0.0.0.0", port=80), "http://127.0.0.1:80"),
        (ServerConfig(host="::1", port=80), "http://[::1]:80"),
        (ServerConfig(tls_cert=Path("cert.pem")), "https://127.0.0.1:8000"),
    ],
)
def test_a_server_is_reached_from_this_machine(config, url):
    assert url_of(config) == url


async def test_what_speaks_against_a_model_is_told_before(on_port):
    engine = ScriptedEngine()
    good = replace(engine.card, max_ctx_tokens=65536, thinks=True, tool_format="qwen-json")
    async with on_port(engine) as client:

        async def asked(card: ModelCard, agent: str = "claude") -> tuple[Served, list[str]]:
            engine.card = card
            return await asyncio.to_thread(ask, str(client.base_url), "", AGENTS[agent])

        served, warnings = await asked(good)
        assert (served.model, served.max_ctx_tokens, served.thinks) == ("tiny", 65536, True)
        assert warnings == []
        _, [warning] = await asked(replace(good, max_ctx_tokens=16384))
        assert "a context of 16,384 tokens is small for Claude Code" in warning
        _, [warning] = await asked(replace(good, tool_format=""))
        assert "how tiny calls tools is not known" in warning
        assert (await asked(replace(good, tool_format=""), "aider"))[1] == []
        with pytest.raises(LuceasyncError, match="has no chat template"):
            await asked(replace(good, takes_chats=False))


async def test_a_server_that_loads_is_waited_for(on_port):
    engine = ScriptedEngine()
    engine.loading = True
    async with on_port(engine) as client:
        asking = asyncio.create_task(
            asyncio.to_thread(ask, str(client.base_url), "", AGENTS["aider"])
        )
        await asyncio.sleep(0.3)
        assert not asking.done()
        engine.loading = False
        served, _ = await asking
    assert served.model == "tiny"


async def test_a_server_that_refuses_the_key_is_told(on_port):
    async with on_port(ScriptedEngine(), ServerConfig(api_keys=("sesame",))) as client:
        with pytest.raises(LuceasyncError, match="/v1/models: status 401"):
            await asyncio.to_thread(ask, str(client.base_url), "other", AGENTS["aider"])


def test_a_flag_that_no_server_has_is_refused():
    words = ["m", "--contxt", "4K"]
    with pytest.raises(UsageError) as caught:
        run_launch("pi", [], words, None, None, only_print=True)
    told = usage_words(caught.value, words)
    assert told.startswith("no such flag: --contxt; ")
    assert told.endswith("luceasync serve -h lists all flags")
