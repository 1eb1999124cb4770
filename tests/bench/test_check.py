"""`luceasync bench check`: figures of short runs beside kept ones, and what is said of each."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from luceasync.bench import check
from luceasync.bench.check import (
    BENCHES,
    RULES,
    Compared,
    KeptFigure,
    ShortBench,
    TakenFigure,
    bench_check,
    best_of,
    compare,
    count_tests,
    cpu_words,
    figures_in,
    gpu_words,
    higher,
    kept_after,
    lower,
    read_kept,
    row_name,
    verdict_of,
)
from luceasync.bench.report import Report
from luceasync.bench.servers import Ended, run_python
from luceasync.cli.app import app
from luceasync.errors import ConfigError
from tests.children import runs

# --- the decision ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "is_lower_better", "verdict"),
    [
        (2.0, False, "same"),
        (1.61, False, "same"),  # 2 / 1.25 = 1.6
        (1.59, False, "worse"),
        (2.49, False, "same"),
        (2.51, False, "better"),
        (2.49, True, "same"),
        (2.51, True, "worse"),
        (1.59, True, "better"),
        (0.0, True, "worse"),  # no figure
        (float("nan"), True, "worse"),
        (float("inf"), False, "worse"),
    ],
)
def test_a_figure_is_worse_beyond_its_tolerance_on_the_side_that_matters(
    now: float, is_lower_better: bool, verdict: str
) -> None:
    assert verdict_of(KeptFigure(2.0, 0.25), now, is_lower_better=is_lower_better) == verdict


def test_every_figure_has_a_line_whether_kept_taken_or_both() -> None:
    kept = {name: KeptFigure(1.0, 0.1) for name in ("a, x: r", "a, gone: r", "b, x: r")}
    taken = [TakenFigure("a, x: r", 1.0, higher("r", 0.1)), TakenFigure("a, y: r", 3.0, RULE)]
    assert compare(kept, taken, {"a"}) == [
        Compared("a, x: r", KeptFigure(1.0, 0.1), 1.0, "same"),
        Compared("a, y: r", None, 3.0, "new"),
        Compared("a, gone: r", KeptFigure(1.0, 0.1), None, "missing"),
        Compared("b, x: r", KeptFigure(1.0, 0.1), None, "not run"),
    ]


RULE = higher("r", 0.1)


def test_the_better_value_of_two_runs_counts() -> None:
    ratio = lower("l", 0.1)
    first = [TakenFigure("a", 1.0, RULE), TakenFigure("b", 1.0, ratio), TakenFigure("c", 5.0, RULE)]
    second = [TakenFigure("a", 2.0, RULE), TakenFigure("b", 2.0, ratio)]
    assert [each.value for each in best_of(first, second)] == [2.0, 1.0, 5.0]


def test_keeping_replaces_the_figures_of_measured_benches_and_no_tolerance() -> None:
    kept = {
        "a, x: r": KeptFigure(1.0, 0.7),
        "a, gone: r": KeptFigure(1.0, 0.1),
        "b, x: r": KeptFigure(1.0, 0.1),
    }
    taken = [
        TakenFigure("a, x: r", 2.00004, RULE),
        TakenFigure("a, y: r", 3.0, RULE),
        TakenFigure("a, z: r", float("nan"), RULE),
    ]
    assert kept_after(kept, taken, {"a"}) == {
        "a, x: r": KeptFigure(2.0, 0.7),
        "a, y: r": KeptFigure(3.0, 0.1),
        "b, x: r": KeptFigure(1.0, 0.1),
    }


# --- what is taken from rows ----------------------------------------------------------------------


def test_a_figure_is_named_by_its_bench_its_row_and_its_column() -> None:
    bench = ShortBench("decode", (), (RULE, lower("p", 0.1, "small, 1")))
    rows = [
        {"table": "t", "model": "small", "lanes": 1, "step": 0.5, "r": 0.25, "p": 2.0},
        {"table": "t", "model": "small", "lanes": 4, "step": 0.5, "r": None, "p": 2.0},
        {"table": "t", "model": "large", "lanes": 4, "step": 0.5, "r": "13.5"},
    ]
    assert [(each.name, each.value) for each in figures_in(bench, rows)] == [
        ("decode, small, 1: r", 0.25),
        ("decode, small, 1: p", 2.0),
        ("decode, large, 4: r", 13.5),
    ]


def test_a_row_that_begins_with_a_value_has_no_name() -> None:
    assert row_name({"table": "t", "rate": 1.0, "what": "x"}) == ""


def test_tests_are_counted_from_the_last_line() -> None:
    said = "2 failed here\n====\n2 failed, 70 passed, 3 skipped, 900 deselected, 1 error in 9.21s\n"
    counts = {"failed": 2, "passed": 70, "skipped": 3, "deselected": 900, "error": 1}
    assert count_tests(said) == counts
    assert count_tests("") == {}


@pytest.mark.parametrize("pair", [(), ("cuda:0", "cuda:1")])
def test_every_short_form_is_a_command_with_flags_that_exist(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "gpu_pair", lambda device: pair)
    commands = typer.main.get_command(app).commands["bench"].commands  # type: ignore[attr-defined]
    for words in (gpu_words("cuda:0"), gpu_words("hip:0"), cpu_words("cpu:0")):
        assert words.keys() <= set(BENCHES) == RULES.keys()
        for line in words.values():
            name, *flags = line.split()
            commands[name].make_context(name, flags)
    assert ("processes" in gpu_words("cuda:0")) == bool(pair)


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "truncated"),
        ("figures", "malformed"),
        ('{"cpu": 1}', "expected devices with figures"),
        ('{"cpu": {"a, x: r": {"value": 0, "tolerance": 0.1}}}', r"cpu: a, x: r: .*> 0\.0"),
        ('{"cpu": {"a, x: r": {"value": 1, "tolerance": "much"}}}', r"cpu: a, x: r: .*tolerance"),
        ('{"cpu": {"a, x: r": {"value": 1}}}', "missing required field `tolerance`"),
        ('{"cpu": {"a, x: r": {"value": 1, "tolerance": 1, "unit": 1}}}', "unknown field `unit`"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_the_place(
    text: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "figures.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as error:
        read_kept(path)
    assert str(error.value).startswith(f"--figures {path}: ") and "\n" not in str(error.value)


def test_the_kept_file_of_this_checkout_can_be_read() -> None:
    assert all(read_kept(check.KEPT_FILE).values())


# --- a run ----------------------------------------------------------------------------------------


class ScriptedRuns:
    """Stands for `run_python`: ends as it is told, command by command."""

    def __init__(self, *ends: Ended) -> None:
        self._ends = list(ends)
        self.commands: list[str] = []

    def __call__(self, words: Sequence[str], cwd: Path, deadline_s: float) -> Ended:
        self.commands.append(" ".join(words))
        return self._ends.pop(0)


def rate(value: float) -> Ended:
    """What `bench prefill` prints of one model."""
    row = {"table": "prefill", "model": "small", "tokens": 512, "time": 1.0, "share": value}
    return Ended(0, f'{{"machine": {{}}}}\n{json.dumps(row)}\n', "", 1.0)


NAME = "prefill, small, 512: share"


def run_check(
    path: Path,
    runs: ScriptedRuns,
    *,
    has_tests: bool = False,
    keeps: bool = False,
    only: Sequence[str] = ("prefill",),
) -> bool:
    report = Report({}, path.with_suffix(".jsonl"))
    given = {"only": only, "has_tests": has_tests, "path": path, "keeps": keeps}
    return bench_check(report, "cpu:0", **given, run=runs)


def verdicts(path: Path) -> dict[str, str]:
    lines = map(json.loads, path.with_suffix(".jsonl").read_text().splitlines())
    return {line["figure"]: line["verdict"] for line in lines if "figure" in line}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a figure of the CPU and one of another device."""
    path = tmp_path / "figures.json"
    figures = {NAME: {"value": 0.5, "tolerance": 0.2}}
    path.write_text(json.dumps({"cpu": figures, "NVIDIA H200": figures}))
    return path


