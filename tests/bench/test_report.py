"""One run, told twice: to people as Markdown, to programs as JSON lines."""

import json
from pathlib import Path

import pytest

from luceasync.bench.report import NOTHING, Report, figure, ms, share


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
