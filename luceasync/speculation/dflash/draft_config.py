"""A drafter's config.json, read and checked against its target.

Pure: no torch, no weights, no devices. A drafter that does not fit its target is refused here: a
wrong pair would not fail, it would only propose badly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from luceasync.config import Config, DraftConfig
from luceasync.errors import ConfigError, ModelError
from luceasync.models.families.laguna import GATES
from luceasync.models.files import ModelFiles
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.spec import ModelSpec
from luceasync.speculation.dflash.draft_files import DraftFiles
from luceasync.speculation.dflash.draft_spec import (
    ConvolutionSpec,
    DraftLayerSpec,
    DraftSpec,
    SelectorSpec,
)

DEFAULT_BLOCK = 16
CAP = "final_logit_softcapping"


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Evenly spaced target layers from the second to the last but two, as many as the drafter has
    layers: the rule of the published drafters.
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_layers))


def adjusted(
    spec: DraftSpec,
    *,
    block: int | None = None,
    swa_window_tokens: int | None = None,
    ctx_max_tokens: int | None = None,
) -> DraftSpec:
    """The drafter with the user's options; None leaves what it was trained with. Raises
    ConfigError, naming the flag.
    """
    if block is not None:
        if not 2 <= block <= spec.trained_block:
            raise ConfigError(
                f"--draft-block {block}: this drafter proposes blocks of 2 to {spec.trained_block}"
            )
        spec = replace(spec, block=block)
    if swa_window_tokens is not None:
        if all(layer.window is None for layer in spec.layers):
            raise ConfigError(
                f"--draft-swa-window {swa_window_tokens}: this drafter has no sliding layers"
            )
        layers = (
            layer if layer.window is None else replace(layer, window=swa_window_tokens)
            for layer in spec.layers
        )
        spec = replace(spec, layers=tuple(layers))
    if ctx_max_tokens is not None:
        spec = replace(spec, ctx_max_tokens=ctx_max_tokens)
    return spec


def read_draft_spec(draft_dir: Path, target: ModelSpec) -> DraftSpec:
    """The spec of the drafter in `draft_dir`, for `target`. Raises ModelError naming the file and
    the field.
    """
    files = DraftFiles(draft_dir)
    try:
        config = files.config
    except ModelError as error:
        raise ModelError(f"--draft {error}") from None
    try:
        return parse_draft_spec(config, target)
    except ModelError as error:
        raise ModelError(f"{files.described_by}: {error}") from None


def drafts_with_mtp(config: Config, model: ModelFiles) -> bool:
    """Whether the head in the model's own weights drafts: if it is named, or nothing is and it is
    there. Raises ConfigError if it is named and is not there.
    """
    named = config.draft.draft_dir
    if named == "mtp" and model.mtp_fault is not None:
        raise ConfigError(f"--draft mtp: {model.path}: {model.mtp_fault}")
    if named is None and config.drafter_dir is None:
        return model.mtp_fault is None
    return named == "mtp"


def refuse_without_drafter(asked: DraftConfig, *, has_mtp: bool = False) -> None:
    """Raise ConfigError for an option that needs a drafter. `has_mtp`: the model's own head drafts,
    which has rows, and nothing else to choose.
    """
    given = {
        "--draft-device": asked.device,
        "--draft-ipc-bin": asked.ipc_bin,
        "--draft-ctx-max": asked.ctx_max_tokens,
        "--draft-swa-window": asked.swa_window_tokens,
        "--draft-block": None if has_mtp else asked.block,
        "--ddtree": "on" if asked.ddtree else None,
    }
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{flag} {value}: it needs a drafter; --draft DIR is expected with it"
            )


def parse_draft_spec(config: Mapping[str, Any], target: ModelSpec) -> DraftSpec:
    """The spec that a parsed config.json describes, checked against `target`. Raises ModelError.

    `block_size`, `mask_token_id`, `target_layer_ids` are at the top or inside `dflash_config`; so
    is our own `ctx_max_tokens`, of a drafter that was not trained on longer texts.
    """
    inner = config.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise ModelError(f"dflash_config = {inner!r}: a JSON object is expected")
    config = {**config, **{name: inner[name] for name in inner if inner[name] is not None}}
    if config.get("attention_bias"):
        raise ModelError(
            f"attention_bias = {config['attention_bias']!r} is not supported in a drafter"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act = {config['hidden_act']!r} is not supported; expected 'silu'")
    num_layers = _positive(config, "num_hidden_layers")
    is_laguna = "DFlashLagunaForCausalLM" in (config.get("architectures") or ())
    is_second = "DFlash2DraftModel" in (config.get("architectures") or ())
    block = _positive(config, "block_size", DEFAULT_BLOCK)
    spec = DraftSpec(
        hidden_size=_positive(config, "hidden_size"),
        intermediate_size=_positive(config, "intermediate_size"),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        attention=_attention(config),
        layers=_layers(config, num_layers),
        taps=_taps(config, target, num_layers),
        mask_token=_mask_token(config, target),
        block=block,
        trained_block=block,
        ctx_max_tokens=_limit(config, "ctx_max_tokens"),
        gate=_gate(config) if is_laguna else "",
        norms_context=is_laguna,
        convolution=_convolution(config) if is_second else None,
        selector=_selector(config, target) if is_second else None,
        # Its rows are the embedding's own, without what the target multiplies them with.
        embedding_scale=_number(config, "input_embedding_scale", 1.0) / target.embedding_scale
        if is_second
        else 1.0,
    )
    _check_sizes(config, spec, target)
    return spec


def _check_sizes(config: Mapping[str, Any], spec: DraftSpec, target: ModelSpec) -> None:
    if spec.trained_block < 2:
        raise ModelError(f"block_size = {spec.trained_block}: at least 2 is expected")
    if spec.hidden_size != target.hidden_size:
        raise ModelError(
            f"hidden_size = {spec.hidden_size}, but the target has {target.hidden_size}: a drafter "
            "shares its target's embedding and head"
        )
    of_target = {"num_target_layers": target.num_layers, "vocab_size": target.vocab_size}
    of_target["draft_vocab_size"] = target.vocab_size
    for name, expected in of_target.items():
        if config.get(name) not in (None, expected):
            raise ModelError(f"{name} = {config[name]!r}, but the target has {expected}")


def _taps(config: Mapping[str, Any], target: ModelSpec, num_layers: int) -> tuple[int, ...]:
    listed = config.get("target_layer_ids")
    if listed is None:
        return default_taps(target.num_layers, num_layers)
    if not isinstance(listed, list) or not listed or not all(type(tap) is int for tap in listed):
        raise ModelError(f"target_layer_ids = {listed!r}: a list of layer numbers is expected")
    wrong = [tap for tap in listed if not 0 <= tap < target.num_layers]
    if wrong or len(set(listed)) != len(listed):
        raise ModelError(
            f"target_layer_ids = {listed}: different layers are expected, from 0 to "
            f"{target.num_layers - 1}, which is the target's last"
        )
    return tuple(listed)


def _mask_token(config: Mapping[str, Any], target: ModelSpec) -> int:
    token = config.get("mask_token_id")
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise ModelError(
            f"mask_token_id = {token!r}: a token of the target's vocabulary is expected, from 0 to "
            f"{target.vocab_size - 1}"
        )
    if token in target.eos_ids:
        raise ModelError(f"mask_token_id = {token} is a stop token of the target")
    return token


def _layers(config: Mapping[str, Any], num_layers: int) -> tuple[DraftLayerSpec, ...]:
    """By default, full layers are bidirectional in the block and sliding ones causal, as in all
    engines; `is_causal` (or `causal`) sets both.
    """
    first_sliding = (
        (config.get("max_window_layers") or 0) if config.get("use_sliding_window") else None
    )
    kinds = config.get("layer_types") or [
        "full_attention" if first_sliding is None or layer < first_sliding else "sliding_attention"
        for layer in range(num_layers)
    ]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(known):
        raise ModelError(f"layer_types = {kinds!r}: {num_layers} of {list(known)} are expected")
    is_causal = config.get("is_causal", config.get("causal"))
    if is_causal not in (None, True, False):
        raise ModelError(f"is_causal = {is_causal!r}: true or false is expected")
    slides = [kind == "sliding_attention" for kind in kinds]
    window = None
    if any(slides):
        name = "swa_window_size" if config.get("swa_window_size") else "sliding_window"
        window = _positive(config, name)
    return tuple(
        DraftLayerSpec(window if slide else None, slide if is_causal is None else is_causal)
        for slide in slides
    )


def _gate(config: Mapping[str, Any]) -> Literal["", "head", "element"]:
    kind = config.get("gating", True)
    if kind is False or kind == "disabled":
        return ""
    if not isinstance(kind, bool | str) or kind not in GATES:
        raise ModelError(f"gating = {kind!r}: expected per-head, per-element or disabled")
    return GATES[kind]


def _convolution(config: Mapping[str, Any]) -> ConvolutionSpec:
    num_taps, group_size = (_positive(config, f"conv_{n}_size") for n in ("kernel", "group"))
    hidden_size = _positive(config, "hidden_size")
    if hidden_size % group_size:
        raise ModelError(
            f"conv_group_size = {group_size}: a divisor of hidden_size {hidden_size} is expected"
        )
    return ConvolutionSpec(num_taps, group_size)


def _selector(config: Mapping[str, Any], target: ModelSpec) -> SelectorSpec:
    # 0 means none, as no cap at all does.
    cap = _number(config, CAP, 1.0) if config.get(CAP) else None
    num_candidates = _positive(config, "selector_top_k")
    if num_candidates > target.vocab_size:
        raise ModelError(
            f"selector_top_k = {num_candidates}: at most {target.vocab_size}, the target's "
            "vocabulary, are expected"
        )
    scale = _number(config, "output_multiplier", 1.0)
    rank = _positive(config, "selector_rank")
    return SelectorSpec(target.vocab_size, rank, num_candidates, scale, cap)


def _attention(config: Mapping[str, Any]) -> AttentionSpec:
    """Attention with plain RoPE over whole heads, whatever the target has."""
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
    head_dim = _positive(config, "head_dim", _positive(config, "hidden_size") // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"num_attention_heads = {num_heads}, num_key_value_heads = {num_kv_heads}, head_dim = "
            f"{head_dim}: heads in equal groups and an even head_dim are expected"
        )
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if kind != "default" or share != 1.0:
        raise ModelError(
            f"rope_type {kind!r} with partial_rotary_factor {share!r} is not supported in a "
            "drafter; expected 'default' over whole heads"
        )
    theta = _number({"rope_theta": config.get("rope_theta"), **rope}, "rope_theta", 10000.0)
    return AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim, theta, gated=False)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope of all layers. A config may have one for each kind of them, or for windows. Raises
    ModelError if layers of several kinds have ropes of their own.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds == {"sliding_attention"} and config.get("swa_rope_parameters"):
        rope = config["swa_rope_parameters"]
    if isinstance(rope, Mapping) and any(isinstance(each, Mapping) for each in rope.values()):
        found = [rope.get(kind) or {} for kind in sorted(kinds)]
        if any(each != found[0] for each in found):
            raise ModelError(f"rope_parameters = {rope!r}: one rope for all layers is expected")
        rope = found[0]
    if not isinstance(rope, Mapping):
        raise ModelError(f"rope_parameters = {rope!r}: a JSON object is expected")
    return rope


def _positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or value < 1:
        raise ModelError(f"{name} = {value!r}: a positive integer is expected")
    return value


def _limit(config: Mapping[str, Any], name: str) -> int | None:
    return None if config.get(name) is None else _positive(config, name)


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = default if config.get(name) is None else config[name]
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{name} = {value!r}: a positive number is expected")
    return float(value)
