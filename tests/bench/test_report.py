"""Variants in turns, what their samples say, and a run shown as Markdown and as JSON lines."""

import json
from pathlib import Path

import pytest

from luceasync.bench.report import (
    NOTHING,
    Report,
    figure,
    interleave,
    measure,
    medians,
    ms,
    paired_ratio,
    percentile,
    share,
    spread,
)


def test_a_row_is_shown_with_units_and_kept_without(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.jsonl"
    table = Report({"cores": 2}, path).table(("what", "time", "limit", "rate", "count"), "decode")
    table.add("ours", ms(0.0125), NOTHING, figure(3.14159, "GB/s"), 7)
    table.add("peer", ms(0.05), share(0.25), figure(2.0), 8)
    assert capsys.readouterr().out.splitlines() == [
        "cores 2",
        "",
        "decode",
        "",
        "| what | time | limit | rate | count |",
        "|---|---|---|---|---|",
        "| ours | 12.5 ms |  | 3.14 GB/s | 7 |",
        "| peer | 50.0 ms | 25% | 2.00 | 8 |",
    ]
    machine, first, second = map(json.loads, path.read_text().splitlines())
    assert machine == {"machine": {"cores": 2}}
    assert first == {"table": "decode", "what": "ours", "time": 12.5, "limit": None} | {
        "rate": 3.14159,
        "count": 7,
    }
    assert second["limit"] == 0.25


def test_a_new_run_replaces_what_an_old_one_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("old\n")
    Report({}, path)
    assert path.read_text() == '{"machine": {}}\n'


def test_a_row_has_a_cell_for_each_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        Report({}).table(("one", "two")).add("alone")


def test_columns_of_one_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="ratio"):
        Report({}).table(("what", "ratio", "ratio"))


def test_json_lines_replace_tables_on_request(capsys) -> None:
    Report({"cores": 2}, is_json=True).table(("what", "time"), "decode").add("ours", ms(0.5))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"machine": {"cores": 2}},
        {"table": "decode", "what": "ours", "time": 500.0},
    ]


def test_rounds_go_there_and_back_and_keep_what_each_returned() -> None:
    said: list[str] = []

    def variant(name: str):
        return lambda: said.append(name) or f"{name}{len(said)}"

    found = interleave({name: variant(name) for name in "abc"}, 2, num_warmups=1)
    assert "".join(said) == "abccbaabc"
    assert found == {"a": ["a6", "a7"], "b": ["b5", "b8"], "c": ["c4", "c9"]}


def test_seconds_are_those_of_the_clock_that_was_given() -> None:
    runs = {"short": lambda: 1.0, "long": lambda: 5.0}
    assert measure(runs, 2, clock=lambda run: run() / 2) == {"short": [0.5] * 2, "long": [2.5] * 2}


def test_a_ratio_is_taken_pair_by_pair_so_that_a_slow_round_does_not_count() -> None:
    ours, base = [2.0, 20.0, 2.0], [1.0, 10.0, 1.0]  # the machine was busy in the second round
    assert paired_ratio(ours, base) == 2.0
    assert paired_ratio([1.0, 30.0, 3.0], [1.0, 10.0, 1.5]) == 2.0  # not 3.0 / 1.5 of the medians


def test_ratios_need_as_many_rounds_of_both() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_medians_are_those_of_each_variant() -> None:
    assert medians({"a": [3.0, 1.0, 2.0], "b": [4.0, 6.0]}) == {"a": 2.0, "b": 5.0}


@pytest.mark.parametrize(("percent", "sample"), [(0, 1.0), (50, 3.0), (99, 4.0), (100, 5.0)])
def test_a_percentile_is_a_sample(percent: float, sample: float) -> None:
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], percent) == sample


def test_spread_is_the_middle_half_by_the_median() -> None:
    assert spread([10.0, 11.0, 12.0, 13.0, 14.0]) == pytest.approx(2 / 12)
    assert spread([7.0]) == 0.0
