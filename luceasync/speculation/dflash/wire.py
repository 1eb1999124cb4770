"""What is said between this process and a drafter's, besides what every backend says.

Owns the messages' fields, and shapes of the tensors that go beside them: each end computes them
itself. See luceasync.pipeline.remote.wire.
"""

from __future__ import annotations

import torch

from luceasync.ipc.packets import Message, Natural, Positive
from luceasync.models.precision import Dtype, torch_dtype
from luceasync.pipeline.remote.tensors import Spec
from luceasync.pipeline.remote.wire import ANSWERS
from luceasync.speculation.adapt import Shape
from luceasync.speculation.dflash.draft_config import DraftSpec

# --- what a drafter is told ----------------------------------------------------------------------


class LoadDraft(Message, frozen=True):
    """Load yourself, on the device `device` of yours, with the row of the mask token in the
    target's embedding. `dtype`: of all numbers; `short_rows`: see LocalDraft; `node_bytes`: of
    memory for nodes, where none is lent.
    """

    spec: DraftSpec
    device: str
    dtype: Dtype
    shapes: tuple[Shape, ...]
    num_lanes: Positive
    max_ctx_tokens: Positive
    short_rows: tuple[Positive, ...]
    has_one_thread: bool
    node_bytes: Positive


class ProposeRows(Message, frozen=True):
    """See DraftNetwork.propose, with the rows of the anchors in the target's embedding."""

    lanes: tuple[Natural, ...]
    begins: tuple[Natural, ...]
    block: Positive


class Absorb(Message, frozen=True):
    """See TapRing.absorb, with the rows of all paths, which have these lengths: one after the
    other, tap by tap.
    """

    lanes: tuple[Natural, ...]
    begins: tuple[Natural, ...]
    lengths: tuple[Natural, ...]
    num_rows: Positive


class AbsorbChunk(Message, frozen=True):
    """See TapRing.absorb_chunk, with the rows, tap by tap."""

    lane: Natural
    begin: Natural
    num_tokens: Positive


class ResetLane(Message, frozen=True):
    """See DraftPasses.reset."""

    lane: Natural
    begin: Natural


class SaveRows(Message, frozen=True):
    """Keep rows of positions `[begin, end)` at `place`: where they begin in the memory that was
    lent, or where none was a number that names them.
    """

    place: Natural
    lane: Natural
    begin: Natural
    end: Positive


class RestoreRows(Message, frozen=True):
    """See FeatureContents.restore. `parts`: places, and of what is there the rows `[begin, end)`."""

    lane: Natural
    begin: Natural
    parts: tuple[tuple[Natural, Natural, Positive], ...]


class AdoptRows(Message, frozen=True):
    """Have room for so many rows, which follow, under the number `place`."""

    place: Natural
    num_rows: Positive


class FillRows(Message, frozen=True):
    """Rows `[begin, end)` of those under `place`, with them."""

    place: Natural
    begin: Natural
    end: Positive


class ExportRows(Message, frozen=True):
    """What are rows `[begin, end)` of those under `place`?"""

    place: Natural
    begin: Natural
    end: Positive


class DropRows(Message, frozen=True):
    """Forget those under `place`."""

    place: Natural


ORDERS: tuple[type[Message], ...] = (
    *(LoadDraft, ProposeRows, Absorb, AbsorbChunk, ResetLane, SaveRows, RestoreRows),
    *(AdoptRows, FillRows, ExportRows, DropRows),
)


# --- what it says --------------------------------------------------------------------------------


class Proposed(Message, frozen=True):
    """The hidden rows of a proposal. `num_unsettled`: see graph.Runner."""

    num_unsettled: Natural


SAYS: tuple[type[Message], ...] = (*ANSWERS, Proposed)


# --- sizes ---------------------------------------------------------------------------------------


class DraftSizes:
    """Shapes of what goes beside these messages."""

    def __init__(self, spec: DraftSpec, dtype: Dtype) -> None:
        self.hidden, self.num_taps = spec.hidden_size, len(spec.taps)
        self.width = spec.feature_size
        self.dtype: torch.dtype = torch_dtype(dtype)

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
        """Of the features of one token."""
        return self.width * self.dtype.itemsize
