"""Which drafter a config asks for, what it takes up, and which options are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.errors import ConfigError, PlacementError
from luceasync.models.files import read_spec
from luceasync.models.ops import TorchOps
from luceasync.models.precision import Precision
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.offer import offer_of
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.dflash.draft import open_network
from luceasync.speculation.dflash.draft_config import adjusted, read_draft_spec
from luceasync.speculation.dflash.features import FeatureRing, FeatureSpec
from luceasync.speculation.dflash.placement import (
    copied_shapes,
    footprint_of,
    plan_with_drafter,
    ring_capacity,
)
from tests import tiny
from tests.processes import backend_program

pytestmark = pytest.mark.usefixtures("forked_backends")

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 100}
CPU = offer_of("cpu:0", 2**33)
BACKEND = "a luceasync-backend"


@pytest.fixture
def config(tiny_dir: Path, tmp_path: Path) -> Config:
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config())
    return Config(
        model=ModelConfig(tiny_dir, dtype="fp32"),
        placement=PlacementConfig(("cpu:0", "cpu:1")),
        engine=EngineConfig(parallel=2, max_ctx_tokens=256),
        draft=DraftConfig(draft_dir=draft_dir),
    )


def asking(config: Config, **draft) -> Config:
    return replace(config, draft=replace(config.draft, **draft))


def test_a_drafter_goes_to_the_targets_last_device(config):
    report, drafter = plan_with_drafter(config)
    first, last = report.plan.shards[0].device, report.plan.shards[-1].device
    assert drafter.device.name == last != first
    assert report.plan.verify_rows == (2, 4, 8)
    assert report.drafter == drafter.footprint(report.spec, Precision.of("fp32"))


def test_another_device_and_a_tree_can_be_asked_for(config):
    asked = asking(config, device="cpu:0", ddtree=True, ddtree_budget=9, block=6)
    report, drafter = plan_with_drafter(asked)
    assert drafter.device.name == "cpu:0"
    assert drafter.shapes == (
        RoundShape(6, 9),
        RoundShape(6),
        RoundShape(4),
        RoundShape(3),
        RoundShape(2),
    )
    assert report.plan.verify_rows == (2, 3, 4, 6, 10)


def test_without_a_drafter_nothing_is_planned_for_one(config):
    report, drafter = plan_with_drafter(asking(config, draft_dir="none"))
    assert drafter is None and report.drafter is None
    assert report.plan.verify_rows == ()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"block": 4}, "--draft-block 4: it needs a drafter"),
        ({"device": "cpu"}, "--draft-device cpu: it needs a drafter"),
        ({"ddtree": True}, "--ddtree on: it needs a drafter"),
        ({"ctx_max_tokens": 64}, "--draft-ctx-max 64: it needs a drafter"),
        ({"ipc_bin": Path("/x")}, "--draft-ipc-bin /x: it needs a drafter"),
    ],
)
def test_options_of_a_drafter_that_is_not_there_are_refused(config, option, words):
    with pytest.raises(ConfigError, match=words):
        plan_with_drafter(asking(config, draft_dir="none", **option))


@pytest.mark.parametrize(("draft", "lookup"), [("none", "on"), ("lookup", "off")])
def test_flags_that_contradict_each_other_are_refused(config, draft, lookup):
    with pytest.raises(
        ConfigError, match=f"^--draft-lookup {lookup}: not allowed with --draft {draft}"
    ):
        plan_with_drafter(asking(config, draft_dir=draft, lookup=lookup))


def test_what_cannot_be_honoured_names_its_flag(config, tmp_path):
    with pytest.raises(ConfigError, match="--draft-block 9: this drafter proposes blocks of 2 to"):
        plan_with_drafter(asking(config, block=9))
    with pytest.raises(PlacementError, match="--draft-device tpu: 'tpu' is not a device"):
        plan_with_drafter(asking(config, device="tpu"))
    with pytest.raises(ConfigError, match="expected a DFlash drafter's directory or GGUF file"):
        plan_with_drafter(asking(config, draft_dir=tmp_path / "nothing"))


@pytest.mark.slow
@pytest.mark.covered(0)
def test_a_drafter_may_have_a_process_of_its_own(config, tmp_path):
    program = backend_program(tmp_path, ["hip:0=cpu:0", "cpu:1=cpu:0"])
    report, drafter = plan_with_drafter(asking(config, device="hip:0", ipc_bin=program))
    assert (drafter.device.name, drafter.device.is_here) == ("hip:0", False)
    assert drafter.program == program
    assert report.drafter.device == drafter.device
    _, drafter = plan_with_drafter(asking(config, ipc_bin=program))
    assert drafter.device.name == report.plan.devices[-1].name  # as in this process


@pytest.mark.slow
@pytest.mark.covered(0)
def test_a_device_is_planned_once_for_both_of_its_processes(config, tmp_path):
    program = backend_program(tmp_path)
    together, _ = plan_with_drafter(asking(config, device="cpu:0"))
    apart, drafter = plan_with_drafter(asking(config, device="cpu:0", ipc_bin=program))
    assert not drafter.device.is_here
    lanes = [(r.plan.parallel, r.plan.max_ctx_tokens) for r in (together, apart)]
    assert lanes[0] == lanes[1]


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize(
    ("script", "device", "words"),
    [
        (
            None,
            None,
            "--draft-ipc-bin {path}: not an executable file; expected a luceasync-backend",
        ),
        ("exit 3", None, "--draft-ipc-bin {path}: no answer: .* ended with status 3"),
        (BACKEND, "hip:7", "--draft-device hip:7: this torch build .* not hip \\({path}\\)"),
        (BACKEND, "hip:-1", "--draft-device hip:-1: "),
    ],
)
def test_a_process_that_cannot_be_had_is_refused(config, tmp_path, script, device, words):
    path = tmp_path / "program"
    if script == BACKEND:
        path = backend_program(tmp_path)
    elif script is not None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    with pytest.raises(PlacementError, match=words.format(path=path)) as caught:
        plan_with_drafter(asking(config, ipc_bin=path, device=device))
    assert "\n" not in str(caught.value)


def test_a_device_of_another_build_needs_a_program(config):
    with pytest.raises(PlacementError, match=r"--draft-device hip:0: .* --draft-ipc-bin names a"):
        plan_with_drafter(asking(config, device="hip:0"))


@pytest.mark.parametrize("fields", [{}, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("ctx_max_tokens", [None, 64])
def test_planned_bytes_are_those_that_are_allocated(tiny_dir, tmp_path, fields, ctx_max_tokens):
    num_lanes, max_ctx = 3, 512
    target = read_spec(tiny_dir)
    folder = tiny.save_draft(tmp_path / "draft", tiny.draft_config(**fields))
    spec = adjusted(read_draft_spec(folder, target), ctx_max_tokens=ctx_max_tokens)
    place = {"dtype": torch.float32, "device": torch.device("cpu")}
    sizes = {"num_lanes": num_lanes, "max_ctx_tokens": max_ctx}
    network = open_network(folder, spec, TorchOps(), lambda tokens: tokens, **sizes, **place)
    ring = FeatureRing(
        FeatureSpec(spec.taps, spec.hidden_size),
        num_lanes=num_lanes,
        capacity_tokens=ring_capacity(spec, max_ctx),
        dtype=torch.float32,
        platform=CpuPlatform(),
    )
    footprint = footprint_of(spec, CPU, target, 4)
    lanes_bytes = (num_lanes + 1) * (max_ctx * footprint.token_bytes + footprint.lane_bytes)
    allocated = network.num_bytes + ring.num_bytes
    assert allocated == pytest.approx(footprint.weight_bytes + lanes_bytes, rel=0.25)
    assert allocated <= 1.02 * (footprint.weight_bytes + lanes_bytes)


def test_a_paged_lane_takes_up_the_same_at_8k_and_at_131k(config, tmp_path: Path):
    """Its drafter's context and features included."""
    longer = shutil.copytree(config.model.model_dir, tmp_path / "longer")
    config = replace(config, model=replace(config.model, model_dir=longer))
    path = longer / "config.json"
    of_model = json.loads(path.read_text()) | {"max_position_embeddings": 131072}
    path.write_text(json.dumps(of_model))
    found, whole = set(), set()
    for max_ctx in (8192, 131072):
        asked = replace(
            config,
            engine=EngineConfig(parallel=1, max_ctx_tokens=max_ctx),
            cache=CacheConfig(memory_bytes=1 << 30),
        )
        plan = plan_with_drafter(asked)[0].plan
        whole.add(sum(map(plan.device_bytes, plan.shards)))
        report, drafter = plan_with_drafter(replace(asked, kvflash=KvFlashConfig(1024)))
        network = open_network(
            drafter.draft_dir,
            drafter.spec,
            TorchOps(),
            lambda tokens: tokens,
            num_lanes=1,
            max_ctx_tokens=max_ctx,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        plan = report.plan
        num_bytes = sum(map(plan.device_bytes, plan.shards))
        found.add((num_bytes, network.num_bytes, ring_capacity(drafter.spec, max_ctx)))
    assert len(found) == 1 and len(whole) == 2


@pytest.mark.parametrize(
    ("draft", "devices", "copies"),
    [
        ({}, ["cpu:0", "cpu:1"], True),
        ({}, ["cuda:0"], False),
        ({}, ["cpu:0", "cuda:0"], False),
        ({"lookup": "on"}, ["cuda:0"], True),
        ({"draft_dir": "lookup"}, ["cuda:0"], True),
        ({"draft_dir": "none"}, ["cpu:0"], False),
        ({"lookup": "off"}, ["cpu:0"], False),
    ],
)
def test_proposals_are_copied_on_cpus_and_where_the_config_says_so(draft, devices, copies) -> None:
    config = Config(draft=DraftConfig(**draft))
    found = copied_shapes(config, None, [offer_of(name, 2**33) for name in devices])
    assert bool(found) == copies