def test_a_figure_that_is_as_good_as_the_kept_one_passes(path: Path) -> None:
    assert run_check(path, ScriptedRuns(rate(0.5)))
    assert verdicts(path) == {NAME: "same"}


def test_a_figure_is_worse_only_if_it_is_so_twice(path: Path) -> None:
    assert run_check(path, ScriptedRuns(rate(0.3), rate(0.5)))
    assert verdicts(path) == {NAME: "same"}
    assert not run_check(path, ScriptedRuns(rate(0.3), rate(0.31)))
    assert verdicts(path) == {NAME: "worse"}


def test_a_figure_that_is_no_longer_there_fails(path: Path) -> None:
    assert not run_check(path, ScriptedRuns(Ended(0, '{"machine": {}}\n', "", 1.0)))
    assert verdicts(path) == {NAME: "missing"}


def test_a_device_without_figures_passes_and_says_so(path: Path, capsys) -> None:
    path.unlink()
    assert run_check(path, ScriptedRuns(rate(0.3)))
    assert verdicts(path) == {NAME: "new"}
    assert "no figures of cpu" in capsys.readouterr().out


def test_keeping_changes_this_device_alone(path: Path) -> None:
    before = read_kept(path)
    run_check(path, ScriptedRuns(rate(0.75)), keeps=True)
    assert read_kept(path) == before | {"cpu": {NAME: KeptFigure(0.75, 0.2)}}


