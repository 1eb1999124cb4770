"""Sizes of Gated DeltaNet, and the small weights that its implementations take.

Does not import torch at its top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Groups of value heads share a key head. A causal convolution over `conv_kernel` tokens comes
    before query, key and value. `stores_decay_rate`: files store -exp(A_log) instead of A_log.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    stores_decay_rate: bool = False

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def output_dim(self) -> int:
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    """Gated DeltaNet's small tensors, all float32.

    conv [channels, kernel]; decay_rate = -exp(A_log) [value_heads]; dt_bias [value_heads];
    norm [value_dim].
    """

    conv: Tensor
    decay_rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.conv, self.decay_rate, self.dt_bias, self.norm))
