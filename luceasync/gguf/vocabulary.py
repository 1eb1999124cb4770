"""The tokenizer of a GGUF header as the text of a tokenizer.json, and its chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from luceasync.errors import ModelError
from luceasync.gguf.header import Metadata
from luceasync.gguf.model import GgufModel

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ADDED = (CONTROL, USER_DEFINED)
# Keys of the tokens that end a text, a turn and a message; all but the first are optional. The
# tokens in ENDS end a text too, if they are control tokens.
END_KEYS = tuple(f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
ENDS = (
    *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<turn|>"),
)
# A token of Gemma 4 that other programs show as text: the result of a tool would begin here.
CALLED = "<|tool_response>"
BEGIN = "tokenizer.ggml.bos_token_id"
SPACE = "\u2581"  # SentencePiece's character for a space
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
    """The steps before merges: how text is split, and whether it is normalised to NFC."""

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
    "laguna": PreTokenizer((_split(r"[^\n]+|[\n]+"), _split(QWEN2))),
    "tekken": PreTokenizer((_split(TEKKEN),), ignore_merges=True),
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokenizer: `definition` is the text of a tokenizer.json; `eos_ids` are the ids that end a
    text.
    """

    definition: str
    eos_ids: frozenset[int]


def vocabulary_of(model: GgufModel) -> GgufVocabulary:
    """The tokenizer of a model. Raises ModelError, which names the file and the key."""
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
    """The texts of bos_token and similar tokens, as far as the file defines them."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    metadata = model.metadata
    try:
        full = {name: f"tokenizer.ggml.{key}_token_id" for name, key in keys.items()}
        ids = {name: metadata.integer(key) for name, key in full.items() if key in metadata}
        texts = metadata.strings_at("tokenizer.ggml.tokens", list(ids.values()))
    except ModelError as error:
        raise ModelError(f"{model.path}: {error}") from None
    return {name: text for name, text in zip(ids, texts, strict=True) if text is not None}


def check_tokenizer(metadata: Metadata) -> None:
    """Raise ModelError if the file's tokenizer is not supported."""
    model = metadata.word("tokenizer.ggml.model")
    if model not in MODELS:
        raise ModelError(
            f"tokenizer.ggml.model {model!r} is not supported; expected {' or '.join(MODELS)}"
        )
    if model == "gpt2":
        _pre_of(metadata)