def test_figures_are_kept_even_if_a_later_bench_ends_the_run(path: Path) -> None:
    with pytest.raises(IndexError):  # no second run is scripted
        run_check(path, ScriptedRuns(rate(0.75)), keeps=True, only=["prefill", "speculation"])
    assert read_kept(path)["cpu"] == {NAME: KeptFigure(0.75, 0.2)}


def test_a_bench_that_lacks_a_package_is_skipped_with_its_name(path: Path, capsys) -> None:
    lacks = "Traceback ...\nModuleNotFoundError: No module named 'triton'\n"
    assert run_check(path, ScriptedRuns(Ended(1, "", lacks, 1.0)))
    assert verdicts(path) == {NAME: "not run"}
    assert "prefill: skipped: needs triton" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended(1, "", "ModuleNotFoundError: No module named 'luceasync.x'\n", 1.0), "exit 1"),
        (Ended(None, "", "", 300.0), "killed at its deadline"),
        (Ended(2, "", "luceasync: --devices cuda:9: out\n", 1.0), "--devices cuda:9: out"),
    ],
)
def test_a_bench_that_fails_fails_the_check_and_shows_its_last_words(
    ended: Ended, expected: str, path: Path, capsys
) -> None:
    assert not run_check(path, ScriptedRuns(ended))
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "said", "is_well"),
    [
        (0, "70 passed, 3 skipped, 900 deselected in 9.2s", True),
        (1, "FAILED tests/a.py::b - no\n1 failed, 70 passed in 9.2s", False),
        (0, "73 skipped, 900 deselected in 9.2s", False),
        (None, "", False),
    ],
)
def test_a_test_that_fails_fails_the_check(
    status: int | None, said: str, is_well: bool, path: Path, capsys
) -> None:
    runs = ScriptedRuns(Ended(status, said, "", 9.2), rate(0.5))
    assert run_check(path, runs, has_tests=True) == is_well
    assert runs.commands[0].startswith("pytest -m gpu ")
    assert said.partition("\n")[0].removesuffix(" in 9.2s") in capsys.readouterr().out


@pytest.mark.slow
def test_a_command_ends_with_the_processes_that_it_has_started(tmp_path: Path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"
    (tmp_path / "starts.py").write_text(f"{code}; p.wait()\n")
    ended = run_python(["starts"], tmp_path, 1.0)
    assert ended.status is None and ended.seconds < 30
    deadline = time.monotonic() + 20
    while runs(int(ended.output)):  # a killed process takes a moment to end
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.02)


@pytest.mark.slow
def test_the_command_runs_a_bench_compares_with_the_file_and_keeps(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    name = "kernels, fill: of a plain copy"
    path.write_text(json.dumps({"cpu": {name: {"value": 1e-6, "tolerance": 0.1}}}))
    words = ["--device", "cpu:0", "--only", "kernels", "--figures", str(path), "--json"]
    ran = CliRunner().invoke(app, ["bench", "check", *words, "--keep"], catch_exceptions=False)
    rows = {
        row["figure"]: row for row in map(json.loads, ran.stdout.splitlines()) if "figure" in row
    }
    assert ran.exit_code == 0 and rows[name]["verdict"] == "better"
    kept = read_kept(path)["cpu"]
    assert kept[name] == KeptFigure(float(f"{rows[name]['now']:.4g}"), 0.1)
    assert kept.keys() == rows.keys()


def test_tests_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--tests"):
        words = ["bench", "check", "--device", "cpu:0", "--tests"]
        CliRunner().invoke(app, words, catch_exceptions=False)
