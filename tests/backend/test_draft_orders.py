"""What a drafter is told and cannot be is refused before anything is run or written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luceasync.backend.draft_orders import DraftOrders, LentRows, OwnRows, RowOrders, SentRows
from luceasync.errors import ChannelClosed
from luceasync.host_cache.arena import PlainMemory
from luceasync.ipc.channel import Received
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.packets import Message
from luceasync.speculation.dflash import wire
from tests.backend.test_pass_orders import Line, Untouched

NUM_LANES, MAX_TOKENS, BLOCK = 2, 128, 8
SPEC = SimpleNamespace(hidden_size=2, taps=(0, 1), feature_size=4, block=BLOCK)
SIZES = wire.DraftSizes(SPEC, "fp32")
ORDER: Any = SimpleNamespace(
    spec=SPEC, dtype="fp32", num_lanes=NUM_LANES, max_ctx_tokens=MAX_TOKENS, short_rows=(16,)
)


def order(message: Message, *tensors: torch.Tensor) -> None:
    embedding = SentRows(torch.zeros(2), NUM_LANES, torch.device("cpu"))
    rows = OwnRows(PlainMemory())
    line = Line(*tensors)
    table = DraftOrders(line, Untouched(), embedding, ORDER, rows).table
    table |= RowOrders(line, rows, SIZES).table
    table[type(message)](message, Received(message, None, 1, 0))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (wire.ProposeRows((), (), 4), "lanes"),
        (wire.ProposeRows((0, 1), (0,), 4), "begins"),
        (wire.ProposeRows((0, 0), (0, 1), 4), "lanes"),
        (wire.ProposeRows((2,), (0,), 4), "lane 2 of 2"),
        (wire.ProposeRows((0,), (128,), 4), "position 128 of 128"),
        (wire.ProposeRows((0,), (5,), 9), "a block of 9 of a drafter of 8"),
        (wire.ProposeRows((0,), (5,), 1), "a block of 1"),
        (wire.ProposeRows((0,), (5,), 4), "another size"),
        (wire.Absorb((0,), (0,), (1, 2), 4), "paths of"),
        (wire.Absorb((0,), (0,), (5,), 4), "paths of"),
        (wire.Absorb((0,), (0,), (3,), 4), "another size"),
        (wire.AbsorbChunk(0, 100, 29), "position 128"),
        (wire.AbsorbChunk(2, 0, 1), "lane 2 of 2"),
        (wire.AbsorbChunk(0, 0, 5), "another size"),
        (wire.ResetLane(2, 0), "lane 2 of 2"),
        (wire.SaveRows(0, 2, 0, 1), "lane 2 of 2"),
        (wire.RestoreRows(2, 0, ((1, 0, 4),)), "lane 2 of 2"),
    ],
)
def test_what_cannot_be_is_refused(message: Message, words: str):
    with pytest.raises(ChannelClosed, match=words):
        order(message, torch.zeros(7))


@pytest.mark.parametrize(
    "message",
    [
        wire.RestoreRows(0, 0, ((1, 0, 4),)),
        wire.ExportRows(1, 0, 4),
    ],
)
def test_a_node_that_is_not_here_is_none(message: Message):
    with pytest.raises(ValueError, match="node 1 is asked for, and is not here"):
        order(message)


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.lists(st.integers(0, 200), max_size=4),
    st.integers(1, 20),
)
def test_nothing_outside_of_the_lanes_is_proposed(lanes: list[int], begins: list[int], block: int):
    fits = (
        len(lanes) == len(begins) == len(set(lanes)) > 0
        and max(lanes) < NUM_LANES
        and max(begins) < MAX_TOKENS
        and 2 <= block <= BLOCK
    )
    message = wire.ProposeRows(tuple(lanes), tuple(begins), block)
    rows = torch.zeros(max(len(lanes), 1), 2)
    with pytest.raises(AssertionError if fits else ChannelClosed):
        order(message, rows)


def test_lent_rows_are_those_at_their_place():
    lent = SealedMemory.create("nodes", 8192)
    rows = LentRows(lent, SIZES.row_bytes)
    rows.make(4096, SIZES.features(3)).copy_(torch.arange(12.0).view(3, 4))
    found = rows.rows(4096, 1, SIZES.features(2))
    assert found.tolist() == [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    with pytest.raises(ValueError, match="of a memory of 8192"):
        rows.rows(8192 - 16, 1, SIZES.features(1))
    del found
    lent.close()


def test_own_rows_are_held_until_they_are_forgotten():
    rows = OwnRows(PlainMemory())
    rows.make(7, SIZES.features(3)).fill_(2.0)
    assert rows.rows(7, 1, SIZES.features(2)).tolist() == [[2.0] * 4] * 2
    with pytest.raises(ValueError, match="rows until 4 of a node that has 3"):
        rows.rows(7, 2, SIZES.features(2))
    rows.forget(7)
    rows.forget(7)
    with pytest.raises(ValueError, match="not here"):
        rows.rows(7, 0, SIZES.features(1))


def test_the_embedding_is_what_was_sent_and_the_masks():
    embedding = SentRows(torch.tensor([9.0, 8.0]), NUM_LANES, torch.device("cpu"))
    tokens = embedding.take(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    found = embedding.embed(torch.tensor([[*tokens, embedding.mask_token]]))
    assert found.tolist() == [[[1.0, 2.0], [3.0, 4.0], [9.0, 8.0]]]
