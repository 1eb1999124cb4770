"""The table of conversations, in short: a turn is found again whatever the client leaves out, after
a restart too, and a broken rule is named.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.acceptance.check_turns import DRAFTED, KEEPING, kinds_of
from tests.acceptance.turns.cells import Cell, Row, cells_of, faults_of
from tests.acceptance.turns.client import Asked
from tests.acceptance.turns.flow import MAX_SHORT_TOKENS, Size
from tests.acceptance.turns.flows import FLOWS
from tests.acceptance.turns.models import make_model

SHORT = Size(num_turns=2, num_steps=1, system=40, message=16, answer=16, long=300)
ASKED = Asked((7, 8), 0, (-0.5, -1.5), 100, 90, 90, 11, True, None)
CELL = Cell("a row", "memory", 90, 90, 0, None, 1.1)


def faults(cell: Cell = CELL, **fields) -> list[str]:
    """What is said of a second request with these `fields`, after one that was as it should be."""
    asked = [ASKED, replace(ASKED, **fields)]
    return faults_of(cell, asked, [ASKED, ASKED], MAX_SHORT_TOKENS, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_name", "template", "flow"),
    [
        ("hybrid", "qwen3.5", "thinking"),
        ("hybrid", "qwen3", "agent_without_reasoning"),
        ("attention", "whole", "edits"),
    ],
)
async def test_what_was_said_before_is_found(tmp_path: Path, model_name, template, flow):
    model = make_model(model_name, template, tmp_path)
    row = Row(flow, model_name, template, 256, ("memory", "restarts"), SHORT)
    for cell in await cells_of(row, model):
        assert cell.faults == ()
        assert cell.num_ideal > 300


@pytest.mark.slow
async def test_that_a_server_which_keeps_nothing_is_told_to_end_is_no_matter(tmp_path: Path):
    """It knows the ids of its answers on, as one does that has a directory."""
    model = make_model("hybrid", "qwen3", tmp_path)
    (cell,) = await cells_of(Row("ended", "hybrid", "qwen3", 256, ("restarts",), Size()), model)
    assert cell.faults == ()


def test_a_cell_that_is_as_it_should_be_breaks_no_rule():
    assert faults() == faults(num_cached=90 - MAX_SHORT_TOKENS) == []


def test_a_request_that_is_too_short_is_named():
    (fault,) = faults(num_cached=90 - MAX_SHORT_TOKENS - 1)
    assert "request 1 is 65 of 90 tokens short" in fault


def test_which_little_memory_excuses_where_the_answer_says_so():
    little = replace(CELL, kind="little memory")
    assert faults(little, num_cached=0, miss_reason="no_memory") == []
    assert len(faults(little, num_cached=0)) == 1


def test_another_text_or_probability_is_named():
    assert "another text" in faults(answer=(7, 9))[0]
    assert "log-probabilities differ by 1.0e-01" in faults(logprobs=(-0.5, -1.4))[0]
    assert faults(logprobs=(-0.5, -1.50001)) == []


def test_a_drafter_that_does_nothing_is_named():
    assert faults(replace(CELL, kind="drafted")) == ["nothing was drafted"]
    assert faults(replace(CELL, kind="drafted"), num_rounds=1) == []


def test_more_bytes_than_those_of_new_state_are_named():
    assert faults(replace(CELL, written=1.1)) == []
    assert "1.20 of new state is written" in faults(replace(CELL, written=1.2))[0]


def test_every_flow_has_a_row_and_the_bundled_model_with_its_drafter_some():
    assert all(kinds_of(flow, "hybrid", "qwen3.5", 2048) for flow in FLOWS.values())
    assert {*KEEPING, *DRAFTED} <= {*kinds_of(FLOWS["thinking"], "bundled", "qwen3.5", 256)}
