"""The flags that all measurements have."""

from pathlib import Path

import pytest

from luceasync.bench import command


def test_lists_are_read_and_defaults_too() -> None:
    parser = command.parser("Words.", rounds=5, device="cpu:0")
    parser.add_argument("--lanes", type=command.numbers, default="1,4")
    parser.add_argument("--shapes", type=command.names, default="a")
    options = parser.parse_args(["--shapes", "a,b", "--json", "x.jsonl"])
    assert (options.lanes, options.shapes, options.rounds) == ([1, 4], ["a", "b"], 5)
    assert (options.device, options.json) == ("cpu:0", Path("x.jsonl"))


def test_a_device_that_is_not_there_is_one_line() -> None:
    options = command.parser("Words.").parse_args([])
    with pytest.raises(SystemExit) as ended:
        command.begin(options, ["cpu:0", "hip:7"])
    assert "hip:7" in str(ended.value) or "hip" in str(ended.value)
    assert "\n" not in str(ended.value)
