"""Every bench command runs, on models that are small enough for a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from luceasync.bench import serve_beside, speculation
from luceasync.cli.app import app
from luceasync.errors import ConfigError, PlacementError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are not frozen: all that this process has imported and collected would be looked
    through for each of them.
    """
    monkeypatch.setattr("luceasync.bench.model.gc", SimpleNamespace(unfreeze=lambda: None))
    monkeypatch.setattr("luceasync.bench.model.freeze_heap", lambda: None)


def rows_of(*words: str) -> list[dict[str, object]]:
    """The rows of all tables that a command prints."""
    ran = CliRunner().invoke(app, ["bench", *words, "--json"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert "machine" in lines[0]
    return [line for line in lines if "table" in line]


@pytest.mark.slow
def test_decode_has_a_row_for_each_model_and_number_of_lanes() -> None:
    rows = rows_of(
        *("decode", "--models", "small,small-hybrid:Q8_0", "--dtype", "fp32"),
        *("--contexts", "64", "--lanes", "1,2", "--steps", "2", "--rounds", "1"),
    )
    assert [(row["model"], row["lanes, context"]) for row in rows] == [
        (model, f"{lanes} at 64") for model in ("small", "small-hybrid:Q8_0") for lanes in (1, 2)
    ]
    assert all(row["step"] > 0 and row["limit"] > 0 for row in rows)


@pytest.mark.slow
def test_prefill_has_a_row_for_each_length() -> None:
    rows = rows_of("prefill", "--prompts", "64,128", "--dtype", "fp32", "--rounds", "1")
    assert [row["tokens"] for row in rows] == [64, 128]
    assert all(row["TFLOP/s"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.covered(0)
@pytest.mark.parametrize("shape", ["small-hybrid", "small"])
def test_speculation_compares_verify_passes_and_rounds_with_steps(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "NUM_WARMUPS", 1)
    monkeypatch.setattr(speculation, "NUM_IN_A_ROW", 2)
    sizes = ("--contexts", "64", "--lanes", "1", "--dtype", "fp32", "--rounds", "1")
    verify, rounds, in_a_row = rows_of("speculation", "--shape", shape, *sizes)
    assert verify["chain of 16"] > 0 and verify["tree of 60"] > 0
    assert rounds["block 16"] > 0 and rounds["block 16, tree 60"] > 0
    assert in_a_row["block 16"] > 0


@pytest.mark.slow
def test_speculation_compares_copies_with_plain_decoding_by_kind_of_answer() -> None:
    sizes = ("--questions", "1", "--max-tokens", "8", "--dtype", "fp32")
    rows = rows_of("speculation", "--only", "edits", "--kinds", "rewrite,code,prose", *sizes)
    assert [row["answers"] for row in rows] == ["whole rewrite", "new code", "prose"]
    assert all(row["tau"] >= 1 and row["equal texts"] == "1 of 1" for row in rows)


@pytest.mark.slow
def test_restore_finds_the_prompt_again_in_memory_and_on_disk() -> None:
    sizes = ("--tokens", "512", "--dtype", "fp32", "--steps", "4", "--rounds", "1")
    rows = rows_of("restore", "--shape", "small-hybrid", *sizes)
    assert next(row["stream"] for row in rows if "stream" in row) == "alone"
    restarts = [row for row in rows if "files in" in row]
    assert [row["files in"] for row in restarts] == ["page cache", "disk"]
    assert all(row["restored"] > 0.8 and row["of the better"] > 0 for row in restarts)


@pytest.mark.slow
def test_paging_compares_pools_with_whole_contexts() -> None:
    sizes = ("--context", "1024", "--pool", "448", "--lanes", "1", "--dtype", "fp32")
    rows = rows_of("paging", *sizes, "--steps", "8", "--rounds", "1", "--turns", "1", "--restart")
    [step] = [row for row in rows if "step" in row]
    assert step["lru"] > 0 and step["qk"] > 0
    turns = [(row["pages for"], row["turn"]) for row in rows if "turn" in row]
    assert turns == [("all", "1"), ("448", "1"), ("all", "restart"), ("448", "restart")]
    assert [row["restored"] > 0.8 for row in rows if row.get("turn") == "restart"] == [True, True]


@pytest.mark.slow
def test_serve_counts_every_token() -> None:
    rows = rows_of("serve", "--streams", "2", "--tokens", "8", "--rate", "200")
    assert [row["streams"] for row in rows] == [2, 2, 2]
    assert rows[-1]["events/s"] > 0


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are measured without a first time that does not count, which starts one more."""
    monkeypatch.setattr(
        serve_beside,
        "interleave",
        lambda variants, rounds: {name: [run()] for name, run in variants.items()},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_serve_tells_how_long_a_question_waits_beside_long_prompts() -> None:
    sizes = ("--dtype", "fp32", "--sentences", "20", "--rounds", "1")
    rows = rows_of("serve", "--only", "question", *sizes)
    assert [row["what"] for row in rows][:3] == [
        "first token, alone",
        "first token, beside one long prompt",
        "first token, beside three",
    ]
    assert all(row["this"] > 0 for row in rows)
    assert rows[-1]["what"] == "the same, processor time"


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_serve_tells_what_a_request_and_a_start_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_beside, "NUM_REQUESTS", 10)
    rows = rows_of("serve", "--only", "request,start", "--dtype", "fp32", "--rounds", "1")
    assert [row["what"] for row in rows] == 2 * ["time", "processor time"]
    request_ms, start_ms = rows[0]["this"], rows[2]["this"]
    assert 0 < request_ms < start_ms


@pytest.mark.slow
def test_kernels_copies_and_hashes_a_node() -> None:
    rows = rows_of("kernels", "--only", "copies", "--tokens", "64", "--rounds", "1")
    assert {"fill", "checksums alone"} <= {row["what"] for row in rows}


@pytest.mark.gpu
def test_kernels_measures_each_kind_on_a_gpu() -> None:
    rows = rows_of("kernels", "--rows", "1", "--contexts", "64", "--lanes", "1", "--rounds", "1")
    from luceasync.kernels.prefill_attention import is_hopper

    assert len({row["table"] for row in rows}) == (6 if is_hopper(0) else 5)


@pytest.mark.slow
def test_ipc_compares_one_process_with_two() -> None:
    sizes = ("--context", "64", "--prompt", "64", "--lanes", "1", "--dtype", "fp32")
    rows = rows_of("ipc", "--hops", "20", "--chunks", "2", "--steps", "2", "--rounds", "1", *sizes)
    whats = [row["what"] for row in rows if "two processes" in row]
    assert whats == ["decode, 1 lanes", "prefill, 64 tokens"]


@pytest.mark.slow
def test_a_checkout_says_the_same_as_itself() -> None:
    sizes = ("--models", "small-hybrid", "--dtype", "fp32", "--context", "130", "--rounds", "1")
    rows = rows_of("against", str(ROOT), *sizes)
    assert {"decode, 1 lane", "save", "restore"} <= {row["case"] for row in rows}
    assert {row["same answers"] for row in rows} == {"yes"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("decode", "--models", "nope"), "--models nope"),
        (("decode", "--lanes", "a"), "--lanes a"),
        (("restore", "--shape", "nope"), "--shape nope"),
        (("paging", "--only", "nope"), "--only nope"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_flag(
    words: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        CliRunner().invoke(app, ["bench", *words], catch_exceptions=False)
    assert "\n" not in str(error.value)


def test_a_device_that_is_missing_is_one_line() -> None:
    with pytest.raises(PlacementError, match="hip") as error:
        words = ["bench", "prefill", "--devices", "hip:7"]
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert "\n" not in str(error.value)
