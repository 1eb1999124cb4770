"""What a kind of layer that mixes tokens declares, and the protocols of its implementations.

Memory, plans, nodes and their names follow from it. Pure; names no kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from luceasync.kv.state import StateLayout, StateTensor

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.layer_reader import LayerReader
    from luceasync.models.ops import Norm
    from luceasync.models.pass_rows import Paths, Rows
    from luceasync.models.trees import Trees

Shape = tuple[int, ...]
# State or scratch of a kind's layers: of one layer, or of all stacked.
State = tuple["Tensor", ...]


class Mixer(StateLayout, Protocol):
    """A kind of layer with its sizes. Layers with equal mixers share stacked state."""

    @property
    def scratch(self) -> tuple[StateTensor, ...]:
        """What a verified row leaves until a path is committed."""
        ...

    @property
    def recent(self) -> RecentSpec | None:
        """How its newest rows are kept to probe chunks that may be absent; None if it does not keep
        any."""
        ...

    @property
    def reach(self) -> int:
        """Number of inputs, of earlier tokens and its own, that a row of a tree reads through
        Trees.taps: the width of its convolution. 1 if earlier tokens affect it in other ways only.
        """
        ...

    @property
    def width(self) -> int:
        """The widest activation of a row, in numbers."""
        ...

    @property
    def verified_row_bytes(self) -> int:
        """Bytes that a row takes while it is verified, besides scratch."""
        ...

    def tensors(self, hidden_size: int) -> dict[str, Shape]:
        """Shapes of its tensors by their names below `layers.<layer>.` in a checkpoint."""
        ...

    def load(self, reader: LayerReader) -> MixerLayer:
        """Read one layer's weights to its device. Raises ModelError."""
        ...

    def torch_body(self) -> MixerBody:
        """Make the implementation for any device."""
        ...

    def triton_body(self) -> MixerBody:
        """Make the implementation for GPUs. Captured passes have no `rows.entries` and no
        `paths.kept`: their single row of each lane, their trees and their commits read `rows` and
        `paths` from the device only, in operations that a CUDA graph can record. So this may return
        `torch_body` only if that does, too."""
        ...

    def compiled_body(self) -> MixerBody:
        """Make the implementation for CPUs: `torch_body` if there is nothing faster."""
        ...


class RecentSpec(Protocol):
    """A ring of a lane's newest rows, at `position % number of rows`. It comes after the layer's
    state and belongs to no node.
    """

    @property
    def ring(self) -> StateTensor:
        """The ring of one lane: [number of rows, ...]."""
        ...

    @property
    def scratch(self) -> StateTensor:
        """What a verified row leaves; it comes after Mixer.scratch."""
        ...

    @property
    def probed_tensor(self) -> str:
        """The name of the tensor whose rows are probed."""
        ...

    @property
    def num_heads(self) -> int:
        """Heads, each of which scores chunks."""
        ...

    def torch_body(self) -> ProbeBody:
        """Make the implementation for any device."""
        ...

    def triton_body(self) -> ProbeBody:
        """Make the implementation for GPUs."""
        ...


class ProbeBody(Protocol):
    """Measures how much attention the newest rows pay to each chunk."""

    def probe(
        self,
        recent: Tensor,
        rows: Tensor,
        begin: int,
        num_tokens: int,
        chunk_tokens: int,
        scores: Tensor,
    ) -> None:
        """Score `rows` [tokens, ...], whose tokens begin at `begin`, by each of `recent` [newest
        rows, ...] of a lane with `num_tokens` tokens. Adds their weights to those of their chunks
        in `scores`, as logarithms: float32 [heads, newest rows, chunks], -inf for nothing."""
        ...


class MixerBody(Protocol):
    """Runs all layers of a kind. How a single layer is run is up to the kind's own layers and
    bodies."""

    def prepare(self, positions: Tensor) -> Any:
        """Prepare what all layers of the kind need for a pass over rows at `positions`, int32
        [entries, rows]; passed on as Rows.prepared."""
        ...

    def commit(self, scratch: State, state: State, paths: Paths) -> None:
        """Write the accepted rows of all layers to the state: [layers, entries, rows, ...] in
        `scratch`, [layers, lanes, ...] in `state`.
        """
        ...


class MixerLayer(Protocol):
    """One layer with its weights: norm, mixing, and addition to the residual stream.

    A layer may also have an `output`, the Weight whose `linear_add` makes its sum: that sum is then
    prepared for the norm behind it.
    """

    @property
    def norm(self) -> Norm:
        """The norm of its rows."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        ...

    def forward(self, x: Tensor, state: State, rows: Rows) -> Tensor:
        """x: [entries, rows, hidden], the residual stream. Updates `state` in place, and copies the
        end state after `rows.mark` rows to lane NO_LANE; ends without a spare have no mark.
        """
        ...

    def verify(self, x: Tensor, state: State, rows: Rows, trees: Trees, scratch: State) -> Tensor:
        """`forward` for rows that form trees. Leaves `state` unchanged and writes to `scratch` what
        a path of the rows would change.
        """
        ...
