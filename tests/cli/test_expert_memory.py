"""`--expert-memory` from outside, on devices that have slots as a GPU has: what a plan says, and
what is refused in one line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from luceasync.cli.app import main
from luceasync.models.files import parse_spec
from luceasync.pipeline import devices
from tests.kernels.experts_double import SlottedPlatform

EXPERTS, CHOSEN, LAYERS, INNER, HIDDEN = 16, 2, 4, 512, 512
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
DENSE = CONFIG | {"model_type": "qwen3", "intermediate_size": 512}
SLOT_BYTES = LAYERS * 3 * HIDDEN * INNER * 4  # of one in each layer, in float32
ENOUGH = CHOSEN * 2 * SLOT_BYTES  # for two lanes


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`plan(CONFIG, "--flag", ..)`: the exit status of `luceasync plan`, and what it printed."""
    monkeypatch.setattr(devices, "open_platform", SlottedPlatform)

    def run(config: dict[str, object], *flags: str) -> tuple[int, str, str]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        write_header(tmp_path / "model.safetensors", config)
        arguments = [str(tmp_path), "--dtype", "fp32", "--target-devices", "cpu:0"]
        command = ["luceasync", "plan", *arguments, "--max-ctx", "512", *flags]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setenv("GOMP_SPINCOUNT", "20000")  # which it sets for itself else
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def write_header(path: Path, config: dict[str, object]) -> None:
    """The weights of a model as a file that is a hole behind its header."""
    at, header = 0, {}
    for name, shape in parse_spec(config).shapes().items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def test_a_plan_says_how_many_slots_there_are_and_what_the_bus_allows(plan) -> None:
    asked = ["--parallel", "2", "--expert-memory"]
    code, out, _ = plan(CONFIG, *asked, str(8 * SLOT_BYTES))
    assert code == 0
    assert f"8 slots for the {EXPERTS} experts of a layer" in out
    row_bytes = CHOSEN * SLOT_BYTES
    for hits in (50, 75, 90):
        rate = 25e9 / row_bytes / (1 - hits / 100)
        assert f"{rate:.0f} tokens/s at {hits}% hits" in " ".join(out.split())
    code, out, _ = plan(CONFIG, *asked, "auto", "--json")
    [shard] = json.loads(out)["shards"]
    assert code == 0 and shard["expert_slots"] == EXPERTS
    assert shard["expert_host_bytes"] == EXPERTS * SLOT_BYTES


@pytest.mark.parametrize(
    ("config", "num_bytes", "words"),
    [
        (DENSE, str(ENOUGH), "this model has no experts that can wait in host memory"),
        (CONFIG, str(ENOUGH - 1), f"3 slots a layer, but 2 lanes may choose 4 experts; at least "
         f"{ENOUGH} bytes"),
        (CONFIG, "0", "'0' is not allowed; allowed: auto, or an integer number of bytes"),
        (CONFIG, "most", "'most' is not allowed; allowed: auto, or an integer number of bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_and_exit_2(plan, config, num_bytes: str, words: str) -> None:
    code, out, err = plan(config, "--parallel", "2", "--expert-memory", num_bytes)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("luceasync: --expert-memory") and words in err


def test_experts_that_exceed_host_memory_are_one_line_and_exit_2(plan, monkeypatch) -> None:
    free = EXPERTS * SLOT_BYTES - 1
    found = SimpleNamespace(available=free, total=free)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    code, _, err = plan(CONFIG, "--parallel", "2", "--expert-memory", str(ENOUGH))
    assert (code, err.count("\n")) == (2, 1)
    assert f"all experts take {free + 1} bytes of host memory, which has {free} free" in err
