"""A drafter as a directory that any DFlash engine can read, and the state from which a run resumes.

Owns the file formats: JSON and safetensors, no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from luceasync.models.spec import ModelSpec
from luceasync.speculation.dflash.draft_spec import DraftSpec
from training.draft.network import Drafter


def draft_config(spec: DraftSpec, target: ModelSpec) -> dict[str, Any]:
    """config.json, with the fields of published drafters."""
    windows = [layer.window for layer in spec.layers]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    attention = spec.attention
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": spec.trained_block,
        "dflash_config": {
            "ctx_max_tokens": spec.ctx_max_tokens,
            "mask_token_id": spec.mask_token,
            "target_layer_ids": list(spec.taps),
        },
        "num_target_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": attention.rope_theta,
        "attention_bias": False,
        "layer_types": kinds,
        "use_sliding_window": any(windows),
        "sliding_window": next((window for window in windows if window), None),
        "max_position_embeddings": target.max_positions,
        "tie_word_embeddings": target.tied_embeddings,
        "dtype": "bfloat16",
    }


def write_draft(drafter: Drafter, target: ModelSpec, out: Path) -> None:
    """config.json and model.safetensors, in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", draft_config(drafter.spec, target))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_run(
    path: Path, drafter: Drafter, optimizers: Sequence[torch.optim.Optimizer], progress: dict
) -> None:
    """Weights in full precision, the optimizers' state, and `progress`, which is JSON."""
    tensors = {f"weight {name}": p.detach() for name, p in drafter.named_parameters()}
    for optimizer, name, parameter in _states(drafter, optimizers):
        state = optimizer.state[parameter]
        tensors |= {f"{key} {name}": value for key, value in state.items()}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"progress": json.dumps(progress)})
    partial.replace(path)


def load_run(
    path: Path, drafter: Drafter, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Load the files of `save_run`; returns the `progress`."""
    device = next(drafter.parameters()).device
    with safe_open(path, framework="pt", device=str(device)) as file:
        parameters = dict(drafter.named_parameters())
        owners = {name: optimizer for optimizer, name, _ in _states(drafter, optimizers)}
        for full_name in file.keys():  # noqa: SIM118
            key, name = full_name.split(" ", 1)
            if key == "weight":
                parameters[name].data.copy_(file.get_tensor(full_name))
            else:
                owners[name].state[parameters[name]][key] = file.get_tensor(full_name)
        return json.loads(file.metadata()["progress"])


def _states(
    drafter: Drafter, optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[torch.optim.Optimizer, str, nn.Parameter]]:
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    return [
        (optimizer, names[parameter], parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
