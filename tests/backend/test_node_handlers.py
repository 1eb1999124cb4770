"""Damaged commands about nodes are refused: nothing is allocated, and nodes stay as they were."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luceasync.backend.node_handlers import LentMemory, NodeHandlers
from luceasync.errors import ChannelClosed
from luceasync.host_cache.arena import PlainMemory
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.packets import Message
from luceasync.models.files import read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.models.precision import Precision
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.remote import wire
from luceasync.pipeline.remote.tensors import StageSizes
from luceasync.pipeline.stage import LocalStage
from tests.backend.parent import Parent

NUM_LANES, MAX_TOKENS, MEMORY_BYTES = 2, 128, 1 << 20
LITTLE_BYTES = 4 << 20

NATURAL = st.integers(0, 300) | st.integers(0, (1 << 62) - 1)
POSITIVE = st.integers(1, 300) | st.integers(1, (1 << 62) - 1)
REGIONS = st.lists(NATURAL, max_size=3).map(tuple)
COMMANDS = st.one_of(
    st.builds(wire.SaveNode, NATURAL, NATURAL, NATURAL, POSITIVE, st.booleans(), NATURAL, REGIONS),
    st.builds(wire.AdoptNode, NATURAL, NATURAL, POSITIVE, st.booleans(), REGIONS),
    st.builds(
        wire.RestoreNodes, NATURAL, st.lists(NATURAL, max_size=3).map(tuple), POSITIVE, NATURAL
    ),
    st.builds(wire.DropNode, NATURAL, st.booleans()),
    st.builds(wire.ExportNode, NATURAL, NATURAL, NATURAL, POSITIVE),
    st.builds(wire.FillNode, NATURAL, NATURAL, NATURAL, POSITIVE),
)


class Holder:
    """Of one stage, over memory that was lent or its own."""

    def __init__(self, model_dir: Path, is_lent: bool) -> None:
        spec = read_spec(model_dir)
        plan = make_plan(
            spec,
            [offer_of("cpu:0", 2**33)],
            precision=Precision.of("fp32"),
            weights=None,
            parallel=NUM_LANES,
            max_ctx_tokens=MAX_TOKENS,
            prefill_chunk_tokens=None,
            verify_rows=(),
        )
        self.sealed = SealedMemory.create("nodes", MEMORY_BYTES) if is_lent else None
        lent = None if self.sealed is None else LentMemory(self.sealed)
        memory = lent or PlainMemory()
        with open_checkpoint(model_dir) as checkpoint:
            self.stage = LocalStage(spec, plan, checkpoint, memory=memory)
        set_offsets = (lambda offsets: None) if lent is None else lent.set_offsets
        self.completed: list[int] = []
        complete = self.completed.append
        sizes = StageSizes(spec, plan, 0)
        handlers = NodeHandlers(self.stage.nodes, memory, set_offsets, complete)
        self.parent = Parent(sizes, handlers)

    def do(self, message: Message) -> None:
        self.parent.send(
            message, [torch.zeros(64, dtype=torch.uint8)] * isinstance(message, wire.FillNode)
        )

    def close(self) -> None:
        self.stage.close()
        if self.sealed is not None:
            self.sealed.close()


@pytest.fixture(scope="module", params=[True, False], ids=["lent", "own"])
def holder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests import tiny

    folder = tiny.save(tiny.build("qwen3"), tmp_path_factory.mktemp("model"))
    made = Holder(folder, request.param)
    yield made
    made.close()


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=COMMANDS)
def test_an_invalid_command_takes_no_memory(holder: Holder, message: Message) -> None:
    tracemalloc.start()
    try:
        holder.do(message)
    except (ChannelClosed, ValueError, AssertionError, KeyError, IndexError) as error:
        assert str(error) is not None  # it ends the process, and the other end sees that
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < LITTLE_BYTES


def test_regions_lie_at_the_offsets_that_were_set():
    lent = SealedMemory.create("nodes", 8192)
    memory = LentMemory(lent)
    memory.set_offsets([4096, 0])
    memory.allocate(4)[:] = b"more"
    memory.allocate(4)[:] = b"some"
    assert bytes(lent.view[:4]) == b"some" and bytes(lent.view[4096:4100]) == b"more"
    lent.close()


def test_an_offset_outside_of_the_memory_is_refused():
    lent = SealedMemory.create("nodes", 8192)
    memory = LentMemory(lent)
    memory.set_offsets([4096, 8190])
    memory.allocate(4096)
    with pytest.raises(ValueError, match="4 bytes at 8190 of a memory of 8192"):
        memory.allocate(4)
    with pytest.raises(ValueError, match="no offset"):
        memory.allocate(4)
    lent.close()
