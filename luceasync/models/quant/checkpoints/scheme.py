"""The Scheme that a checkpoint's config names. Refuses what is not supported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luceasync.errors import ModelError
from luceasync.models.quant.checkpoints.fp4 import DIVIDED, MXFP4, NVFP4, Fp4Scheme
from luceasync.models.quant.checkpoints.fp8 import ByteScheme
from luceasync.models.quant.checkpoints.int4 import AwqScheme, GptqScheme, PackQuantizedScheme
from luceasync.models.quant.checkpoints.module import Scheme

METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt")
FORMATS: tuple[str, ...] = (
    "float-quantized",
    "int-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)
FORMATS += ("naive-quantized", "pack-quantized")
MODELOPT_FILE = "hf_quant_config.json"

Fields = Mapping[str, Any]


def scheme_at(model_dir: Path) -> Scheme | None:
    """The scheme that config.json names, or modelopt's file beside it; None: weights are plain.
    Raises ModelError naming the file."""
    path = model_dir / "config.json"
    if not path.exists():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        other = model_dir / MODELOPT_FILE
        if other.exists():
            own = json.loads(other.read_text(encoding="utf-8"))
            config.setdefault("quantization_config", {"quant_method": "modelopt", **own})
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise ModelError(f"{path}: expected a JSON object, got {type(config).__name__}")
    try:
        return scheme_of(config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def scheme_of(config: Fields) -> Scheme | None:
    """The scheme that a config.json, or the text_config in it, names; None: weights are plain.
    Raises ModelError.
    """
    text = config.get("text_config")
    places = [config, text] if isinstance(text, Mapping) else [config]
    names = ("quantization_config", "compression_config")
    found = [place[name] for place in places for name in names if place.get(name) is not None]
    if not found:
        return None
    if not isinstance(found[0], Mapping):
        raise ModelError(f"quantization_config = {found[0]!r}: expected a JSON object")
    own = _QuantConfig(found[0])
    method = own.fields.get("quant_method")
    makers = {
        "awq": _awq,
        "compressed-tensors": _compressed_tensors,
        "fbgemm_fp8": lambda own: ByteScheme("FP8"),
        "fp8": lambda own: ByteScheme("FP8", own.block("weight_block_size")),
        "gptq": _gptq,
        "modelopt": _modelopt,
    }
    if not isinstance(method, str) or method not in makers:
        raise own.fault("quant_method", method, " or ".join(METHODS))
    return makers[method](own)


class _QuantConfig:
    """A quantization_config, or a part of one. An invalid field is a ModelError."""

    def __init__(self, fields: Fields, name: str = "quantization_config") -> None:
        self.fields = fields
        self.name = name

    def fault(self, field: str, value: object, expected: str) -> ModelError:
        shown = repr(value)[:80]
        return ModelError(f"{self.name}.{field} = {shown} is not supported; expected {expected}")

    def one_of(self, field: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        value = self.fields.get(field)
        value = default if value is None else value
        if value not in allowed or isinstance(value, bool) is not isinstance(allowed[0], bool):
            raise self.fault(field, value, " or ".join(map(repr, allowed)))
        return value

    def group(self, field: str = "group_size") -> int:
        """Columns that share a scale; -1: the whole row."""
        value = self.fields.get(field)
        if type(value) is not int or (value != -1 and (value < 16 or value % 16)):
            raise self.fault(field, value, "-1 or a multiple of 16")
        return value

    def block(self, field: str) -> tuple[int, int] | None:
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(_is_size(n) for n in value):
            raise self.fault(field, value, "[rows, columns]")
        return value[0], value[1]

    def part(self, field: str) -> _QuantConfig:
        value = self.fields.get(field)
        if not isinstance(value, Mapping):
            raise self.fault(field, value, "a JSON object")
        return _QuantConfig(value, f"{self.name}.{field}")


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 16 and value % 16 == 0


def _awq(own: _QuantConfig) -> Scheme:
    own.one_of("bits", (4,))
    own.one_of("version", ("gemm", "GEMM"), "gemm")
    own.one_of("zero_point", (True,), True)
    return AwqScheme(own.group())


def _gptq(own: _QuantConfig) -> Scheme:
    own.one_of("desc_act", (False,), False)
    versions = {"gptq": 1, "gptq_v2": 0, None: None}  # added to stored zero points
    field = "checkpoint_format" if own.fields.get("checkpoint_format") is not None else "format"
    stored = own.one_of(field, tuple(versions))
    is_symmetric = own.one_of("sym", (True, False), False)
    return GptqScheme(own.group(), own.one_of("bits", (4, 8)), versions[stored], is_symmetric)


def _modelopt(own: _QuantConfig) -> Scheme:
    inner = own.part("quantization") if "quantization" in own.fields else own
    algorithm = inner.one_of("quant_algo", ("NVFP4", "FP8"))
    if algorithm == "FP8":
        return ByteScheme("FP8")
    return Fp4Scheme(NVFP4, "weight", matrix_scale="weight_scale_2")


def _compressed_tensors(own: _QuantConfig) -> Scheme:
    own.one_of("quantization_status", ("compressed",), "compressed")
    for unknown in ("transform_config", "sparsity_config"):
        value = own.fields.get(unknown)
        if isinstance(value, Mapping) and value.get("format", "") != "dense" and value:
            raise own.fault(unknown, value, "none")
    groups = own.part("config_groups").fields
    if len(groups) != 1:
        raise own.fault("config_groups", sorted(groups), "one group")
    group = own.part("config_groups").part(next(iter(groups)))
    storage = own.one_of("format", FORMATS) if group.fields.get("format") is None else ""
    storage = storage or group.one_of("format", FORMATS)
    weights = group.part("weights")
    if storage == "mxfp4-pack-quantized":
        return Fp4Scheme(MXFP4, "weight_packed")
    if storage == "nvfp4-pack-quantized":
        return Fp4Scheme(DIVIDED, "weight_packed", matrix_scale="weight_global_scale")
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"))
    bits = weights.one_of("num_bits", (4, 8))
    if storage == "pack-quantized":
        weights.one_of("type", ("int",))
        size = weights.group() if strategy == "group" else -1
        return PackQuantizedScheme(
            size, bits, bool(weights.one_of("symmetric", (True, False), True))
        )
    weights.one_of("num_bits", (8,))
    weights.one_of("symmetric", (True,), True)
    is_float = weights.one_of("type", ("float", "int")) == "float"
    if strategy == "group":
        raise weights.fault("strategy", strategy, "'tensor', 'channel' or 'block'")
    return ByteScheme("FP8" if is_float else "int8", weights.block("block_structure"))
