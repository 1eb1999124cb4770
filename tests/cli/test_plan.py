"""The plan as a table and as JSON."""

from __future__ import annotations

import json

from luceasync.cli.plan import run_plan
from luceasync.config import Config, EngineConfig, PlacementConfig

CONFIG = Config(
    placement=PlacementConfig(devices=("cpu:0", "cpu:1"), layer_split=(0.5, 0.5)),
    engine=EngineConfig(parallel=2, max_ctx_tokens=256),
)


def test_json_tells_every_shard_in_bytes(capsys):
    run_plan(CONFIG, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["parallel"], told["max_ctx_tokens"]) == (2, 256)
    first, last = told["shards"]
    assert (first["begin"], first["end"], last["end"]) == (0, last["begin"], told["num_layers"])
    lane_bytes = 256 * first["lane_bytes_per_token"] + first["state_bytes_per_lane"]
    assert first["lane_bytes"] == lane_bytes
    assert first["device_bytes"] < first["free_bytes"]


def test_the_table_tells_it_to_a_person(capsys):
    run_plan(CONFIG, as_json=False)
    out = capsys.readouterr().out
    assert "2 lanes of 256 tokens" in out
    assert "cpu:0" in out
    assert "cpu:1" in out
