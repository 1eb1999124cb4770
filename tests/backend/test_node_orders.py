"""Orders about nodes that are damaged are refused: nothing is allocated, and nodes stay as they
were.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from luceasync.backend.node_orders import LentMemory, NodeOrders
from luceasync.errors import ChannelClosed
from luceasync.host_cache.arena import PlainMemory
from luceasync.ipc.channel import Received
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.packets import Message
from luceasync.models.files import read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.models.precision import Precision
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.remote import wire
from luceasync.pipeline.stage import LocalStage

NUM_LANES, MAX_TOKENS, MEMORY_BYTES = 2, 128, 1 << 20
LITTLE_BYTES = 4 << 20

NATURAL = st.integers(0, 300) | st.integers(0, (1 << 62) - 1)
POSITIVE = st.integers(1, 300) | st.integers(1, (1 << 62) - 1)
REGIONS = st.lists(NATURAL, max_size=3).map(tuple)
ORDERS = st.one_of(
    st.builds(wire.Save, NATURAL, NATURAL, NATURAL, POSITIVE, st.booleans(), NATURAL, REGIONS),
    st.builds(wire.Adopt, NATURAL, NATURAL, POSITIVE, st.booleans(), REGIONS),
    st.builds(wire.Restore, NATURAL, st.lists(NATURAL, max_size=3).map(tuple), POSITIVE, NATURAL),
    st.builds(wire.Drop, NATURAL, st.booleans()),
    st.builds(wire.Export, NATURAL, NATURAL, NATURAL, POSITIVE),
    st.builds(wire.Fill, NATURAL, NATURAL, NATURAL, POSITIVE),
)


class Line:
    """The other end, which sends payloads of whatever size; see Answers."""

    def __init__(self, num_given_bytes: int) -> None:
        self._num_given_bytes = num_given_bytes
        self.answers: list[Message] = []

    def answer(self, got: Any, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        self.answers.append(message)

    def given(self, got: Any, specs: Sequence[Any]) -> list[Tensor]:
        [((num_bytes,), dtype)] = specs
        if num_bytes != self._num_given_bytes:
            self.refuse("another size")
        return [torch.zeros(num_bytes, dtype=dtype)]

    def refuse(self, words: str) -> Any:
        raise ChannelClosed(words)


class Orders:
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
        self.line = Line(64)
        lay = (lambda regions: None) if lent is None else lent.tell
        limits = NUM_LANES, MAX_TOKENS
        self.told: list[int] = []
        tell = self.told.append
        self.orders = NodeOrders(self.line, self.stage.nodes, memory, lay, limits, tell)

    def do(self, message: Message) -> None:
        self.orders.table[type(message)](message, Received(message, None, 1, 0))

    def close(self) -> None:
        self.stage.close()
        if self.sealed is not None:
            self.sealed.close()


@pytest.fixture(scope="module", params=[True, False], ids=["lent", "own"])
def orders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests import tiny

    folder = tiny.save(tiny.build("qwen3"), tmp_path_factory.mktemp("model"))
    made = Orders(folder, request.param)
    yield made
    made.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=ORDERS)
def test_an_order_that_cannot_be_takes_no_memory(orders: Orders, message: Message) -> None:
    tracemalloc.start()
    try:
        orders.do(message)
    except (ChannelClosed, ValueError, AssertionError, KeyError, IndexError) as error:
        assert str(error) is not None  # it ends the process, and the other end sees that
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < LITTLE_BYTES
