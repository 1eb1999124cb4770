"""The tokenizer of a GGUF header as the text of a tokenizer.json, and its chat templates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from luceasync.errors import ModelError
from luceasync.gguf.header import Metadata
from luceasync.gguf.model import GgufModel

# Values of tokenizer.ggml.token_type.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
ADDED = (CONTROL, USER_DEFINED)
# Keys of the tokens that end a text, a turn and a message; all but the first are optional. ENDS end
# a text too, if they are control tokens.
END_KEYS = tuple(f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
TEMPLATE = "tokenizer.chat_template"

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What happens before merges: how text is split, and whether it is normalised to NFC."""

    splits: tuple[dict[str, Any], ...]
    nfc: bool = False
    ignore_merges: bool = False


def _split(pattern: str) -> dict[str, Any]:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


# By the value of tokenizer.ggml.pre.
PRES = {
    "qwen2": PreTokenizer((_split(QWEN2),), nfc=True),
    "qwen35": PreTokenizer((_split(QWEN35),), nfc=True),
    "smollm": PreTokenizer(
        ({"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True})
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama-v3", "llama3"), PreTokenizer((_split(LLAMA3),), ignore_merges=True)
    ),
    "tekken": PreTokenizer((_split(TEKKEN),), ignore_merges=True),
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokenizer: `definition` is the text of a tokenizer.json; `eos_ids` end a text."""

    definition: str
    eos_ids: frozenset[int]


def vocabulary_of(model: GgufModel) -> GgufVocabulary:
    """The tokenizer of a model. Raises ModelError naming the file and the key."""
    try:
        return _vocabulary(model.metadata)
    except ModelError as error:
        raise ModelError(f"{model.path}: {error}") from None


def templates_of(model: GgufModel) -> dict[str, str]:
    """Chat templates by name; the unnamed one is "default"."""
    try:
        named = [key for key in model.metadata.keys if key.startswith(f"{TEMPLATE}.")]
        found = {key.removeprefix(f"{TEMPLATE}."): model.metadata.text(key) for key in named}
        if TEMPLATE in model.metadata:
            found["default"] = model.metadata.text(TEMPLATE)
        return found
    except ModelError as error:
        raise ModelError(f"{model.path}: {error}") from None


def special_tokens_of(model: GgufModel) -> dict[str, str]:
    """The texts of bos_token and the like, as far as the file names them."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    metadata = model.metadata
    try:
        full = {name: f"tokenizer.ggml.{key}_token_id" for name, key in keys.items()}
        ids = {name: metadata.integer(key) for name, key in full.items() if key in metadata}
        texts = metadata.strings_at("tokenizer.ggml.tokens", list(ids.values()))
    except ModelError as error:
        raise ModelError(f"{model.path}: {error}") from None
    return {name: text for name, text in zip(ids, texts, strict=True) if text is not None}


def check_tokenizer(metadata: Metadata) -> PreTokenizer:
    """How the file splits text. Raises ModelError if that is not supported."""
    model, pre = metadata.word("tokenizer.ggml.model"), metadata.word("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ModelError(f"tokenizer.ggml.model {model!r} is not supported; expected 'gpt2'")
    if pre not in PRES:
        raise ModelError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(sorted(PRES))}"
        )
    return PRES[pre]


def _vocabulary(metadata: Metadata) -> GgufVocabulary:
    pre = check_tokenizer(metadata)
    tokens = metadata.strings("tokenizer.ggml.tokens")
    kinds = metadata.integers("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise ModelError(
            f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens"
        )
    added = [i for i, kind in enumerate(kinds) if kind in ADDED]
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    if len(ids) != len(kinds) - kinds.count(UNUSED):
        raise ModelError("tokenizer.ggml.tokens has a duplicate token")
    merges = [_merge(entry, ids) for entry in metadata.strings("tokenizer.ggml.merges")]
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], kinds[i]) for i in added],
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _pretokenizers(pre)},
        "post_processor": None,
        "decoder": BYTES | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": ids,
            "merges": merges,
        },
    }
    return GgufVocabulary(json.dumps(definition), _eos_ids(metadata, tokens, kinds))


def _pretokenizers(pre: PreTokenizer) -> list[dict[str, Any]]:
    """The splits of `pre`, followed by byte-level encoding unless one of them does that."""
    own = list(pre.splits)
    return own if any(split["type"] == "ByteLevel" for split in own) else [*own, BYTES]


def _merge(entry: str, ids: dict[str, int]) -> list[str]:
    left, _, right = entry.partition(" ")
    if left not in ids or right not in ids or left + right not in ids:
        raise ModelError(
            f"tokenizer.ggml.merges has {entry[:80]!r}, which does not merge two tokens"
        )
    return [left, right]


def _added(token_id: int, content: str, kind: int) -> dict[str, Any]:
    strict = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **strict, "special": kind == CONTROL}


def _eos_ids(metadata: Metadata, tokens: list[str], kinds: tuple[int, ...]) -> frozenset[int]:
    named = {key: metadata.integer(key) for key in END_KEYS[:1]}
    named |= {key: metadata.integer(key) for key in END_KEYS[1:] if key in metadata}
    for key, token_id in named.items():
        if token_id >= len(tokens):
            raise ModelError(f"{key} = {token_id}: there are only {len(tokens)} tokens")
    also = {i for i, token in enumerate(tokens) if token in ENDS and kinds[i] == CONTROL}
    return frozenset(also.union(named.values()))
