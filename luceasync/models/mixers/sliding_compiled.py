"""Attention to a window on CPUs by luceasync.cyext.attention: steps read the ring in place, prompts
read the window before them and their own rows.

Trees run in torch: see sliding_torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from luceasync.cyext.attention import attend
from luceasync.models.mixers.attention_compiled import compiled_heads
from luceasync.models.mixers.attention_sizes import HeadNorms
from luceasync.models.mixers.attention_torch import Rotation
from luceasync.models.mixers.sliding_torch import Pair, TorchSliding, keep


class CompiledSliding(TorchSliding):
    """Attention to a window by the compiled kernel, for specs that attention_compiled.can_attend
    accepts. Sums are float32; the output is rounded once, and in bf16 the softmax weights are
    rounded, too."""

    def heads(
        self, projected: Tensor, norms: HeadNorms, turn: Rotation
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return compiled_heads(projected, self._spec, norms, turn)

    def attend_entry(self, q: Tensor, new: Pair, rings: Pair, begin: int) -> Tensor:
        if len(q) > 1:
            return super().attend_entry(q, new, rings, begin)
        for ring, row in zip(rings, new, strict=True):
            keep(ring, row, begin)
        return self._attend(q, *rings, min(begin + 1, self._spec.window))

    def attend_rows(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._attend(q, keys, values, len(keys))

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, num_seen: int) -> Tensor:
        """Attention of rows to their windows, of which the last one ends at `num_seen`."""
        assert q.dtype == keys.dtype and keys.stride() == values.stride(), (q.dtype, keys.dtype)
        assert keys.stride()[1:] == (keys.shape[2], 1), keys.stride()
        rows, out = q.contiguous(), q.new_empty(q.shape)
        attend(
            rows.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            (q.shape[0], q.shape[1], q.shape[2]),
            keys.shape[1],
            keys.stride(0) * keys.element_size(),
            0,
            0,
            num_seen - len(q),
            q.dtype == torch.bfloat16,
            self._spec.window,
        )
        return out
