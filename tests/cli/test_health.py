"""The health command finds the server that runs here, and asks it whether it is ready."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import psutil
import pytest

from luceasync.cli.health import run_health, running_server, words_of_serve
from luceasync.server.app import create_app
from luceasync.server.http.listener import listen, run_hypercorn, tls_context
from luceasync.server_config import ServerConfig
from tests.server.scripted import ScriptedEngine
from tests.server.secure import SECURE


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig(port=0),
        ServerConfig(host="0.0.0.0", port=0, api_keys=("sesame",), allow_hosts=("chat.lan",)),
        replace(SECURE, port=0),
    ],
    ids=["plain", "behind a key and a name", "TLS"],
)
async def test_a_server_is_healthy_once_it_is_ready(config, capsys):
    engine = ScriptedEngine()
    engine.loading = True
    listener, closed = listen(config), asyncio.Event()
    config = replace(config, port=listener.getsockname()[1])
    async with asyncio.TaskGroup() as tasks:
        serving = run_hypercorn(create_app(engine, config), listener, closed, tls_context(config))
        tasks.create_task(serving)
        loading = await asyncio.to_thread(run_health, config)
        engine.loading = False
        ready = await asyncio.to_thread(run_health, config)
        closed.set()
    assert (loading, ready) == (False, True)
    assert not await asyncio.to_thread(run_health, config)
    assert "does not answer" in capsys.readouterr().out


class FakeProcess:
    def __init__(self, command: str, **environ: str) -> None:
        self._command, self._environ = command.split(), environ

    def cmdline(self) -> list[str]:
        return self._command

    def environ(self) -> dict[str, str]:
        if "other" in self._environ:
            raise psutil.AccessDenied
        return self._environ


SERVE = FakeProcess(
    f"python /opt/bin/luceasync serve /models/m --port 9000 --tls-cert {SECURE.tls_cert}",
    LUCEASYNC_HOST="0.0.0.0",
    LUCEASYNC_TLS_KEY=str(SECURE.tls_key),
)
INIT = FakeProcess(f"/sbin/docker-init -- {' '.join(SERVE.cmdline()[1:])}", **SERVE.environ())
OTHERS = [FakeProcess("luceasync health"), FakeProcess("luceasync serve", other="yes")]


@pytest.mark.parametrize("processes", [[SERVE], [INIT, SERVE], [*OTHERS, SERVE]])
def test_the_server_that_runs_is_known_by_its_own_flags_and_variables(processes):
    server = running_server(processes)
    assert server is not None
    assert (server.host, server.port, server.tls_cert) == ("0.0.0.0", 9000, SECURE.tls_cert)


@pytest.mark.parametrize("processes", [[], OTHERS, [SERVE, FakeProcess("luceasync serve")]])
def test_none_or_several_servers_are_not_guessed_at(processes):
    assert running_server(processes) is None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python -m luceasync serve --port 1", ["--port", "1"]),
        ("/opt/luceasync/bin/luceasync serve", []),
        ("luceasync", None),
        ("luceasync health", None),
        ("vi serve luceasync", None),
    ],
)
def test_the_words_of_a_server(command, words):
    assert words_of_serve(command.split()) == words
