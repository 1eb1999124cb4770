"""What a drafter's process is told and answers, besides what every backend is.

Owns the messages' fields, and the shapes and bounds that each end computes for itself; see
luceasync.pipeline.remote.wire.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from luceasync.ipc.packets import Message, Natural, Positive, WireError
from luceasync.ipc.supervised import CallKind
from luceasync.models.precision import Dtype, torch_dtype
from luceasync.models.rope import PLAIN
from luceasync.pipeline.remote import answers, wire
from luceasync.pipeline.remote.tensors import Spec
from luceasync.pipeline.remote.wire import Command
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.dflash.draft_spec import DraftSpec


class DraftSizes:
    """Shapes of what goes beside these messages, and the bounds of what a drafter may be told."""

    def __init__(self, spec: DraftSpec, dtype: Dtype, num_lanes: int, max_tokens: int) -> None:
        self.hidden, self.num_taps = spec.hidden_size, len(spec.taps)
        self.width, self.block = spec.feature_size, spec.block
        self.dtype: torch.dtype = torch_dtype(dtype)
        self.num_lanes, self.max_tokens = num_lanes, max_tokens

    def hidden_rows(self, *shape: int) -> Spec:
        """Rows of the embedding, or of a proposal."""
        return (*shape, self.hidden), self.dtype

    def taps(self, num_rows: int) -> Spec:
        """Rows of each tap."""
        return (self.num_taps, num_rows, self.hidden), self.dtype

    def features(self, num_rows: int) -> Spec:
        """Rows of a node."""
        return (num_rows, self.width), self.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of the features of one token."""
        return self.width * self.dtype.itemsize

    def check_lanes(self, lanes: tuple[int, ...], begins: tuple[int, ...]) -> None:
        """Raise WireError unless each lane exists, comes once, and begins within its bounds."""
        if len(lanes) != len(begins) or not lanes or len(set(lanes)) != len(lanes):
            raise WireError(f"lanes {[*lanes]} and begins {[*begins]}")
        if max(lanes) >= self.num_lanes or max(begins) >= self.max_tokens:
            raise WireError(
                f"lane {max(lanes)} of {self.num_lanes}, "
                f"position {max(begins)} of {self.max_tokens}"
            )


# --- commands -------------------------------------------------------------------------------------


def describe(spec: DraftSpec) -> dict[str, Any]:
    """The spec as it is sent: without the kind of its rotation, which drafters have the plain one
    of. A message cannot name one class of several.
    """
    described: dict[str, Any] = msgspec.to_builtins(spec)
    assert spec.attention.rope == PLAIN, spec.attention.rope
    del described["attention"]["rope"]
    return described


class LoadDraft(Command, frozen=True):
    """Load the drafter on the receiver's device `device`. Comes with the mask token's row of the
    target's embedding. `dtype`: of all numbers; `short_rows`: see LocalDraft; `node_bytes`: of
    memory for nodes, if none is lent; `described`: see `describe`. Answered as LoadStage.
    """

    described: dict[str, Any]
    device: str
    dtype: Dtype
    shapes: tuple[RoundShape, ...]
    num_lanes: Positive
    max_ctx_tokens: Positive
    short_rows: tuple[Positive, ...]
    has_one_thread: bool
    node_bytes: Positive

    @property
    def spec(self) -> DraftSpec:
        """The drafter."""
        return msgspec.convert(self.described, DraftSpec)

    @property
    def sizes(self) -> DraftSizes:
        """Sizes of all messages that follow."""
        return DraftSizes(self.spec, self.dtype, self.num_lanes, self.max_ctx_tokens)

    def payload(self, sizes: object) -> list[Spec]:
        return [self.sizes.hidden_rows()]


class ProposeBlock(Command, frozen=True):
    """Return the hidden rows of a block behind each anchor, whose rows of the target's embedding
    come along. Answered by DraftRows.
    """

    lanes: tuple[Natural, ...]
    begins: tuple[Natural, ...]
    block: Positive

    def check(self, sizes: DraftSizes) -> None:
        sizes.check_lanes(self.lanes, self.begins)
        if not 2 <= self.block <= sizes.block:
            raise WireError(f"a block of {self.block} of a drafter of {sizes.block}")

    def payload(self, sizes: DraftSizes) -> list[Spec]:
        return [sizes.hidden_rows(len(self.lanes))]

    def returns(self, sizes: DraftSizes) -> list[Spec]:
        return [sizes.hidden_rows(len(self.lanes), self.block - 1)]

    @property
    def call_kind(self) -> CallKind:
        return CallKind("propose", len(self.lanes) * self.block)


class AbsorbPaths(Command, frozen=True):
    """Take up the rows of paths of these lengths: one path after the other, tap by tap."""

    lanes: tuple[Natural, ...]
    begins: tuple[Natural, ...]
    lengths: tuple[Natural, ...]
    num_rows: Positive

    def check(self, sizes: DraftSizes) -> None:
        sizes.check_lanes(self.lanes, self.begins)
        if len(self.lengths) != len(self.lanes) or max(self.lengths) > self.num_rows:
            raise WireError(f"paths of {self.lengths} rows for lanes {self.lanes}")

    def payload(self, sizes: DraftSizes) -> list[Spec]:
        return [sizes.taps(sum(self.lengths))]


class AbsorbChunk(Command, frozen=True):
    """Take up the rows of a prefill chunk, tap by tap."""

    lane: Natural
    begin: Natural
    num_tokens: Positive

    def check(self, sizes: DraftSizes) -> None:
        sizes.check_lanes((self.lane,), (self.begin + self.num_tokens - 1,))

    def payload(self, sizes: DraftSizes) -> list[Spec]:
        return [sizes.taps(self.num_tokens)]


class ResetDraftLane(Command, frozen=True):
    """Let the lane go on at position `begin`, without features."""

    lane: Natural
    begin: Natural

    def check(self, sizes: DraftSizes) -> None:
        sizes.check_lanes((self.lane,), (0,))


class SaveRows(Command, frozen=True):
    """Copy the lane's rows of positions `[begin, end)` to `place`: where they begin in the lent
    memory, or a number for them if none was lent. Answered by NodeRoom.
    """

    place: Natural
    lane: Natural
    begin: Natural
    end: Positive

    def check(self, sizes: DraftSizes) -> None:
        sizes.check_lanes((self.lane,), (0,))


class RestoreRows(Command, frozen=True):
    """Give the lane these rows, of positions from `begin` on, and no others. `parts`: places, and
    rows `[begin, end)` of what is there.
    """

    lane: Natural
    begin: Natural
    parts: tuple[tuple[Natural, Natural, Positive], ...]

    def check(self, sizes: DraftSizes) -> None:
        sizes.check_lanes((self.lane,), (self.begin,))


class AdoptRows(Command, frozen=True):
    """Allocate room for so many rows, which follow as FillNode, under the number `place`. Answered
    by NodeRoom.
    """

    place: Natural
    num_rows: Positive


COMMANDS: tuple[type[Command], ...] = (
    *(LoadDraft, ProposeBlock, AbsorbPaths, AbsorbChunk, ResetDraftLane),
    *(SaveRows, RestoreRows, AdoptRows, wire.FillNode, wire.ExportNode, wire.DropNode),
)


# --- answers --------------------------------------------------------------------------------------


class DraftRows(Message, frozen=True):
    """The hidden rows of a proposal come along. `num_unsettled`: see graph.Runner."""

    num_unsettled: Natural


ANSWERS: tuple[type[Message], ...] = (*answers.ANSWERS, DraftRows)
