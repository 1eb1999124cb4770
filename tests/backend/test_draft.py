"""Invalid commands to a drafter are refused before anything is run or written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luceasync.backend.draft import (
    DraftHandlers,
    LentRows,
    OwnRows,
    RowHandlers,
    SentEmbedding,
)
from luceasync.errors import ChannelClosed
from luceasync.host_cache.arena import PlainMemory
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.packets import Message, WireError
from luceasync.pipeline.remote.wire import ExportNode
from luceasync.speculation.dflash import wire
from tests.backend.parent import Parent
from tests.backend.test_pass_handlers import Untouched

NUM_LANES, MAX_TOKENS, BLOCK = 2, 128, 8
SPEC = SimpleNamespace(hidden_size=2, taps=(0, 1), feature_size=4, block=BLOCK)
SIZES = wire.DraftSizes(SPEC, "fp32", NUM_LANES, MAX_TOKENS)
COMMAND: Any = SimpleNamespace(sizes=SIZES, short_rows=(16,))


def send(message: Message, *tensors: torch.Tensor) -> None:
    embedding = SentEmbedding(torch.zeros(2), NUM_LANES, torch.device("cpu"))
    rows = OwnRows(PlainMemory())
    handlers = DraftHandlers(Untouched(), embedding, COMMAND, rows)
    Parent(SIZES, handlers, RowHandlers(rows, SIZES)).send(message, tensors)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (wire.ProposeBlock((), (), 4), "lanes"),
        (wire.ProposeBlock((0, 1), (0,), 4), "begins"),
        (wire.ProposeBlock((0, 0), (0, 1), 4), "lanes"),
        (wire.ProposeBlock((2,), (0,), 4), "lane 2 of 2"),
        (wire.ProposeBlock((0,), (128,), 4), "position 128 of 128"),
        (wire.ProposeBlock((0,), (5,), 9), "a block of 9 of a drafter of 8"),
        (wire.ProposeBlock((0,), (5,), 1), "a block of 1"),
        (wire.ProposeBlock((0,), (5,), 4), "another size"),
        (wire.AbsorbPaths((0,), (0,), (1, 2), 4), "paths of"),
        (wire.AbsorbPaths((0,), (0,), (5,), 4), "paths of"),
        (wire.AbsorbPaths((0,), (0,), (3,), 4), "another size"),
        (wire.AbsorbChunk(0, 100, 29), "position 128"),
        (wire.AbsorbChunk(2, 0, 1), "lane 2 of 2"),
        (wire.AbsorbChunk(0, 0, 5), "another size"),
        (wire.ResetDraftLane(2, 0), "lane 2 of 2"),
        (wire.SaveRows(0, 2, 0, 1), "lane 2 of 2"),
        (wire.RestoreRows(2, 0, ((1, 0, 4),)), "lane 2 of 2"),
    ],
)
def test_an_invalid_command_is_refused(message: Message, words: str):
    tensors = [torch.zeros(7)] if message.payload(SIZES) else []
    with pytest.raises(ChannelClosed, match=words):
        send(message, *tensors)


@pytest.mark.parametrize(
    "message",
    [
        wire.RestoreRows(0, 0, ((1, 0, 4),)),
        ExportNode(1, 0, 0, 4),
    ],
)
def test_a_node_that_is_not_here_is_refused(message: Message):
    with pytest.raises(ChannelClosed, match="node 1 is not here"):
        send(message)


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
    message = wire.ProposeBlock(tuple(lanes), tuple(begins), block)
    rows = torch.zeros(max(len(lanes), 1), 2)
    with pytest.raises(AssertionError if fits else ChannelClosed):
        send(message, rows)


def test_lent_rows_are_those_at_their_place():
    lent = SealedMemory.create("nodes", 8192)
    rows = LentRows(lent, SIZES.row_bytes)
    rows.allocate(4096, SIZES.features(3)).copy_(torch.arange(12.0).view(3, 4))
    found = rows.rows(4096, 1, SIZES.features(2))
    assert found.tolist() == [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    with pytest.raises(WireError, match="of a memory of 8192"):
        rows.rows(8192 - 16, 1, SIZES.features(1))
    del found
    lent.close()


def test_own_rows_are_kept_until_they_are_dropped():
    rows = OwnRows(PlainMemory())
    rows.allocate(7, SIZES.features(3)).fill_(2.0)
    assert rows.rows(7, 1, SIZES.features(2)).tolist() == [[2.0] * 4] * 2
    with pytest.raises(WireError, match="rows until 4 of a node that has 3"):
        rows.rows(7, 2, SIZES.features(2))
    rows.drop(7)
    rows.drop(7)
    with pytest.raises(WireError, match="not here"):
        rows.rows(7, 0, SIZES.features(1))


def test_the_embedding_has_the_rows_that_were_sent_and_the_mask():
    embedding = SentEmbedding(torch.tensor([9.0, 8.0]), NUM_LANES, torch.device("cpu"))
    tokens = embedding.replace(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    found = embedding.embed(torch.tensor([[*tokens, embedding.mask_token]]))
    assert found.tolist() == [[[1.0, 2.0], [3.0, 4.0], [9.0, 8.0]]]
