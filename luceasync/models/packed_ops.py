"""The operations of luceasync.models.ops on CPUs, over weights that oneDNN has laid out for itself.

Plain rows cost oneDNN a quarter of its speed at few rows in bf16, and MKL two thirds in float32. A
row's result is the same whatever rows are beside it, from two rows on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from luceasync.models.ops import TorchOps

ROWS_HINT = 4  # the layout suits a decode batch; prefill loses nothing by it


class PackedOps(TorchOps):
    """TorchOps with packed weights, which may be given to nothing else; a head that is tied to the
    embedding stays as it is and is taken too.
    """

    def pack(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def can_pack() -> bool:
    """Whether this build of torch has oneDNN."""
    return torch.backends.mkldnn.is_available()
