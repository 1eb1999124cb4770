"""Variants meet whatever else the machine does alike: in turns, there and back."""

from luceasync.bench.rounds import interleave, measure


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
