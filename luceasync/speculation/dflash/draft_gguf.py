"""Drafters in GGUF files, as llama.cpp writes them: what the metadata says of one, in the fields of
a config.json, and where its tensors are.

Pure: no torch, no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from luceasync.errors import ModelError
from luceasync.gguf.config import ArchitectureKeys
from luceasync.gguf.header import SUPPORTED
from luceasync.gguf.layout import AS_STORED, ATTENTION
from luceasync.gguf.model import GgufModel
from luceasync.models.gguf_model import GgufTensor
from luceasync.models.spec import Shape

ARCHITECTURE = "dflash"
MASK_TOKEN = "tokenizer.ggml.mask_token_id"
WINDOW = "attention.sliding_window"
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
FACTORS = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")
ENDS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
LAYER = ATTENTION | {
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# Those of the target, which some files repeat.
TARGETS_OWN = frozenset({"token_embd.weight", "output.weight"})


def draft_config_of(model: GgufModel) -> dict[str, Any]:
    """The fields of the drafter's config.json. Raises ModelError."""
    if model.architecture != ARCHITECTURE:
        raise ModelError(
            f"general.architecture {model.architecture!r} is no drafter that is supported; "
            f"expected {ARCHITECTURE!r}"
        )
    keys, metadata = ArchitectureKeys(model), model.metadata
    scaling = keys.name("rope.scaling.type")
    if scaling in metadata and metadata.word(scaling) != "none":
        raise ModelError(f"{scaling} = {metadata.word(scaling)!r}: expected 'none'")
    num_heads = keys.layered("attention.head_count")
    is_second = keys.name(SECOND[0]) in metadata
    causal = keys.name("attention.causal")
    return {
        "architectures": ["DFlash2DraftModel" if is_second else "DFlashDraftModel"],
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.layered("feed_forward_length"),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.layered("attention.head_count_kv"),
        "head_dim": keys.integer("attention.key_length"),
        "rms_norm_eps": metadata.real(keys.name("attention.layer_norm_rms_epsilon")),
        "rope_theta": metadata.real(keys.name("rope.freq_base"), 10000.0),
        "block_size": keys.integer("block_size"),
        "mask_token_id": metadata.integer(MASK_TOKEN),
        # A file counts the layers whose input is read, which is the output of the one before.
        "target_layer_ids": [n - 1 for n in metadata.integers(keys.name("target_layers"))],
        **_windows(keys),
        **({"is_causal": metadata.flag(causal, False)} if causal in metadata else {}),
        **({name: keys.integer(name) for name in SECOND} if is_second else {}),
        **{name: metadata.real(keys.name(name)) for name in FACTORS if keys.name(name) in metadata},
    }


def _windows(keys: ArchitectureKeys) -> dict[str, Any]:
    """The window and the kinds of layers; all have one if the file does not say which."""
    window, pattern = keys.integer(WINDOW, 0), keys.name(f"{WINDOW}_pattern")
    if not window:
        return {}
    slides = [True] * keys.num_layers
    if pattern in keys.metadata:
        slides = [bool(flag) for flag in keys.metadata.integers(pattern)][: keys.num_layers]
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return {"sliding_window": window, "layer_types": kinds}


def stored_name(name: str) -> str:
    """The name in a file of the tensor that is published as `name`."""
    if (found := IN_LAYER.fullmatch(name)) is None:
        return ENDS.get(name, name)
    return f"blk.{found[1]}.{LAYER.get(found[2], found[2])}"


def tensors_of(model: GgufModel, shapes: Mapping[str, Shape]) -> dict[str, GgufTensor]:
    """The stored tensors by published names. Raises ModelError if one is missing, has another
    shape, or if the file has one more: without it the drafter would propose badly.
    """
    stored = {}
    for name, shape in shapes.items():
        if (found := model.tensors.get(stored_name(name))) is None:
            raise ModelError(f"{model.path}: there is no tensor {stored_name(name)!r}")
        path, tensor = found
        if tensor.shape != shape:
            raise ModelError(f"{path}: {tensor.name!r} has shape {tensor.shape}; expected {shape}")
        if tensor.type.name not in SUPPORTED:
            raise ModelError(
                f"{path}: {tensor.name!r} is stored as {tensor.type.name}, which is not supported; "
                f"supported: {', '.join(SUPPORTED)}"
            )
        stored[name] = GgufTensor(path, tensor, 0, shape, AS_STORED)
    used = {each.tensor.name for each in stored.values()} | TARGETS_OWN
    if unknown := sorted(model.tensors.keys() - used):
        raise ModelError(
            f"{model.path}: {unknown[0]!r} and {len(unknown) - 1} other tensors are not part of "
            "the DFlash drafter that the metadata describes"
        )
    return stored
