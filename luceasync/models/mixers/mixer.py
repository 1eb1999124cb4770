"""What a kind of layer that mixes tokens says of itself, and what runs it.

Everything else follows from it: memory, plans, nodes and their names. Pure; names no kind.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

from luceasync.kv.state import StateTensor

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.layer_reader import LayerReader
    from luceasync.models.pass_rows import Paths, Rows
    from luceasync.models.trees import Trees

Shape = tuple[int, ...]
# What the layers of a kind keep, or leave until it is committed: of one layer, or all stacked.
State = tuple["Tensor", ...]


class Mixer(Hashable, Protocol):
    """A kind of layer with its sizes. Layers whose mixers are equal share stacks of state."""

    @property
    def rows(self) -> tuple[StateTensor, ...]:
        ...

    @property
    def end(self) -> tuple[StateTensor, ...]:
        ...

    @property
    def scratch(self) -> tuple[StateTensor, ...]:
        """What a row that is verified leaves until a path is committed."""
        ...

    @property
    def recent(self) -> RecentSpec | None:
        """What its newest rows are kept as where chunks may be away from a device: they tell which
        ones are looked at. None where no chunk is.
        """
        ...

    @property
    def width(self) -> int:
        """Numbers of a row where its activations are widest."""
        ...

    @property
    def verified_row_bytes(self) -> int:
        """Bytes that a row takes besides while it is verified."""
        ...

    def tensors(self, hidden_size: int) -> dict[str, Shape]:
        """Its tensors below `layers.<layer>.` in a checkpoint."""
        ...

    def load(self, reader: LayerReader) -> MixerLayer:
        """One layer's weights, where they are to run. Raises ModelError."""
        ...

    def torch_body(self) -> MixerBody:
        """What runs it on any device."""
        ...

    def triton_body(self) -> MixerBody:
        """What runs it on GPUs; the same as `torch_body` where there is nothing faster."""
        ...

    def compiled_body(self) -> MixerBody:
        """What runs it on CPUs; the same as `torch_body` where there is nothing faster."""
        ...


class RecentSpec(Protocol):
    """The newest rows of a lane, by `position % number of rows`. They follow the layer's state, and
    belong to no node.
    """

    @property
    def ring(self) -> StateTensor:
        """Of one lane, [number of rows, ...]."""
        ...

    @property
    def scratch(self) -> StateTensor:
        """Of a row that is verified; it follows Mixer.scratch."""
        ...

    @property
    def probed_tensor(self) -> str:
        """The name of the tensor of rows that they look at."""
        ...

    @property
    def num_heads(self) -> int:
        """Each of them weighs chunks for itself."""
        ...

    def torch_body(self) -> ProbeBody:
        """What looks on any device."""
        ...

    def triton_body(self) -> ProbeBody:
        """What looks on GPUs."""
        ...


class ProbeBody(Protocol):
    """How much of what the newest rows see lies in each chunk."""

    def probe(
        self,
        recent: Tensor,
        rows: Tensor,
        begin: int,
        num_tokens: int,
        chunk_tokens: int,
        scores: Tensor,
    ) -> None:
        """Add what `rows` [tokens, ...], whose tokens begin at `begin`, weigh for each of `recent`
        [newest rows, ...] of a lane that stands after `num_tokens`: to the logs of what each chunk
        weighs, `scores` float32 [heads, newest rows, chunks], -inf for nothing.
        """
        ...


class MixerBody(Protocol):
    """What is done for all layers of a kind at once. How a single one is run is between the kind's
    own layers and bodies.
    """

    def prepare(self, positions: Tensor) -> Any:
        """What every layer of the kind needs to know of a pass over rows at `positions`, int32
        [entries, rows]; it is found in Rows.prepared.
        """
        ...

    def commit(self, scratch: State, state: State, paths: Paths) -> None:
        """Make the accepted rows of every layer state: [layers, entries, rows, ...] each in
        `scratch`, [layers, lanes, ...] in `state`.
        """
        ...


class MixerLayer(Protocol):
    """One layer with its weights: norm, mixing, and what it adds to the residual stream."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        ...

    def forward(self, x: Tensor, state: State, rows: Rows) -> Tensor:
        """x: [entries, rows, hidden], the residual stream; `state` moves on in place. What
        belongs to the end is left with lane NO_LANE as it is after `rows.mark` rows.
        """
        ...

    def verify(self, x: Tensor, state: State, rows: Rows, trees: Trees, scratch: State) -> Tensor:
        """As `forward`, for rows that form trees; `state` stays as it is, and `scratch` takes what
        a path of the rows would change.
        """
        ...
