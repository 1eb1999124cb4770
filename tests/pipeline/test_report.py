"""`luceasync plan` shows what would be built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from luceasync.config import Config, EngineConfig, ModelConfig, PlacementConfig
from luceasync.errors import ModelError, PlacementError
from luceasync.models.files import read_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.report import plan_report


@pytest.fixture
def config(tiny_dir: Path) -> Config:
    return Config(
        model=ModelConfig(tiny_dir, dtype="fp32"),
        placement=PlacementConfig(("cpu:0", "cpu:1"), (3.0, 1.0)),
        engine=EngineConfig(parallel=2, max_ctx_tokens=200, prefill_chunk_tokens=128),
    )


def test_a_plan_is_what_the_config_asks(config: Config):
    report = plan_report(config)
    plan = report.plan
    assert report.spec == read_spec(config.model.model_dir)
    assert [(s.device, s.begin, s.end) for s in plan.shards] == [("cpu:0", 0, 3), ("cpu:1", 3, 4)]
    assert (plan.parallel, plan.max_ctx_tokens) == (2, 200)
    assert plan.precision == Precision.of("fp32")
    assert (plan.prefill_chunk_tokens, plan.reasons) == (128, ())


def test_each_shard_is_told_beside_its_device(config: Config):
    report = plan_report(config)
    for shown, shard in zip(report.shards, report.plan.shards, strict=True):
        assert shown.shard is shard
        assert shown.lane_bytes == report.plan.lane_bytes(shard)
        assert shown.device_bytes == report.plan.device_bytes(shard) < shown.free_bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_auto_is_the_devices_dtype(config: Config, monkeypatch, dtype: str):
    monkeypatch.setattr("luceasync.pipeline.report.default_dtype", lambda devices: dtype)
    auto = replace(config, model=replace(config.model, dtype="auto"))
    assert plan_report(auto).plan.precision == Precision.of(dtype)
    assert plan_report(config).plan.precision == Precision.of("fp32")


def test_a_directory_that_is_no_model_is_refused(config: Config, tmp_path: Path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        plan_report(replace(config, model=ModelConfig(tmp_path)))


def test_a_placement_that_cannot_be_is_refused(config: Config):
    placement = PlacementConfig(("cpu:0", "cpu"))
    with pytest.raises(PlacementError, match="--target-devices cpu:0,cpu: cpu:0 is named twice"):
        plan_report(replace(config, placement=placement))
