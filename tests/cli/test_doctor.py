"""Broken findings decide the exit code, and do not stop other checks."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.util import cache_from_source
from itertools import islice
from pathlib import Path

import pytest
import torch

from luceasync.cli.doctor import Finding, examine, run_doctor
from luceasync.config import CacheConfig, Config, DraftConfig, ModelConfig
from luceasync.models.files import ModelFiles
from luceasync.models.precision import Precision
from luceasync.pipeline import gpu_platform
from luceasync.prefix_cache.namespace import facts_of, named
from luceasync.server_config import ServerConfig

HEALTHY = Config(server=ServerConfig(port=0))


def find(config: Config) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(config)}


def test_a_healthy_machine_passes(capsys):
    assert run_doctor(HEALTHY)
    out = capsys.readouterr().out
    for subject in ("python", "torch", "cpu", "memory", "disk", "model", "plan", "port"):
        assert subject in out


@pytest.mark.parametrize("is_kept", [True, False])
def test_bytecode_that_is_not_kept_is_noted(is_kept: bool, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    path = Path(cache_from_source(torch.__file__))
    path.parent.mkdir(parents=True)
    if is_kept:
        path.touch()
    python, following = islice(examine(HEALTHY), 2)
    assert python.state == "ok"
    assert (following.subject == "bytecode") is not is_kept


def test_a_taken_port_is_broken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = find(replace(HEALTHY, server=ServerConfig(port=port)))["port"]
    assert finding.state == "broken"
    assert f"--port {port}" in finding.words


def test_a_public_port_without_keys_is_noted():
    finding = find(replace(HEALTHY, server=ServerConfig(host="0.0.0.0", port=0)))["port"]
    assert (finding.state, "no API key is set" in finding.words) == ("note", True)


def test_a_directory_without_a_model_is_broken_and_other_checks_still_run(tmp_path):
    findings = find(replace(HEALTHY, model=ModelConfig(tmp_path)))
    broken = [subject for subject, finding in findings.items() if finding.state == "broken"]
    assert broken == ["model", "weights", "tokenizer"]
    assert findings["port"].state == "ok"


def test_truncated_weights_are_broken_in_both_findings(tmp_path):
    for path in HEALTHY.model.model_dir.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).symlink_to(path)
    weights = (HEALTHY.model.model_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-7])
    findings = find(replace(HEALTHY, model=ModelConfig(tmp_path)))
    broken = {subject: f.words for subject, f in findings.items() if f.state == "broken"}
    assert broken.keys() == {"model", "weights"}
    assert all("truncated" in words for words in broken.values())


def test_a_cache_directory_need_not_exist_yet(tmp_path):
    config = replace(HEALTHY, cache=CacheConfig(cache_dir=tmp_path / "a" / "b"))
    assert "broken" not in {finding.state for finding in find(config).values()}
    assert f"in {tmp_path}" in find(config)["cache"].words
    assert not (tmp_path / "a").exists()


def test_a_file_is_not_a_cache_directory(tmp_path):
    (tmp_path / "file").touch()
    finding = find(replace(HEALTHY, cache=CacheConfig(cache_dir=tmp_path / "file")))["cache"]
    assert (finding.state, str(tmp_path / "file") in finding.words) == ("broken", True)


@pytest.mark.parametrize(("mode", "is_noted"), [(0o700, False), (0o750, True)])
def test_a_cache_accessible_to_others_is_noted(tmp_path, mode, is_noted):
    tmp_path.chmod(mode)
    findings = find(replace(HEALTHY, cache=CacheConfig(cache_dir=tmp_path)))
    assert ("cache mode" in findings) == is_noted


def test_another_users_cache_is_noted_with_its_owner(tmp_path, monkeypatch):
    config = replace(HEALTHY, cache=CacheConfig(cache_dir=tmp_path))
    assert "cache owner" not in find(config)
    owner_id = tmp_path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner_id + 1)
    words = f"user {owner_id} owns it, this is user {owner_id + 1}"
    assert words in find(config)["cache owner"].words
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert words in find(config)["cache"].words


def test_a_missing_drafter_is_reported(tmp_path):
    config = replace(HEALTHY, draft=DraftConfig(draft_dir="none"))
    assert find(config)["drafter"].words.startswith("none")
    broken = find(replace(HEALTHY, draft=DraftConfig(draft_dir=tmp_path)))["model"]
    assert (broken.state, str(tmp_path) in broken.words) == ("broken", True)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton", "numba-cuda"])
def test_missing_gpu_compilers_are_noted(name, monkeypatch):
    def missing(asked: str) -> str:
        raise PackageNotFoundError(asked)

    monkeypatch.setattr("luceasync.cli.doctor.version", missing)
    assert find(HEALTHY)[name].state == "note"
    assert "not installed" in find(HEALTHY)[name].words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("product", "kind", "state", "words"),
    [
        ("NVIDIA H200", "sm_90", "ok", "8.0 GiB free of 24.0 GiB"),
        ("NVIDIA GeForce RTX 3090", "sm_86", "note", "luceasync has not been run on one yet; its"),
        ("AMD Radeon RX 580", "gfx803", "note", "nor its kernels compiled for gfx803"),
    ],
)
def test_an_untested_card_is_noted(monkeypatch, product, kind, state, words):
    gpu = gpu_platform.FoundGpu("cuda:0", product, kind, 8 << 30, 24 << 30)
    monkeypatch.setattr(gpu_platform, "found_gpus", lambda: [gpu])
    found = find(HEALTHY)["cuda:0"]
    assert found.state == state
    assert product in found.words and words in found.words


def test_servers_that_share_no_nodes_are_told_apart_by_what_they_depend_on(tmp_path):
    store = tmp_path / "store"
    weights = [HEALTHY.model.model_dir / "model.safetensors"]
    files = ModelFiles(HEALTHY.model.model_dir)
    for dtype in ("fp32", "bf16"):
        facts = facts_of(weights, files.spec, Precision.of(dtype), None)
        (store / named(facts)).mkdir(parents=True)
        (store / named(facts) / "namespace.json").write_text(json.dumps(facts))
    (store / "ab" / "cd").mkdir(parents=True)
    (store / "ab" / "cd" / "x.safetensors").write_bytes(b"x")
    cache = CacheConfig(cache_dir=tmp_path / "cache", store_url=f"file://{store}")
    config = replace(HEALTHY, cache=cache, model=replace(HEALTHY.model, dtype="fp32"))
    told = [each for each in examine(config) if each.subject == "store"]
    assert told[0].words.endswith(": 3 namespaces")
    assert "this server's, there" in told[1].words and told[1].words != told[2].words
    others = sorted(each.words.partition(": ")[2] for each in told[2:])
    assert others == ["kv_dtype bf16, fp32 here", "no server has said what it depends on"]
