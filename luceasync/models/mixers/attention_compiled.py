"""Attention on CPUs by luceasync.cyext.attention, which reads keys and values in place. A row has
the same bits in decode steps and prompts.

Trees, and prompts with absent rows before them, run in torch: see attention_torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from luceasync.cyext.attention import HAS_KERNEL, attend
from luceasync.cyext.rows import MAX_HEAD, turn_heads
from luceasync.models.mixers.attention_sizes import AttentionSizes, HeadNorms
from luceasync.models.mixers.attention_torch import Rotation, TorchAttention
from luceasync.models.pass_rows import Entry

HEAD_STEP = 32  # numbers of a head that the kernel processes at once


def can_attend(spec: AttentionSizes) -> bool:
    """Whether this machine has the kernel and it supports the head size."""
    return HAS_KERNEL and spec.head_dim % HEAD_STEP == 0 and spec.head_dim <= MAX_HEAD


class CompiledAttention(TorchAttention):
    """Attention by the compiled kernel. Sums are float32; the output is rounded once, and in bf16
    the softmax weights are rounded, too."""

    def heads(
        self, projected: Tensor, norms: HeadNorms, turn: Rotation
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return compiled_heads(projected, self._spec, norms, turn)

    def attend_entry(self, q: Tensor, keys: Tensor, values: Tensor, entry: Entry) -> Tensor:
        assert q.dtype == keys.dtype and keys.stride() == values.stride(), (q.dtype, keys.dtype)
        assert keys.stride()[1:] == (keys.shape[2], 1), keys.stride()
        shape = q.shape  # cached: torch creates a new one at each access
        rows, out = q.contiguous(), q.new_empty(shape)
        places = entry.read
        address, first = (0, places.start) if isinstance(places, slice) else (places.data_ptr(), 0)
        attend(
            rows.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            (shape[0], shape[1], shape[2]),
            keys.shape[1],
            keys.stride(0) * keys.element_size(),
            address,
            first,
            entry.end - shape[0],
            rows.dtype == torch.bfloat16,
        )
        return out


def compiled_heads(
    projected: Tensor, spec: AttentionSizes, norms: HeadNorms, turn: Rotation
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The compiled kernel for attention_torch.heads_of."""
    x, (cos, sin) = projected.contiguous(), turn
    shape = x.shape[:-1]
    q = x.new_empty((*shape, spec.num_heads, spec.head_dim))
    k = x.new_empty((*shape, spec.num_kv_heads, spec.head_dim))
    turn_heads(
        x.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        (x.numel() // x.shape[-1], x.shape[-1], spec.head_dim, spec.rotary_dim),
        (spec.num_heads, spec.num_kv_heads),
        (_address(norms.query), _address(norms.key)),
        norms.eps,
        cos.data_ptr(),
        sin.data_ptr(),
        x.dtype == torch.bfloat16,
    )
    first, end = spec.query_dim + spec.kv_dim, spec.query_dim + 2 * spec.kv_dim
    v = x[..., first:end].unflatten(-1, (-1, spec.head_dim))
    return q, k, v, x[..., end:] if spec.gated else None


def _address(weight: Tensor | None) -> int:
    """The data pointer, 0 for None."""
    return 0 if weight is None else weight.data_ptr()
