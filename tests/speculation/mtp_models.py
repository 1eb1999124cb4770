"""Tiny Qwen3.5 models with a head that drafts, as their checkpoints have one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "model.safetensors"


def build(seed: int = 0, cycle: int = tiny.VOCAB_SIZE) -> PreTrainedModel:
    """A model that mostly says of each token the same next one: what stands in the residual stream
    is for the most part the token's embedding, which is the row of its successor in the head.
    `cycle`: after so many successors a token comes again, at most.
    """
    model = tiny.build("qwen3_5", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.copy_(0.6 * torch.randn(embedding.shape, generator=generator))
        head = model.get_output_embeddings().weight
        head[successors(seed, cycle)] = embedding / 8
        norm = model.model.norm.weight  # of which a head that took rows before it knows nothing
        norm.copy_(0.4 * torch.randn(norm.shape, generator=generator))
    return model


def successors(seed: int, cycle: int) -> Tensor:
    """The usual next token of each."""
    if cycle < tiny.VOCAB_SIZE:
        token = torch.arange(tiny.VOCAB_SIZE)
        return token - token % cycle + (token + 1) % cycle
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randperm(tiny.VOCAB_SIZE, generator=generator)


def mtp_tensors(folder: Path, *, seed: int = 0, copies: float = 0.0) -> dict[str, Tensor]:
    """Random weights of a head for the model in `folder`. `copies`: how much of the token itself
    goes through its layer, as through those of the model.
    """
    generator = torch.Generator().manual_seed(seed + 2)
    stored = load_file(folder / FILE)
    layer = "model.layers.3."  # a layer with attention has the shapes
    shapes = {
        f"mtp.layers.0.{name.removeprefix(layer)}": tensor.shape
        for name, tensor in stored.items()
        if name.startswith(layer)
    }
    hidden = stored["model.norm.weight"].shape[0]
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes |= {f"mtp.{name}.weight": torch.Size([hidden]) for name in norms}
    shapes["mtp.fc.weight"] = torch.Size([hidden, 2 * hidden])
    scale = 0.2 if copies else 1.0
    found = {
        name: torch.randn(shape, generator=generator)
        * (0.1 if len(shape) == 1 else scale * shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }
    found["mtp.fc.weight"][:, :hidden] += copies * torch.eye(hidden)
    return found


def save(folder: Path, *, seed: int = 0, copies: float = 1.0, cycle: int = tiny.VOCAB_SIZE) -> Path:
    """Write a model and its head."""
    tiny.save(build(seed, cycle), folder)
    return add_mtp(folder, mtp_tensors(folder, seed=seed, copies=copies))


def add_mtp(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Add tensors of a head to the model in `folder`, and to its config that there is one."""
    stored = load_file(folder / FILE)
    save_file(stored | tensors, folder / FILE, metadata={"format": "pt"})
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return folder
