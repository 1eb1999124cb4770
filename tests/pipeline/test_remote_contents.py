"""Which memory another process may still read, and when it is free."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from luceasync.host_cache.nodes import Span
from luceasync.host_cache.shard_nodes import NodeLayout
from luceasync.kv.cache import Shape
from luceasync.pipeline.remote import answers
from luceasync.pipeline.remote.nodes import NodeRegion, RemoteContents, RemoteNode


class Heard:
    """In the place of a Link: a process whose copies come when the test says so."""

    def __init__(self) -> None:
        self.copies: list[Callable[[bool], None]] = []

    def ask(self, message: object, kind: type[answers.NodeRoom]) -> answers.NodeRoom:
        return answers.NodeRoom(is_there=True, have_arrived=False)

    def expect(self, number: int, over: Callable[[bool], None]) -> None:
        self.copies.append(over)

    def send_soon(self, message: object) -> None:
        """It is told."""

    send_if_open = send_soon

    def failure(self, words: str) -> Exception:
        return RuntimeError(words)


class Counted:
    """See NodeBytes: counts the regions that are referenced."""

    def __init__(self) -> None:
        self._areas: list[Any] = []

    def allocate(self, span: Span) -> list[NodeRegion]:
        area = np.zeros(span.end - span.begin, np.uint8)
        self._areas.append(weakref.ref(area))
        return [NodeRegion(area.data, False)]

    def offsets(self, regions: Sequence[NodeRegion]) -> tuple[int, ...]:
        return (0,)

    def read(self, node: RemoteNode, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
        return {}

    def write(
        self, node: RemoteNode, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]
    ) -> None:
        """Nothing is there."""

    @property
    def num_held(self) -> int:
        return sum(area() is not None for area in self._areas)


def test_what_a_node_takes_the_place_of_is_free_once_later_copies_have_come():
    heard, memory = Heard(), Counted()
    contents: Any = RemoteContents(
        heard, NodeLayout({}, lambda role: torch.float32), memory  # type: ignore[arg-type]
    )  # fmt: skip
    for begin in (0, 64):  # as a lane's own: their names go at once
        span = Span(begin, begin + 64, with_state=False)
        own, _ = contents.save(1, span)
        contents.hold(1, span, own, span.end)
        contents.drop(own, state_only=False)
        heard.copies.pop()(True)
    assert memory.num_held == 2
    node, _ = contents.save(1, span := Span(0, 128, with_state=False))
    contents.hold(1, span, node, 128)
    heard.copies.pop()(True)
    assert memory.num_held == 3  # a pass that came before the node may read them still
    contents.save(2, Span(0, 64, with_state=False))
    heard.copies.pop()(True)
    assert memory.num_held == 3  # of another lane
    contents.save(1, Span(128, 192, with_state=False))
    assert memory.num_held == 4
    heard.copies.pop()(True)
    assert memory.num_held == 1
    contents.drop(node, state_only=False)
    assert memory.num_held == 1  # the lane reads it
    contents.release(1)
    assert memory.num_held == 0
