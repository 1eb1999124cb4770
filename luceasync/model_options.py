"""The settings of a model and of what it reads and writes: a part of luceasync.options."""

from __future__ import annotations

from luceasync import parsers
from luceasync.option import Option

DTYPES = ("auto", "bf16", "fp32")
TOOL_FORMATS = ("auto", "qwen-json", "qwen-xml", "glm-xml", "llama-json", "none")
REASONING_FORMATS = ("auto", "none")

MODEL_OPTIONS: tuple[Option, ...] = (
    Option(
        "model-dir",
        "model",
        "model_dir",
        parsers.path,
        "the path of a Hugging Face model directory or a GGUF file",
        "PATH",
        "Hugging Face model directory or GGUF file; without it the bundled model is served.",
    ),
    Option(
        "model-name",
        "model",
        "names",
        parsers.words,
        "names with commas, none empty; * for every name",
        "NAME",
        "Name under which the model is served; may be repeated, and * is every name; default: the "
        "directory's name.",
        repeatable=True,
    ),
    Option(
        "dtype",
        "model",
        "dtype",
        parsers.one_of(*DTYPES),
        " | ".join(DTYPES),
        "|".join(DTYPES),
        "Precision of activations, keys/values and plain weights; auto: bf16 where the device "
        "computes it, else fp32. Quantised weights stay as they are.",
    ),
    Option(
        "trust-special-tokens",
        "model",
        "trust_special_tokens",
        parsers.switch,
        "on | off",
        "on|off",
        "Read '<|im_end|>' and the like in messages as control tokens; default: as text.",
        switch=True,
    ),
    Option(
        "tool-format",
        "model",
        "tool_format",
        parsers.one_of(*TOOL_FORMATS),
        " | ".join(TOOL_FORMATS),
        "FORMAT",
        "How the model writes calls of tools: qwen-json, qwen-xml, glm-xml, llama-json, or none; "
        "auto: as its chat template shows.",
    ),
    Option(
        "reasoning-format",
        "model",
        "reasoning_format",
        parsers.one_of(*REASONING_FORMATS),
        " | ".join(REASONING_FORMATS),
        "|".join(REASONING_FORMATS),
        "auto: what the model thinks between <think> and </think> is told apart from its answer; "
        "none: it is part of the text.",
    ),
)
