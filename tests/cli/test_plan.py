"""The plan as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from luceasync.cli.plan import run_plan
from luceasync.config import CacheConfig, Config, DraftConfig, EngineConfig, PlacementConfig

CONFIG = Config(
    placement=PlacementConfig(devices=("cpu:0", "cpu:1"), layer_split=(0.5, 0.5)),
    engine=EngineConfig(parallel=2, max_ctx_tokens=256),
)


def test_json_has_every_shard_in_bytes(capsys):
    run_plan(CONFIG, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["parallel"], printed["max_ctx_tokens"]) == (2, 256)
    first, last = printed["shards"]
    assert (first["begin"], first["end"], last["end"]) == (0, last["begin"], printed["num_layers"])
    lane_bytes = first["state_bytes_per_lane"] + first["verify_bytes_per_lane"]
    assert first["lane_bytes"] == 256 * first["lane_bytes_per_token"] + lane_bytes
    assert first["device_bytes"] < first["free_bytes"]


def test_the_table_has_every_shard(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    run_plan(CONFIG, as_json=False)
    out = capsys.readouterr().out
    assert "2 lanes of 256 tokens" in out
    assert "cpu:0" in out
    assert "cpu:1" in out
    [cells] = [line.split() for line in out.splitlines() if line.startswith("cpu:1")]
    assert len(cells) == 3 + 2 * 6  # the device, a span, and six sizes with their units


@pytest.fixture
def cached(tmp_path) -> Config:
    cache = CacheConfig(memory_bytes=2**30, cache_dir=tmp_path / "cache", budget_bytes=2**32)
    return replace(CONFIG, cache=cache)


def test_the_prefix_cache_is_part_of_the_plan(cached, capsys):
    run_plan(cached, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    cache = printed["prefix_cache"]
    assert (cache["memory_bytes"], cache["disk_bytes"]) == (2**30, 2**32)
    assert cache["bytes_per_token"] == sum(s["lane_bytes_per_token"] for s in printed["shards"])
    assert cache["state_bytes"] == sum(s["state_bytes_per_lane"] for s in printed["shards"]) > 0


def test_the_prefix_cache_is_printed(cached, capsys):
    run_plan(cached, as_json=False)
    out = capsys.readouterr().out
    assert "prefix cache: 1.0 GiB of memory" in out
    assert "- 4.0 GiB in" in out


def test_without_a_directory_there_are_no_disk_bytes(capsys):
    run_plan(CONFIG, as_json=True)
    assert json.loads(capsys.readouterr().out)["prefix_cache"]["disk_bytes"] is None


def test_the_drafter_is_part_of_the_plan(capsys):
    run_plan(replace(CONFIG, draft=DraftConfig(draft_dir="none")), as_json=True)
    assert json.loads(capsys.readouterr().out)["drafter"] is None
    run_plan(CONFIG, as_json=True)
    drafter = json.loads(capsys.readouterr().out)["drafter"]
    assert drafter["draft_dir"] == str(CONFIG.drafter_dir)
    assert drafter["weight_bytes"] > 0
    run_plan(CONFIG, as_json=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"drafter on {drafter['device']}" in printed
    assert "16 rows per proposal" in printed
