"""What is broken is said, and decides the exit code; the rest is still looked at."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from luceasync.cli.doctor import Finding, examine, run_doctor
from luceasync.config import Config, ModelConfig, ServerConfig

HEALTHY = Config(server=ServerConfig(port=0))


def find(config: Config) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(config)}


def test_a_healthy_machine_passes(capsys):
    assert run_doctor(HEALTHY)
    out = capsys.readouterr().out
    for subject in ("python", "torch", "cpu", "memory", "disk", "model", "plan", "port"):
        assert subject in out


def test_a_taken_port_is_broken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = find(replace(HEALTHY, server=ServerConfig(port=port)))["port"]
    assert finding.state == "broken"
    assert f"--port {port}" in finding.words


def test_a_directory_without_a_model_is_broken_and_the_rest_still_checked(tmp_path):
    findings = find(replace(HEALTHY, model=ModelConfig(tmp_path)))
    broken = [subject for subject, finding in findings.items() if finding.state == "broken"]
    assert broken == ["model", "weights", "tokenizer"]
    assert findings["port"].state == "ok"


def test_an_unexpected_failure_is_a_finding(monkeypatch):
    def fail(directory: Path) -> None:
        raise PermissionError("no entry")

    monkeypatch.setattr("shutil.disk_usage", fail)
    assert find(HEALTHY)["disk"] == Finding("disk", "broken", "PermissionError: no entry")


@pytest.mark.parametrize("broken", [True, False])
def test_only_what_is_broken_fails(broken, monkeypatch, capsys):
    findings = [Finding("a", "note", "odd"), Finding("b", "broken" if broken else "ok", "[b]")]
    monkeypatch.setattr("luceasync.cli.doctor.examine", lambda config: iter(findings))
    assert run_doctor(HEALTHY) is not broken
    assert "[b]" in capsys.readouterr().out
