"""Invalid commands to a stage are refused before anything is run or written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from luceasync.backend.pass_handlers import PassHandlers
from luceasync.errors import ChannelClosed
from luceasync.ipc.packets import Message
from luceasync.models.pass_rows import NO_LANE
from luceasync.pipeline.remote import wire
from luceasync.pipeline.remote.tensors import StageSizes
from tests.backend.parent import Parent

NUM_LANES, MAX_TOKENS, NUM_PAGES = 2, 128, 2


class Untouched:
    """Passes of which none may be run."""

    def __getattr__(self, name: str) -> Any:
        def run(*arguments, **named):
            raise AssertionError(f"{name} was run")

        return run


class FirstStage(StageSizes):
    """Of a first stage, without a model."""

    is_first, is_last, hidden, dtype = True, False, 2, torch.float32
    num_lanes, max_tokens, num_pages = NUM_LANES, MAX_TOKENS, NUM_PAGES

    def __init__(self) -> None:
        pass


def send(message: Message, *tensors: Tensor) -> None:
    untouched, sizes = Untouched(), FirstStage()
    handlers = PassHandlers(untouched, sizes, [], untouched.queued, untouched.prepare)
    Parent(sizes, handlers).send(message, tensors)


def run(lanes: tuple[int, ...], begins: tuple[int, ...]) -> wire.RunPass:
    return wire.RunPass("decode", lanes, begins, 1)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (run((), ()), "0 lanes and 0 begins"),
        (run((0, 1), (0,)), "2 lanes and 1 begins"),
        (run((2,), (0,)), "lane 2 of 2"),
        (run((-2,), (0,)), "lane -2 of 2"),
        (run((0,), (128,)), "129 tokens in a lane of 128"),
        (run((0,), (0,)), "without its payload"),
        (wire.PreparePass(run((2,), (0,))), "lane 2 of 2"),
        (
            wire.PreparePass(wire.RunPass("prefill", (0,), (0,), 8)),
            "a prefill chunk cannot be prepared",
        ),
        (wire.ResetLane(2), "lane 2 of 2"),
        (wire.PlacePages(1, ((2, 0, 0),)), "lane 2 of 2"),
        (wire.PlacePages(1, ((0, 2, 0),)), "chunk 2, page 0 of a lane of 2 chunks"),
        (wire.PlacePages(1, ((0, 0, 2),)), "chunk 0, page 2 of a lane of 2 chunks"),
        (wire.RecallPages(0, ((0, 2),)), "chunk 0, page 2 of a lane of 2 chunks"),
        (wire.StartProbe(0, 129), "129 tokens in a lane of 128"),
        (wire.ReadAttentionMass(2, 9), "lane 2 of 2"),
        (wire.ReadLogprob(0, 0), "before any was ranked"),
    ],
)
def test_an_invalid_command_is_refused(message: Message, words: str):
    with pytest.raises(ChannelClosed, match=words):
        send(message)


def test_a_path_beyond_its_pass_is_refused():
    with pytest.raises(ChannelClosed, match="a path beyond the 1 rows"):
        send(wire.CommitPaths((2,)), torch.tensor([0, 1], dtype=torch.int32))


@pytest.mark.parametrize(("kind", "mark"), [("prefill", 8), ("prefill", 90), ("decode", 3)])
def test_a_mark_is_within_a_chunk(kind: str, mark: int):
    with pytest.raises(ChannelClosed):
        send(wire.RunPass(kind, (0,), (0,), 8, mark), torch.zeros(1, 8, dtype=torch.int64))


@given(
    st.lists(st.integers(-3, 4), max_size=4),
    st.lists(st.integers(0, 200), max_size=4),
    st.integers(1, 200),
)
def test_no_batch_outside_of_the_lanes_is_run(lanes: list[int], begins: list[int], num_rows: int):
    fits = len(lanes) == len(begins) > 0 and all(
        lane == NO_LANE or (0 <= lane < NUM_LANES and begin + num_rows <= MAX_TOKENS)
        for lane, begin in zip(lanes, begins, strict=False)
    )
    message = wire.RunPass("decode", tuple(lanes), tuple(begins), num_rows)
    rows = torch.zeros(max(len(lanes), 1), num_rows, dtype=torch.int64)
    with pytest.raises(AssertionError if fits else ChannelClosed):
        send(message, rows)
