"""A tiny DFlash2 drafter that is mostly right: its selector knows the usual next token of each."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny

FILE = "model.safetensors"
RANK = 64


def save(folder: Path, model_dir: Path, successors: Tensor, share_wrong: float = 0.15) -> Path:
    """Write a drafter for the model in `model_dir`; `successors`: int64 [vocab], but for a share of
    tokens, of which it believes that another one follows.

    Its layers add little to the mask token's row, so that hidden rows are nearly alike, and the
    selector's projection can make ones of them. Then codes decide: that of a token as predecessor
    is that of its successor.
    """
    fields = tiny.DFLASH2["dflash_config"]
    fields = fields | {"selector_rank": RANK, "selector_top_k": tiny.VOCAB_SIZE}
    config = tiny.draft_config(**tiny.DFLASH2 | {"dflash_config": fields})
    tiny.save_draft(folder, config)
    tensors = load_file(folder / FILE)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.02
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(2, (tiny.VOCAB_SIZE, RANK), generator=generator) * 2.0 - 1
    is_wrong = torch.rand(tiny.VOCAB_SIZE, generator=generator) < share_wrong
    believed = torch.where(is_wrong, successors.roll(1), successors)
    hidden = _hidden_row(model_dir, tensors["norm.weight"])
    selector = "candidate_selector."
    tensors[f"{selector}successor_codebook"] = codes
    tensors[f"{selector}predecessor_codebook"] = codes[believed]
    tensors[f"{selector}hidden_projection.weight"] = (hidden / hidden.square().sum()).repeat(
        RANK, 1
    )
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def _hidden_row(model_dir: Path, norm: Tensor) -> Tensor:
    """What the mask token's row is after the final norm."""
    mask = load_file(model_dir / FILE)["model.embed_tokens.weight"][tiny.MASK_TOKEN].float()
    return F.rms_norm(mask, mask.shape) * norm
