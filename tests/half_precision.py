"""What a CPU needs for tests of oneDNN in bfloat16. Where it is missing a server offers float32."""

from __future__ import annotations

import pytest
import torch

needs_bf16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this CPU has no products in bfloat16",
)