def _pre_of(metadata: Metadata) -> PreTokenizer:
    pre = metadata.word("tokenizer.ggml.pre")
    if pre not in PRES:
        raise ModelError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(sorted(PRES))}"
        )
    return PRES[pre]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a file by id, and their kinds. `ids` leaves out unused tokens."""

    texts: list[str]
    kinds: tuple[int, ...]
    ids: dict[str, int]

    @classmethod
    def of(cls, metadata: Metadata) -> _Tokens:
        texts = metadata.strings("tokenizer.ggml.tokens")
        kinds = metadata.integers("tokenizer.ggml.token_type")
        if len(kinds) != len(texts):
            raise ModelError(
                f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(texts)} tokens"
            )
        ids = {text: i for i, text in enumerate(texts) if kinds[i] != UNUSED}
        if len(ids) != len(kinds) - kinds.count(UNUSED):
            raise ModelError("tokenizer.ggml.tokens has a duplicate token")
        return cls(texts, kinds, ids)

    def text_at(self, metadata: Metadata, key: str) -> str:
        """The token whose id is the value of `key`."""
        token_id = metadata.integer(key)
        if token_id >= len(self.texts):
            raise ModelError(f"{key} = {token_id}: there are only {len(self.texts)} tokens")
        return self.texts[token_id]


def _vocabulary(metadata: Metadata) -> GgufVocabulary:
    check_tokenizer(metadata)
    tokens = _Tokens.of(metadata)
    parts = MODELS[metadata.word("tokenizer.ggml.model")](metadata, tokens)
    added = [i for i, kind in enumerate(tokens.kinds) if kind in ADDED]
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens.texts[i], tokens.kinds[i]) for i in added],
        **parts,
    }
    return GgufVocabulary(json.dumps(definition), _eos_ids(metadata, tokens.texts, tokens.kinds))


def _byte_level(metadata: Metadata, tokens: _Tokens) -> dict[str, Any]:
    """The parts of a definition with tokens of bytes, with merges in the order of the file."""
    pre, ids = _pre_of(metadata), tokens.ids
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _pretokenizers(pre)},
        "post_processor": _beginning(metadata, tokens, default=False),
        "decoder": BYTES | {"use_regex": True},
        "model": _bpe(ids, _merges(metadata, ids)) | {"ignore_merges": pre.ignore_merges},
    }


def _scored_pieces(metadata: Metadata, tokens: _Tokens) -> dict[str, Any]:
    """The parts of a definition for SentencePiece (Kudo and Richardson, 2018), with merges derived
    from the scores of pieces.
    """
    spaced = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    return _pieces(metadata, tokens, _merges_by_score(metadata, tokens), spaced=spaced)


def _merged_pieces(metadata: Metadata, tokens: _Tokens) -> dict[str, Any]:
    """The parts of a definition with pieces of text and merges in the order of the file."""
    return _pieces(metadata, tokens, _merges(metadata, tokens.ids), spaced=False)


def _pieces(
    metadata: Metadata, tokens: _Tokens, merges: list[str], *, spaced: bool
) -> dict[str, Any]:
    """The parts of a definition with tokens of text, in which SPACE replaces spaces. If `spaced`,
    one is inserted before a text. Characters outside the vocabulary become bytes.
    """
    replaced = [("Replace", {"pattern": {"String": " "}, "content": SPACE})]
    if spaced:
        replaced.insert(0, ("Prepend", {"prepend": SPACE}))
    restored = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaced:
        restored.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    key = "tokenizer.ggml.unknown_token_id"
    unknown = tokens.text_at(metadata, key) if key in metadata else None
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": kind, **fields} for kind, fields in replaced],
        },
        "pre_tokenizer": None,
        "post_processor": _beginning(metadata, tokens, default=True),
        "decoder": {"type": "Sequence", "decoders": restored},
        "model": _bpe(tokens.ids, merges)
        | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def _merges_by_score(metadata: Metadata, tokens: _Tokens) -> list[str]:
    """All pairs of pieces that form a piece, the piece with the highest score first. Of equal
    pieces, SentencePiece merges the first in the text; here pairs have a fixed order, which makes a
    difference only where a piece overlaps itself.
    """
    key = "tokenizer.ggml.scores"
    scores = metadata.reals(key)
    if len(scores) != len(tokens.texts):
        raise ModelError(f"{key} has {len(scores)} entries for {len(tokens.texts)} tokens")
    each = zip(tokens.texts, tokens.kinds, scores, strict=True)
    pieces = {text: score for text, kind, score in each if kind == NORMAL and " " not in text}
    by_score = sorted(pieces, key=pieces.__getitem__, reverse=True)  # stable
    return [
        f"{left} {right}"
        for text in by_score
        for cut in range(1, len(text))
        if (left := text[:cut]) in pieces and (right := text[cut:]) in pieces
    ]


# By the value of tokenizer.ggml.model.
MODELS: Mapping[str, Callable[[Metadata, _Tokens], dict[str, Any]]] = {
    "gemma4": _merged_pieces,
    "gpt2": _byte_level,
    "llama": _scored_pieces,
}


def _bpe(ids: dict[str, int], merges: list[str]) -> dict[str, Any]:
    """A BPE model with merges such as "a b". Pairs, the current form in tokenizer.json, take twice
    as long to read; but in text form, a merge that begins like this would be a comment.
    """
    is_text = not any(merge.startswith("#version") for merge in merges)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": ids,
        "merges": merges if is_text else [merge.split(" ") for merge in merges],
    }


def _beginning(metadata: Metadata, tokens: _Tokens, *, default: bool) -> dict[str, Any] | None:
    """The post-processor that inserts the first token before a text, if the file or the `default`
    requires it.
    """
    if not metadata.flag("tokenizer.ggml.add_bos_token", default) or BEGIN not in metadata:
        return None
    text = tokens.text_at(metadata, BEGIN)
    first, sequence = {"SpecialToken": {"id": text, "type_id": 0}}, {"id": "A", "type_id": 0}
    known = {"id": text, "ids": [metadata.integer(BEGIN)], "tokens": [text]}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": sequence}],
        "pair": [first, {"Sequence": sequence}, {"Sequence": sequence | {"id": "B"}}],
        "special_tokens": {text: known},
    }


def _pretokenizers(pre: PreTokenizer) -> list[dict[str, Any]]:
    """The splits of `pre`, followed by byte-level encoding unless one of them includes that."""
    own = list(pre.splits)
    return own if any(split["type"] == "ByteLevel" for split in own) else [*own, BYTES]


def _merges(metadata: Metadata, ids: dict[str, int]) -> list[str]:
    """The merges of the file, such as "a b", in order."""
    entries = metadata.strings("tokenizer.ggml.merges")
    for entry in entries:
        left, _, right = entry.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(
                f"tokenizer.ggml.merges has {entry[:80]!r}, which does not merge two tokens"
            )
    return entries


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
    called = {i for i, token in enumerate(tokens) if token == CALLED and kinds[i] in ADDED}
    return frozenset(also.union(called, named.values()))
