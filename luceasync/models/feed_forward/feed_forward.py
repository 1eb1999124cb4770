"""What a kind of feed-forward network says of itself. Pure; names no kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from luceasync.models.layer_reader import LayerReader
    from luceasync.models.ops import Norm
    from luceasync.models.weights import Weight

Shape = tuple[int, ...]


class FeedForward(Protocol):
    """A kind of feed-forward network with its sizes."""

    @property
    def width(self) -> int:
        """Numbers of a row where its activations are widest."""
        ...

    def tensors(self, hidden_size: int) -> dict[str, Shape]:
        """Its tensors below `layers.<layer>.` in a checkpoint."""
        ...

    def load(self, reader: LayerReader) -> FeedForwardLayer:
        """One layer's weights, where they are to run. Raises ModelError."""
        ...


@runtime_checkable
class RoutedFeedForward(FeedForward, Protocol):
    """A kind of which each row meets a few experts, so that the others may be elsewhere."""

    @property
    def num_experts(self) -> int: ...

    @property
    def num_chosen(self) -> int:
        """Experts that a row meets."""
        ...

    def expert_tensors(self, hidden_size: int) -> dict[str, Shape]:
        """Those of `tensors` that one expert has for itself, of all experts."""
        ...


class FeedForwardLayer(Protocol):
    """One layer's network with its weights and norm."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        ...

    def link(self, mixed: Weight | None, following: Norm | None) -> None:
        """Tell weights which norm comes after their sums: this layer's after `mixed.linear_add`,
        and `following` after its own results, where they are not None."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """x: [entries, rows, hidden], the residual stream, moved on."""
        ...
