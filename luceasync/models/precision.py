"""Number types of a model's weights, activations and state. Pure: dtypes are strings here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from luceasync.kv.state import Role

if TYPE_CHECKING:
    import torch

Dtype = Literal["bf16", "fp32"]
ITEM_BYTES: dict[Dtype, int] = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Precision:
    """`weights`: of matrices that a file stores plainly; `compute`: of activations; `kv`: of keys
    and values. Norms and small tensors of recurrent layers are always float32.
    """

    weights: Dtype
    compute: Dtype
    kv: Dtype

    @classmethod
    def of(cls, dtype: Dtype) -> Precision:
        """The same dtype for everything."""
        return cls(dtype, dtype, dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight of a plain matrix."""
        return ITEM_BYTES[self.weights]

    def item_bytes(self, role: Role) -> int:
        """Bytes of one number of a state tensor in this role."""
        return ITEM_BYTES[self._dtype(role)]

    def torch_dtype(self, role: Role) -> torch.dtype:
        """Dtype of a state tensor in this role."""
        return torch_dtype(self._dtype(role))

    def _dtype(self, role: Role) -> Dtype:
        dtypes: dict[Role, Dtype] = {"kv": self.kv, "compute": self.compute, "float32": "fp32"}
        return dtypes[role]


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """torch's dtype."""
    import torch

    return {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
