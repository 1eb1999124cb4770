"""Attention on CPUs by the kernel of luceasync.cyext.attention: keys and values are read where they
lie, by decode steps and by prompts alike; a row's bits are the same in both.

Trees, and prompts that see what is not here, are torch's: see attention_torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from luceasync.cyext.attention import HAS_KERNEL, attend
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_torch import TorchAttention
from luceasync.models.pass_rows import Entry

HEAD_STEP = 32  # numbers of a head that the kernel takes at once


def can_attend(spec: AttentionSpec) -> bool:
    """Whether this machine has the kernel, and it takes heads of that size."""
    return HAS_KERNEL and spec.head_dim % HEAD_STEP == 0


class CompiledAttention(TorchAttention):
    """An AttentionBody. Sums are float32; what is seen is rounded once, in bf16 the shares too."""

    def attend_entry(self, q: Tensor, keys: Tensor, values: Tensor, entry: Entry) -> Tensor:
        """See TorchAttention."""
        assert q.dtype == keys.dtype and keys.stride() == values.stride(), (q.dtype, keys.dtype)
        assert keys.stride()[1:] == (keys.shape[2], 1), keys.stride()
        rows, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype)
        places = entry.read
        address, first = (0, places.start) if isinstance(places, slice) else (places.data_ptr(), 0)
        attend(
            rows.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            (rows.shape[0], rows.shape[1], rows.shape[2]),
            keys.shape[1],
            keys.stride(0) * keys.element_size(),
            address,
            first,
            entry.end - len(rows),
            rows.dtype == torch.bfloat16,
        )
        return out
