"""In which types the tensors of quantised files are, as llama.cpp's quantiser chooses them."""

from __future__ import annotations

import re
from collections.abc import Callable

from luceasync.models.forms import Dense, Form
from luceasync.models.quant.ggml import FORMS

FormOf = Callable[[str], Form]


def form_of(mix: str, num_layers: int) -> FormOf:
    """`mix`: "plain", a type such as "Q4_K" for every matrix, or "Q4_K_M"."""
    if mix == "plain":
        return lambda name: Dense()
    if mix == "Q4_K_M":
        return lambda name: FORMS[_of_medium(name, num_layers)] if _is_matrix(name) else Dense()
    return lambda name: FORMS[mix] if _is_matrix(name) else Dense()


def _of_medium(name: str, num_layers: int) -> str:
    """Q6_K for the head, and in half of the layers for values and what goes down; Q5_K where one
    matrix has queries, keys and values.
    """
    if "embed_tokens" in name:
        return "Q4_K"
    if "lm_head" in name:
        return "Q6_K"
    if "in_proj_qkv" in name:
        return "Q5_K"
    layer = int(re.search(r"layers\.(\d+)\.", name)[1])  # type: ignore[index]
    eighth = num_layers // 8
    is_fine = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    return "Q6_K" if is_fine and ("v_proj" in name or "down_proj" in name) else "Q4_K"


def _is_matrix(name: str) -> bool:
    is_small = "norm" in name or "conv1d" in name or name.endswith(("A_log", "dt_bias"))
    return not is_small
